"""Mentored decoding, exact: its law from the optimality conditions solved once more by scipy, and that it is optimal.

The same checks are then shown to fail for faults planted in the real source.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from models.verification import base, mentored, token
from tests.models.verification.enumeration import EXACT, fails, planted
from tests.models.verification.laws import (
    DEEP,
    Check,
    Law,
    check_enumerated,
    check_rows_apart,
    check_strict,
    check_verdicts,
    is_caught,
    random_block,
    tv,
)

BOUNDS = (0.02, 0.3, np.inf)


def divergence(p: np.ndarray, nu: np.ndarray) -> float:
    """KL(p || nu)."""
    inside = p > 0
    with np.errstate(divide="ignore"):
        return float(np.sum(p[inside] * (np.log(p[inside]) - np.log(nu[inside]))))


def mentor(kl_bound: float) -> Law:
    """The law, by a search (of `lower`, sum nu = 1) within a search (of `upper`, KL = kl_bound)."""

    @cache
    def solve(p_bytes: bytes, q_bytes: bytes) -> np.ndarray:
        p, q = np.frombuffer(p_bytes), np.frombuffer(q_bytes)
        inside = p > 0

        def held(lower: float, upper: float) -> np.ndarray:
            return np.where(inside, np.minimum(np.maximum(q, lower * p), upper * p), 0.0)

        def with_upper(log_upper: float) -> np.ndarray:
            upper = np.exp(log_upper)
            if held(0.0, upper).sum() >= 1.0 - 1e-15 or held(1.0, upper).sum() <= 1.0:
                return held(0.0 if held(0.0, upper).sum() >= 1.0 - 1e-15 else 1.0, upper)
            return held(brentq(lambda lower: held(lower, upper).sum() - 1.0, 0.0, 1.0, xtol=1e-16), upper)

        top = np.log(max(1.0, (q[inside] / p[inside]).max()))
        if divergence(p, with_upper(top)) <= kl_bound:
            return with_upper(top)
        excess = lambda log_upper: divergence(p, with_upper(log_upper)) - kl_bound  # noqa: E731
        return with_upper(brentq(lambda x: min(excess(x), 10.0), 0.0, top, xtol=1e-15))

    return lambda p, q, text: solve(np.ascontiguousarray(p).tobytes(), np.ascontiguousarray(q).tobytes())


LAWS = {kl_bound: mentor(kl_bound) for kl_bound in BOUNDS}


def check_verdict(code: SimpleNamespace) -> None:
    for kl_bound in BOUNDS:
        check_verdicts(code.MentoredDecoding(kl_bound), LAWS[kl_bound])


def check_law(code: SimpleNamespace) -> None:
    for kl_bound in BOUNDS:
        check_enumerated(code.MentoredDecoding(kl_bound), LAWS[kl_bound], budgets=(0.1,))


def check_deep_law(code: SimpleNamespace) -> None:
    check_enumerated(code.MentoredDecoding(0.3), LAWS[0.3], DEEP[1:])


def check_rows(code: SimpleNamespace) -> None:
    check_rows_apart(code.MentoredDecoding(0.1))


def check_strict_end(code: SimpleNamespace) -> None:
    """A bound of 0, of divergence or of distance, is lossless token verification, bit for bit."""
    check_strict(code.MentoredDecoding(0.0))
    check_strict(code.MentoredDecoding(0.5), budget=0.0)


def law_of(code: SimpleNamespace, p: np.ndarray, q: np.ndarray, kl_bound: float) -> np.ndarray:
    """nu, by the code."""
    p_V, q_V = torch.tensor(p), torch.tensor(q)
    rule = code.MentoredDecoding(kl_bound)
    return rule.law(p_V, q_V, *rule.prepare(None, p_V, q_V)).numpy()


def contexts() -> list[tuple[np.ndarray, np.ndarray]]:
    """(p, q) over three tokens: full supports, and a zero in p, in q, or in both."""
    rng = np.random.default_rng(8)
    pairs = []
    for zero_p, zero_q in [(0, 0), (0, 0), (1, 0), (0, 1), (1, 1), (0, 0)]:
        p, q = rng.dirichlet(np.ones(3), 2)
        p[0] *= 1 - zero_p
        q[rng.integers(3)] *= 1 - zero_q
        pairs.append((p / p.sum(), q / q.sum()))
    return pairs


def check_optimal(code: SimpleNamespace) -> None:
    """Within the bound, and no point of a grid of 500,000 laws over three tokens that is accepts more.

    Nor does it lose much to what that grid can resolve: acceptance is 1-Lipschitz in the sum of |changes| / 2.
    """
    step = 1e-3
    first, second = np.meshgrid(np.arange(0.0, 1.0 + step, step), np.arange(0.0, 1.0 + step, step), indexing="ij")
    grid = np.stack([first, second, 1.0 - first - second], axis=-1)[first + second <= 1.0 + 1e-9].clip(min=0.0)
    for p, q in contexts():
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(p > 0, p * (np.log(p) - np.log(grid)), 0.0)
        allowed = (grid[:, p == 0] == 0).all(axis=1)
        for kl_bound in (0.01, 0.1, 1.0):
            nu = law_of(code, p, q, kl_bound)
            assert abs(nu.sum() - 1.0) < EXACT
            assert (nu >= 0).all()
            assert (nu[p == 0] == 0).all()
            assert divergence(p, nu) < kl_bound + EXACT
            best = np.minimum(grid[allowed & (terms.sum(axis=1) <= kl_bound)], q).sum(axis=1).max()
            assert best - EXACT < np.minimum(nu, q).sum() < best + 3 * step


def check_ends(code: SimpleNamespace) -> None:
    """From p to the nearest law that accepts all that can be accepted; acceptance and divergence grow between."""
    for p, q in contexts():
        bounds = [0.0, 1e-9, 1e-3, 0.03, 0.1, 0.4, 1.0, 30.0, np.inf]
        laws = [law_of(code, p, q, kl_bound) for kl_bound in bounds]
        accepted = [np.minimum(nu, q).sum() for nu in laws]
        assert (np.diff(accepted) > -EXACT).all()
        assert (np.diff([divergence(p, nu) for nu in laws[:-2]]) > -EXACT).all()
        assert np.abs(laws[1] - p).max() < 1e-4
        assert abs(accepted[-1] - q[p > 0].sum()) < EXACT
        # The least distance at which that is possible: sum of (q - p)+ on the support.
        assert abs(tv(laws[-1], p) - np.maximum(q - p, 0.0)[p > 0].sum()) < EXACT
        if q[p > 0].sum() == 1.0:
            assert np.abs(laws[-1] - q).max() < EXACT


def check_classes(code: SimpleNamespace) -> None:
    """A vocabulary too large to be sorted: a distribution, within the bound and near the law by sorting."""
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(2, 2, 12_000, generator=generator, dtype=torch.float64)
    q = (logits + torch.randn(logits.shape, generator=generator)).softmax(dim=-1)
    p = torch.where(logits > -1.0, logits, -torch.inf).softmax(dim=-1)  # a part of q is outside p's support
    q = torch.where(logits < 6.0, q, 0.0)
    q = q / q.sum(dim=-1, keepdim=True)
    for kl_bound in (0.2, 0.7, np.inf):
        rule = code.MentoredDecoding(kl_bound)
        stats = rule.prepare(None, p, q)
        nu = rule.law(p, q, *stats)
        assert (nu.sum(dim=-1) - 1.0).abs().max() < EXACT
        assert (rule.distance(p, q, *stats) - (nu - p).abs().sum(dim=-1) / 2).abs().max() < EXACT
        for index in np.ndindex(2, 2):
            exact = law_of(SORTING, p[index].numpy(), q[index].numpy(), kl_bound)
            assert tv(nu[index].numpy(), exact) < 1e-4
            assert divergence(p[index].numpy(), nu[index].numpy()) <= kl_bound + EXACT
            assert abs(divergence(p[index].numpy(), nu[index].numpy()) - divergence(p[index].numpy(), exact)) < 1e-4


CHECKS: list[Check] = [
    check_classes,
    check_rows,
    check_ends,
    check_optimal,
    check_verdict,
    check_strict_end,
    check_law,
    check_deep_law,
]
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(mentored)))
SORTING = planted(["base", "token", "mentored"], "many = p.shape[-1] > NUM_CLASSES", "many = False")


@pytest.mark.parametrize("check", CHECKS)
def test_mentored_decoding_is_exact(check: Check) -> None:
    check(REAL)


PLANTED = {
    "KL of nu from p": ("-torch.xlogy(p_lifted, lower)", "torch.xlogy(p_lifted, lower)"),
    "bound ignored": ("(kl <= kl_bound)", "(kl <= kl)"),
    "upper and lower swapped": ("lower, upper, share = stats", "upper, lower, share = stats"),
    "no upper": (".clamp_(min=q, max=upper * p)", ".clamp_(min=q)"),
    "no lower, so not normalised": (
        "return (lower * p).clamp_(min=q, max=upper * p)",
        "return torch.minimum(q, upper * p)",
    ),
    "small p lost in a difference of sums": (
        "p_cut, q_cut = self.p_above.gather(-1, num_uncut)",
        "p_cut, q_cut = self.p_below[..., -1:] - self.p_below.gather(-1, num_uncut)",
    ),
    "a token with q = 0 left at 0 for free": ("self.lift, missing, right=True", "self.lift, missing"),
    "all tokens taken as cut": ("self.p_above.gather(-1, num_uncut)", "self.p_above[..., :1]"),
    "gain of the cut tokens": (
        "kept_gain = self.gain_below.gather(-1, num_uncut)",
        "kept_gain = self.gain_below[..., -1:]",
    ),
    "mass outside the support lost": ("q.gather(-1, order).double()", "(q * p.sign()).gather(-1, order).double()"),
    "takes the end beyond the bound": ("edges.gather(-1, num_within - 1)", "edges.gather(-1, num_within)"),
    "too few rounds": ("NUM_ROUNDS, NUM_PARTS = 15, 16", "NUM_ROUNDS, NUM_PARTS = 7, 16"),
    "one bound for all rows": (
        "lower, upper = mentor_bounds(p_BKV, q_BKV, self.kl_bound)",
        "lower, upper = (s.amin(0, True).expand(s.shape) for s in mentor_bounds(p_BKV, q_BKV, self.kl_bound))",
    ),
    "classes: all by q": ("empty.scatter_add(-1, index, p)", "empty.scatter_add(-1, index, q)"),
    "classes: too wide": (">> 15) - ((127 - 16) << 8)", ">> 20) - ((127 - 16) << 3)"),
    "classes: lower not made exact": ("range(2)", "range(0)"),
    "classes: slope of the whole": (".sign_().clamp_(min=0.0).mul_(p)", ".sign_().mul_(p)"),
    "classes: bound passed": ("(kl_bound / kl.clamp(min=kl_bound))", "torch.ones_like(kl)"),
    "classes: distance of the whole": (" * share[..., 0].double()", ""),
    "distance by upper": ("((1.0 - lower) * p)", "((1.0 - stats[1]).abs() * p)"),
    "residual (p - q)+": ("return (self.law(p, q, *stats) - q).clamp(min=0.0)", "return (p - q).clamp(min=0.0)"),
    "accepts as lossless": ("return acceptance_probs(self.law(p, q, *stats), q)", "return acceptance_probs(p, q)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    assert is_caught(CHECKS, ["mentored"], *PLANTED[fault])


def test_large_vocabulary_in_float32() -> None:
    """1000 rows of 1000 tokens: within the bound, a distribution, nothing outside the support, more than lossless."""
    block = random_block(1000, 1000, 1, seed=3, dtype=torch.float32)
    p, q = block.target_probs_BTV[:, :1], block.dense_draft_probs()
    rule = mentored.MentoredDecoding(0.1)
    nu = rule.law(p, q, *rule.prepare(block, p, q)).double().numpy()
    kl = [divergence(target[0], relaxed[0]) for target, relaxed in zip(p.double().numpy(), nu, strict=True)]
    assert max(kl) < 0.1 + 1e-4
    assert np.mean(np.abs(np.array(kl) - 0.1) < 1e-4) > 0.8  # the bound is used up, but where p == q or nearly
    assert np.abs(nu.sum(axis=-1) - 1.0).max() < 1e-5
    assert (nu[p.numpy() == 0] == 0).all()
    gain = np.minimum(nu, q.numpy()).sum(axis=-1) - torch.minimum(p, q).sum(dim=-1).numpy()
    assert gain.min() > -1e-5
    assert gain.mean() > 0.1


def test_reference_is_not_the_code() -> None:
    """The check of the law refuses another bound."""
    wrong = SimpleNamespace(MentoredDecoding=lambda kl_bound: mentored.MentoredDecoding(kl_bound * 1.01))
    assert fails(check_verdict, wrong)


@pytest.mark.parametrize("kl_bound", [-0.1, float("nan")])
def test_bad_bound(kl_bound: float) -> None:
    with pytest.raises(ValueError, match=r"kl_bound=.*at least 0"):
        mentored.MentoredDecoding(kl_bound)
