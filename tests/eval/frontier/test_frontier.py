"""Figures of points and rules from a sitting written down by hand; and the checks against planted faults."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import eval.frontier.frontier
from eval.frontier.frontier import Frontier, FrontierOptions
from eval.frontier.points import DYNAMIC, LOSSLESS, PEER, PLAIN, STATIC, Point
from eval.frontier.samples import Sample, Sitting, TimedTurn
from models.decoding.counters import Counters
from tests.eval.planting import as_code, fails, planted

CODE = as_code(eval.frontier.frontier)
NUM_PROMPTS, SAMPLES = 6, 2
# Ease of a prompt: added to the reward of every point, so that it cancels from differences.
EASE = [0.0, 0.3, -0.2, 0.1, -0.3, 0.1]
# name: family, accepted of 10 drafted on even prompts and of 30 on odd ones, reward, certificate, seconds a turn.
MADE: dict[str, tuple[str, int, int, float, float | None, float]] = {
    "plain": (PLAIN, 0, 0, 0.80, 0.0, 4.0),
    "token": (LOSSLESS, 4, 12, 0.80, 0.0, 2.0),  # acceptance 0.4
    "block": (LOSSLESS, 5, 13, 0.79, 0.0, 2.0),  # 0.45
    "w = 0.5": (STATIC, 5, 19, 0.60, 2.0, 1.5),  # 0.6
    "w = 0.4": (STATIC, 4, 16, 0.55, 2.4, 1.5),  # 0.5, dominated
    "w = 0": (STATIC, 10, 30, 0.20, 4.0, 1.0),  # 1
    "lam = 1": (DYNAMIC, 8, 24, 0.70, 1.0, 1.25),  # 0.8
    "lam = 0": (DYNAMIC, 7, 15, 0.85, 0.5, 1.25),  # 0.55
    "peer": (PEER, 6, 18, 0.40, None, 8.0),  # 0.6
}
NUM_DRAFTED = (10, 30)


def make_sitting(num_prompts: int = NUM_PROMPTS) -> Sitting:
    sitting = Sitting()
    for name, (family, *accepted, reward, certificate, seconds) in MADE.items():
        for prompt in range(num_prompts):
            drafted = NUM_DRAFTED[prompt % 2] if family != PLAIN else 0
            kept = accepted[prompt % 2]
            blocks = drafted // 5 or 20
            counters = Counters(blocks, drafted, kept, 0, kept + blocks + 1, 1)
            sitting.samples += [
                Sample(name, prompt, number, "", counters.emitted, reward + EASE[prompt], counters, certificate)
                for number in range(SAMPLES)
            ]
            sitting.turns.append(TimedTurn(name, prompt, seconds * (1 + prompt), 10))
    return sitting


def make_points() -> list[Point]:
    nobody: Any = None
    return [Point(name, family, nobody) for name, (family, *_) in MADE.items()]


def analysed(code: SimpleNamespace, **options: Any) -> tuple[Frontier, dict[str, Any], dict[str, Any]]:
    frontier = code.analyse(make_sitting(), make_points(), FrontierOptions(**{"num_resamples": 100, **options}))
    return frontier, {one.name: one for one in frontier.points}, {one.name: one for one in frontier.families}


def check_figures_of_completions(code: SimpleNamespace) -> None:
    _, points, _ = analysed(code)
    # Sums over prompts of both lengths: 2 samples of 3 prompts each.
    assert points["token"].acceptance.value == pytest.approx(16 / 40)
    assert points["w = 0.5"].acceptance.value == pytest.approx(24 / 40)
    assert points["w = 0"].acceptance.value == 1.0
    assert math.isnan(points["plain"].acceptance.value)
    # Blocks of even and odd prompts: 2 and 6; each emits one token more than it keeps.
    assert points["token"].block_length.value == pytest.approx((16 + 8) / 8)
    assert points["plain"].block_length.value == 1.0
    assert points["lam = 1"].reward.value == pytest.approx(0.7)
    assert points["lam = 1"].certificate.value == pytest.approx(1.0)
    assert points["lam = 1"].certificate_per_token.value == pytest.approx(2 * 1.0 / (8 + 2 + 1 + 24 + 6 + 1))
    assert points["token"].certificate_per_token.value == 0.0
    assert math.isnan(points["peer"].certificate.value)
    assert points["lam = 1"].reward.low < 0.6 < 0.8 < points["lam = 1"].reward.high


def check_changes_are_paired(code: SimpleNamespace) -> None:
    """Ease of the prompts is common to all points: it spreads each reward and no difference."""
    _, points, _ = analysed(code)
    change = points["lam = 1"].reward_change
    assert (change.value, change.low, change.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert points["token"].reward_change.value == 0.0


def check_dominance(code: SimpleNamespace) -> None:
    """The static line goes through (0.4, 0.8), (0.6, 0.6) and (1, 0.2): acceptance at reward r is 1.2 - r."""
    _, points, _ = analysed(code)
    inside, beyond, peer = points["lam = 1"], points["lam = 0"], points["peer"]
    assert inside.static_acceptance.value == pytest.approx(0.5)
    assert inside.gain_in_acceptance.value == pytest.approx(0.3)
    assert inside.gain_in_reward.value == pytest.approx(0.3)  # at acceptance 0.8 the line has reward 0.4
    assert not inside.is_beyond_static
    assert beyond.static_acceptance.value == pytest.approx(0.4)
    assert beyond.gain_in_acceptance.value == pytest.approx(0.15)
    assert beyond.is_beyond_static
    assert peer.gain_in_acceptance.value == pytest.approx(-0.2)
    assert points["w = 0.4"].gain_in_acceptance.value == pytest.approx(-0.15)
    assert inside.gain_in_acceptance.low < 0.3 < inside.gain_in_acceptance.high
    assert inside.gain_in_acceptance.low > 0.2


def check_floor(code: SimpleNamespace) -> None:
    for floor, within in (
        (0.0, {"plain", "token", "lam = 0"}),
        (0.15, {"plain", "token", "block", "lam = 0", "lam = 1"}),
    ):
        frontier, points, families = analysed(code, reward_floor=floor)
        assert {name for name, point in points.items() if point.is_within_floor} == within
        assert frontier.floor == pytest.approx(0.8 - floor)
        assert frontier.lossless == "token"
        assert families[STATIC].best == "token"
        assert families[STATIC].best_acceptance == pytest.approx(0.4)
        assert families[DYNAMIC].best == ("lam = 1" if floor else "lam = 0")


def check_hypervolumes(code: SimpleNamespace) -> None:
    """Every rule has the lossless point (0.4, 0.8) too."""
    _, _, families = analysed(code, reference=(0.2, 0.1))
    assert families[LOSSLESS].hypervolume.value == pytest.approx(0.2 * 0.7 + 0.05 * 0.69)
    assert families[STATIC].hypervolume.value == pytest.approx(0.2 * 0.7 + 0.2 * 0.5 + 0.4 * 0.1)
    dynamic = 0.35 * 0.75 + 0.25 * 0.6
    assert families[DYNAMIC].hypervolume.value == pytest.approx(dynamic)
    assert families[DYNAMIC].hypervolume_gain.value == pytest.approx(dynamic - 0.28)
    assert families[PEER].hypervolume.value == pytest.approx(0.2 * 0.7 + 0.2 * 0.3)
    assert list(families) == [LOSSLESS, STATIC, DYNAMIC, PEER]


def check_speed(code: SimpleNamespace) -> None:
    """The machine slows down from turn to turn, sixfold in the end; the ratio of two points is the same in all."""
    _, points, _ = analysed(code)
    rate = points["lam = 1"].tokens_per_s
    assert rate.value == pytest.approx(60 / (1.25 * 21))
    assert rate.low < 0.9 * rate.value < 1.1 * rate.value < rate.high
    over = points["lam = 1"].speedup_over_lossless
    assert (over.value, over.low, over.high) == pytest.approx((1.6, 1.6, 1.6))
    assert points["lam = 1"].speedup_over_plain.value == pytest.approx(3.2)


CHECKS: list[Callable[[SimpleNamespace], None]] = [
    check_figures_of_completions,
    check_changes_are_paired,
    check_dominance,
    check_floor,
    check_hypervolumes,
    check_speed,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_figures(check: Callable[[SimpleNamespace], None]) -> None:
    check(CODE)


def test_without_a_static_line() -> None:
    sitting, points = make_sitting(), [point for point in make_points() if point.family != STATIC]
    sitting.samples = [sample for sample in sitting.samples if MADE[sample.point][0] != STATIC]
    sitting.turns = [turn for turn in sitting.turns if MADE[turn.point][0] != STATIC]
    frontier = CODE.analyse(sitting, points, FrontierOptions(num_resamples=100))
    dynamic = next(point for point in frontier.points if point.name == "lam = 1")
    assert math.isnan(dynamic.gain_in_acceptance.value)
    assert not dynamic.is_beyond_static
    assert all(math.isnan(family.hypervolume_gain.value) for family in frontier.families)


def test_one_prompt_has_figures_without_intervals() -> None:
    frontier = CODE.analyse(make_sitting(1), make_points(), FrontierOptions(num_resamples=100))
    dynamic = next(point for point in frontier.points if point.name == "lam = 1")
    for figure in (dynamic.acceptance, dynamic.reward, dynamic.gain_in_acceptance, dynamic.tokens_per_s):
        assert math.isfinite(figure.value)
        assert math.isnan(figure.low)
        assert math.isnan(figure.high)


FAULTS = [
    ("one.counters.accepted, one.counters.drafted)", "one.counters.accepted / max(1, one.counters.drafted), 1)"),
    ("one.counters.emitted - one.counters.sequences", "one.counters.emitted"),
    ("(NAN if one.certificate is None else one.certificate, one.num_tokens)", "(one.certificate or 0.0, 1)"),
    ('"certificate": lambda one: (NAN if', '"certificate": lambda one: (0.0 if'),
    # Changes against resamples of another order: nothing cancels.
    ('figures_RP["reward"][:, [lossless]]', 'figures_RP["reward"][::-1, [lossless]]'),
    # The line without its lossless end.
    ("line = [lossless, *(i for", "line = [*(i for"),
    # The line of all points, dynamic ones among them.
    ("if family == STATIC)]", "if family != PLAIN)]"),
    ("attained_each(y_RP[:, line], x_RP[:, line], x_RP)", "attained_each(y_RP[:, line], x_RP[:, line], y_RP)"),
    ("y_RP[0, i] > y_RP[0, line].max()", "x_RP[0, i] > x_RP[0, line].max()"),
    ("- options.reward_floor", "+ options.reward_floor"),
    ("[lossless] if i != lossless else []", "[]"),
    ("areas_R[name] - areas_R[STATIC]", "areas_R[name] - areas_R[LOSSLESS]"),
    ("max(within, key=", "min(within, key="),
    ("_over(rates_RP, plain)", "_over(rates_RP, lossless)"),
    ("above_PN[place[sample.point], sample.prompt] += above", "above_PN[place[sample.point], sample.prompt] = above"),
    ("np.broadcast_to(values_RP[:, [other]]", "np.broadcast_to(values_RP[::-1, [other]]"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    code = planted(eval.frontier.frontier, right, wrong)
    assert any(fails(check, code) for check in CHECKS)
