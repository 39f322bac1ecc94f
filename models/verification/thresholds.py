"""Rules with a threshold on p: typical acceptance, probability gap, and SGLang's two thresholds.

Comparisons over the vocabulary are made in place on a copy, so in p's dtype: with a bool tensor they, and what is made
of it, take several times as long on a CPU.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

import math
from abc import abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Block, Verdict, acceptance_probs
from .token import AcceptRule, Stats, verify_with

CHUNK_TOKENS = 256


def entropy_nats(p: Tensor) -> Tensor:
    """H(p) = -sum p ln p, [..., 1]; p = 0 adds nothing. (`torch.special.entr` takes twice the time.)"""
    return -p.clamp(min=torch.finfo(p.dtype).tiny).log_().mul_(p).sum(dim=-1, keepdim=True)


def largest(p: Tensor, count: int) -> Tensor:
    """The `count` largest values of p [..., V], descending, or all; p >= 0. Exact, in a fraction of `topk`'s time.

    They lie in the `count` chunks of the vocabulary whose largest values are largest, so only those are searched.
    """
    vocab_size = p.shape[-1]
    if vocab_size % CHUNK_TOKENS:
        p = F.pad(p, (0, -vocab_size % CHUNK_TOKENS))
    chunks = p.unflatten(-1, (-1, CHUNK_TOKENS))
    best = chunks.amax(dim=-1).topk(min(count, chunks.shape[-2])).indices[..., None]
    inside = chunks.gather(-2, best.expand(*best.shape[:-1], CHUNK_TOKENS)).flatten(-2)
    return inside.topk(min(count, vocab_size)).values


class LosslessOrThreshold(AcceptRule):
    """A drafted token that meets a threshold on p is kept; any other is judged by the lossless rule.

    The published rules take the target's own token where their test fails; drawn from p, that is the law of lossless
    verification of a one-hot q, so there the laws agree. For a sampled q the lossless test is a deviation: a
    strict threshold then keeps what lossless verification keeps, instead of nothing.

    Law, known: nu = q a + (sum q (1 - a)) norm((p - q)+). p = 0: never accepted, never drawn.
    """

    @abstractmethod
    def threshold(self, p_BKV: Tensor) -> Tensor:
        """[B, K, 1] that `meets` compares p with."""

    @abstractmethod
    def meets(self, p: Tensor, threshold: Tensor) -> Tensor:
        """[..., V]: 1 for tokens that are always kept, otherwise, and where p = 0, 0. In p's dtype, see the module."""

    def accept_stats(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """See `AcceptRule.accept_stats`."""
        return (self.threshold(p_BKV),)

    def accept(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.accept`."""
        return torch.maximum(self.meets(p, stats[0]), acceptance_probs(p, q))

    def refused(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `AcceptRule.refused`."""
        rejected = self.meets(p, stats[0]).neg_().add_(1.0)
        return rejected.mul_(q - p).clamp_(min=0.0)


class TypicalAcceptance(LosslessOrThreshold):
    """Keep a token with p(x) > min(epsilon, delta exp(-H(p))), H in nats.

    Medusa, Cai et al. 2024 (arXiv 2401.10774), section 3.3.1; its candidates are greedy. See `LosslessOrThreshold` for
    what becomes of the others, and for the law.
    epsilon in [0, 1], delta >= 0; 0 keeps every token of p's support. Lossless: epsilon = 1 and delta = inf; epsilon
    alone cannot be, since exp(-H) <= 1. ValueError for anything else.
    """

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon={epsilon}: must be in [0, 1]; smaller accepts more, 1 leaves it to delta.")
        if not delta >= 0.0:
            raise ValueError(f"delta={delta}: must be 0 or more; smaller accepts more, inf leaves it to epsilon.")
        self.epsilon = epsilon
        self.delta = delta

    def threshold(self, p_BKV: Tensor) -> Tensor:
        """See `LosslessOrThreshold.threshold`."""
        return (self.delta * torch.exp(-entropy_nats(p_BKV))).clamp(max=self.epsilon)

    def meets(self, p: Tensor, threshold: Tensor) -> Tensor:
        """See `LosslessOrThreshold.meets`."""
        return p.clone().gt_(threshold)


class ProbabilityGap(LosslessOrThreshold):
    """Keep a token among the top_k likeliest whose probability is at most `gap` below the likeliest one's.

    TensorRT-LLM's relaxed acceptance for multi-token prediction (relaxed_topk, relaxed_delta), which puts the likeliest
    token where a draft is none of these. See `LosslessOrThreshold` for what becomes of the others here, and for the
    law. All tokens equal to the top_k-th count, as in sampling.
    top_k >= 0, gap in [0, 1]. Lossless: top_k = 0. ValueError for anything else.
    """

    def __init__(self, top_k: int, gap: float) -> None:
        if top_k < 0:
            raise ValueError(f"top_k={top_k}: must be 0 (lossless) or the number of candidates.")
        if not 0.0 <= gap <= 1.0:
            raise ValueError(f"gap={gap}: must be in [0, 1]; 0 leaves only the likeliest token.")
        self.top_k = top_k
        self.gap = gap

    def threshold(self, p_BKV: Tensor) -> Tensor:
        """See `LosslessOrThreshold.threshold`."""
        if self.top_k == 0:
            return torch.full_like(p_BKV[..., :1], math.inf)
        top = largest(p_BKV, self.top_k)
        return torch.maximum(top[..., -1:], top[..., :1] - self.gap).clamp(min=torch.finfo(p_BKV.dtype).tiny)

    def meets(self, p: Tensor, threshold: Tensor) -> Tensor:
        """See `LosslessOrThreshold.meets`."""
        return p.clone().ge_(threshold)


class ThresholdSampling(AcceptRule):
    """SGLang's two thresholds: keep a drafted token with probability min(1, p / threshold_acc), or 1 from p(x) >=
    threshold_single on; a rejected place's token is drawn from p without the rejected one.

    SGLang's `tree_speculative_sampling_target_only` (speculative_accept_threshold_single, _acc) on a chain; comparisons
    of u are strict here, so that p = 0 is never accepted, and never drawn. It does not look at q: the drafted token is
    taken as given, as if q were one-hot.
    Both in [0, 1], threshold_acc above 0. Lossless, as for a one-hot q: 1 and 1. ValueError for anything else.

    Law, known, where tokens are drawn from q: with c(x) = q(x) (1 - a(x)) / (1 - p(x)), 0 at p(x) = 1, and C = sum c,
    nu = q a + p (C - c). What a verdict tells, nu and TV(nu, p), is of the law given the drafted token; the mean of
    that distance over drafts is never below the distance of the law above, so the certificate holds.
    """

    def __init__(self, threshold_single: float, threshold_acc: float) -> None:
        if not 0.0 <= threshold_single <= 1.0:
            raise ValueError(f"threshold_single={threshold_single}: must be in [0, 1]; 1 switches it off.")
        if not 0.0 < threshold_acc <= 1.0:
            raise ValueError(f"threshold_acc={threshold_acc}: must be in (0, 1]; 1 switches it off.")
        self.threshold_single = threshold_single
        self.threshold_acc = threshold_acc

    def verify(self, block: Block) -> Verdict:
        """See `TokenRule.verify`; q is set aside."""
        return verify_with(self, replace(block, draft_probs_BKV=None))

    def prepare(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """See `TokenRule.prepare`: what `AcceptRule` has, for a one-hot q, from the drafted token's probability."""
        p_x = p_BKV.gather(2, block.draft_tokens_BK[..., None])
        return 1.0 - self.accept(p_x, torch.ones_like(p_x)), (1.0 - p_x).clamp(min=0.0)

    def accept_stats(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """See `AcceptRule.accept_stats`: nothing."""
        return ()

    def accept(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.accept`."""
        sampled = acceptance_probs(p, self.threshold_acc * q)
        return torch.where((p >= self.threshold_single) & (p > 0), 1.0, sampled)
