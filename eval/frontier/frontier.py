"""From completions to the figures of each point and of each rule's frontier, with their intervals. Runs nothing.

Acceptance is accepted over drafted tokens of all completions, not a mean of their rates. Figures of completions are
resampled by prompt, those of time by turn. `frontier_stats` has the arithmetic.

Shape suffixes: P points, N prompts or turns, R resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.frontier.points import LOSSLESS, PLAIN, STATIC, Point
from eval.frontier.samples import Sample, Sitting
from eval.frontier.stats import Estimate, Floats, attained_each, estimate, hypervolumes, ratios, resamples

NAN = float("nan")


@dataclass(frozen=True)
class FrontierOptions:
    """reference: acceptance and reward from which hypervolumes count. reward_floor: most that a mean reward may lie
    below the lossless one. confidence: of the intervals, from so many resamples."""

    reference: tuple[float, float] = (0.0, 0.0)
    reward_floor: float = 0.0
    num_resamples: int = 2000
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class PointFigures:
    """What was measured of one point; NaN where it has no such figure.

    reward_change: over lossless token verification. gain_in_acceptance: over the static line at the same reward;
    gain_in_reward: over it at the same acceptance. is_beyond_static: its reward is above all that static points reach,
    so that the gain in acceptance is at least the one given.
    """

    name: str
    family: str
    acceptance: Estimate
    block_length: Estimate
    reward: Estimate
    reward_change: Estimate
    certificate: Estimate
    certificate_per_token: Estimate
    tokens_per_s: Estimate
    speedup_over_lossless: Estimate
    speedup_over_plain: Estimate
    static_acceptance: Estimate
    gain_in_acceptance: Estimate
    gain_in_reward: Estimate
    is_beyond_static: bool
    is_within_floor: bool


@dataclass(frozen=True)
class FamilyFigures:
    """A rule's frontier: its points and lossless token verification, the strict end of every rule.

    hypervolume_gain: over the static rule's. best: its most accepting point within the reward floor.
    """

    name: str
    hypervolume: Estimate
    hypervolume_gain: Estimate
    best: str
    best_acceptance: float


@dataclass(frozen=True)
class Frontier:
    """All figures. lossless: the point that the floor and the changes refer to."""

    points: list[PointFigures]
    families: list[FamilyFigures]
    lossless: str
    floor: float  # reward


# Of one completion: what is summed above and below the line.
METRICS: dict[str, Callable[[Sample], tuple[float, float]]] = {
    "acceptance": lambda one: (one.counters.accepted, one.counters.drafted) if one.counters else (NAN, 1),
    "block_length": lambda one: (
        (one.counters.emitted - one.counters.sequences, one.counters.blocks) if one.counters else (NAN, 1)
    ),
    "reward": lambda one: (one.reward, 1),
    "certificate": lambda one: (NAN if one.certificate is None else one.certificate, 1),
    "certificate_per_token": lambda one: (NAN if one.certificate is None else one.certificate, one.num_tokens),
}


def analyse(sitting: Sitting, points: Sequence[Point], options: FrontierOptions) -> Frontier:
    """All figures of a sitting of these points."""
    names = [point.name for point in points]
    families = [point.family for point in points]
    lossless, plain = families.index(LOSSLESS), families.index(PLAIN)
    counts_RN = resamples(sitting.num_prompts, options.num_resamples, options.seed)
    figures_RP = {name: ratios(*_sums(sitting, names, terms), counts_RN) for name, terms in METRICS.items()}
    figures_RP["reward_change"] = figures_RP["reward"] - figures_RP["reward"][:, [lossless]]
    figures_RP |= _speeds(sitting, names, lossless, plain, options)
    x_RP, y_RP = figures_RP["acceptance"], figures_RP["reward"]
    # The static line begins at w = 1, which is the lossless point.
    line = [lossless, *(i for i, family in enumerate(families) if family == STATIC)]
    if len(line) == 1:
        line = []
    figures_RP["static_acceptance"] = attained_each(x_RP[:, line], y_RP[:, line], y_RP)
    figures_RP["gain_in_acceptance"] = x_RP - figures_RP["static_acceptance"]
    figures_RP["gain_in_reward"] = y_RP - attained_each(y_RP[:, line], x_RP[:, line], x_RP)
    floor = float(y_RP[0, lossless]) - options.reward_floor
    found = [
        PointFigures(
            name,
            family,
            **{key: estimate(values_RP[:, i], options.confidence) for key, values_RP in figures_RP.items()},
            is_beyond_static=bool(line and y_RP[0, i] > y_RP[0, line].max()),
            is_within_floor=bool(y_RP[0, i] >= floor),
        )
        for i, (name, family) in enumerate(zip(names, families, strict=True))
    ]
    return Frontier(found, _families(found, x_RP, y_RP, lossless, options), names[lossless], floor)


def _families(
    points: Sequence[PointFigures], x_RP: Floats, y_RP: Floats, lossless: int, options: FrontierOptions
) -> list[FamilyFigures]:
    """One a rule, in their order."""
    members: dict[str, list[int]] = {}
    for i, point in enumerate(points):
        if point.family != PLAIN:
            members.setdefault(point.family, [lossless] if i != lossless else []).append(i)
    areas_R = {name: hypervolumes(x_RP[:, ids], y_RP[:, ids], options.reference) for name, ids in members.items()}
    found = []
    for name, ids in members.items():
        within = [i for i in ids if points[i].is_within_floor and np.isfinite(x_RP[0, i])]
        best = max(within, key=lambda i: x_RP[0, i], default=lossless)
        gain_R = areas_R[name] - areas_R[STATIC] if STATIC in areas_R else np.full(len(x_RP), np.nan)
        found.append(
            FamilyFigures(
                name,
                estimate(areas_R[name], options.confidence),
                estimate(gain_R, options.confidence),
                points[best].name,
                float(x_RP[0, best]),
            )
        )
    return found


def _sums(
    sitting: Sitting, names: Sequence[str], terms: Callable[[Sample], tuple[float, float]]
) -> tuple[Floats, Floats]:
    """What stands above and below the line, each summed over the completions of a prompt, [P, N]."""
    place = {name: i for i, name in enumerate(names)}
    above_PN, below_PN = np.zeros((2, len(names), sitting.num_prompts))
    for sample in sitting.samples:
        above, below = terms(sample)
        above_PN[place[sample.point], sample.prompt] += above
        below_PN[place[sample.point], sample.prompt] += below
    return above_PN, below_PN


def _speeds(
    sitting: Sitting, names: Sequence[str], lossless: int, plain: int, options: FrontierOptions
) -> dict[str, Floats]:
    """Tokens a second, and their ratio to the two yardsticks, [R, P]."""
    place = {name: i for i, name in enumerate(names)}
    num_turns = 1 + max(turn.turn for turn in sitting.turns)
    tokens_PN, seconds_PN = np.zeros((2, len(names), num_turns))
    for turn in sitting.turns:
        tokens_PN[place[turn.point], turn.turn] = turn.num_tokens
        seconds_PN[place[turn.point], turn.turn] = turn.seconds
    rates_RP = ratios(tokens_PN, seconds_PN, resamples(num_turns, options.num_resamples, options.seed))
    return {
        "tokens_per_s": rates_RP,
        "speedup_over_lossless": _over(rates_RP, lossless),
        "speedup_over_plain": _over(rates_RP, plain),
    }


def _over(values_RP: Floats, other: int) -> Floats:
    """Each point's value over another point's; NaN where that is 0."""
    others_RP = np.broadcast_to(values_RP[:, [other]], values_RP.shape)
    return np.divide(values_RP, others_RP, out=np.full(values_RP.shape, np.nan), where=others_RP != 0)
