"""The cross-task table, from records of runs."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from eval.frontier.transfer import cells_of, read_run, render_transfer, require_same_pair, transfer_csv
from eval.speed.report import write_json


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def make_record(
    task: str, heads: dict[str, tuple[str | None, float]], target: str = "aa", drafter: str = "bb"
) -> dict[str, Any]:
    points = [
        {
            "name": name,
            "family": "dynamic",
            "settings": {"trained_on": trained_on},
            "acceptance": estimate(value),
            "reward": estimate(value + 0.05),
            "reward_change": estimate(value - 1),
            "gain_in_acceptance": {"value": value / 2, "low": float("nan"), "high": float("nan")},
        }
        for name, (trained_on, value) in heads.items()
    ]
    points.append({"name": "static", "family": "static", "settings": {}})
    return {
        "task": task,
        "target": {"name": "t", "fingerprint": target},
        "drafter": {"name": "d", "fingerprint": drafter},
        "frontier": {"points": points},
    }


A = make_record("sums", {"one": ("sums", 0.5), "two": ("news", 0.75)})
B = make_record("news", {"one": ("sums", 0.25), "two": ("news", 0.875), "three": (None, 0.125)})


def test_table_and_csv_through_files(tmp_path: Path) -> None:
    for name, record in (("a", A), ("b", B)):
        write_json(tmp_path / name / "pareto.json", record)
    cells = cells_of([read_run(tmp_path / "a"), read_run(tmp_path / "b")])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in render_transfer(cells).splitlines()]
    assert lines[0] == [
        "trained on", "head", "sums: acceptance", "reward over lossless", "gain over static",
        "news: acceptance", "reward over lossless", "gain over static",
    ]  # fmt: skip
    assert lines[2] == [
        "sums", "one", "0.500 (0.400–0.600)", "-0.500 (-0.600 to -0.400)", "+0.250",
        "0.250 (0.150–0.350)", "-0.750 (-0.850 to -0.650)", "+0.125",
    ]  # fmt: skip
    assert lines[3][:3] == ["news", "two", "0.750 (0.650–0.850)"]
    assert lines[4] == ["unknown", "three", "–", "–", "–", "0.125 (0.025–0.225)", "-0.875 (-0.975 to -0.775)", "+0.062"]
    assert len(lines) == 5
    rows = list(csv.DictReader(io.StringIO(transfer_csv(cells))))
    assert [(row["trained_on"], row["head"], row["measured_on"]) for row in rows] == [
        ("sums", "one", "sums"), ("news", "two", "sums"),
        ("sums", "one", "news"), ("news", "two", "news"), ("unknown", "three", "news"),
    ]  # fmt: skip
    assert float(rows[2]["reward_change"]) == -0.75
    assert (rows[0]["gain_in_acceptance"], rows[0]["gain_in_acceptance_low"]) == ("0.25", "")


def test_one_pair() -> None:
    require_same_pair(A, B, Path("b"))
    with pytest.raises(ValueError, match=r"b was measured with target 't' \(cc\), this run has 't' \(aa\)"):
        require_same_pair(A, make_record("news", {}, target="cc"), Path("b"))
    with pytest.raises(ValueError, match=r"b was measured with drafter 'd' \(cc\)"):
        require_same_pair(A, make_record("news", {}, drafter="cc"), Path("b"))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two runs measured task 'sums'; name one of them otherwise"):
        cells_of([A, A])
    with pytest.raises(ValueError, match=r"holds no pareto\.json; give output_dir of an earlier run"):
        read_run(tmp_path)
    (tmp_path / "pareto.json").write_text("{")
    with pytest.raises(ValueError, match="no readable JSON"):
        read_run(tmp_path)
    (tmp_path / "pareto.json").write_text(json.dumps({"format_version": 99}))
    with pytest.raises(ValueError, match="format version 99, expected 1"):
        read_run(tmp_path)
