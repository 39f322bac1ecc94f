"""Speculative cascades: a deferral rule decides where the proposal's own law is good enough.

Narasimhan et al., "Faster Cascades via Speculative Decoding", ICLR 2025 (arXiv 2405.19261). The drafter answers with
q', q restricted to p's support and renormalised (see `ensemble`); what is deferred is answered by the target.

    deferral | deferred (otherwise kept)            | plug-in rule of the paper
    chow     | max q' < 1 - alpha                   | equation 2
    diff     | max q' < max p - alpha               | equation 5
    opt      | max q' < max p - alpha TV(p, q')     | equation 10, optimal for the 0-1 loss
    v1       | token v with q'(v) < max p - alpha   | equation 13
    v2       | token v with p(v) < max p - alpha    | equation 14
    v3       | token v with p(v) < (1 - alpha) max p | equation 15

Output law, known. The first three decide for a whole place: nu = q' where it is kept, p where it is deferred. The
others decide for each token (section 4.4, equation 11): nu(v) = q'(v) [v is kept] + p(v) times the mass that q' has on
deferred tokens, so that a deferred token is drawn anew from the target. p for the bonus.

Two deviations. The paper writes q; q' is the same unless p was filtered or masked. And its experiments compare
confidences at temperature 1, whatever the temperature of sampling; here p and q are what tokens are drawn from.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

import torch
from torch import Tensor

from .base import Block
from .ensemble import restricted, support_scale
from .token import LawRule, Stats

WHOLE_PLACE = ("chow", "diff", "opt")
BY_TOKEN = ("v1", "v2", "v3")


class SpeculativeCascade(LawRule):
    """One of the six deferral rules, see the module for their laws. alpha: any number up to 1, or -inf.

    At alpha = 1 nothing is deferred by any rule (nu = q', TV(p, q') being at least max p - max q'); at -inf everything
    is, which is lossless, bit for bit. The formulas defer all already at alpha < 0 for chow, v2 and v3, <= -1 for diff
    and v1, < -1 for opt. alpha = 0 is not lossless: it keeps a place at which the proposal is as sure as the target
    (diff, opt) or certain (chow), a token at least as likely as the target's best (v1), the target's best token (v2,
    v3).

    A token with p = 0 has nu = 0 and is never emitted; where q has no mass on p's support, all is deferred. ValueError
    for another name, or an alpha above 1 or NaN.

    Cost, one row, K = 4 and V = 49152 on one core of a small CPU: 1.3 ms, 1.6 ms for a token rule (lossless 0.9 ms).
    """

    def __init__(self, deferral: str, alpha: float) -> None:
        if deferral not in WHOLE_PLACE + BY_TOKEN:
            raise ValueError(f"deferral={deferral!r}: must be one of {', '.join(WHOLE_PLACE + BY_TOKEN)}.")
        if not alpha <= 1.0:
            raise ValueError(f"alpha={alpha}: must be at most 1, which keeps every draft; -inf, lossless, keeps none.")
        self.deferral = deferral
        self.alpha = alpha

    def prepare(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """Scale of q' (0 at a deferred place), share of p in nu, and what depends on the rule, see `TokenRule.prepare`.

        That is TV(nu, p) for a whole place, and the least score of a kept token for the others.
        """
        scale = support_scale(p_BKV, q_BKV)
        if self.deferral in WHOLE_PLACE:
            tv = _distance_to_restricted(p_BKV, q_BKV, scale)
            kept = (self._keeps_place(p_BKV, q_BKV, scale, tv) & (scale > 0)).to(scale)
            return scale * kept, 1.0 - kept, tv * kept
        least = self._least_score(p_BKV, scale)
        kept_mass = self._kept(p_BKV, q_BKV, scale, least).sum(dim=-1, keepdim=True)
        return scale, (1.0 - kept_mass).clamp(min=0.0), least

    def law(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.law`."""
        scale, target_share, least = stats
        kept = self._kept(p, q, scale, least) if self.deferral in BY_TOKEN else restricted(p, q, scale)
        return kept.addcmul_(p, target_share)

    def distance(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """TV(nu, p), see `TokenRule.distance`: known for a whole place, otherwise sum (nu - p)+."""
        if self.deferral in WHOLE_PLACE:
            return stats[2][..., 0].double().clamp(max=1.0)
        return self.law(p, q, *stats).sub_(p).clamp_(min=0.0).sum(dim=-1).double().clamp(max=1.0)

    def _keeps_place(self, p: Tensor, q: Tensor, scale: Tensor, tv: Tensor) -> Tensor:
        """[..., 1], bool."""
        best_p, best_q = p.amax(dim=-1, keepdim=True), p.sign().mul_(q).amax(dim=-1, keepdim=True) * scale
        if self.deferral == "chow":
            return best_q >= 1.0 - self.alpha
        if self.deferral == "diff":
            return best_q >= best_p - self.alpha
        if self.alpha == 1.0:  # always, as max p - max q' <= TV; they can be equal, and must not be judged by rounding
            return torch.ones_like(best_q, dtype=torch.bool)
        # -inf times 0 is NaN, and nothing is at least NaN: deferred, as it should be.
        return best_q >= best_p - self.alpha * tv

    def _kept(self, p: Tensor, q: Tensor, scale: Tensor, least: Tensor) -> Tensor:
        """q' of the kept tokens. (`ge_` stays in p's dtype: a comparison to bool takes several times as long.)"""
        return restricted(p, q, scale).mul_(self._scores(p, q).clone().ge_(least))

    def _scores(self, p: Tensor, q: Tensor) -> Tensor:
        """What a token is kept for: q itself rather than q', so that float32 and float64 keep the same tokens."""
        return q if self.deferral == "v1" else p

    def _least_score(self, p: Tensor, scale: Tensor) -> Tensor:
        """Of a kept token, [..., 1]."""
        best_p = p.amax(dim=-1, keepdim=True)
        if self.deferral == "v3":
            return best_p * (1.0 - self.alpha)
        return (best_p - self.alpha) / scale if self.deferral == "v1" else best_p - self.alpha


def _distance_to_restricted(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """TV(p, q') = sum (p - q')+, [..., 1]; needs no restriction, since it is 0 where p = 0."""
    return torch.addcmul(p, q, scale, value=-1.0).clamp_(min=0.0).sum(dim=-1, keepdim=True)
