"""Verification of several drafts at once, as a tree: the records, the lossless rules that walk it from the root, and
the greedy rule.

At each place of the tree a rule tries one child after the other. A child with token x, drawn from q, is accepted with
probability min(1, p(x) / q(x)), and then its own children are tried. After a rejection p becomes norm((p - q)+), and
the next child is tried against that; when none is left, the last token is drawn from what p has become. The rules
differ in q for the later children:

- `MultiRound`, SpecInfer, Miao et al. 2024 (arXiv 2305.09781), multi-step speculative sampling: siblings are drawn
  independently, all from q.
- `WithoutReplacement`, Sequoia, Chen et al. 2024 (arXiv 2402.12374): siblings are drawn without replacement, so that
  after a rejection the token is taken out of q and the rest renormalised. Deviation: where q has fewer tokens than
  there are children, Sequoia draws the others uniformly; here they are not drafted.

Children that are no random draw (q None: the likeliest tokens of a head, an n-gram's continuations) count as draws from
one-hot q: accepted with probability p(x), and after a rejection p loses x.

Output law of both: known, p at every place. A token with p = 0 is never accepted, nor drawn.

Shape suffixes: B rows, N nodes, T = N + 1 places (place 0 is the root, the text so far; place n + 1 is after node n),
I inner places (those with children), C children, D depth, V vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ..sampling import sample_from
from .base import acceptance_probs, next_weights


@lru_cache(maxsize=64)
def children_of(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The nodes below each place, in the order in which they are tried."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents={parents}: node {node} must come after its parent; -1 is the root.")
        children[parent + 1].append(node)
    return tuple(tuple(nodes) for nodes in children)


@lru_cache(maxsize=64)
def widths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The largest number of children of a place at each depth 0 .. D - 1."""
    children, widths, places = children_of(parents), [], [0]
    while any(children[place] for place in places):
        widths.append(max(len(children[place]) for place in places))
        places = [node + 1 for place in places for node in children[place]]
    return tuple(widths)


