"""Ensembles of target and proposal: nu = w p + (1 - w) q', one w for all places or one a place.

Static ensembles are the baseline, the dynamic one is the rule, of DIVERSED (arXiv 2604.07622). Probabilities are mixed,
never logits. q' is q restricted to p's support and renormalised: where p = 0 (after top-k, top-p, a grammar) a plain
mixture would still emit the token. The drafted token was drawn from q, so it is q that the acceptance divides by. Where
q has no mass on p's support at all, nu = p.

Output law, known: nu at each place, p for the bonus. Distance TV(nu, p) = (1 - w) TV(p, q'); acceptance
1 - w TV(p, q) where q's support lies inside p's. For any rule the lost acceptance and the distance together are at
least TV(p, q); here, with nested supports, they equal it, so no rule gives more of one for the other in one context.

Cost: two passes over [B, K, V] (q's mass on p's support, TV), each with one temporary of that size.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from .base import Block
from .token import LawRule, Stats


def support_scale(p: Tensor, q: Tensor) -> Tensor:
    """1 / (q's mass where p > 0), [..., V] -> [..., 1]; 0 where there is none (or too little to have an inverse)."""
    mass = torch.linalg.vecdot(q, p.sign())[..., None]
    return torch.where(mass > torch.finfo(mass.dtype).tiny, 1.0 / mass, 0.0)


def restricted(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """q times `scale` where p > 0, otherwise 0: q' for the scale of `support_scale`. Elementwise, a new tensor."""
    return p.sign().mul_(q).mul_(scale)  # in place: with large V, memory that is touched anew is what takes the time


class _Ensemble(LawRule):
    """nu = w p + (1 - w) q'. Stats: w, which is 1 where q has no mass on p's support, and the scale of q'."""

    @abstractmethod
    def weights(self, block: Block) -> Tensor:
        """w [B, K], in [0, 1]."""

    def prepare(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """See `TokenRule.prepare`."""
        scale_BK1 = support_scale(p_BKV, q_BKV)
        return torch.where(scale_BK1 > 0, self.weights(block)[..., None].to(p_BKV), 1.0), scale_BK1

    def law(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.law`."""
        target_weight, scale = stats
        return restricted(p, q, (1.0 - target_weight) * scale).addcmul_(p, target_weight)

    def distance(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """(1 - w) TV(p, q'), see `TokenRule.distance`; (p - q')+ needs no restriction, being 0 where p = 0."""
        target_weight, scale = stats
        tv = torch.addcmul(p, q, scale, value=-1.0).clamp_(min=0.0).sum(dim=-1).double().clamp(max=1.0)
        return (1.0 - target_weight[..., 0].double()) * tv


class StaticEnsemble(_Ensemble):
    """The same w everywhere. target_weight: w in [0, 1]; 1 is lossless, bit for bit, 0 follows the proposal (q').

    Law: nu = w p + (1 - w) q', see the module; a token with p = 0 has nu = 0 and is never emitted. ValueError for a w
    outside [0, 1].
    """

    def __init__(self, target_weight: float) -> None:
        if not 0.0 <= target_weight <= 1.0:
            raise ValueError(
                f"target_weight={target_weight}: must be in [0, 1]; 1 is lossless, smaller accepts more drafted tokens."
            )
        self.target_weight = target_weight

    def weights(self, block: Block) -> Tensor:
        """w [B, K]."""
        return torch.full_like(block.draft_tokens_BK, self.target_weight, dtype=block.target_probs_BTV.dtype)


class DynamicEnsemble(_Ensemble):
    """A w of its own for each place. weigh: a block -> w [B, K] in [0, 1], in any float type.

    Law: nu_k = w_k p_k + (1 - w_k) q'_k, see the module; a token with p = 0 has nu = 0 and is never emitted. This is
    the law only if w_k depends on nothing but the text, drafted tokens 0 .. k - 1 and what was computed from them:
    p_k, q_k and hidden states k, never drafted token k, p_{k+1} or what comes later.

    A check of the values would wait for the GPU at every block, so there is none: NaN counts as 1 (lossless), what is
    outside [0, 1] as the nearer end. ValueError for something that cannot be called, or w of another shape.
    """

    def __init__(self, weigh: Callable[[Block], Tensor]) -> None:
        if not callable(weigh):
            raise ValueError(f"weigh={weigh!r}: must be a function of a Block to the weights [B, K] of the target.")
        self.weigh = weigh

    def weights(self, block: Block) -> Tensor:
        """w [B, K]."""
        weights_BK = self.weigh(block)
        expected = block.draft_tokens_BK.shape
        if weights_BK.shape != expected:
            raise ValueError(
                f"weigh gave weights of shape {tuple(weights_BK.shape)}: must be {tuple(expected)}, "
                "one for each row and drafted token."
            )
        return weights_BK.nan_to_num(nan=1.0).clamp(0.0, 1.0)
