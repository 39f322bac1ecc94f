"""The cross-task table: ensemble heads by what they were trained on, against what they were measured on.

Puts together the JSON of several runs of `eval.pareto`, one a task; measures nothing.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.frontier.points import DYNAMIC
from eval.frontier.report import show
from eval.frontier.stats import Estimate
from eval.speed.report import ABSENT, FORMAT_VERSION, align

FIGURES = {"acceptance": False, "reward": False, "reward_change": True, "gain_in_acceptance": True}  # signed or not
NAN = float("nan")


@dataclass(frozen=True)
class Cell:
    """One head on one task; the figures of FIGURES by name."""

    name: str
    trained_on: str
    measured_on: str
    figures: dict[str, Estimate]


def read_run(folder: Path) -> dict[str, Any]:
    """The record of an earlier run. ValueError where there is none, or one of another version."""
    path = folder / "pareto.json"
    if not path.is_file():
        raise ValueError(
            f"transfer names {str(folder)!r}, which holds no pareto.json; give output_dir of an earlier run"
        )
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"transfer: {path} is no readable JSON ({error}); run it again") from error
    if record.get("format_version") != FORMAT_VERSION:
        version = record.get("format_version")
        raise ValueError(f"transfer: {path} has format version {version}, expected {FORMAT_VERSION}; run it again")
    return record


def require_same_pair(record: Mapping[str, Any], other: Mapping[str, Any], folder: Path) -> None:
    """ValueError unless both runs had the same target and drafter: heads of another pair are other heads."""
    for part in ("target", "drafter"):
        ours, theirs = record[part]["fingerprint"], other[part]["fingerprint"]
        if ours != theirs:
            raise ValueError(
                f"transfer: {folder} was measured with {part} {other[part]['name']!r} ({theirs}), this run has "
                f"{record[part]['name']!r} ({ours}); a table needs one pair"
            )


def cells_of(records: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Every dynamic point of every run. ValueError for two runs of one task, which would be one column."""
    tasks = [record["task"] for record in records]
    if repeated := [task for task in tasks if tasks.count(task) > 1]:
        raise ValueError(f"transfer: two runs measured task {repeated[0]!r}; name one of them otherwise with task=NAME")
    return [
        Cell(
            point["name"],
            point["settings"].get("trained_on") or "unknown",
            record["task"],
            {name: Estimate(**{key: _number(value) for key, value in point[name].items()}) for name in FIGURES},
        )
        for record in records
        for point in record["frontier"]["points"]
        if point["family"] == DYNAMIC
    ]


def _number(value: float | str) -> float:
    """Back from JSON, which has no NaN and says the word."""
    return float(value)


def render_transfer(cells: Sequence[Cell]) -> str:
    """Rows: what a head was trained on. Columns: for each task acceptance, reward over lossless, gain over static."""
    tasks = list(dict.fromkeys(cell.measured_on for cell in cells))
    header = ["trained on", "head"]
    for task in tasks:
        header += [f"{task}: acceptance", "reward over lossless", "gain over static"]
    lines = []
    for trained_on, name in dict.fromkeys((cell.trained_on, cell.name) for cell in cells):
        line = [trained_on, name]
        for task in tasks:
            found = [
                cell for cell in cells if (cell.trained_on, cell.name, cell.measured_on) == (trained_on, name, task)
            ]
            for key in ("acceptance", "reward_change", "gain_in_acceptance"):
                line.append(show(found[0].figures[key], 3, FIGURES[key]) if found else ABSENT)
        lines.append(line)
    return align(header, lines, num_left=2)


def transfer_csv(cells: Sequence[Cell]) -> str:
    """One line a head and task."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [f"{name}{end}" for name in FIGURES for end in ("", "_low", "_high")]
    writer.writerow(["trained_on", "head", "measured_on", *columns])
    for cell in cells:
        row: list[Any] = [cell.trained_on, cell.name, cell.measured_on]
        for name in FIGURES:
            figure = cell.figures[name]
            row += ["" if value != value else repr(value) for value in (figure.value, figure.low, figure.high)]
        writer.writerow(row)
    return text.getvalue()
