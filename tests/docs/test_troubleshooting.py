"""docs/troubleshooting.md quotes messages as the code raises them: by their templates, and by commands that are run."""

import ast
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.docs.pages import ROOT, read_blocks

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("models", "train", "rl", "eval", "scripts")
# A template gives a message when this share of it, or so many letters, are the template's own: less fits anything.
MIN_SHARE, MIN_LITERAL = 0.35, 35
ANYTHING = ".*?"


def text_of(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    """A string expression as a regular expression, what is filled in being anything; None for what is no string."""
    if isinstance(node, ast.Constant):
        return re.escape(node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return re.escape(constants[node.id]) if node.id in constants else None
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants) if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) or ANYTHING for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(part, constants) or ANYTHING for part in (node.left, node.right))
    return None


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Names that stand for one text, of a module or of a function of it."""
    return {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@cache
def templates() -> list[tuple[str, int, str]]:
    """Every string in the packages: its longest part, the length of all its parts, and all of it as a pattern."""
    found = set()
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = constants_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.expr) and (pattern := text_of(node, constants)):
                parts = [re.sub(r"\\(.)", r"\1", part) for part in pattern.split(ANYTHING)]
                found.add((max(parts, key=len), sum(map(len, parts)), pattern))
    return sorted(found)


def is_raised(message: str) -> bool:
    return any(
        part in message and length >= min(MIN_LITERAL, MIN_SHARE * len(message)) and re.fullmatch(pattern, message)
        for part, length, pattern in templates()
    )


def lines_of(language: str) -> Iterator[str]:
    for block in read_blocks(PAGE.read_text(encoding="utf-8")):
        if block.language == language:
            yield from block.text.splitlines()


MESSAGES = list(lines_of("text"))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:60])
def test_message_is_the_codes_own(message: str) -> None:
    assert is_raised(message), "no string in the code gives this message"


def test_there_are_many() -> None:
    assert len(MESSAGES) > 40
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize(
    "message",
    [
        "cut.layers=8 must be at least 1 and less than the target's 3 layer",
        "cut.layers=8 must be at least 2 and less than the target's 3 layers",
        "anything at all",
        "outputs/x holds the work of another run: x is 1, now 2; choose another folder",
    ],
)
def test_a_message_that_nothing_raises_is_found(message: str) -> None:
    assert not is_raised(message)


def transcripts() -> list[tuple[str, list[str]]]:
    """(command, lines of its output) of all blocks of a console."""
    found: list[tuple[str, list[str]]] = []
    for line in lines_of("console"):
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize(("command", "lines"), transcripts(), ids=lambda value: value if isinstance(value, str) else "")
def test_transcript(command: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command fails, as it is written, and says each of these lines, or begins them so."""
    python, option, module, *words = shlex.split(command)
    assert (python, option) == ("python", "-m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", [module, *words])
    GlobalHydra.instance().clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), pytest.raises(SystemExit) as stopped:
        import_module(module).main()
    assert stopped.value.code not in (0, None)
    for line in lines:
        assert any(found.startswith(line) for found in said.getvalue().splitlines()), said.getvalue()
