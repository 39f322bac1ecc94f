"""The frontier as Markdown, CSV and JSON records. Measures and computes nothing."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from eval.frontier.frontier import FamilyFigures, Frontier, PointFigures
from eval.frontier.points import DYNAMIC, LOSSLESS, PEER, PLAIN, STATIC, Point
from eval.frontier.stats import Estimate
from eval.speed.report import ABSENT, align

QUALITY_HEADER = (
    "point",
    "acceptance",
    "block length",
    "reward",
    "over lossless",
    "static here",
    "gain over static",
    "gain in reward",
)
COST_HEADER = ("point", "tokens/s", "× lossless", "× plain", "distance / sequence", "distance / token")
FAMILY_HEADER = ("rule", "hypervolume", "over static", "best within the floor", "its acceptance")
ESTIMATES = tuple(field.name for field in fields(PointFigures) if field.type in (Estimate, "Estimate"))
FLAGS = ("is_beyond_static", "is_within_floor")


def render_quality(points: Sequence[PointFigures]) -> str:
    """The main table, one line a point."""
    return align(QUALITY_HEADER, [_quality(point) for point in points])


def _quality(point: PointFigures) -> tuple[str, ...]:
    # The static line is no gain over itself.
    has_gain = point.family not in (PLAIN, LOSSLESS, STATIC)
    mark = "" if point.is_within_floor else " *"
    beyond = "≥ " if point.is_beyond_static else ""
    return (
        point.name,
        show(point.acceptance, 3),
        show(point.block_length, 2),
        show(point.reward, 3) + mark,
        show(point.reward_change, 3, signed=True),
        show(point.static_acceptance, 3) if has_gain else ABSENT,
        beyond + show(point.gain_in_acceptance, 3, signed=True) if has_gain else ABSENT,
        show(point.gain_in_reward, 3, signed=True) if has_gain else ABSENT,
    )


def render_cost(points: Sequence[PointFigures]) -> str:
    """What each point takes: time, and distance from the target's law."""
    return align(
        COST_HEADER,
        [
            (
                point.name,
                show(point.tokens_per_s, 1),
                show(point.speedup_over_lossless, 2),
                show(point.speedup_over_plain, 2),
                show(point.certificate, 2),
                show(point.certificate_per_token, 3),
            )
            for point in points
        ],
    )


def render_families(families: Sequence[FamilyFigures]) -> str:
    """One line a rule."""
    return align(
        FAMILY_HEADER,
        [
            (
                family.name,
                show(family.hypervolume, 3),
                ABSENT if family.name in (STATIC, LOSSLESS) else show(family.hypervolume_gain, 3, signed=True),
                family.best,
                f"{family.best_acceptance:.3f}",
            )
            for family in families
        ],
    )


def show(figure: Estimate, digits: int, signed: bool = False) -> str:
    """0.871 (0.860–0.882); with signs, "to" stands between the bounds."""
    if not math.isfinite(figure.value):
        return ABSENT
    sign = "+" if signed else ""
    text = f"{figure.value:{sign}.{digits}f}"
    if not math.isfinite(figure.low):
        return text
    between = " to " if signed else "–"
    return f"{text} ({figure.low:{sign}.{digits}f}{between}{figure.high:{sign}.{digits}f})"


def points_csv(points: Sequence[PointFigures]) -> str:
    """One line a point, each figure with its bounds; empty where there is none."""
    columns = [f"{name}{end}" for name in ESTIMATES for end in ("", "_low", "_high")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "family", *columns, *FLAGS])
    for point in points:
        cells: list[Any] = [point.name, point.family]
        for name in ESTIMATES:
            figure: Estimate = getattr(point, name)
            cells += [_cell(figure.value), _cell(figure.low), _cell(figure.high)]
        writer.writerow([*cells, *(int(getattr(point, flag)) for flag in FLAGS)])
    return text.getvalue()


def _cell(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""


def frontier_record(frontier: Frontier, points: Sequence[Point]) -> dict[str, Any]:
    """For JSON: every figure, with the settings behind each point, and `dominance` over the static line."""
    settings: Mapping[str, dict[str, Any]] = {point.name: point.settings for point in points}
    return {
        "lossless": frontier.lossless,
        "reward_floor": frontier.floor,
        "points": [asdict(point) | {"settings": settings[point.name]} for point in frontier.points],
        "families": [asdict(family) for family in frontier.families],
        "dominance": [
            {
                "name": point.name,
                "reward": asdict(point.reward),
                "acceptance": asdict(point.acceptance),
                "static_acceptance": asdict(point.static_acceptance),
                "gain_in_acceptance": asdict(point.gain_in_acceptance),
                "gain_in_reward": asdict(point.gain_in_reward),
                "is_beyond_static": point.is_beyond_static,
            }
            for point in frontier.points
            if point.family == DYNAMIC
        ],
    }


def legend(has_peer: bool, reward_floor: float, reference: Sequence[float], confidence: float) -> list[str]:
    """What the columns mean."""
    lines = [
        f"In brackets: {confidence:.0%} intervals, from resampled prompts (of tokens/s from resampled turns); what two "
        "points share cancels from their difference.",
        "acceptance: kept over drafted tokens. over lossless: reward less that of lossless token verification; plain "
        "decoding and block verification have the target's law as well, and show how much of it is chance.",
        f"*: more than {reward_floor:g} below the lossless reward.",
        "distance: bound on the total variation between the rule's output law and the target's.",
        "static here: what the static line accepts at this reward, between its undominated points; ≥: no static point "
        "reaches this reward.",
        f"hypervolume: area above acceptance {reference[0]:g} and reward {reference[1]:g}; every rule has the lossless "
        "point as its strict end.",
    ]
    if has_peer:
        lines.append(f"{PEER}: one prompt at a time, whatever the batch size of the others; its distance is not told.")
    return lines
