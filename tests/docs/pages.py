"""The pages of README.md and docs/ as tests read them: blocks of code in their order, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The log tells of commands that were run once; the other two are made from the code (tests/scripts/document).
NOT_FOR_READERS = ("log.md", "options.md", "api.md")
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in NOT_FOR_READERS)]
# Languages of blocks that are not run: output, and parts of files.
INERT = ("text", "yaml", "json", "mermaid")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", flags=re.M | re.S)
# What a comment of a command may say of it: then nothing here runs it, but its options are checked.
MARKS = ("needs a GPU", "needs the hub", "needs an account", "needs deepspeed")
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")


@dataclass(frozen=True)
class Code:
    """One fenced block. language: bash, python, or one of INERT."""

    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One shell command. words: as the shell reads them, settings of variables left out. comment: behind it."""

    words: tuple[str, ...]
    comment: str = ""

    @property
    def line(self) -> str:
        """The command without its comment."""
        return " ".join(self.words)

    @property
    def mark(self) -> str:
        """What keeps it from being run here, "" for nothing."""
        return next((mark for mark in MARKS if mark in self.comment), "")

    @property
    def module(self) -> str:
        """The module that it runs, by python or a launcher; "" for other commands."""
        if self.words[0] not in ("python", *LAUNCHERS):
            return ""
        at = next((n for n, word in enumerate(self.words) if word in ("-m", "--module")), None)
        return "" if at is None else self.words[at + 1]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words behind the module."""
        return self.words[self.words.index(self.module) + 1 :]


def read_blocks(text: str) -> list[Code]:
    """All fenced blocks of a page, in order."""
    return [Code(found["language"], found["text"]) for found in FENCE.finditer(text)]


def read_commands(block: str) -> Iterator[Command]:
    """The commands of a bash block; lines that end in a backslash go on, and `&&` joins two."""
    for line in block.replace("\\\n", " ").splitlines():
        comment = found[1] if (found := re.search(r"(?:^|\s)#\s*(.*)$", line)) else ""
        for part in " ".join(map(shlex.quote, shlex.split(line, comments=True))).split(" '&&' "):
            words = shlex.split(part)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield Command(tuple(words), comment)


def commands_of(path: Path) -> list[Command]:
    """All commands of a page's bash blocks."""
    blocks = read_blocks(path.read_text(encoding="utf-8"))
    return [command for block in blocks if block.language == "bash" for command in read_commands(block.text)]
