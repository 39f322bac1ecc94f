"""The frontier's table, CSV and JSON: what is written reads back."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval.frontier.frontier import FamilyFigures, Frontier, PointFigures
from eval.frontier.points import DYNAMIC, LOSSLESS, PEER, PLAIN, STATIC, Point
from eval.frontier.report import (
    ESTIMATES,
    frontier_record,
    legend,
    points_csv,
    render_cost,
    render_families,
    render_quality,
    show,
)
from eval.frontier.stats import Estimate
from eval.speed.report import write_json

NAN = float("nan")
NONE = Estimate(NAN, NAN, NAN)


def make_point(name: str, family: str, **figures: Any) -> PointFigures:
    """All figures apart, so that a column of another shows."""
    made = {key: Estimate(0.1 + i, 0.05 + i, 0.15 + i) for i, key in enumerate(ESTIMATES)}
    return PointFigures(name, family, **{**made, "is_beyond_static": False, "is_within_floor": True, **figures})


POINTS = [
    make_point("plain", PLAIN, acceptance=NONE, gain_in_acceptance=NONE, static_acceptance=NONE, gain_in_reward=NONE),
    make_point("lossless, token", LOSSLESS),
    make_point("static, w = 0.5", STATIC, is_within_floor=False),
    make_point('dynamic, "a, b"', DYNAMIC, is_beyond_static=True),
    make_point("peer", PEER, certificate=NONE, certificate_per_token=NONE, reward=Estimate(0.25, NAN, NAN)),
]
FAMILIES = [
    FamilyFigures(STATIC, Estimate(0.5, 0.4, 0.6), Estimate(0.0, 0.0, 0.0), "lossless, token", 0.4),
    FamilyFigures(DYNAMIC, Estimate(0.7, 0.6, 0.8), Estimate(0.2, 0.1, 0.3), "lam", 0.9),
]
FRONTIER = Frontier(POINTS, FAMILIES, "lossless, token", 0.775)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_estimates_are_found_by_type() -> None:
    assert len(ESTIMATES) == 12
    assert "acceptance" in ESTIMATES
    assert "is_beyond_static" not in ESTIMATES


@pytest.mark.parametrize(
    ("figure", "digits", "signed", "text"),
    [
        (Estimate(0.8714, 0.86, 0.8821), 3, False, "0.871 (0.860–0.882)"),
        (Estimate(-0.01, -0.02, 0.03), 2, True, "-0.01 (-0.02 to +0.03)"),
        (Estimate(0.5, NAN, NAN), 1, False, "0.5"),
        (Estimate(0.5, NAN, NAN), 1, True, "+0.5"),
        (NONE, 3, False, "–"),
    ],
)
def test_show(figure: Estimate, digits: int, signed: bool, text: str) -> None:
    assert show(figure, digits, signed) == text


def test_tables() -> None:
    header, _, plain, lossless, static, dynamic, peer = cells(render_quality(POINTS))
    column = {name: i for i, name in enumerate(header)}
    by_key = {key: f"{0.1 + i:.3f} ({0.05 + i:.3f}–{0.15 + i:.3f})" for i, key in enumerate(ESTIMATES)}
    assert plain[column["acceptance"]] == "–"
    assert lossless[column["acceptance"]] == by_key["acceptance"]
    assert lossless[column["gain over static"]] == static[column["gain over static"]] == "–"
    assert static[column["reward"]] == by_key["reward"] + " *"
    assert dynamic[column["static here"]] == by_key["static_acceptance"]
    assert dynamic[column["gain over static"]].startswith("≥ +")
    assert not peer[column["gain over static"]].startswith("≥")
    assert peer[column["reward"]] == "0.250"
    header, _, *rows = cells(render_cost(POINTS))
    assert rows[-1][header.index("distance / sequence")] == "–"
    assert rows[3][header.index("× plain")].startswith(f"{0.1 + ESTIMATES.index('speedup_over_plain'):.2f}")
    header, _, static, dynamic = cells(render_families(FAMILIES))
    assert static[header.index("over static")] == "–"
    assert dynamic == ["dynamic", "0.700 (0.600–0.800)", "+0.200 (+0.100 to +0.300)", "lam", "0.900"]


def test_csv_round_trip() -> None:
    rows = list(csv.DictReader(io.StringIO(points_csv(POINTS))))
    assert [row["name"] for row in rows] == [point.name for point in POINTS]
    for row, point in zip(rows, POINTS, strict=True):
        for name in ESTIMATES:
            figure: Estimate = getattr(point, name)
            for key, value in ((name, figure.value), (f"{name}_low", figure.low), (f"{name}_high", figure.high)):
                assert (row[key] == "") == math.isnan(value)
                assert math.isnan(value) or float(row[key]) == value  # to the last bit
        assert row["is_within_floor"] == str(int(point.is_within_floor))
        assert row["is_beyond_static"] == str(int(point.is_beyond_static))


def test_json_round_trip(tmp_path: Path) -> None:
    nobody: Any = None
    points = [Point(point.name, point.family, nobody, settings={"lam": 0.5}) for point in POINTS]
    write_json(tmp_path / "a.json", frontier_record(FRONTIER, points))
    record = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert record["reward_floor"] == 0.775
    for read, point in zip(record["points"], POINTS, strict=True):
        assert read["settings"] == {"lam": 0.5}
        for name in ESTIMATES:
            figure: Estimate = getattr(point, name)
            assert Estimate(**{key: float(value) for key, value in read[name].items()}) == figure or math.isnan(
                figure.low
            )
    (dominance,) = record["dominance"]
    assert dominance["name"] == 'dynamic, "a, b"'
    assert dominance["gain_in_acceptance"]["value"] == POINTS[3].gain_in_acceptance.value
    assert dominance["static_acceptance"]["value"] == POINTS[3].static_acceptance.value
    assert [family["name"] for family in record["families"]] == [STATIC, DYNAMIC]


def test_the_legend_names_what_was_used() -> None:
    text = "\n".join(legend(True, 0.03, (0.2, -1.0), 0.9))
    assert "90% intervals" in text
    assert "more than 0.03 below" in text
    assert "acceptance 0.2 and reward -1" in text
    assert PEER in text
    assert PEER not in "\n".join(legend(False, 0.03, (0.2, -1.0), 0.9))
