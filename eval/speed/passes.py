"""Counts of transformers' own assisted decoding, which tells none: read off what it shows the target.

Its first pass, over the prompt, is a block already, where this project's decoder emits a first token from the prompt
alone: so no token of it is a prefill's, and its mean block length is emitted tokens over passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from models.decoding.counters import Counters


@contextmanager
def shown_to(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Token ids [1, T] of every pass that the model makes meanwhile."""
    shown: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shown.append(kwargs["input_ids"])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shown
    finally:
        handle.remove()


def count_passes(shown: Sequence[torch.Tensor], prompt_length: int, tokens: Sequence[int]) -> Counters:
    """Counts of one sequence from its passes' token ids [1, T]. Raises as `count_blocks`."""
    starts = [prompt_length, *[1] * (len(shown) - 1)]  # before the candidates stands what is settled
    return count_blocks([ids_1T[0, start:].tolist() for ids_1T, start in zip(shown, starts, strict=True)], tokens)


def count_blocks(candidates: Sequence[Sequence[int]], tokens: Sequence[int]) -> Counters:
    """Counts of one sequence from the candidates of each of its passes, as `Counters` has them.

    A recovered token is never the candidate that it replaces, since the residual is 0 there: a pass has kept what its
    candidates and the output have in common. ValueError where that does not add up to the output.
    """
    counters = Counters()
    place = 0
    for drafted in candidates:
        rest = tokens[place:]
        pairs = zip(drafted, rest, strict=False)
        num_kept = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(rest)))
        num_emitted = min(num_kept + 1, len(rest))
        # Where a kept token ended the sequence, those behind it were never judged.
        counters.record_block(num_kept if num_emitted == num_kept else len(drafted), num_kept, num_emitted)
        place += num_emitted
    if place != len(tokens):
        raise ValueError(f"transformers emitted {len(tokens)} tokens, and its passes account for {place}")
    return counters
