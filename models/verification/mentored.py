"""Mentored decoding: the law that accepts most among those within a bound of the target, in KL divergence.

Vivien Tran-Thien 2023, "An optimal lossy variant of speculative decoding" (huggingface.co/blog/vivien/
optimal-lossy-variant-of-speculative-decoding; his p and q are our q and p, his 1 / alpha and 1 / beta our `upper` and
`lower`): among all nu with KL(p || nu) = sum p log(p / nu) <= D, and nu = 0 where p = 0, the one with the largest
acceptance sum min(q, nu).

Solution. The problem is concave; at its optimum, with multipliers l of the bound and m of sum nu = 1, each token has
nu < q and 1 + l p / nu = m, or nu > q and l p / nu = m, or nu = q in between. So nu is q held within
[lower p, upper p], lower = l / m <= 1 <= upper = l / (m - 1). Raising `upper` from 1 raises acceptance and KL together,
and sum nu = 1 gives `lower`: a search for the largest `upper` whose KL is within the bound.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Block
from .token import LawRule, Stats

# Each round cuts the interval of log(upper), at most 710 long, into parts and keeps one: to 1e-15.
NUM_ROUNDS, NUM_PARTS = 15, 16
NUM_CLASSES = 32 * 2**8 + 1  # 32 powers of 2 in 256 parts each, and the end


@dataclass(frozen=True)
class _Ranked:
    """Tokens of each place in order of q / p, with sums below and above each rank: a cut by ratio is a look-up.

    ratio: q / p ascending [..., V], -1 outside p's support. lift: what a lower bound of that ratio adds to sum nu.
    Others, [..., V + 1]: sums over the first i tokens or over all but them, of p, of q, and of p log(q / p), which is
    p log(nu / p) where nu = q. (A difference of sums from below would lose the small p of the tokens that `upper`
    multiplies.)
    """

    ratio: Tensor
    lift: Tensor
    p_below: Tensor
    q_below: Tensor
    gain_below: Tensor
    p_above: Tensor
    q_above: Tensor

    def lower(self, upper: Tensor) -> tuple[Tensor, Tensor]:
        """(`lower` that makes nu a distribution, KL(p || nu)) for any number of `upper`, all [..., N]."""
        num_uncut = torch.searchsorted(self.ratio, upper, right=True)
        p_cut, q_cut = self.p_above.gather(-1, num_uncut), self.q_above.gather(-1, num_uncut)
        # What is cut off q. What q has outside p's support counts as lifted, to 0: it comes first, and has lift <= 0.
        missing = (q_cut - upper * p_cut).clamp(min=0.0)
        num_lifted = torch.searchsorted(self.lift, missing, right=True)
        p_lifted, q_lifted = self.p_below.gather(-1, num_lifted), self.q_below.gather(-1, num_lifted)
        lower = torch.where(p_lifted > 0, (missing + q_lifted) / p_lifted, 0.0).clamp(max=1.0)
        kept_gain = self.gain_below.gather(-1, num_uncut) - self.gain_below.gather(-1, num_lifted)
        return lower, -torch.xlogy(p_lifted, lower) - torch.xlogy(p_cut, upper) - kept_gain


def _rank(p: Tensor, q: Tensor) -> _Ranked:
    """Sort the tokens [..., V]; sums in float64."""
    ratio = torch.where(p > 0, q / p, -1.0).clamp_(max=torch.finfo(p.dtype).max / 2)
    ratio, order = ratio.sort(dim=-1)
    ratio, p, q = ratio.double(), p.gather(-1, order).double(), q.gather(-1, order).double()
    gain = torch.where(ratio > 0, ratio.log(), 0.0) * p
    below = [F.pad(term.cumsum(dim=-1), (1, 0)) for term in (p, q, gain)]
    above = [F.pad(term.flip(-1).cumsum(dim=-1).flip(-1), (0, 1)) for term in (p, q)]
    return _Ranked(ratio, ratio * below[0][..., 1:] - below[1][..., 1:], *below, *above)


def _classes(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """p and q [..., V] summed over classes of tokens whose q / p is the same to 2^-8, up to 2^16 and from 2^-16 on.

    The class is read off the float32 number's bits: its exponent and the first bits of its mantissa.
    What q has outside p's support is in the last, where it is cut off by any `upper` that cuts at all.
    """
    ratio = (q / p.clamp(min=torch.finfo(p.dtype).tiny)).float().clamp_(2.0**-16, 2.0**16)
    index = ((ratio.view(torch.int32) >> 15) - ((127 - 16) << 8)).long()
    empty = p.new_zeros(*p.shape[:-1], NUM_CLASSES)
    return empty.scatter_add(-1, index, p), empty.scatter_add(-1, index, q)


def _normalised(p: Tensor, q: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """`lower` by Newton steps on sum nu = 1, convex and piecewise linear in it."""
    for _ in range(2):
        lifted = lower * p
        slope = (lifted - q).sign_().clamp_(min=0.0).mul_(p).sum(dim=-1, keepdim=True)
        excess = lifted.clamp_(min=q, max=upper * p).sum(dim=-1, keepdim=True) - 1.0
        lower = torch.where(slope > 0, lower - excess / slope, lower).clamp(0.0, 1.0)
    return lower


def mentor_bounds(p: Tensor, q: Tensor, kl_bound: float) -> tuple[Tensor, Tensor]:
    """(lower, upper) [..., 1] of the optimal law for p and q [..., V], in their dtype."""
    many = p.shape[-1] > NUM_CLASSES
    ranked = _rank(*_classes(p, q)) if many else _rank(p, q)
    low = torch.zeros_like(ranked.ratio[..., :1])
    high = ranked.ratio[..., -1:].clamp(min=1.0).log()
    parts = torch.linspace(0.0, 1.0, NUM_PARTS + 1, dtype=low.dtype, device=low.device)
    for _ in range(NUM_ROUNDS):
        edges = low + (high - low) * parts
        _, kl = ranked.lower(edges.exp())
        num_within = (kl <= kl_bound).sum(dim=-1, keepdim=True).clamp(1, NUM_PARTS)
        low, high = edges.gather(-1, num_within - 1), edges.gather(-1, num_within)
    upper = torch.where(ranked.lower(high.exp())[1] <= kl_bound, high, low).exp()
    lower, upper = ranked.lower(upper)[0].to(p.dtype), upper.to(p.dtype)
    return _normalised(p, q, lower, upper) if many else lower, upper


def _share_within(p: Tensor, nu: Tensor, kl_bound: float) -> Tensor:
    """A share [..., 1] for which share nu + (1 - share) p is surely within the bound, KL(p || .) being convex."""
    tiny = torch.finfo(p.dtype).tiny
    terms = p.clamp(min=tiny).log_().sub_(nu.clamp(min=tiny).log_()).mul_(p)
    kl = terms.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return (kl_bound / kl.clamp(min=kl_bound)).to(p.dtype)


class MentoredDecoding(LawRule):
    """Most acceptance for a bound on KL(p || nu) at each place. kl_bound: nats, at least 0, inf for no bound.

    Law, known: nu = min(max(q, lower p), upper p), see the module; p for the bonus. kl_bound = 0 is lossless, bit for
    bit. With a large one nu = q where q's support lies within p's, and otherwise q lifted by the mass it has outside to
    max(q, lower p), which of all laws that accept every drafted token with p > 0 is the nearest to p in KL and in total
    variation. A token with p = 0 has nu = 0 and is never emitted. ValueError for a negative or NaN bound.

    Above NUM_CLASSES tokens, those of nearly the same q / p are taken together in the search, two Newton steps on all
    tokens make nu a distribution for the `upper` found, and where its KL then passes the bound (by 1e-5 nats on random
    softmax laws at V = 49152) it is mixed with p until it does not. So the bound is kept, and nu is the optimal law of
    one slightly smaller.

    Cost: at V = 49152 about 2 ms a place on one core of a small CPU, several times that of any other rule; a sort of
    the whole vocabulary instead of the classes would take 11 ms.
    """

    def __init__(self, kl_bound: float) -> None:
        if not kl_bound >= 0.0:
            raise ValueError(f"kl_bound={kl_bound}: must be at least 0, in nats; 0 is lossless, inf sets no bound.")
        self.kl_bound = kl_bound

    def prepare(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """lower, upper, and the share of their law, p having the rest; see `TokenRule.prepare`."""
        one = torch.ones_like(p_BKV[..., :1])
        if self.kl_bound == 0.0:
            return one, one, one
        lower, upper = mentor_bounds(p_BKV, q_BKV, self.kl_bound)
        if p_BKV.shape[-1] <= NUM_CLASSES or self.kl_bound == torch.inf:
            return lower, upper, one
        return lower, upper, _share_within(p_BKV, self.law(p_BKV, q_BKV, lower, upper, one), self.kl_bound)

    def law(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.law`."""
        lower, upper, share = stats
        return (lower * p).clamp_(min=q, max=upper * p).mul_(share).addcmul_(p, 1.0 - share)

    def distance(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """TV(nu, p) = share sum (p - held)+, in which `upper` has no part; see `TokenRule.distance`."""
        lower, _, share = stats
        held = ((1.0 - lower) * p).clamp_(max=p - q).clamp_(min=0.0)
        return held.sum(dim=-1).double().clamp(max=1.0) * share[..., 0].double()
