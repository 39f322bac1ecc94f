"""When a drafter ends its draft early, because what it would draft next is likely to be rejected.

A stop may look at all that the drafter has seen, and at what it has drafted, but never at a token whose fate it
decides: a token that is drawn and then dropped for what it is would leave the others with another law than q. So
`entropy` looks at a place's q before a token is drawn from it, and `confidence` at the tokens before the place.

Shape suffixes: B rows, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

ENTROPY, CONFIDENCE = "entropy", "confidence"
KINDS = (ENTROPY, CONFIDENCE)

D = TypeVar("D")


@dataclass(frozen=True)
class DraftStop:
    """entropy: a row stops before a place where 1 - sqrt(scale * H(q)), a lower bound on the place's acceptance by
    AdaEDL (Agrawal et al. 2024, arXiv 2410.18351, equation 5; H in nats, scale its gamma), is below the threshold.
    confidence: a row stops after the token at which the product of the q(x) drafted so far falls below it.

    In greedy decoding q is the softmax of the drafter's logits, which the first guesses were taken from.
    """

    kind: str
    threshold: float
    scale: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"length.kind={self.kind!r} is no stop; choose one of {', '.join(KINDS)}")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"length.threshold={self.threshold} must lie between 0, which never stops, and 1")
        if not self.scale > 0.0:
            raise ValueError(f"length.scale={self.scale} must be above 0")

    def before(self, q_BV: Tensor) -> Tensor:
        """Rows that draft nothing from q_BV, bool [B]."""
        if self.kind != ENTROPY:
            return torch.zeros(len(q_BV), dtype=torch.bool, device=q_BV.device)
        entropy_B = torch.special.entr(q_BV).sum(dim=-1)
        return 1.0 - (self.scale * entropy_B).sqrt() < self.threshold

    def after(self, product_B: Tensor) -> Tensor:
        """Rows that draft no more, bool [B], given the product of the q(x) of what they have drafted."""
        return product_B < self.threshold if self.kind == CONFIDENCE else torch.zeros_like(product_B, dtype=torch.bool)


class Stopping:
    """Which rows of a block are still drafting, and how many tokens each has."""

    def __init__(self, stop: DraftStop, num_rows: int) -> None:
        self.stop = stop
        self._goes_on_B = torch.ones(num_rows, dtype=torch.bool)
        self._product_B = torch.ones(num_rows)
        self._counts_B = torch.zeros(num_rows, dtype=torch.long)

    def is_over(self, q_BV: Tensor) -> bool:
        """Whether no row drafts from q_BV; rows that do not are stopped from here on."""
        self._goes_on_B &= ~self.stop.before(q_BV).cpu()
        return not self._goes_on_B.any()

    def take(self, q_BV: Tensor, tokens_B: Tensor) -> bool:
        """Count these tokens, drawn from q_BV. Whether no row drafts on after them."""
        self._counts_B += self._goes_on_B
        self._product_B *= q_BV.gather(1, tokens_B[:, None])[:, 0].float().cpu()
        self._goes_on_B &= ~self.stop.after(self._product_B)
        return not self._goes_on_B.any()

    def counts(self) -> list[int]:
        """Tokens of each row that count."""
        counts: list[int] = self._counts_B.tolist()
        return counts


def with_stop(drafter: D, stop: DraftStop) -> D:
    """The same drafter over the same network, ending its drafts early. ValueError for one that has no distribution."""
    if not hasattr(drafter, "stop"):
        raise ValueError(
            f"length={stop.kind} with {type(drafter).__name__}: it drafts without a distribution that could tell when "
            "to stop; use length=fixed or length=adaptive"
        )
    stopping: Any = copy.copy(drafter)
    stopping.stop = stop
    return stopping
