"""One block of drafted trees: the target's pass over them, the verdict, and the kept path's entries moved together.

Afterwards everything is as if the kept path had been drafted as a chain.

Shape suffixes: B rows, N nodes, S side nodes, W watched ones, T = N + 1 places (0 the root), D depth, V vocabulary,
H hidden.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache.ragged import RaggedCache
from ..cache.tree_entries import keep_path, lineage, tree_masks, tree_positions
from ..drafters.base import Branches
from ..processors.block import BlockProcessor
from ..sampling import SamplingParams
from ..verification.base import Rule
from .counters import Timings
from .judge import Judgement
from .rows import Row
from .target_pass import TargetPass
from .tree_judge import along, judge_tree, parents_of


@dataclass(frozen=True)
class KeptPath:
    """What a chain's pass would have left: the verdict, hidden states [B, D + 1, H] and tokens [B, D + 1] of the path.

    The former with the layers that the drafter reads. Both begin at the root, and behind the accepted tokens they mean
    nothing.
    """

    judged: Judgement
    hidden_BTH: Tensor
    tokens_BT: Tensor


@dataclass(frozen=True)
class TreeBlock:
    """What a block of trees needs of the decoder."""

    model: TargetPass
    cache: RaggedCache
    rule: Rule
    timings: Timings

    def decode(
        self,
        rows: Sequence[Row],
        branches: Branches,
        most_drafted: Sequence[int],
        uniforms_BU: Tensor | None,
        sampling: SamplingParams,
        processor: BlockProcessor | None,
    ) -> KeptPath:
        """Run, judge, and move entries; the cache's lengths stay. most_drafted[b]: depth at which row b's tree ends."""
        clock = time.perf_counter()
        root_B1 = torch.tensor([row.tokens[-1:] for row in rows], device=self.model.target.device)
        ids_BT = torch.cat([root_B1, branches.tokens_BN], dim=1)
        branches = _within(branches, most_drafted)
        hidden_BTH = self._pass(ids_BT, branches)
        raw_BTV = self.model.logits(hidden_BTH)
        self.timings.target_passes += 1
        self.timings.target_s += time.perf_counter() - clock

        clock = time.perf_counter()

        def judge(raw_BTV: Tensor) -> tuple[Judgement, Tensor]:
            logits_BTV = raw_BTV
            if processor is not None:
                processed_BTV = processor.target_tree(
                    raw_BTV, branches.tokens_BN, branches.drafted_BN, branches.parents
                )
                logits_BTV = self.model.target.hide_padding(processed_BTV)
            return judge_tree(self.rule, rows, logits_BTV, raw_BTV, branches, uniforms_BU, sampling)

        judged, path_BT = judge(raw_BTV)
        if ill := judged.ill_rows:
            hidden_BTH, raw_BTV = self.model.compute_again(
                ill, ids_BT, branches.parents, self.cache, hidden_BTH, raw_BTV
            )
            judged, path_BT = judge(raw_BTV)
        counts = [emission.num_accepted + 1 for emission in judged.emissions]
        if processor is not None:
            processor.follow([path[:count] for path, count in zip(path_BT.tolist(), counts, strict=True)])
        keep_path(self.cache, path_BT, counts)
        self.timings.verify_s += time.perf_counter() - clock
        return KeptPath(judged, along(hidden_BTH, path_BT), ids_BT.gather(1, path_BT))

    def _pass(self, ids_BT: Tensor, branches: Branches) -> Tensor:
        """Hidden states [B, T, H] after the root and the nodes; the side nodes are run and watched."""
        side, num_places = branches.side, ids_BT.shape[1]
        parents_BN = parents_of(branches)
        if side is not None:
            ids_BT = torch.cat([ids_BT, side.tokens_BS], dim=1)
            parents_BN = torch.cat([parents_BN, _shifted(side.parents, parents_BN)], dim=1)
        sees_BTT, depths_BT = lineage(parents_BN)
        positions_BT = tree_positions(self.cache, depths_BT)
        masks = tree_masks(self.cache, sees_BTT, depths_BT)
        hidden_BTH = self.model.run_with(ids_BT, masks, positions_BT, self.cache)
        if side is not None:
            side.watch(self.model.logits(hidden_BTH[:, -side.num_watched :]).argmax(dim=-1))
        return hidden_BTH[:, :num_places]


def _within(branches: Branches, most_drafted: Sequence[int]) -> Branches:
    """Without the nodes of row b that are deeper than most_drafted[b]."""
    _, depths_BT = lineage(parents_of(branches))
    limits_B1 = torch.tensor(most_drafted, device=depths_BT.device)[:, None]
    return replace(branches, drafted_BN=branches.drafted_BN & (depths_BT[:, 1:] <= limits_B1))


def _shifted(side_parents: tuple[int, ...], parents_BN: Tensor) -> Tensor:
    """The side nodes' parents [B, S], as they count behind the nodes of the tree."""
    num_rows, num_nodes = parents_BN.shape
    side_S = torch.tensor(side_parents, device=parents_BN.device)
    return torch.where(side_S >= 0, side_S + num_nodes, side_S).expand(num_rows, -1)
