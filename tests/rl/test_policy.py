"""The policy gradient is unbiased: every run of small worlds is enumerated. The same checks catch planted faults."""

import inspect
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rl import policy
from rl.policy import PolicyOptions
from tests.models.verification.enumeration import fails
from tests.rl.worlds import (
    EXACT,
    FREE_OF_VERDICTS,
    REQUIRED,
    THETA,
    THETA_LATER,
    TOKENS_ALONE,
    UNCLIPPED,
    WORLDS,
    Pairs,
    World,
    expected_gradient,
    gap,
)

REAL = SimpleNamespace(**vars(policy))

# ---- unbiased: each check takes the code, so that it can be shown to catch faults ----


def check_verdicts(code: SimpleNamespace) -> None:
    """Tokens with verdicts, whatever q and w depend on; score, acceptance and entropy, each alone and together."""
    for world in (World(**kw) for kw in WORLDS):
        for lam, entropy in ((0.0, 0.0), (0.7, 0.0), (0.0, 0.2), (0.7, 0.2)):
            options = replace(UNCLIPPED, lam=lam, entropy=entropy)
            assert gap(expected_gradient(code, world, THETA, options), world.gradient(THETA, options)) < REQUIRED


def check_tokens(code: SimpleNamespace) -> None:
    """Tokens alone, in a world where no verdict matters to what follows."""
    world = World(**FREE_OF_VERDICTS)
    for options in (TOKENS_ALONE, replace(TOKENS_ALONE, lam=0.0, entropy=0.0)):
        assert gap(expected_gradient(code, world, THETA, options), world.gradient(THETA, options)) < REQUIRED


def check_pairs(code: SimpleNamespace) -> None:
    """Two samples a prompt: with the leave-one-out baseline, and with what is known before each token left out."""
    for kw in ({"length": 3}, {"length": 4, "by_place": True}):
        world = World(**kw)
        pairs = Pairs(code, world, THETA)
        for with_luck in (False, True):
            got, _ = pairs.moments(code, THETA, UNCLIPPED, with_luck)
            assert gap(got, world.gradient(THETA, UNCLIPPED)) < REQUIRED


def check_second_epoch(code: SimpleNamespace) -> None:
    """Tokens drawn under one theta, the gradient taken at another: unbiased with the ratio of whole sequences."""
    for kw, options in (({"by_place": True}, UNCLIPPED), (FREE_OF_VERDICTS, TOKENS_ALONE)):
        world = World(**kw)
        got = expected_gradient(code, world, THETA_LATER, options, theta_old=THETA)
        assert gap(got, world.gradient(THETA_LATER, options)) < REQUIRED


def check_token_ratio(code: SimpleNamespace) -> None:
    """With the ratio of single tokens, unbiased where theta has not moved."""
    world, options = World(by_place=True), replace(UNCLIPPED, ratio="token")
    got = expected_gradient(code, world, THETA, options, theta_old=THETA)
    assert gap(got, world.gradient(THETA, options)) < REQUIRED


def random_tokens(code: SimpleNamespace, seed: int, num_sequences: int = 40) -> tuple[SimpleNamespace, Tensor]:
    """Random tokens of ragged sequences, some empty, and old log-probabilities around the present ones of w = 0.5."""
    generator = torch.Generator().manual_seed(seed)
    counts_S = torch.randint(0, 5, (num_sequences,), generator=generator)
    counts_S[-1] = 0
    sequence_N = torch.repeat_interleave(torch.arange(num_sequences), counts_S)
    num_tokens = len(sequence_N)
    p_N, q_N, tv_N = torch.rand(3, num_tokens, generator=generator, dtype=torch.float64)
    tokens = code.VerifiedTokens(p_N, q_N, tv_N, (p_N <= q_N) | (p_N < 0.6), sequence_N)
    noise_N = 0.2 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    half_N = torch.full_like(p_N, 0.5)
    return tokens, code.logprobs(half_N, tokens, PolicyOptions()) + noise_N