@lru_cache(maxsize=64)
def child_table(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """The nodes below each place, int64 [T, C], filled up with -1."""
    children = children_of(parents)
    width = max(map(len, children))
    rows = [(*nodes, *(-1,) * (width - len(nodes))) for nodes in children]
    return torch.tensor(rows, dtype=torch.long, device=device)


@lru_cache(maxsize=64)
def inner_index(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the q of each place stands among those of the inner places, int64 [T]; no meaning at a leaf."""
    is_inner_T = torch.tensor([len(nodes) > 0 for nodes in children_of(parents)], device=device)
    return (is_inner_T.long().cumsum(dim=0) - 1).clamp(min=0)


@lru_cache(maxsize=64)
def path_table(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """The nodes from the root to each place, int64 [T, D], filled up with -1."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent + 1], node))
    depth = max(map(len, paths))
    rows = [(*path, *(-1,) * (depth - len(path))) for path in paths]
    return torch.tensor(rows, dtype=torch.long, device=device)


@dataclass(frozen=True)
class DraftTree:
    """One drafted tree a row, of the same shape in all rows.

    parents: of each node, -1 for the root's children; a node comes after its parent, and siblings are in the order in
    which they were drawn. target_probs_BTV: p at every place. draft_probs_BIV: q that the children of each inner place
    were drawn from, inner places in ascending order; None: no child is a random draw. drafted_BN: nodes of a row that
    count, the others are padding, and so are all below them; that must not depend on the node's own token or on later
    ones. distinct: siblings were drawn without replacement; independently otherwise. uniforms_BN, final_uniform_B:
    float64 in [0, 1), independent of each other and of the draft.
    """

    parents: tuple[int, ...]
    target_probs_BTV: Tensor
    draft_probs_BIV: Tensor | None
    tokens_BN: Tensor
    drafted_BN: Tensor
    uniforms_BN: Tensor
    final_uniform_B: Tensor
    distinct: bool = False

    def place(self, place_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """p and q, [B, V] each, at one place a row; q has no meaning at a leaf."""
        rows_B = torch.arange(len(place_B), device=place_B.device)
        if self.draft_probs_BIV is None or not self.parents:
            return self.target_probs_BTV[rows_B, place_B], None
        inner_B = inner_index(self.parents, place_B.device)[place_B]
        return self.target_probs_BTV[rows_B, place_B], self.draft_probs_BIV[rows_B, inner_B]


@dataclass(frozen=True)
class TreeVerdict:
    """What becomes of one tree. path_BD: the accepted nodes from the root on, filled up with -1."""

    path_BD: Tensor
    num_accepted_B: Tensor
    next_token_B: Tensor
    is_bonus_B: Tensor  # no child of the last accepted node counts: the next token is drawn from p itself


class TreeRule(Protocol):
    """A rule for trees; see `base.Rule`."""

    is_lossless: bool
    knows_law: bool

    def verify(self, tree: DraftTree) -> TreeVerdict:
        """Judge one tree a row."""
        ...


class MultiRound:
    """Siblings drawn independently: SpecInfer's multi-step speculative sampling."""

    is_lossless = True
    knows_law = True

    def verify(self, tree: DraftTree) -> TreeVerdict:
        """Judge one tree a row; node n is accepted by uniform n."""
        if tree.distinct and tree.draft_probs_BIV is not None:
            raise ValueError("distinct=True: MultiRound judges siblings drawn independently; use WithoutReplacement.")
        return _verify_from_root(tree)


class WithoutReplacement:
    """Siblings drawn without replacement: Sequoia's verification."""

    is_lossless = True
    knows_law = True

    def verify(self, tree: DraftTree) -> TreeVerdict:
        """Judge one tree a row; node n is accepted by uniform n."""
        if not tree.distinct and tree.draft_probs_BIV is not None:
            raise ValueError("distinct=False: WithoutReplacement judges distinct siblings; use MultiRound.")
        return _verify_from_root(tree)


@dataclass
class Remainder:
    """What rejected children have left of one place: p is weights / total, q is q / q_mass; q None: one-hot at a child.

    lost_B: the part of `total_B` that is not in the weights, for a rule that may also fall back behind this place.
    Nothing dense is normalised, so that the first child meets p and q themselves. q_mass 0: q has no more tokens, and
    what was drawn none the less is never accepted and leaves everything as it is.
    """

    weights_BV: Tensor
    q_BV: Tensor | None
    distinct: bool
    lost_B: Tensor
    total_B: Tensor
    q_mass_B: Tensor

    @classmethod
    def start(cls, p_BV: Tensor, q_BV: Tensor | None, distinct: bool, lost_B: Tensor) -> "Remainder":
        """Before the first child."""
        return cls(p_BV, q_BV, distinct, lost_B, torch.ones_like(lost_B), torch.ones_like(lost_B))

    def restart(self, where_B: Tensor, p_BV: Tensor, q_BV: Tensor | None) -> None:
        """Go on to a new place in the rows of where_B."""
        self.weights_BV = torch.where(where_B[:, None], p_BV, self.weights_BV)
        self.total_B = self.total_B.masked_fill(where_B, 1.0)
        if q_BV is not None and self.q_BV is not None:
            self.q_BV = torch.where(where_B[:, None], q_BV, self.q_BV)
            self.q_mass_B = self.q_mass_B.masked_fill(where_B, 1.0)

    def _scale(self) -> Tensor:
        return torch.where(self.q_mass_B > 0, self.total_B / self.q_mass_B, 0.0)

    def accept_probs(self, tokens_B: Tensor) -> Tensor:
        """min(1, p(x) / q(x)) [B] of the next child, float64."""
        p_x_B = self.weights_BV.gather(1, tokens_B[:, None])[:, 0].double()
        if self.q_BV is None:
            return acceptance_probs(p_x_B, self.total_B)
        q_x_B = self.q_BV.gather(1, tokens_B[:, None])[:, 0].double()
        return acceptance_probs(p_x_B, q_x_B * self._scale())

    def reject(self, tokens_B: Tensor, where_B: Tensor) -> Tensor:
        """The next child, with these tokens, is rejected in the rows of where_B; the weights left [B], float64."""
        tokens_B1 = tokens_B[:, None]
        if self.q_BV is None:
            left_B1 = self.weights_BV.gather(1, tokens_B1).masked_fill(where_B[:, None], 0.0)
            self.weights_BV = self.weights_BV.scatter(1, tokens_B1, left_B1)
        else:
            scale_B1 = torch.where(where_B, self._scale(), 0.0)[:, None].to(self.q_BV.dtype)
            self.weights_BV = (self.weights_BV - scale_B1 * self.q_BV).clamp_(min=0.0)
            if self.distinct:
                left_B1 = self.q_BV.gather(1, tokens_B1).masked_fill(where_B[:, None], 0.0)
                self.q_BV = self.q_BV.scatter(1, tokens_B1, left_B1)
                self.q_mass_B = torch.where(where_B, self.q_BV.sum(dim=1).double(), self.q_mass_B)
        left_B = self.weights_BV.sum(dim=1).double()
        self.total_B = torch.where(where_B, left_B + self.lost_B, self.total_B)
        return left_B


def has_children(parents: tuple[int, ...], drafted_BN: Tensor, place_B: Tensor) -> Tensor:
    """Whether any child below one place a row counts, bool [B]."""
    nodes_BC = child_table(parents, place_B.device)[place_B]
    return ((nodes_BC >= 0) & drafted_BN.gather(1, nodes_BC.clamp(min=0))).any(dim=1)


def _verify_from_root(tree: DraftTree) -> TreeVerdict:
    rows_B = torch.arange(len(tree.tokens_BN), device=tree.tokens_BN.device)
    table = child_table(tree.parents, rows_B.device)
    place_B, moved_B = torch.zeros_like(rows_B), torch.ones_like(rows_B, dtype=torch.bool)
    remainder = Remainder.start(*tree.place(place_B), tree.distinct, torch.zeros_like(tree.final_uniform_B))
    for depth, width in enumerate(widths_of(tree.parents)):
        if depth > 0:
            remainder.restart(moved_B, *tree.place(place_B))
        accepted_B = torch.full_like(place_B, -1)
        for child in range(width):
            node_B = table[place_B, child]
            tokens_B = tree.tokens_BN[rows_B, node_B]
            is_tried_B = moved_B & (node_B >= 0) & (accepted_B < 0) & tree.drafted_BN[rows_B, node_B]
            passed_B = is_tried_B & (tree.uniforms_BN[rows_B, node_B] < remainder.accept_probs(tokens_B))
            remainder.reject(tokens_B, is_tried_B & ~passed_B)
            accepted_B = torch.where(passed_B, node_B, accepted_B)
        moved_B = accepted_B >= 0
        place_B = torch.where(moved_B, accepted_B + 1, place_B)
    return tree_verdict(tree, place_B, remainder.weights_BV)


def tree_verdict(tree: DraftTree, place_B: Tensor, weights_BV: Tensor) -> TreeVerdict:
    """The verdict where everything up to place_B is kept and the children there have left these weights."""
    is_bonus_B = ~has_children(tree.parents, tree.drafted_BN, place_B)
    weights_BV = next_weights(tree.place(place_B)[0], weights_BV, is_bonus_B)
    path_BD = path_table(tree.parents, place_B.device)[place_B]
    return TreeVerdict(path_BD, (path_BD >= 0).sum(dim=1), sample_from(weights_BV, tree.final_uniform_B), is_bonus_B)


def verify_tree_greedy(
    target_tokens_BT: Tensor, parents: tuple[int, ...], tokens_BN: Tensor, drafted_BN: Tensor
) -> TreeVerdict:
    """Every rule at temperature 0, on ids alone: the path of the target's own tokens, as far as the tree has it.

    target_tokens_BT: argmax of the target's logits at every place.
    """
    table = child_table(parents, tokens_BN.device)
    place_B = tokens_BN.new_zeros(len(tokens_BN))
    for _ in widths_of(parents):
        nodes_BC = table[place_B]
        tokens_BC, drafted_BC = (values.gather(1, nodes_BC.clamp(min=0)) for values in (tokens_BN, drafted_BN))
        same_BC = (tokens_BC == target_tokens_BT.gather(1, place_B[:, None])) & drafted_BC & (nodes_BC >= 0)
        first_B1 = same_BC.to(torch.uint8).argmax(dim=1, keepdim=True)
        place_B = torch.where(same_BC.any(dim=1), nodes_BC.gather(1, first_B1)[:, 0] + 1, place_B)
    path_BD = path_table(parents, place_B.device)[place_B]
    next_token_B = target_tokens_BT.gather(1, place_B[:, None])[:, 0]
    is_bonus_B = ~has_children(parents, drafted_BN, place_B)
    return TreeVerdict(path_BD, (path_BD >= 0).sum(dim=1), next_token_B, is_bonus_B)


def draw_without_replacement(probs_BV: Tensor, uniforms_BC: Tensor) -> tuple[Tensor, Tensor]:
    """C children a row, drawn one after the other from q without the tokens drawn before: (tokens, drafted) [B, C].

    uniforms_BC: float64 in [0, 1). drafted is False where q has no token left.
    """
    tokens, drafted = [], []
    for uniform_B in uniforms_BC.unbind(dim=1):
        tokens.append(sample_from(probs_BV, uniform_B))
        drafted.append((probs_BV > 0).any(dim=1))
        probs_BV = probs_BV.scatter(1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, dim=1), torch.stack(drafted, dim=1)
