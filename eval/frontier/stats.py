"""Arithmetic of a frontier of acceptance against reward: bootstrap, undominated points, hypervolume, gain. Numpy alone.

Intervals come from resampling whole units (prompts, with all samples of each), the same units for every point: what
two points share cancels from their difference. The intervals are percentiles of the resamples (Efron 1979).

Shape suffixes: P points, N units, R resamples, the first of which is the sample itself.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval; NaN where there is no figure, and an interval of NaN where there is none to tell."""

    value: float
    low: float
    high: float


def resamples(num_units: int, num_resamples: int, seed: int) -> Floats:
    """How often each unit counts, [1 + R, N]: row 0 is the sample itself, the others are N draws with replacement.

    NaN in the others for a single unit: all would be alike, and an interval of width 0 a lie.
    """
    itself = np.ones((1, num_units))
    if num_units < 2:
        return np.concatenate([itself, np.full((num_resamples, num_units), np.nan)])
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(num_units, np.full(num_units, 1.0 / num_units), size=num_resamples)
    return np.concatenate([itself, drawn])


def ratios(numerators_PN: Floats, denominators_PN: Floats, counts_RN: Floats) -> Floats:
    """Ratio of sums over units, [R, P]; NaN where nothing stands below the line.

    Every figure is one: acceptance is accepted over drafted tokens of all units, a mean reward rewards over samples.
    """
    below_RP = counts_RN @ denominators_PN.T
    return np.divide(counts_RN @ numerators_PN.T, below_RP, out=np.full(below_RP.shape, np.nan), where=below_RP != 0)


def estimate(values_R: Floats, confidence: float) -> Estimate:
    """The measured figure, entry 0, with its percentile interval; resamples without a figure are left out."""
    value, others = values_R[0], values_R[1:]
    others = others[np.isfinite(others)]
    if not np.isfinite(value) or not len(others):
        return Estimate(float(value), np.nan, np.nan)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(others, [tail, 1.0 - tail])
    return Estimate(float(value), float(low), float(high))


def undominated(x_P: ArrayLike, y_P: ArrayLike) -> NDArray[np.int64]:
    """Indices of the points that no other equals or passes in both, by rising y (and so by falling x).

    Of equal points the first one stays; a point with a NaN is none.
    """
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    order = known[np.lexsort((-x[known], -y[known]))]
    if not len(order):
        return order
    best_before = np.concatenate([[-np.inf], np.maximum.accumulate(x[order])[:-1]])
    return order[x[order] > best_before][::-1]


def hypervolume(x_P: ArrayLike, y_P: ArrayLike, reference: tuple[float, float]) -> float:
    """Area that the points dominate, down to the reference (x, y); a point that is below it in either adds nothing."""
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    front = undominated(x, y)[::-1]  # rising x, falling y
    widths = np.diff(np.maximum(x[front], reference[0]), prepend=reference[0])
    return float(widths @ np.maximum(y[front] - reference[1], 0.0))


def attained(x_P: ArrayLike, y_P: ArrayLike, at_y: ArrayLike) -> Floats:
    """x that a rule reaches at these y: along the straight lines between its undominated points.

    Level beyond its ends. Above the highest y the rule has no point at all, and level there is more than it can do; so
    the gain over it is never overstated. NaN without a point.
    """
    x, y = np.asarray(x_P, dtype=np.float64), np.asarray(y_P, dtype=np.float64)
    front = undominated(x, y)
    if not len(front):
        return np.full(np.shape(at_y), np.nan)
    return np.interp(np.asarray(at_y, dtype=np.float64), y[front], x[front])


def attained_each(x_RP: Floats, y_RP: Floats, at_RQ: Floats) -> Floats:
    """`attained` for each resample, [R, Q]."""
    return np.stack([attained(x_P, y_P, at_Q) for x_P, y_P, at_Q in zip(x_RP, y_RP, at_RQ, strict=True)])


def hypervolumes(x_RP: Floats, y_RP: Floats, reference: tuple[float, float]) -> Floats:
    """`hypervolume` of each resample, [R]."""
    return np.array([hypervolume(x_P, y_P, reference) for x_P, y_P in zip(x_RP, y_RP, strict=True)])
