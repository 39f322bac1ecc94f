"""One block of drafted chains: the target's pass over root and drafts, and the verdict.

Shape suffixes: B rows, K drafted tokens, T = K + 1 places (0 the root), V vocabulary, H hidden.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.ragged import RaggedCache
from ..drafters.base import Draft
from ..processors.block import BlockProcessor
from ..sampling import SamplingParams
from .counters import Timings
from .judge import Judge, Judgement
from .rows import Row
from .target_pass import TargetPass, first_ill


@dataclass(frozen=True)
class ChainBlock:
    """What a block of chains needs of the decoder."""

    model: TargetPass
    cache: RaggedCache
    judge: Judge
    timings: Timings

    def decode(
        self,
        rows: Sequence[Row],
        draft: Draft,
        num_drafted: Sequence[int],
        uniforms_BU: Tensor | None,
        sampling: SamplingParams,
        processor: BlockProcessor | None,
    ) -> tuple[Judgement, Tensor, Tensor]:
        """(verdict, hidden states [B, T, H], tokens [B, T] root first); the cache's lengths stay.

        num_drafted[b]: tokens of row b that count. A row whose pass was no number at some place is computed again; what
        it drafted ends with the token behind which there is no number, whatever its verdict: the rules are lossless
        where a draft's end depends on the tokens before it alone.
        """
        clock = time.perf_counter()
        ids_BT = _padded(rows, draft, num_drafted)
        hidden_BTH = self.model.run(ids_BT, self.cache)
        raw_BTV = self.model.logits(hidden_BTH)
        self.timings.target_passes += 1
        self.timings.target_s += time.perf_counter() - clock

        def judge(raw_BTV: Tensor, num_drafted: Sequence[int]) -> Judgement:
            logits_BTV = raw_BTV
            if processor is not None:
                logits_BTV = self.model.target.hide_padding(processor.target(raw_BTV, draft.tokens_BK, num_drafted))
            final_BTH = self.model.target.final(hidden_BTH)
            return self.judge.judge(rows, logits_BTV, raw_BTV, draft, num_drafted, uniforms_BU, sampling, final_BTH)

        clock = time.perf_counter()
        judged = judge(raw_BTV, num_drafted)
        if ill := judged.ill_rows:
            chain = range(-1, ids_BT.shape[1] - 2)
            parents = [chain] * len(rows)
            hidden_BTH, raw_BTV = self.model.compute_again(ill, ids_BT, parents, self.cache, hidden_BTH, raw_BTV)
            limits = dict(zip(ill, first_ill(raw_BTV, ill), strict=True))
            judged = judge(raw_BTV, [min(count, limits.get(row, count)) for row, count in enumerate(num_drafted)])
        self.timings.verify_s += time.perf_counter() - clock
        return judged, hidden_BTH, ids_BT


def _padded(rows: Sequence[Row], draft: Draft, num_drafted: Sequence[int]) -> Tensor:
    """The root and the drafted tokens that count, [B, T]; behind them the root again, which is a number if any is."""
    device, width = draft.tokens_BK.device, draft.tokens_BK.shape[1]
    root_B1 = torch.tensor([row.tokens[-1:] for row in rows], device=device)
    tokens_BK = draft.tokens_BK
    if min(num_drafted) < width:
        counts_B1 = torch.tensor(num_drafted, device=device)[:, None]
        tokens_BK = torch.where(torch.arange(width, device=device) < counts_B1, tokens_BK, root_B1)
    return torch.cat([root_B1, tokens_BK], dim=1)
