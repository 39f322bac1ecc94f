"""The table says what the rows say, and the JSON is JSON whatever the numbers are."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval.speed.acceptance import Agreement, Difference
from eval.speed.report import ABSENT, HEADER, finite, render_groups, render_table, row_record, write_json
from eval.speed.results import Row
from eval.speed.timing import Spread
from models.decoding.counters import Counters


def make_counters() -> Counters:
    counters = Counters(sequences=2, emitted=2)
    for kept in (3, 0, 1, 3, 2):
        counters.record_block(3, kept, kept + 1)
    return counters


ROW = Row(
    method="heads lossless, K = 3",
    num_tokens=16,
    tokens_per_s=Spread(61.34, 59.9, 63.0, 3),
    speedup_over_plain=Spread(1.914, 1.9, 2.0, 3),
    speedup_over_generate=Spread(2.51, 2.4, 2.6, 3),
    counters=make_counters(),
    pass_ms=Spread(44.0, 43.0, 46.0, 3),
    pass_over_bare=Spread(1.07, 1.0, 1.1, 3),
    draft_over_target=Spread(0.185, 0.18, 0.19, 3),
    peak_bytes=700 * 2**20,
    agreement=Agreement(12, (Difference(3, 8, 5, 6, 0.125),)),
    certificate_per_token=0.01234,
)
BARE_ROW = Row("generate", 9, Spread(math.nan, 1, math.inf, 3), None, None, None, None, None, None, 0, None)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_has_the_rows_figures() -> None:
    header, rule, first, second = render_table([ROW, BARE_ROW]).splitlines()
    assert cells(header) == list(HEADER)
    assert cells(rule)[0].strip("-") == ""
    assert all(cell.endswith("-:") for cell in cells(rule)[1:])
    assert len({len(line) for line in (header, rule, first, second)}) == 1
    kept = "0.80 0.60 0.40"  # 4, 3 and 2 of 5 blocks
    assert cells(first) == [
        "heads lossless, K = 3",
        "61.3 (59.9–63.0)",
        "1.91",
        "2.51",
        f"{1 + 9 / 5:.2f}",
        kept,
        "1.07",
        "0.18",
        "700",
        "0.012",
        "11 of 12, gap 0.125",
    ]
    assert cells(second)[2:8] == [ABSENT] * 6
    assert cells(second)[9] == ABSENT


def test_group_table_names_every_group() -> None:
    lines = render_groups({"chat short": [ROW, BARE_ROW], "maths long": [ROW]}).splitlines()[2:]
    assert [cells(line)[:2] for line in lines] == [
        ["chat short", "heads lossless, K = 3"],
        ["chat short", "generate"],
        ["maths long", "heads lossless, K = 3"],
    ]


def test_record_equals_the_counters() -> None:
    record = row_record(ROW)
    counters = record["counters"]
    assert record["mean_block_length"] == pytest.approx(
        (counters["emitted"] - counters["sequences"]) / counters["blocks"]
    )
    assert record["acceptance_rate"] == counters["accepted"] / counters["drafted"] == 9 / 15
    assert record["acceptance_by_place"] == [4 / 5, 3 / 5, 2 / 5]
    assert record["agreement"]["num_identical"] == 11
    assert record["agreement"]["largest_gap"] == 0.125
    assert record["agreement"]["differences"][0]["place"] == 8


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def test_json_has_no_numbers_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    write_json(path, {"rows": [row_record(BARE_ROW)], "gap": -math.inf, "deep": {"x": (math.nan, 1.5, "é", True)}})
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert record["rows"][0]["tokens_per_s"] == {"median": "nan", "low": 1, "high": "inf", "count": 3}
    assert record["gap"] == "-inf"
    assert record["deep"] == {"x": ["nan", 1.5, "é", True]}
    assert record["format_version"] == 1
    assert finite(2) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_json(path, {"a": 1})
    before = path.read_text()
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.json"]
