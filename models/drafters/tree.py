"""Drafting trees with trained heads: several guesses at a place, each with a continuation of its own.

Two kinds of shape:

- static: one tree for all blocks, the best one for the accuracies that were measured on held-out text when the heads
  were trained (`tree_shapes.best_tree`). When sampling, siblings are drawn from q without replacement; when greedy,
  they are the likeliest tokens.
- dynamic: EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4). The likeliest top_k nodes of each level get top_k
  children each, by the product of q on the way to a node; of all of these nodes the likeliest num_nodes are drafted.
  Nodes are no random draw: q is one-hot. Deviation: q is at temperature 1, whatever the sampling parameters are.

Why both are lossless: a rule for trees may be given any shape that drawn tokens have no part in. The static one is
fixed; the dynamic one hangs on the settled text and on the draft's distributions, and nothing in it is drawn.

Shape suffixes: B rows, N nodes, M nodes of one level, C children or candidates, D depth, V vocabulary, I inner places.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import heads_record, load_heads, read_config
from ..heads.base import DraftHead, HeadState, below
from ..processors.block import BlockProcessor
from ..sampling import SamplingParams, transform_logits
from ..verification.tree import draw_without_replacement
from .base import Branches, Draft
from .heads import HeadRows, HeadsState
from .options import DrafterContext, DrafterOptions, settings_record
from .tree_shapes import Level, best_tree, levels_of, monotone

SHAPES = ("static", "dynamic")


class _Growth:
    """A tree that grows level by level: its logits, each node's with its own prefix."""

    def __init__(self, head: DraftHead, state: HeadState, processor: BlockProcessor | None) -> None:
        self._head, self._state, self._processor = head, state, processor
        self._paths_BMD: Tensor | None = None

    def logits(self, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        """[B, M, V], float32; see `DraftHead.level_states`."""
        logits_BMV = self._head.level_logits(self._state, tokens_BM, parents_BM)
        logits_BMV = self._head.target.get.hide_padding(logits_BMV)
        if tokens_BM is None or parents_BM is None:
            self._paths_BMD = torch.zeros(len(logits_BMV), 1, 0, dtype=torch.long, device=logits_BMV.device)
        else:
            assert self._paths_BMD is not None
            self._paths_BMD = torch.cat([below(self._paths_BMD, parents_BM), tokens_BM[..., None]], dim=2)
        if self._processor is None:
            return logits_BMV
        paths = [list(paths_BD.unbind(dim=1)) for paths_BD in self._paths_BMD.unbind(dim=1)]
        nodes = zip(logits_BMV.unbind(dim=1), paths, strict=True)
        return torch.stack([self._processor.draft(logits_BV, path) for logits_BV, path in nodes], dim=1)


class StaticTreeDrafter(HeadRows):
    """One shape for all blocks."""

    def __init__(self, head: DraftHead, num_nodes: int, top_k: int, accuracy: Sequence[Sequence[float]]) -> None:
        """accuracy[k][r]: share of right r-th guesses of head k + 1. ValueError for options out of range."""
        _check_size(head, num_nodes, top_k)
        fewest = min(map(len, accuracy), default=0)
        if top_k > fewest:
            raise ValueError(
                f"drafter.top_k={top_k}: must be at most {fewest} with drafter.shape=static, for so many guesses of "
                "each head were measured"
            )
        super().__init__(head)
        self.num_nodes = num_nodes
        self.accuracy = monotone(accuracy, top_k)

    @torch.no_grad()
    def propose(
        self,
        state: HeadsState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `BranchDrafter`."""
        parents = best_tree(self.accuracy, self.num_nodes, num_draft_tokens)
        self.read(state)
        growth = _Growth(self.head, state.head, processor)
        logits_BMV = growth.logits(None, None)
        num_rows, device = len(logits_BMV), logits_BMV.device
        tokens_BN = torch.zeros(num_rows, len(parents), dtype=torch.long, device=device)
        drafted_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
        probs: list[Tensor] = []
        for level in levels_of(parents):
            if level.parents:
                parents_BM = torch.tensor(level.parents, device=device).expand(num_rows, -1)
                logits_BMV = growth.logits(tokens_BN[:, list(level.nodes)], parents_BM)
            if uniforms_BK is None:
                tokens_BMC, drafted_BMC = _likeliest(logits_BMV, max(map(len, level.children)))
            else:
                probs.append(transform_logits(logits_BMV, params))
                tokens_BMC, drafted_BMC = _draw(probs[-1], level, uniforms_BK)
            for place, nodes in enumerate(level.children):
                tokens_BN[:, list(nodes)] = tokens_BMC[:, place, : len(nodes)]
                drafted_BN[:, list(nodes)] = drafted_BMC[:, place, : len(nodes)]
        probs_BIV = torch.cat(probs, dim=1) if probs else None
        branches = Branches([parents] * num_rows, tokens_BN, drafted_BN, probs_BIV, distinct=bool(probs))
        return Draft(tokens_BN[:, :0], branches=branches)


def _likeliest(logits_BMV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(tokens, drafted) [B, M, count]: the largest logits first; -inf is not drafted."""
    best = logits_BMV.topk(count, dim=-1)
    return best.indices, best.values > -torch.inf


def _draw(probs_BMV: Tensor, level: Level, uniforms_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, drafted) [B, M, C]: the children of each node, drawn without replacement, node n by uniform n."""
    num_rows, num_nodes = probs_BMV.shape[:2]
    width = max(map(len, level.children))
    numbers = [[*nodes, *[0] * (width - len(nodes))] for nodes in level.children]  # what is behind is not used
    uniforms_BMC = uniforms_BN[:, torch.tensor(numbers, device=uniforms_BN.device)]
    tokens_RC, drafted_RC = draw_without_replacement(probs_BMV.flatten(0, 1), uniforms_BMC.flatten(0, 1))
    return tokens_RC.view(num_rows, num_nodes, width), drafted_RC.view(num_rows, num_nodes, width)


class DynamicTreeDrafter(HeadRows):
    """A shape of its own for each row and block."""

    def __init__(self, head: DraftHead, num_nodes: int, top_k: int) -> None:
        """ValueError for options out of range."""
        _check_size(head, num_nodes, top_k)
        super().__init__(head)
        self.num_nodes, self.top_k = num_nodes, top_k

    @torch.no_grad()
    def propose(
        self,
        state: HeadsState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `BranchDrafter`. Nothing is drawn."""
        self.read(state)
        growth = _Growth(self.head, state.head, processor)
        tokens_BC, scores_BC = self._children(growth.logits(None, None), None)
        parents_BC = torch.full_like(tokens_BC, -1)
        first, width = 0, tokens_BC.shape[1]  # of the last level's candidates
        numbers_BM: Tensor | None = None  # of the nodes that were expanded last
        for _ in range(num_draft_tokens - 1):
            level = slice(first, first + width)
            chosen_BM = scores_BC[:, level].topk(min(self.top_k, width), dim=1).indices.sort(dim=1).values
            below_BM = torch.zeros_like(chosen_BM) if numbers_BM is None else chosen_BM // self.top_k
            numbers_BM = first + chosen_BM
            logits_BMV = growth.logits(tokens_BC.gather(1, numbers_BM), below_BM)
            tokens_BL, scores_BL = self._children(logits_BMV, scores_BC.gather(1, numbers_BM))
            first, width = tokens_BC.shape[1], tokens_BL.shape[1]
            parents_BC = torch.cat([parents_BC, numbers_BM.repeat_interleave(self.top_k, dim=1)], dim=1)
            tokens_BC = torch.cat([tokens_BC, tokens_BL], dim=1)
            scores_BC = torch.cat([scores_BC, scores_BL], dim=1)
        return Draft(tokens_BC[:, :0], branches=_best(tokens_BC, scores_BC, parents_BC, self.num_nodes))

    def _children(self, logits_BMV: Tensor, scores_BM: Tensor | None) -> tuple[Tensor, Tensor]:
        """(tokens, log of the product of q) of the likeliest children of each node, [B, M * top_k]."""
        log_q_BMV = logits_BMV.log_softmax(dim=-1).nan_to_num(nan=-torch.inf).clamp(max=0.0)
        best = log_q_BMV.topk(self.top_k, dim=-1)
        scores_BMC = best.values if scores_BM is None else best.values + scores_BM[..., None]
        return best.indices.flatten(1), scores_BMC.flatten(1)


def _best(tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_nodes: int) -> Branches:
    """The num_nodes best candidates, a tree: no score is above its parent's, and of equal ones the first is taken."""
    order_BC = scores_BC.sort(dim=1, descending=True, stable=True).indices
    chosen_BN = order_BC[:, :num_nodes].sort(dim=1).values
    numbers_BN = torch.arange(chosen_BN.shape[1], device=chosen_BN.device).expand_as(chosen_BN)
    number_of_BC = torch.full_like(parents_BC, -1).scatter(1, chosen_BN, numbers_BN)
    above_BN = parents_BC.gather(1, chosen_BN)
    parents_BN = torch.where(above_BN < 0, above_BN, number_of_BC.gather(1, above_BN.clamp(min=0)))
    drafted_BN = scores_BC.gather(1, chosen_BN) > -torch.inf
    return Branches([tuple(row) for row in parents_BN.tolist()], tokens_BC.gather(1, chosen_BN), drafted_BN)


def _check_size(head: DraftHead, num_nodes: int, top_k: int) -> None:
    if num_nodes < 1 or not 1 <= top_k <= head.vocab_size:
        raise ValueError(
            f"drafter.num_nodes={num_nodes} and drafter.top_k={top_k}: both must be at least 1, and the second at most "
            f"{head.vocab_size}, the size of the vocabulary"
        )


def build(
    options: DrafterOptions, context: DrafterContext
) -> tuple[StaticTreeDrafter | DynamicTreeDrafter, dict[str, Any]]:
    """See `options.Build`. ValueError where the checkpoint is missing, or lacks what a static tree is made from."""
    assert options.num_nodes is not None
    assert options.top_k is not None
    if options.shape not in SHAPES:
        raise ValueError(f"drafter.shape={options.shape!r} is unknown; choose one of {', '.join(SHAPES)}")
    if context.checkpoint is None:
        raise ValueError("drafter=tree needs checkpoint=FOLDER, which train.mtp writes")
    record = heads_record(context.checkpoint)
    settings = settings_record(options)["fingerprint"]
    record = record | {"kind": options.kind, "fingerprint": f"{record['fingerprint']}, {settings}"}
    head = load_heads(context.checkpoint, context.target)
    if options.shape == "dynamic":
        return DynamicTreeDrafter(head, options.num_nodes, options.top_k), record
    accuracy = read_config(context.checkpoint).get("acceptance", {}).get("accuracy_by_rank")
    if not accuracy:
        raise ValueError(
            f"drafter.shape=static: checkpoint={str(context.checkpoint)!r} has no acceptance.accuracy_by_rank, which a "
            "static tree is made from; train the heads again with train.mtp, or use drafter.shape=dynamic"
        )
    return StaticTreeDrafter(head, options.num_nodes, options.top_k, accuracy), record
