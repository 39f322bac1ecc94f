"""Rows that decode together: their state side by side, and what joining and leaving does to it.

Shape suffixes: B rows, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.ragged import RaggedCache
from ..drafters.base import Drafter
from .rows import Row


@dataclass
class Batch:
    """Rows that decode together, with the state that belongs to them, in the same order."""

    rows: list[Row]
    cache: RaggedCache
    draft_state: Any  # the drafter's own; None without a drafter


def merged(batch: Batch | None, joined: Batch | None, drafter: Drafter | None) -> Batch | None:
    """The rows of both, those of the second one last."""
    if batch is None or joined is None:
        return joined or batch
    batch.rows += joined.rows
    batch.cache.extend(joined.cache)
    if drafter is not None:
        drafter.extend(batch.draft_state, joined.draft_state)
    return batch


def pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [B, T], each prompt padded on the right with its last token.

    Nothing real looks there, but with weight 0: a token of another row's could be no number, and 0 * NaN is NaN.
    """
    longest = max(len(prompt) for prompt in prompts)
    return torch.tensor([[*prompt, *[prompt[-1]] * (longest - len(prompt))] for prompt in prompts], device=device)


def fill_holes(finished: Sequence[bool]) -> list[int]:
    """Rows that go on, in an order that moves few of them: each hole is filled from the end."""
    kept = [row for row, is_finished in enumerate(finished) if not is_finished]
    num_kept = len(kept)
    from_end = [row for row in kept if row >= num_kept]
    return [row if not finished[row] else from_end.pop() for row in range(num_kept)]
