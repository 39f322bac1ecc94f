"""Tables of Markdown, and values and types in the words of the command line."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import MISSING


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested mappings; empty ones are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def type_name(annotation: Any) -> str:
    """A type in short: `float or null`, `list of str`, `mapping`."""
    if annotation is Any:
        return "any"
    origin, of = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return f"list of {type_name(of[0])}" if of[0] is not Any else "list"
    if origin is dict:
        return "mapping"
    if type(None) in of:
        return f"{type_name(next(one for one in of if one is not type(None)))} or null"
    return str(annotation.__name__)


def shown(value: Any) -> str:
    """A value as it would be typed; what must be given is said to be, and what fills more than a line is not shown."""
    if isinstance(value, str) and value == MISSING:
        return "must be given"
    if isinstance(value, Mapping) and value:
        return "see the file"
    return f"`{typed(value)}`"


def typed(value: Any) -> str:
    """A value in Hydra's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return ".inf" if value == math.inf else f"{value:g}"
    if isinstance(value, list):
        if any(isinstance(one, Mapping) for one in value):
            return "[...]"
        return f"[{', '.join(map(typed, value))}]"
    return str(value) if value != "" else '""'


def rows_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; bars within a cell are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
