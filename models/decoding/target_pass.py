"""One pass of the target over new tokens of a ragged batch, and the second look at rows where it gave no numbers.

A hidden entry of a cache still takes part in attention, with weight 0, and 0 * NaN is NaN: one drafted token that makes
a NaN or an infinity spoils every place of its row, those before it as well. `compute_again` computes such a row's
places once more, each behind its own path alone, as plain decoding would come to it. What is no number then is none in
plain decoding either. Other rows are not touched, for rows meet nowhere in a pass.

Shape suffixes: B rows, T positions (root first), V vocabulary, H hidden, with the layers that the drafter reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.ragged import AttentionMasks, RaggedCache
from ..target.model import Target


@dataclass(frozen=True)
class TargetPass:
    """The target as the decoder runs it. reads: its layers that the drafter reads."""

    target: Target
    context_length: int | None
    reads: tuple[int, ...] = ()

    def run(self, ids_BT: Tensor, cache: RaggedCache) -> Tensor:
        """Hidden states [B, T, H] of new tokens that follow each other; the cache's lengths stay."""
        num_new = ids_BT.shape[1]
        return self.run_with(ids_BT, cache.attention_masks(num_new), cache.positions(num_new), cache)

    def run_with(self, ids_BT: Tensor, masks: AttentionMasks, positions_BT: Tensor, cache: RaggedCache) -> Tensor:
        """The same with masks and position ids of one's own."""
        if self.context_length is not None and cache.longest + ids_BT.shape[1] > self.context_length:
            # Only padding stands there, but a table of learned positions ends at the context's length.
            positions_BT = positions_BT.clamp(max=self.context_length - 1)
        return self.target.hidden(ids_BT, masks, positions_BT, cache, self.reads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of what a pass gave [..., H]: [..., V], float32."""
        return self.target.hide_padding(self.target.logits(self.target.final(hidden)))

    def compute_again(
        self,
        rows: Sequence[int],
        ids_BT: Tensor,
        parents: Sequence[Sequence[int]],
        cache: RaggedCache,
        hidden_BTH: Tensor,
        logits_BTV: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(hidden states, logits) of a pass with these rows computed again; entry t stands in slot length + t.

        parents[b][n]: node n's parent among the nodes, -1 the root's; node n is place n + 1. In these rows the cache
        then holds zeros where a place is no number, and behind the pass. Such places have hidden states of 0 and logits
        NaN, and so have all that come after them.
        """
        hidden_BTH, logits_BTV = hidden_BTH.clone(), logits_BTV.clone()
        for row in rows:
            alone = cache.copy_of(row)
            cache.wipe(row)
            hidden_BTH[row], logits_BTV[row] = 0.0, torch.nan
            paths = {0: [0]}  # of the places that are numbers, from the root on
            for place in range(ids_BT.shape[1]):
                if place > 0:
                    above = paths.get(parents[row][place - 1] + 1)
                    if above is None:
                        continue
                    paths[place] = [*above, place]
                path = paths[place]
                last_11H = self.run(ids_BT[row : row + 1, path], alone)[:, -1:]
                logits_V = self.logits(last_11H)[0, 0]
                if not logits_V.amax().isfinite():
                    del paths[place]
                    continue
                hidden_BTH[row, place], logits_BTV[row, place] = last_11H[0, 0], logits_V
                cache.take(row, cache.lengths[row] + place, alone, alone.longest + len(path) - 1)
        return hidden_BTH, logits_BTV


def first_ill(logits_BTV: Tensor, rows: Sequence[int]) -> list[int]:
    """The first place of each of these rows whose logits are no law (NaN, +inf, or nothing but -inf); else T."""
    is_good_RT = logits_BTV[list(rows)].amax(dim=-1).isfinite()
    return is_good_RT.long().cumprod(dim=1).sum(dim=1).tolist()
