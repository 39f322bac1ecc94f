"""The policy gradient of a dynamic ensemble verifier, from three scalars a token: p(y), q(y) and TV(p, q).

A place of a block that is judged gives one verified token: y accepted with probability min(q, nu)(y), or y recovered
with (nu - q)+(y), where nu = w p + (1 - w) q. p and q are frozen, so an update never runs a language model. Objective
(DIVERSED, arXiv 2604.07622):

    J = E[R + A],   A = mean over a sequence's verified tokens of a_t,   a_t = lam (1 - TV(q_t, nu_t)) + entropy H_t

The paper adds up 1 - TV where we take the mean, so that lam means the same at every length; H_t is the entropy of the
place's verdict. A depends on w in two ways, through each a_t and through the text that w lets happen:

    grad J = E[sum_t grad log pi_t (R + A - b_t) + grad A]

Bonus tokens are drawn from p: they are no verified tokens, and have neither a score nor a share in A. The same holds
for the first token, which comes from the prompt's own pass. Nothing here is told by token ids, a closing EOS least of
all: it is verified like any other token, also where the padding token has the same id.

Shape suffixes: N verified tokens of all sequences, S sequences.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LIKELIHOODS = ("verdicts", "tokens")
RATIOS = ("sequence", "token")
MAX_LOG_RATIO = 20.0  # importance weights beyond exp of this carry nothing, and would overflow


@dataclass(frozen=True)
class PolicyOptions:
    """lam, entropy: the weights in J. clip_low, clip_high: an importance ratio below 1 - clip_low or above
    1 + clip_high is out of range (PPO's epsilon, inf switches it off).

    likelihood: what the score is taken of.
        verdicts  tokens with their verdicts. Unbiased whatever q and w depend on.
        tokens    tokens alone, log nu. Unbiased only where nothing that follows a token depends on its verdict: q and w
                  are functions of the text alone, and there are no bonus tokens. `Decoder` gives a bonus token after
                  each block that is accepted whole, so with it this is the paper's approximation.
    ratio: what is weighted for having been drawn under an older w, and clipped.
        sequence  whole sequences, as trl's RLOO; unbiased while unclipped.
        token     each token alone, as GRPO: less noise, unbiased only at the w that drew the tokens.
    """

    lam: float = 0.1
    entropy: float = 0.0
    likelihood: str = "verdicts"
    ratio: str = "sequence"
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        for name in ("lam", "entropy"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a number of at least 0.")
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0; inf switches clipping off.")
        if self.likelihood not in LIKELIHOODS:
            raise ValueError(f"likelihood={self.likelihood!r}: must be one of {', '.join(LIKELIHOODS)}.")
        if self.ratio not in RATIOS:
            raise ValueError(f"ratio={self.ratio!r}: must be one of {', '.join(RATIOS)}.")


@dataclass(frozen=True)
class VerifiedTokens:
    """The verified tokens of S sequences, one sequence after another, each in the order of its text.

    p_N, q_N: probabilities of the token after the sampling transforms. tv_N: TV(p, q) at its place. is_accepted_N:
    bool, False for a recovered token. sequence_N: int64, which sequence it belongs to, rising; a sequence may have
    none.
    """

    p_N: Tensor
    q_N: Tensor
    tv_N: Tensor
    is_accepted_N: Tensor
    sequence_N: Tensor


@dataclass(frozen=True)
class PolicyStats:
    """What an update saw: scalars, without gradient, on the device. Means over tokens, 0 where there are none."""

    weight: Tensor  # w
    acceptance: Tensor  # 1 - TV(q, nu)
    entropy: Tensor  # of the verdict [nats]
    log_ratio: Tensor  # log pi - log pi_old
    clipped: Tensor  # share of tokens without a score, because their ratio is out of range
    num_tokens: int


def token_logprob(w: Tensor, p_y: Tensor, q_y: Tensor) -> Tensor:
    """log nu(y) = log(w p(y) + (1 - w) q(y)). Any shape. Probabilities are mixed, never logits."""
    return _safe_log(w * p_y + (1.0 - w) * q_y)


def verdict_logprob(w: Tensor, p_y: Tensor, q_y: Tensor, is_accepted: Tensor) -> Tensor:
    """log min(q, nu)(y) of an accepted token, log (nu - q)+(y) = log w + log (p - q)+(y) of a recovered one. Any shape.

    Rounding may have recovered a token with p(y) <= q(y), where p is nearly q: its score is that of the others, 1 / w.
    """
    kept = _safe_log(torch.where(is_accepted, torch.minimum(q_y, w * p_y + (1.0 - w) * q_y), w))
    return kept + torch.where(is_accepted, 0.0, _safe_log(p_y - q_y))


def acceptance(w: Tensor, tv: Tensor) -> Tensor:
    """1 - TV(q, nu) = 1 - w TV(p, q): the probability that a drafted token is accepted. Any shape."""
    return 1.0 - w * tv


def verdict_entropy(w: Tensor, tv: Tensor) -> Tensor:
    """Entropy [nats] of accepted or rejected, the latter with probability w TV(p, q). Any shape.

    It keeps a place from being accepted for certain: there the verdict has no score, and w would never come back.
    """
    rejected = w * tv
    return -rejected * _safe_log(rejected) - (1.0 - rejected) * _safe_log(1.0 - rejected)


def logprobs(w_N: Tensor, tokens: VerifiedTokens, options: PolicyOptions) -> Tensor:
    """log pi [N] by the likelihood of the options."""
    if options.likelihood == "tokens":
        return token_logprob(w_N, tokens.p_N, tokens.q_N)
    return verdict_logprob(w_N, tokens.p_N, tokens.q_N, tokens.is_accepted_N)


def bonuses(w_N: Tensor, tokens: VerifiedTokens, options: PolicyOptions) -> Tensor:
    """a_t [N], which is decided before token t is drawn."""
    bonus_N = options.lam * acceptance(w_N, tokens.tv_N)
    return bonus_N + options.entropy * verdict_entropy(w_N, tokens.tv_N) if options.entropy else bonus_N


def returns(w_N: Tensor, tokens: VerifiedTokens, reward_S: Tensor, options: PolicyOptions) -> Tensor:
    """R + A [S]. A sequence without verified tokens has A = 0."""
    return reward_S + _sums(bonuses(w_N, tokens, options), tokens, len(reward_S)) / _counts(tokens, len(reward_S))


def leave_one_out(values_S: Tensor, group_S: Tensor) -> Tensor:
    """Mean [S] of the other sequences' values in the same group. group_S: int64 ids. ValueError for a group of one."""
    _, group_S, sizes_G = torch.unique(group_S, return_inverse=True, return_counts=True)
    if int(sizes_G.min()) < 2:
        raise ValueError("a prompt has one sample, which leaves no others as its baseline: draw at least 2 a prompt.")
    sums_G = values_S.new_zeros(len(sizes_G)).index_add(0, group_S, values_S)
    return (sums_G[group_S] - values_S) / (sizes_G[group_S] - 1)


@torch.no_grad()
def baselines(w_N: Tensor, tokens: VerifiedTokens, reward_S: Tensor, group_S: Tensor, options: PolicyOptions) -> Tensor:
    """b_t [N]: the mean return of the other samples of the prompt, and what the sequence's past had of luck.

    a_1 .. a_t are decided before token t is drawn, so its score need not be multiplied by them. They cannot just be
    left out of A, which divides by the number of verified tokens, and that is decided later; but any function of the
    past may be subtracted. Here: sum_{s <= t} (a_s - m) / n, with m and n the mean of A and of the number of tokens
    over the other samples. In a group whose samples have equally many tokens, what is left of A is a_{t+1} and later.
    """
    bonus_N = bonuses(w_N, tokens, options)
    counts_S = _counts(tokens, len(reward_S))
    mean_S = _sums(bonus_N, tokens, len(reward_S)) / counts_S
    others_S, others_mean_S = leave_one_out(reward_S + mean_S, group_S), leave_one_out(mean_S, group_S)
    excess_N = bonus_N - others_mean_S[tokens.sequence_N]
    past_N = excess_N.double().cumsum(dim=0)
    ends_S = _sums(excess_N.double(), tokens, len(reward_S)).cumsum(dim=0)
    before_S = torch.cat([ends_S.new_zeros(1), ends_S[:-1]])
    luck_N = (past_N - before_S[tokens.sequence_N]) / leave_one_out(counts_S, group_S)[tokens.sequence_N]
    return others_S[tokens.sequence_N] + luck_N.to(others_S.dtype)


def surrogate(
    w_N: Tensor,
    tokens: VerifiedTokens,
    reward_S: Tensor,
    baseline_N: Tensor,
    options: PolicyOptions,
    old_logprob_N: Tensor | None = None,
    num_sequences: float | None = None,
) -> tuple[Tensor, PolicyStats]:
    """A scalar whose gradient with respect to w is minus the estimate of grad J, averaged over the S sequences.

    num_sequences: what the sum over sequences is divided by, S where it is None. Parts of a batch, each divided by the
    mean number of sequences of a part, have the batch's own gradient as the mean of theirs, however uneven they are.

    w_N: requires grad. reward_S: float. baseline_N: see `baselines`; zeros do too. old_logprob_N: `logprobs` under the
    w that drew the tokens; None: the present ones. The value itself means nothing.

    Clipping is PPO's (arXiv 1707.06347, equation 7): no score where the ratio is out of range on the side to which the
    advantage pushes. grad a_t, which is exact but for the text it is taken on, is left out at every place out of range.
    """
    logprob_N = logprobs(w_N, tokens, options)
    log_ratio_N = torch.zeros_like(logprob_N) if old_logprob_N is None else logprob_N.detach() - old_logprob_N
    ratio_N = log_ratio_N
    if options.ratio == "sequence":
        ratio_N = _sums(log_ratio_N, tokens, len(reward_S))[tokens.sequence_N]
    ratio_N = ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_low_N, is_high_N = ratio_N < 1.0 - options.clip_low, ratio_N > 1.0 + options.clip_high

    advantage_N = returns(w_N.detach(), tokens, reward_S, options)[tokens.sequence_N] - baseline_N
    is_clipped_N = torch.where(advantage_N > 0.0, is_high_N, is_low_N)
    score_N = (ratio_N * advantage_N).masked_fill(is_clipped_N, 0.0) * logprob_N
    # What a place adds to A is decided before its token is drawn, so token by token it has no ratio of its own.
    trust_N = ratio_N if options.ratio == "sequence" else torch.ones_like(ratio_N)
    share_N = trust_N.masked_fill(is_low_N | is_high_N, 0.0) / _counts(tokens, len(reward_S))[tokens.sequence_N]
    loss = -(score_N + share_N * bonuses(w_N, tokens, options)).sum() / (num_sequences or len(reward_S))
    return loss, _stats(w_N.detach(), tokens, log_ratio_N, is_clipped_N)


def _stats(w_N: Tensor, tokens: VerifiedTokens, log_ratio_N: Tensor, is_clipped_N: Tensor) -> PolicyStats:
    means = (w_N, acceptance(w_N, tokens.tv_N), verdict_entropy(w_N, tokens.tv_N), log_ratio_N, is_clipped_N.float())
    weight, accepted, entropy, log_ratio, clipped = (values.sum() / max(len(w_N), 1) for values in means)
    return PolicyStats(weight, accepted, entropy, log_ratio, clipped, len(w_N))


def _sums(values_N: Tensor, tokens: VerifiedTokens, num_sequences: int) -> Tensor:
    """Sum [S] over each sequence's tokens."""
    return values_N.new_zeros(num_sequences).index_add(0, tokens.sequence_N, values_N)


def _counts(tokens: VerifiedTokens, num_sequences: int) -> Tensor:
    """Number [S] of verified tokens, at least 1, as a float."""
    return _sums(torch.ones_like(tokens.p_N), tokens, num_sequences).clamp(min=1.0)


def _safe_log(x: Tensor) -> Tensor:
    """log x; below the smallest normal number its log, without a gradient."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()