def check_clipping(code: SimpleNamespace) -> None:
    """Against PPO's objective, written out sequence by sequence; the acceptance term where the ratio is in range."""
    for ratio, seed in itertools.product(("sequence", "token"), range(3)):
        options = PolicyOptions(lam=0.5, ratio=ratio, clip_low=0.1, clip_high=0.3)
        tokens, old_N = random_tokens(code, seed)
        reward_S = torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        w_N = torch.full_like(tokens.p_N, 0.5).requires_grad_()
        loss, stats = code.surrogate(w_N, tokens, reward_S, torch.zeros_like(w_N), options, old_N)
        (got,) = torch.autograd.grad(loss, w_N)
        (expected,) = torch.autograd.grad(-ppo_objective(w_N, tokens, reward_S, options, old_N), w_N)
        assert (got - expected).abs().max() < EXACT
        assert 0.05 < float(stats.clipped) < 0.95


def ppo_objective(
    w_N: Tensor, tokens: SimpleNamespace, reward_S: Tensor, options: PolicyOptions, old_N: Tensor
) -> Tensor:
    """Mean over sequences, by loops and with the likelihood written out."""
    total = torch.zeros((), dtype=torch.float64)
    for s, reward in enumerate(reward_S):
        mine = [n for n in range(len(w_N)) if tokens.sequence_N[n] == s]
        accepted = [1.0 - w_N[n] * tokens.tv_N[n] for n in mine]
        advantage = reward + (sum(options.lam * a.detach() for a in accepted) / len(mine) if mine else 0.0)
        ratios = []
        for n in mine:
            w, p, q = w_N[n], tokens.p_N[n], tokens.q_N[n]
            nu = w * p + (1.0 - w) * q
            likelihood = torch.minimum(nu, q) if tokens.is_accepted_N[n] else nu - q
            ratios.append(likelihood / old_N[n].exp())
        if options.ratio == "sequence" and mine:
            ratios = [torch.stack(ratios).prod()]
        for ratio in ratios:
            bounded = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
            total = total + torch.minimum(ratio * advantage, bounded * advantage)
        for i, a in enumerate(accepted):
            ratio = (ratios[0] if options.ratio == "sequence" else ratios[i]).detach()
            if 1.0 - options.clip_low <= ratio <= 1.0 + options.clip_high:
                trust = ratio if options.ratio == "sequence" else 1.0
                total = total + trust * options.lam * a / len(mine)
    return total / len(reward_S)


def check_baselines(code: SimpleNamespace) -> None:
    """Return and baseline of every token against loops; groups of 2, 3 and 5, not in order."""
    options = PolicyOptions(lam=0.7, entropy=0.3)
    tokens, _ = random_tokens(code, 5, num_sequences=10)
    generator = torch.Generator().manual_seed(1)
    w_N = torch.rand(len(tokens.p_N), generator=generator, dtype=torch.float64)
    reward_S = torch.rand(10, generator=generator, dtype=torch.float64)
    group_S = torch.tensor([7, 3, 3, 9, 7, 9, 9, 3, 9, 9])
    rejected_N = w_N * tokens.tv_N
    entropy_N = -rejected_N * rejected_N.log() - (1.0 - rejected_N) * (1.0 - rejected_N).log()
    bonus_N = 0.7 * (1.0 - rejected_N) + 0.3 * entropy_N
    mine = [torch.nonzero(tokens.sequence_N == s)[:, 0].tolist() for s in range(10)]
    mean = [float(bonus_N[mine[s]].mean()) if mine[s] else 0.0 for s in range(10)]
    got_S = code.returns(w_N, tokens, reward_S, options)
    got_N = code.baselines(w_N, tokens, reward_S, group_S, options)
    for s in range(10):
        assert abs(float(got_S[s]) - float(reward_S[s]) - mean[s]) < EXACT
        others = [o for o in range(10) if o != s and group_S[o] == group_S[s]]
        expected = np.mean([float(reward_S[o]) + mean[o] for o in others])
        count = np.mean([max(1, len(mine[o])) for o in others])
        for n in mine[s]:
            expected += (float(bonus_N[n]) - np.mean([mean[o] for o in others])) / count
            assert abs(float(got_N[n]) - expected) < EXACT


CHECKS = (
    check_baselines,
    check_clipping,
    check_verdicts,
    check_tokens,
    check_second_epoch,
    check_token_ratio,
    check_pairs,
)


