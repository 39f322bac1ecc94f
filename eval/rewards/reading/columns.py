"""The dataset's columns as rewards need them: read as what they plainly are, else refused in one line.

A column that is misread pays 0 for every answer, and says nothing.
"""

import ast
import functools
import json
import math
import warnings
from typing import Any, NoReturn

MAX_SHOWN = 80


def refuse(value: object, reward: str, column: str, expected: str) -> NoReturn:
    """ValueError that names all of it."""
    shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
    raise ValueError(f"reward {reward!r}: column {column!r} holds {shown}; it must be {expected}")


def text_of(value: object, reward: str, column: str, expected: str = "text") -> str:
    """Text; a number is its decimal text."""
    if hasattr(value, "item") and not isinstance(value, str):  # a number of numpy's
        value = value.item() if getattr(value, "ndim", 0) == 0 else value
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    refuse(value, reward, column, expected)


def texts_of(value: object, reward: str, column: str, expected: str) -> list[str]:
    """A list of texts, or one text alone."""
    parts: Any = value.tolist() if hasattr(value, "tolist") else value
    parts = [parts] if isinstance(parts, str) else parts
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, str) for part in parts):
        refuse(value, reward, column, expected)
    return list(parts)


def tests_of(value: object, reward: str, column: str) -> list[str]:
    """Pieces of Python: a list, a list that was written into a text as JSON or Python, or one piece as a text."""
    expected = "a list of pieces of Python code, such as ['assert f(1) == 2']"
    parts: Any = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(parts, str):
        parts = listed(parts) or [parts]
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) and is_python(part) for part in parts):
        refuse(value, reward, column, expected)
    if parts and not any(part.strip() for part in parts):
        refuse(value, reward, column, expected)
    return list(parts)


def listed(text: str) -> list[Any] | None:
    """The list that a text holds in JSON's notation or Python's, or None."""
    if not text.lstrip().startswith(("[", "(")):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list | tuple) and found:
            return list(found)
    return None


def python_of(value: object, reward: str, column: str, is_whole: bool = True) -> str:
    """A piece of Python. is_whole: it parses as it is, and is no stub that waits for a body."""
    if not isinstance(value, str) or (is_whole and not is_python(value)):
        refuse(value, reward, column, "text that is Python code")
    return value


def name_of(value: object, reward: str, column: str) -> str:
    """A name in Python."""
    if not isinstance(value, str) or not value.strip().isidentifier():
        refuse(value, reward, column, "the name of a function")
    return value.strip()


@functools.lru_cache(1024)
def is_python(source: str) -> bool:
    """Whether it parses. For the dataset's code, which is trusted, and not a model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
