"""The frontier's arithmetic against closed forms, brute force and known coverage; the checks against planted faults."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import eval.frontier.stats
from eval.frontier.stats import (
    Estimate,
    attained,
    attained_each,
    estimate,
    hypervolume,
    hypervolumes,
    ratios,
    resamples,
    undominated,
)
from tests.eval.planting import as_code, fails, planted

CODE = as_code(eval.frontier.stats)


# ---- the bootstrap ----


def check_resamples(code: SimpleNamespace) -> None:
    counts_RN = code.resamples(7, 500, seed=3)
    assert counts_RN.shape == (501, 7)
    assert (counts_RN[0] == 1).all()
    assert (counts_RN.sum(axis=1) == 7).all()
    assert counts_RN[1:].min() == 0
    assert (counts_RN == code.resamples(7, 500, seed=3)).all()
    assert (counts_RN != code.resamples(7, 500, seed=4)).any()


def check_interval_of_a_mean(code: SimpleNamespace) -> None:
    """900 units: the percentiles of resampled means are mean +- 1.96 s / sqrt(n), here to 6% of that."""
    values_1N = np.random.default_rng(0).normal(3.0, 2.0, size=(1, 900))
    replicates_R1 = code.ratios(values_1N, np.ones_like(values_1N), code.resamples(900, 4000, seed=1))
    found = code.estimate(replicates_R1[:, 0], 0.95)
    half = 1.96 * values_1N.std() / 30
    assert found.value == pytest.approx(values_1N.mean(), abs=1e-12)
    assert found.low == pytest.approx(found.value - half, abs=0.06 * half)
    assert found.high == pytest.approx(found.value + half, abs=0.06 * half)


def check_ratio_of_sums(code: SimpleNamespace) -> None:
    """Not the mean of ratios: 8 of 10 and 0 of 2 are 8 of 12. Its spread is that of the delta method, to 5%."""
    counts_RN = code.resamples(2, 100, seed=0)
    assert code.ratios(np.array([[8.0, 0.0]]), np.array([[10.0, 2.0]]), counts_RN)[0, 0] == pytest.approx(8 / 12)
    rng = np.random.default_rng(5)
    below_1N = rng.integers(5, 60, size=(1, 800)).astype(float)
    above_1N = rng.binomial(below_1N.astype(int), 0.3).astype(float)
    replicates_R = code.ratios(above_1N, below_1N, code.resamples(800, 4000, seed=2))[:, 0]
    residual_1N = above_1N - replicates_R[0] * below_1N
    expected = np.sqrt((residual_1N**2).sum()) / below_1N.sum()
    assert replicates_R[1:].std() == pytest.approx(expected, rel=0.05)


def check_pairing(code: SimpleNamespace) -> None:
    """Hard and easy prompts move two points together: a constant lead of one has no spread at all."""
    base_N = np.random.default_rng(6).normal(size=40)
    above_PN, below_PN = np.stack([base_N, base_N + 0.5]), np.ones((2, 40))
    replicates_RP = code.ratios(above_PN, below_PN, code.resamples(40, 300, seed=0))
    alone = code.estimate(replicates_RP[:, 1], 0.95)
    lead = code.estimate(replicates_RP[:, 1] - replicates_RP[:, 0], 0.95)
    assert alone.high - alone.low > 0.3
    assert (lead.value, lead.low, lead.high) == pytest.approx((0.5, 0.5, 0.5))


def check_nothing_to_tell(code: SimpleNamespace) -> None:
    alone = code.estimate(code.ratios(np.ones((1, 1)), np.ones((1, 1)), code.resamples(1, 50, seed=0))[:, 0], 0.95)
    assert alone.value == 1.0
    assert np.isnan([alone.low, alone.high]).all()
    undefined_R = code.ratios(np.zeros((1, 3)), np.zeros((1, 3)), code.resamples(3, 50, seed=0))[:, 0]
    assert np.isnan(undefined_R).all()
    assert np.isnan(code.estimate(undefined_R, 0.95).value)
    some_R = np.array([1.0, np.nan, 2.0, 4.0])
    assert code.estimate(some_R, 0.5).low == pytest.approx(2.5)


def test_coverage() -> None:
    """600 simulated runs of 50 prompts of unequal length and difficulty; the 95% interval covers the true acceptance.

    For a coverage of .95 the share has standard deviation .009; the percentile interval's is a little lower at 50 units
    (.94). Outside .91 to .975 with probability below 1e-3.
    """
    rng = np.random.default_rng(7)
    num_runs, covered = 600, 0
    # E[accepted] / E[drafted]: difficulty is independent of length.
    truth = 2.0 / 5.0
    for run in range(num_runs):
        drafted_1N = rng.integers(20, 100, size=(1, 50))
        accepted_1N = rng.binomial(drafted_1N, rng.beta(2.0, 3.0, size=(1, 50)))
        replicates_RP = ratios(accepted_1N.astype(float), drafted_1N.astype(float), resamples(50, 500, seed=run))
        found = estimate(replicates_RP[:, 0], 0.95)
        covered += found.low <= truth <= found.high
    assert 0.91 < covered / num_runs < 0.975


# ---- undominated points ----


def brute_front(points: list[tuple[float, float]]) -> set[tuple[float, float]]:
    """Points that none equals or passes in both without being the same."""
    return {(x, y) for x, y in points if not any((u, v) != (x, y) and u >= x and v >= y for u, v in points)}


def check_undominated(code: SimpleNamespace) -> None:
    rng = np.random.default_rng(8)
    for _ in range(200):
        points = [tuple(pair) for pair in rng.integers(0, 6, size=(rng.integers(1, 9), 2)).astype(float).tolist()]
        x, y = zip(*points, strict=True)
        front = code.undominated(x, y)
        assert {points[i] for i in front} == brute_front(points)
        assert len(front) == len(brute_front(points))  # of equal points one
        assert (np.diff(np.array(y)[front]) > 0).all()
        assert (np.diff(np.array(x)[front]) < 0).all()
    assert code.undominated([1.2, np.nan, 0.9], [np.nan, 1.0, 0.1]).tolist() == [2]
    assert code.undominated([], []).tolist() == []


# ---- hypervolume ----


def check_hypervolume(code: SimpleNamespace) -> None:
    """Whole coordinates: cells of the grid that some point dominates, counted one by one."""
    rng = np.random.default_rng(9)
    for _ in range(100):
        x, y = rng.integers(-3, 12, size=(2, rng.integers(1, 8)))
        cells = sum(bool(((x >= i + 1) & (y >= j + 1)).any()) for i in range(1, 12) for j in range(2, 12))
        assert code.hypervolume(x, y, (1.0, 2.0)) == pytest.approx(cells)
    assert code.hypervolume([0.5, 0.8], [1.0, 0.5], (0.0, 0.0)) == pytest.approx(0.5 + 0.3 * 0.5)
    assert code.hypervolume([np.nan], [1.0], (0.0, 0.0)) == 0.0
    each_R = code.hypervolumes(np.array([[0.5], [0.25]]), np.array([[1.0], [1.0]]), (0.0, 0.0))
    assert each_R.tolist() == [0.5, 0.25]


# ---- what a rule reaches ----

# Unsorted, with two dominated points: (0.5, 0.7) under the line, (0.6, 0.8) equal in reward to a better one.
X, Y = [0.9, 0.6, 0.5, 0.7, 0.6], [0.2, 1.0, 0.7, 0.8, 0.8]


def check_attained(code: SimpleNamespace) -> None:
    expected = {1.0: 0.6, 0.9: 0.65, 0.8: 0.7, 0.5: 0.8, 0.2: 0.9}
    assert code.attained(X, Y, list(expected)) == pytest.approx(list(expected.values()))
    assert code.attained(X, Y, [1.5, -3.0]) == pytest.approx([0.6, 0.9])  # level beyond the ends
    assert code.attained([0.4], [0.5], [0.9, 0.1]) == pytest.approx([0.4, 0.4])
    assert np.isnan(code.attained([], [], [0.3])).all()
    assert np.isnan(code.attained(X, Y, [np.nan])).all()
    each_RQ = code.attained_each(np.array([X, [v + 0.1 for v in X]]), np.array([Y, Y]), np.array([[0.9], [0.5]]))
    assert each_RQ == pytest.approx(np.array([[0.65], [0.9]]))


CHECKS: list[Callable[[SimpleNamespace], None]] = [
    check_resamples,
    check_interval_of_a_mean,
    check_ratio_of_sums,
    check_pairing,
    check_nothing_to_tell,
    check_undominated,
    check_hypervolume,
    check_attained,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_arithmetic(check: Callable[[SimpleNamespace], None]) -> None:
    check(CODE)


def test_names() -> None:
    """What the checks reach through the module is what others import."""
    assert (CODE.attained, CODE.hypervolumes, CODE.attained_each) == (attained, hypervolumes, attained_each)
    assert (CODE.hypervolume, CODE.undominated, CODE.Estimate) == (hypervolume, undominated, Estimate)


# ---- planted faults ----

FAULTS = [
    # The sample itself is no resample of its own.
    ("np.concatenate([itself, drawn])", "drawn"),
    # Drawn without replacement: every resample is the sample.
    ("drawn = rng.multinomial(", "drawn = 1 + 0 * rng.multinomial("),
    ("rng = np.random.default_rng(seed)", "rng = np.random.default_rng(0)"),
    # An interval of width 0 from one prompt.
    ("if num_units < 2:", "if num_units < 1:"),
    # The mean of ratios.
    (
        "below_RP = counts_RN @ denominators_PN.T",
        "return counts_RN @ (numerators_PN / denominators_PN).T / counts_RN.sum(axis=1)[:, None]\n    below_RP = 0",
    ),
    ("tail = (1.0 - confidence) / 2.0", "tail = 1.0 - confidence"),
    ("others = others[np.isfinite(others)]", "others = np.nan_to_num(others)"),
    # Dominated points stay; equal points stay twice; the order is another.
    ("order[x[order] > best_before]", "order[x[order] >= best_before]"),
    ("np.maximum.accumulate(x[order])", "np.minimum.accumulate(x[order])"),
    ("np.lexsort((-x[known], -y[known]))", "np.lexsort((x[known], -y[known]))"),
    ("order[x[order] > best_before][::-1]", "order[x[order] > best_before]"),
    ("np.isfinite(x) & np.isfinite(y)", "np.isfinite(x)"),
    # The area under the line between points, which no point dominates; and one that falls below the reference.
    ("widths @ np.maximum(y[front] - reference[1], 0.0)", "np.trapezoid(y[front], x[front])"),
    ("np.maximum(y[front] - reference[1], 0.0)", "(y[front] - reference[1])"),
    ("np.maximum(x[front], reference[0])", "x[front]"),
    # Through all points, dominated ones too.
    ("front = undominated(x, y)\n    if not", "front = np.argsort(y)\n    if not"),
    (
        "np.interp(np.asarray(at_y, dtype=np.float64), y[front], x[front])",
        "np.interp(at_y, x[front][::-1], y[front][::-1])",
    ),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    code = planted(eval.frontier.stats, right, wrong)
    assert any(fails(check, code) for check in CHECKS)
