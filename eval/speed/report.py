"""The bench's table, Markdown that reads well in a terminal too, and the JSON behind it. Measures nothing."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.speed.acceptance import Agreement
from eval.speed.results import Row
from eval.speed.timing import Spread
from models.decoding.counters import Counters
from models.files import write_text

FORMAT_VERSION = 1
ABSENT = "–"
MEBIBYTE = 2**20
HEADER = (
    "method",
    "tokens/s (low–high)",
    "× plain",
    "× generate",
    "block length",
    "kept at place 1, 2, ...",
    "pass / bare",
    "draft / pass",
    "peak MiB",
    "distance / token",
    "identical to plain",
)
GROUP_HEADER = (
    "prompts",
    "method",
    "tokens/s (low–high)",
    "× plain",
    "× generate",
    "block length",
    "identical to plain",
)


def render_table(rows: Sequence[Row]) -> str:
    """The main table, one line a method."""
    return align(
        HEADER,
        [
            (
                row.method,
                _rate(row.tokens_per_s),
                _times(row.speedup_over_plain),
                _times(row.speedup_over_generate),
                _block_length(row),
                _places(row.counters),
                _times(row.pass_over_bare),
                _times(row.draft_over_target),
                f"{row.peak_bytes / MEBIBYTE:.0f}",
                ABSENT if row.certificate_per_token is None else f"{row.certificate_per_token:.3f}",
                _agreement(row.agreement),
            )
            for row in rows
        ],
    )


def render_groups(groups: Mapping[str, Sequence[Row]]) -> str:
    """The same figures for each task and length of answers."""
    return align(
        GROUP_HEADER,
        [
            (
                name,
                row.method,
                _rate(row.tokens_per_s),
                _times(row.speedup_over_plain),
                _times(row.speedup_over_generate),
                _block_length(row),
                _agreement(row.agreement),
            )
            for name, rows in groups.items()
            for row in rows
        ],
        num_left=2,
    )


def row_record(row: Row) -> dict[str, Any]:
    """A row for JSON: its fields, and what follows from its counts."""
    record = asdict(row)
    if row.counters is not None:
        record["mean_block_length"] = row.counters.mean_block_length
        record["acceptance_rate"] = row.counters.acceptance_rate
        record["acceptance_by_place"] = row.counters.acceptance_by_place
    if row.agreement is not None:
        record["agreement"] |= {"num_identical": row.agreement.num_identical, "largest_gap": row.agreement.largest_gap}
    return record


def finite(value: Any) -> Any:
    """The value with every infinite or undefined number, at any depth, as the word for it: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    text = json.dumps(
        finite({"format_version": FORMAT_VERSION, **record}), indent=1, ensure_ascii=False, allow_nan=False
    )
    write_text(path, text + "\n")


def align(header: Sequence[str], lines: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Markdown with columns of even width: the first `num_left` left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    rule = ["-" * width if i < num_left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(
        "| " + " | ".join(_pad(cell, width, i < num_left) for i, (cell, width) in enumerate(columns)) + " |"
        for columns in (list(zip(cells, widths, strict=True)) for cells in (header, rule, *lines))
    )


def _pad(cell: str, width: int, is_left: bool) -> str:
    return cell.ljust(width) if is_left else cell.rjust(width)


def _rate(rate: Spread) -> str:
    return f"{rate.median:.1f} ({rate.low:.1f}–{rate.high:.1f})"


def _times(value: Spread | None) -> str:
    return ABSENT if value is None or not math.isfinite(value.median) else f"{value.median:.2f}"


def _block_length(row: Row) -> str:
    return ABSENT if row.counters is None or not row.counters.blocks else f"{row.counters.mean_block_length:.2f}"


def _places(counters: Counters | None) -> str:
    return (
        " ".join(f"{share:.2f}" for share in counters.acceptance_by_place) if counters and counters.drafted else ABSENT
    )


def _agreement(agreement: Agreement | None) -> str:
    if agreement is None:
        return ABSENT
    share = f"{agreement.num_identical} of {agreement.num_sequences}"
    return share if not agreement.differences else f"{share}, gap {agreement.largest_gap:.3g}"
