"""From one target pass over drafted trees to what it emits: the counterpart of `judge` for trees.

Two rules judge trees, and both are lossless: lossless token verification goes from the root down, block verification
from the leaves up (`TREE_RULES`). Relaxed rules are stated for chains alone.

Shape suffixes: B rows, N nodes, T = N + 1 places (0 the root), D depth, V vocabulary; G rows with trees of one shape.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.tree_entries import lineage
from ..drafters.base import Branches
from ..sampling import SamplingParams, transform_logits
from ..verification.base import Rule, Verdict
from ..verification.blockwise import BlockVerification
from ..verification.token import TokenVerification
from ..verification.traversal import TraversalVerification
from ..verification.tree import (
    DraftTree,
    MultiRound,
    TreeRule,
    TreeVerdict,
    WithoutReplacement,
    inner_index,
    verify_tree_greedy,
)
from .judge import Judgement, make_emissions, with_logprobs
from .rows import Row

# The rule for chains that was asked for -> those that do the same to trees, for siblings (distinct, independent).
TREE_RULES: dict[type, tuple[type[TreeRule], type[TreeRule]]] = {
    TokenVerification: (WithoutReplacement, MultiRound),
    BlockVerification: (TraversalVerification, TraversalVerification),
}


def check_tree_rule(rule: Rule) -> None:
    """ValueError for a rule that cannot judge trees."""
    if type(rule) not in TREE_RULES:
        raise ValueError(
            f"the drafter proposes trees, which {type(rule).__name__} cannot judge: use verifier=lossless or "
            "verifier=block, or a drafter of chains."
        )


def judge_tree(
    rule: Rule,
    rows: Sequence[Row],
    logits_BTV: Tensor,
    raw_BTV: Tensor,
    branches: Branches,
    uniforms_BU: Tensor | None,
    sampling: SamplingParams,
) -> tuple[Judgement, Tensor]:
    """The verdict, as if the kept path had been drafted as a chain; and that path's places [B, D + 1], the root first.

    logits_BTV: after penalties; raw_BTV: before them. uniforms_BU: float64, number n judges node n, and the last one
    draws the last token; None when greedy. A tree counts as as many drafted tokens as it is deep. Behind the kept
    places the path is filled up with 0.
    """
    is_ill_BT = ~logits_BTV.amax(dim=-1).isfinite()  # NaN, +inf, or nothing but -inf
    met_ill_B = is_ill_BT.any(dim=1)
    branches = _before_nan(branches, is_ill_BT)
    probs_BTV = None if uniforms_BU is None else transform_logits(logits_BTV, sampling)
    found = _verify(rule, branches, logits_BTV.argmax(dim=-1), probs_BTV, uniforms_BU)
    path_BT = F.pad(found.path_BD + 1, (1, 0))

    verdict = Verdict(found.num_accepted_B, found.next_token_B, found.is_bonus_B)
    chain_BD = branches.tokens_BN.gather(1, found.path_BD.clamp(min=0))
    emissions = make_emissions(verdict, chain_BD, _depths(branches), is_ill_BT.gather(1, path_BT), met_ill_B)
    if any(row.wants_logprobs for row in rows):
        probs_BTV = None if probs_BTV is None else along(probs_BTV, path_BT)
        emissions = with_logprobs(emissions, verdict, along(raw_BTV, path_BT), probs_BTV, rule.knows_law)
    return Judgement(verdict, emissions, block=None), path_BT


def along(values_BTX: Tensor, path_BT: Tensor) -> Tensor:
    """The entries of the path's places."""
    return values_BTX.gather(1, path_BT[..., None].expand(-1, -1, values_BTX.shape[-1]))


def _before_nan(branches: Branches, is_ill_BT: Tensor) -> Branches:
    """Without the nodes below a place whose p or q is not a distribution; drawn tokens below it decide none of that."""
    parents_BN = parents_of(branches)
    is_good_BN = ~is_ill_BT.gather(1, parents_BN + 1)
    if branches.probs_BIV is not None and branches.parents[0]:
        is_nan_BI = branches.probs_BIV.amax(dim=-1).isnan()
        inner_BN = inner_index(branches.parents[0], is_ill_BT.device)[parents_BN + 1]
        is_good_BN &= ~is_nan_BI.gather(1, inner_BN)
    return replace(branches, drafted_BN=branches.drafted_BN & is_good_BN)


def parents_of(branches: Branches) -> Tensor:
    """Parents as a tensor [B, N]."""
    shape = branches.tokens_BN.shape
    return torch.tensor(branches.parents, dtype=torch.long, device=branches.tokens_BN.device).reshape(shape)


def _depths(branches: Branches) -> Tensor:
    """How deep each row's tree is, [B]."""
    sees_BTT, depths_BT = lineage(parents_of(branches))
    is_there_BT = F.pad(branches.drafted_BN, (1, 0), value=True)
    is_whole_BT = ~(sees_BTT & ~is_there_BT[:, None]).any(dim=-1)
    return (depths_BT * is_whole_BT).amax(dim=1)


def _verify(
    rule: Rule, branches: Branches, tokens_BT: Tensor, probs_BTV: Tensor | None, uniforms_BU: Tensor | None
) -> TreeVerdict:
    """Rows whose trees have one shape are judged together. tokens_BT: the target's likeliest, for greedy decoding."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, parents in enumerate(branches.parents):
        groups.setdefault(parents, []).append(row)
    assert branches.probs_BIV is None or len(groups) == 1
    verdicts = []
    for parents, members in groups.items():
        rows_G = torch.tensor(members, device=tokens_BT.device)
        tokens_GN, drafted_GN = branches.tokens_BN[rows_G], branches.drafted_BN[rows_G]
        if probs_BTV is None or uniforms_BU is None:
            verdicts.append(verify_tree_greedy(tokens_BT[rows_G], parents, tokens_GN, drafted_GN))
        else:
            q_GIV = None if branches.probs_BIV is None else branches.probs_BIV[rows_G]
            uniforms_GN = uniforms_BU[rows_G, : len(parents)]
            tree = DraftTree(
                parents,
                probs_BTV[rows_G],
                q_GIV,
                tokens_GN,
                drafted_GN,
                uniforms_GN,
                uniforms_BU[rows_G, -1],
                branches.distinct,
            )
            verdicts.append(_tree_rule(rule, branches).verify(tree))
    return _in_order(verdicts, [row for members in groups.values() for row in members])


def _tree_rule(rule: Rule, branches: Branches) -> TreeRule:
    distinct, independent = TREE_RULES[type(rule)]
    return independent() if branches.probs_BIV is not None and not branches.distinct else distinct()


def _in_order(verdicts: Sequence[TreeVerdict], order: Sequence[int]) -> TreeVerdict:
    """One verdict over all rows; order: which row each one of the verdicts' rows is."""
    depth = max(verdict.path_BD.shape[1] for verdict in verdicts)
    back_B = torch.tensor(order, device=verdicts[0].path_BD.device).argsort()
    paths = [F.pad(verdict.path_BD, (0, depth - verdict.path_BD.shape[1]), value=-1) for verdict in verdicts]
    return TreeVerdict(
        torch.cat(paths)[back_B],
        torch.cat([verdict.num_accepted_B for verdict in verdicts])[back_B],
        torch.cat([verdict.next_token_B for verdict in verdicts])[back_B],
        torch.cat([verdict.is_bonus_B for verdict in verdicts])[back_B],
    )
