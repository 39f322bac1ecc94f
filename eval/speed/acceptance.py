"""Whether two methods wrote the same, and how near a tie every difference was.

Two exact methods differ where the order of additions does: in bfloat16 the target's two best tokens can change places.
A difference at a near tie is rounding; one anywhere else is a fault, and shows by its gap.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from models.target.model import Target


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs of prompt number `prompt` part.

    token, other: what each wrote there; None: it had ended. gap: see `gap_at`; infinite where one had ended.
    """

    prompt: int
    place: int
    token: int | None
    other: int | None
    gap: float


@dataclass(frozen=True)
class Agreement:
    """How many of `num_sequences` outputs are identical, and where the others part."""

    num_sequences: int
    differences: tuple[Difference, ...] = ()

    @property
    def num_identical(self) -> int:
        return self.num_sequences - len(self.differences)

    @property
    def largest_gap(self) -> float:
        """0 without a difference."""
        return max((difference.gap for difference in self.differences), default=0.0)


def compare_outputs(
    target: Target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> Agreement:
    """Compare token for token; the target runs once more for every pair that differs."""
    differences = []
    for index, (prompt, output, other) in enumerate(zip(prompts, outputs, others, strict=True)):
        place = first_difference(output, other)
        if place is None:
            continue
        token = output[place] if place < len(output) else None
        other_token = other[place] if place < len(other) else None
        gap = math.inf
        if token is not None and other_token is not None:
            gap = gap_at(target, [*prompt, *output[:place]], token, other_token)
        differences.append(Difference(index, place, token, other_token, gap))
    return Agreement(len(prompts), tuple(differences))


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Where the two part: the first unequal place, or the shorter one's end; None where they are identical."""
    for place, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return place
    return None if len(tokens) == len(others) else min(len(tokens), len(others))


@torch.no_grad()
def gap_at(target: Target, context: Sequence[int], token: int, other: int) -> float:
    """Distance, in logits, from the best token to the worse of the two after `context`, in the target's own dtype.

    Where the two are the target's best ones it is the top-2 gap; where they are not it is larger, so that a wrong token
    cannot hide behind a near tie of two others.
    """
    hidden_1TH = target.hidden(torch.tensor([list(context)], device=target.device))
    logits_V = target.hide_padding(target.logits(hidden_1TH[0, -1]))
    return float(logits_V.max() - torch.minimum(logits_V[token], logits_V[other]))


def join(agreements: Iterable[Agreement]) -> Agreement:
    """Over several groups of prompts; `prompt` goes on counting from group to group."""
    total, differences = 0, []
    for agreement in agreements:
        for found in agreement.differences:
            differences.append(Difference(total + found.prompt, found.place, found.token, found.other, found.gap))
        total += agreement.num_sequences
    return Agreement(total, tuple(differences))
