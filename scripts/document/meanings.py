"""What is written about an option where it is defined: a comment of conf/, or the docstring of its dataclass.

Three places may say what an option means: the comment right above its key in a YAML file, `name: meaning` in the
docstring of its dataclass, and the comment right above the field there. The first comment of a YAML file is about the
file. Nothing is made up here: an option that none of them explains has no meaning, and the page is not written.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

KEY = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?: |$)")
FIELD = re.compile(r"    (?P<name>\w+): ")
COMMENT = re.compile(r" *# ?(?P<text>.*)")
# A name that begins an explanation in a docstring follows the end of a sentence, or a line of its own.
BEGINS = r"(?:^|(?<=[.;]\s)|(?<=\n))"


def file_comment(path: Path) -> list[str]:
    """The lines of the comment that a YAML file begins with, Hydra's own `@package` line left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if (found := COMMENT.fullmatch(line)) is None:
            break
        if not found["text"].startswith("@package"):
            lines.append(found["text"].strip())
    return lines


def description(path: Path) -> str:
    """What a file of a group is: its first comment up to an empty line, without commands."""
    lines = [line for line in file_comment(path) if not is_command(line)]
    while lines and not lines[0]:
        lines.pop(0)
    return " ".join(lines[: lines.index("")] if "" in lines else lines)


def is_command(line: str) -> bool:
    """Whether a line of a comment is a command to be typed."""
    return re.match(r"(?:python -m|deepspeed|torchrun|accelerate|wandb) ", line) is not None


def yaml_comments(path: Path) -> dict[str, str]:
    """Dotted key -> the comment right above it; keys without one are left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((n for n, line in enumerate(lines) if COMMENT.fullmatch(line) is None), len(lines))
    return {key: text for key, text in _keys(lines[number:]) if text}


def _keys(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each key with the comment lines above it, as one text."""
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    for line in lines:
        if comment := COMMENT.fullmatch(line):
            above.append(comment["text"].strip())
            continue
        if found := KEY.match(line):
            indent = len(found["indent"])
            parents = [(depth, name) for depth, name in parents if depth < indent] + [(indent, found["key"])]
            yield ".".join(name for _, name in parents), " ".join(above)
        above = []


def docstring_meanings(schema: type) -> dict[str, str]:
    """Field -> what is written of it in the dataclass, and in those that it is made from.

    Of `a, b: text` in a docstring both have the text.
    """
    names = "|".join(schema.__dataclass_fields__)  # type: ignore[attr-defined]
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        found |= field_comments(base)
        text = inspect.cleandoc(base.__doc__ or "")
        begins = list(re.finditer(rf"{BEGINS}(?P<names>(?:{names})(?:, (?:{names}))*):\s", text))
        ends = [*(begin.start() for begin in begins[1:]), len(text)]
        for this, end in zip(begins, ends, strict=False):
            meaning = text[this.end() : end].partition("\n\n")[0]
            found |= dict.fromkeys(this["names"].split(", "), " ".join(meaning.split()).rstrip(".;"))
    return found


def field_comments(schema: type) -> dict[str, str]:
    """Field -> the comment right above it in the class."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(schema).splitlines():
        if comment := COMMENT.fullmatch(line):
            above.append(comment["text"].strip())
            continue
        if (field := FIELD.match(line)) and above:
            found[field["name"]] = " ".join(above).rstrip(".")
        above = []
    return found
