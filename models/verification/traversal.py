"""Lossless verification of a drafted tree from its leaves to its root.

Traversal verification, Weng et al. 2025 (arXiv 2505.12398), algorithm 3. It is to a tree what block verification is to
a chain: the rules in `tree` give up all that lies below a rejected node, here a node is judged after its descendants,
by the weight that the whole path to it still has.

A place v begins with a weight a (the root: 1) and with its own p. A child with token x ~ q is judged first, with all
that lies below it; its weight is min(1, a p(x) / q(x)). If nothing of that is kept, then

    S = sum (a p - q)+,    a <- S / (S + 1 - a),    p <- norm((a p - q)+)

and the next child follows; siblings drawn without replacement take their tokens out of q, and children that are no
random draw have one-hot q, as in `tree`. When no child is left, v is kept if u < a, and the last token is drawn from p.
Otherwise v's parent goes on.

Why it is lossless: by induction from the leaves, a place of weight a is kept with probability a, and the text then goes
on by its p. For, as long as that holds for a child, the text goes on through x with probability q min(1, a p / q) =
min(q, a p); what is left of a p is (a p - q)+, beside 1 - a for a text that ends before v. Given that nothing of the
child is kept, these are the new a and p. The next child's law given the last one's token does not depend on what
became of it, so the same holds again, whichever token that was.

Output law: known, p at every place. A path with a token of p = 0 has weight 0: it is never kept, nor is such a token
drawn. A chain is judged exactly as in block verification.

Shape suffixes: B rows, N nodes, T = N + 1 places, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import DraftTree, Remainder, TreeVerdict, children_of, tree_verdict


class TraversalVerification:
    """The lossless rule of Weng et al., for siblings drawn either way."""

    is_lossless = True
    knows_law = True

    def verify(self, tree: DraftTree) -> TreeVerdict:
        """Judge one tree a row; whether the path to node n is kept, and no more than that, hangs on uniform n."""
        kept = _Kept(torch.full_like(tree.final_uniform_B, -1, dtype=torch.long), tree.target_probs_BTV[:, 0])
        _judge(tree, 0, torch.ones_like(tree.final_uniform_B), kept)
        return tree_verdict(tree, kept.place_B, kept.weights_BV)


@dataclass
class _Kept:
    """Up to which place each row is kept, -1 where that is not decided, and what rejected children left of p there."""

    place_B: Tensor
    weights_BV: Tensor


def _judge(tree: DraftTree, place: int, weight_B: Tensor, kept: _Kept) -> None:
    """Judge what lies below a place of this weight, float64 [B], and then the place itself."""
    children = children_of(tree.parents)[place]
    if children:
        p_BV, q_BV = tree.place(torch.full_like(kept.place_B, place))
        remainder = Remainder.start(weight_B[:, None].to(p_BV.dtype) * p_BV, q_BV, tree.distinct, 1.0 - weight_B)
    for node in children:
        tokens_B, drafted_B = tree.tokens_BN[:, node], tree.drafted_BN[:, node]
        _judge(tree, node + 1, torch.where(drafted_B, remainder.accept_probs(tokens_B), 0.0), kept)
        left_B = remainder.reject(tokens_B, drafted_B)
        # S = 0 and a = 1: something of this child is always kept, and any weight does.
        left_share_B = torch.where(remainder.total_B > 0, left_B / remainder.total_B, 1.0)
        weight_B = torch.where(drafted_B, left_share_B, weight_B)
    is_kept_B = kept.place_B < 0
    if place > 0:
        is_kept_B &= tree.uniforms_BN[:, place - 1] < weight_B
    kept.place_B = kept.place_B.masked_fill(is_kept_B, place)
    if children:  # a leaf's next token comes from p itself
        kept.weights_BV = torch.where(is_kept_B[:, None], remainder.weights_BV, kept.weights_BV)