@pytest.mark.parametrize("check", CHECKS)
def test_policy_gradient(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "regulariser with the wrong sign": ("(score_N + share_N * bonuses(", "(score_N - share_N * bonuses("),
    "regulariser only through the text": (
        "(score_N + share_N * bonuses(w_N, tokens, options))",
        "score_N",
    ),
    "regulariser not in the return": (
        "returns(w_N.detach(), tokens, reward_S, options)[tokens.sequence_N]",
        "reward_S[tokens.sequence_N]",
    ),
    "acceptance of 1 - w": ("return 1.0 - w * tv", "return 1.0 - (1.0 - w) * tv"),
    "w and 1 - w swapped": ("_safe_log(w * p_y + (1.0 - w) * q_y)", "_safe_log(w * q_y + (1.0 - w) * p_y)"),
    "logits mixed": (
        "_safe_log(w * p_y + (1.0 - w) * q_y)",
        "w * _safe_log(p_y) + (1.0 - w) * _safe_log(q_y)",
    ),
    "accepted token as if nu-distributed": (
        "torch.minimum(q_y, w * p_y + (1.0 - w) * q_y)",
        "w * p_y + (1.0 - w) * q_y",
    ),
    "recovered token as if nu-distributed": (
        "(1.0 - w) * q_y), w)",
        "(1.0 - w) * q_y), w * p_y + (1.0 - w) * q_y)",
    ),
    "recovered token from p": (
        "(1.0 - w) * q_y), w)",
        "(1.0 - w) * q_y), torch.ones_like(w))",
    ),
    "verdicts flipped": ("torch.where(is_accepted, torch", "torch.where(~is_accepted, torch"),
    "sum in place of the mean": (" / _counts(tokens, len(reward_S))[tokens.sequence_N]", ""),
    "tokens in place of sequences": (").sum() / (num_sequences or len(reward_S))", ").mean()"),
    "entropy upside down": ("return -rejected * _safe_log(rejected) - ", "return rejected * _safe_log(rejected) + "),
    "baseline with the sample itself": (
        "(sums_G[group_S] - values_S) / (sizes_G[group_S] - 1)",
        "sums_G[group_S] / sizes_G[group_S]",
    ),
    "past divided by the sequence's own length": (
        "leave_one_out(counts_S, group_S)[tokens.sequence_N]",
        "counts_S[tokens.sequence_N]",
    ),
    "past with the next place": (
        "past_N = excess_N.double().cumsum(dim=0)",
        "past_N = excess_N.double().cumsum(dim=0) + excess_N.roll(-1)",
    ),
    "past of the sequence before": ("torch.cat([ends_S.new_zeros(1), ends_S[:-1]])", "torch.zeros_like(ends_S)"),
    "no importance ratio": ("(ratio_N * advantage_N)", "advantage_N"),
    "importance ratio upside down": ("logprob_N.detach() - old_logprob_N", "old_logprob_N - logprob_N.detach()"),
    "no importance ratio on the acceptance": ('trust_N = ratio_N if options.ratio == "sequence" else ', "trust_N = "),
    "ratio of tokens where sequences are meant": ('if options.ratio == "sequence":', "if False:"),
    "clipped on the wrong side": (
        "torch.where(advantage_N > 0.0, is_high_N, is_low_N)",
        "torch.where(advantage_N > 0.0, is_low_N, is_high_N)",
    ),
    "clipped on both sides": ("torch.where(advantage_N > 0.0, is_high_N, is_low_N)", "is_high_N | is_low_N"),
    "acceptance not clipped": ("trust_N.masked_fill(is_low_N | is_high_N, 0.0)", "trust_N"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = PLANTED[fault]
    source = inspect.getsource(policy)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    module = ModuleType("faulty_policy")
    monkeypatch.setitem(sys.modules, "faulty_policy", module)
    exec(compile(source.replace(right, wrong, 1), "faulty policy", "exec"), module.__dict__)
    assert any(fails(check, SimpleNamespace(**vars(module))) for check in CHECKS)


# ---- numbers and arguments ----


@pytest.mark.parametrize("likelihood", policy.LIKELIHOODS)
def test_extreme_probabilities_give_finite_gradients(likelihood: str) -> None:
    """float32, w at both margins of the head; p or q 0 or tiny; a token recovered by rounding; TV 0 and 1."""
    cases = [
        (w, p, q, tv, is_accepted)
        for w in (1e-6, 0.5, 1.0 - 1e-6)
        for p, q in ((0.0, 1.0), (1.0, 0.0), (1e-12, 1e-25), (1e-25, 1e-12), (0.3, 0.3), (1.0, 1.0))
        for tv in (0.0, 1e-9, 0.5, 1.0)
        for is_accepted in (True, False)
    ]
    w_N, p_N, q_N, tv_N, is_accepted_N = (torch.tensor(column) for column in zip(*cases, strict=True))
    w_N.requires_grad_()
    tokens = policy.VerifiedTokens(p_N, q_N, tv_N, is_accepted_N, torch.arange(len(cases)) // 10)
    reward_S = torch.linspace(-1.0, 1.0, int(tokens.sequence_N[-1]) + 1)
    options = PolicyOptions(likelihood=likelihood, entropy=0.1)
    old_N = torch.linspace(-200.0, 200.0, len(cases))
    for old in (None, old_N):
        loss, stats = policy.surrogate(w_N, tokens, reward_S, torch.zeros(len(cases)), options, old)
        (gradient_N,) = torch.autograd.grad(loss, w_N)
        assert loss.isfinite()
        assert gradient_N.isfinite().all()
        assert all(math.isfinite(value) for value in vars(stats).values())


def test_float32_head_with_float64_probabilities() -> None:
    tokens, _ = random_tokens(REAL, 3)
    w_N = torch.full((len(tokens.p_N),), 0.4, requires_grad=True)
    reward_S, group_S = torch.rand(40), torch.arange(40) // 4
    baseline_N = policy.baselines(w_N, tokens, reward_S, group_S, PolicyOptions())
    loss, _ = policy.surrogate(w_N, tokens, reward_S, baseline_N, PolicyOptions())
    loss.backward()
    assert w_N.grad.dtype == torch.float32
    assert w_N.grad.norm() > 0


def test_sequences_without_verified_tokens_count_in_the_mean() -> None:
    """Their share of the objective has no gradient; with none at all the loss is 0 and can still be differentiated."""
    one = [torch.tensor([value], dtype=torch.float64) for value in (0.6, 0.2, 0.5)]
    tokens = policy.VerifiedTokens(*one, torch.tensor([False]), torch.tensor([1]))
    options = PolicyOptions(lam=0.0)
    w_N = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    reward_S = torch.tensor([9.0, 3.0, 9.0], dtype=torch.float64)
    loss, _ = policy.surrogate(w_N, tokens, reward_S, torch.zeros(1), options)
    assert torch.autograd.grad(loss, w_N)[0].tolist() == pytest.approx([-3.0 / 0.5 / 3])
    empty = policy.VerifiedTokens(
        *(torch.zeros(0) for _ in range(3)), torch.zeros(0, dtype=torch.bool), torch.zeros(0).long()
    )
    w_N = torch.zeros(0, requires_grad=True)
    loss, _ = policy.surrogate(w_N, empty, torch.ones(2), torch.zeros(0), options)
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_stats() -> None:
    one = [torch.tensor(values, dtype=torch.float64) for values in ([0.6, 0.1], [0.2, 0.3], [0.5, 0.25])]
    tokens = policy.VerifiedTokens(*one, torch.tensor([False, True]), torch.tensor([0, 1]))
    w_N = torch.tensor([0.5, 0.2], dtype=torch.float64)
    old_N = policy.logprobs(w_N, tokens, PolicyOptions()) - torch.tensor([0.5, 0.0])
    reward_S = torch.ones(2, dtype=torch.float64)
    _, stats = policy.surrogate(w_N, tokens, reward_S, torch.zeros(2), PolicyOptions(), old_N)
    found = {name: float(value) for name, value in vars(stats).items()}
    entropy = [-r * math.log(r) - (1 - r) * math.log(1 - r) for r in (0.25, 0.05)]
    expected = {"weight": 0.35, "acceptance": 0.85, "entropy": sum(entropy) / 2, "log_ratio": 0.25, "clipped": 0.5}
    expected["num_tokens"] = 2
    assert found == pytest.approx(expected)


def test_a_prompt_with_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="draw at least 2 a prompt"):
        policy.leave_one_out(torch.ones(3), torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lam": -0.1}, r"lam=-0\.1: must be a number of at least 0"),
        ({"lam": math.nan}, "lam=nan: must be"),
        ({"lam": math.inf}, "lam=inf: must be"),
        ({"entropy": -1.0}, r"entropy=-1\.0: must be"),
        ({"clip_low": 0.0}, r"clip_low=0\.0: must be above 0; inf switches"),
        ({"clip_high": -0.2}, r"clip_high=-0\.2: must be above 0"),
        ({"likelihood": "logits"}, "likelihood='logits': must be one of verdicts, tokens"),
        ({"ratio": "block"}, "ratio='block': must be one of sequence, token"),
    ],
)
def test_bad_options(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**changes)
