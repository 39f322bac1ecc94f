"""Drawing a block place by place from a network's logits: what the drafters with a distribution have in common.

A block may begin with tokens that another drafter proposes (`Prefix`): those are taken as they are, and the network
goes on behind them. It may end early (`stop`).

Shape suffixes: B rows, K drafted tokens, P tokens of a prefix, V vocabulary, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..processors.block import BlockProcessor
from ..sampling import SamplingParams, sample_from, transform_logits
from .base import Draft
from .stop import DraftStop, Stopping


@dataclass(frozen=True)
class Prefix:
    """Another drafter's tokens at the first counts[b] places of row b.

    probs_BPV: what they were drawn from; None: one-hot.
    """

    tokens_BP: Tensor
    counts: Sequence[int]
    probs_BPV: Tensor | None = None

    def probs(self, place: int, like_BV: Tensor) -> Tensor:
        """q [B, V] at a place."""
        if self.probs_BPV is not None:
            return self.probs_BPV[:, place]
        return torch.zeros_like(like_BV).scatter_(1, self.tokens_BP[:, place, None], 1.0)


class Drawing:
    """One block under way. `tokens`: drafted so far, [B] a place; at the first `num_given` no row draws."""

    def __init__(
        self,
        device: torch.device,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
        stop: DraftStop | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        """See `Drafter.propose`."""
        self.num_given = min(prefix.counts) if prefix else 0
        self.tokens = list(prefix.tokens_BP[:, : self.num_given].unbind(dim=1)) if prefix else []
        self._params, self._uniforms_BK, self._processor, self._prefix = params, uniforms_BK, processor, prefix
        self._stop = stop
        self._stopping: Stopping | None = None
        self._device = device
        self._probs: list[Tensor] = []
        self._hidden: list[Tensor] = []

    def draw(self, logits_BV: Tensor, hidden_BH: Tensor) -> bool:
        """Draft the next place from raw logits; whether any row drafts on behind it."""
        if self._processor is not None:
            logits_BV = self._processor.draft(logits_BV, self.tokens)
        if self._uniforms_BK is None and self._stop is None:
            self.tokens.append(self._or_given(logits_BV.argmax(dim=-1)))
            self._hidden.append(hidden_BH)
            return True
        if self._stop is not None and self._stopping is None:
            self._stopping = Stopping(self._stop, len(logits_BV))
        is_greedy = self._uniforms_BK is None
        q_BV = logits_BV.float().softmax(dim=-1) if is_greedy else transform_logits(logits_BV, self._params)
        if self._stopping is not None and self._stopping.is_over(q_BV):
            return False
        if self._uniforms_BK is None:
            tokens_B = self._or_given(logits_BV.argmax(dim=-1))
        else:
            tokens_B = self._or_given(sample_from(q_BV, self._uniforms_BK[:, len(self.tokens)]))
            self._probs.append(self._given_probs(q_BV))
        self.tokens.append(tokens_B)
        self._hidden.append(hidden_BH)
        return self._stopping is None or not self._stopping.take(q_BV, tokens_B)

    def finish(self, limits: Sequence[int]) -> Draft:
        """The draft, of which at most limits[b] tokens of row b count."""
        width, prefix = len(self.tokens), self._prefix
        counts = [min(limit, width) for limit in limits]
        if self._stopping is not None:
            counts = [min(pair) for pair in zip(counts, self._stopping.counts(), strict=True)]
        tokens_BK = (
            torch.stack(self.tokens, dim=1)
            if width
            else torch.zeros(len(counts), 0, dtype=torch.long, device=self._device)
        )
        probs = self._probs
        if probs and prefix is not None:
            probs = [prefix.probs(place, probs[0]) for place in range(self.num_given)] + probs
        # What a place was drawn from is not known of a given one, and a learned rule would read nonsense.
        hidden_BKH = torch.stack(self._hidden, dim=1) if self._hidden and prefix is None else None
        return Draft(tokens_BK, torch.stack(probs, dim=1) if probs else None, counts, hidden_BKH)

    def _or_given(self, tokens_B: Tensor) -> Tensor:
        """What was drawn, or in rows whose prefix reaches this place the prefix's token."""
        is_given_B = self._is_given()
        if self._prefix is None or is_given_B is None:
            return tokens_B
        return torch.where(is_given_B, self._prefix.tokens_BP[:, len(self.tokens)], tokens_B)

    def _given_probs(self, q_BV: Tensor) -> Tensor:
        """What it was drawn from."""
        is_given_B = self._is_given()
        if self._prefix is None or is_given_B is None:
            return q_BV
        return torch.where(is_given_B[:, None], self._prefix.probs(len(self.tokens), q_BV), q_BV)

    def _is_given(self) -> Tensor | None:
        """Rows [B] whose prefix reaches the place that is drawn now; None where no row's does."""
        place = len(self.tokens)
        if self._prefix is None or place >= max(self._prefix.counts):
            return None
        return torch.tensor(self._prefix.counts, device=self._device) > place
