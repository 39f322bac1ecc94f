"""What is written about options is found where it stands, and what is not written is not found."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.document.meanings import description, docstring_meanings, file_comment, yaml_comments

YAML = """\
# @package _global_
# python -m train.mtp +model=tiny
#
# What this file is,
# in two lines.
#
# And more of it.
kind: one
# Above the first,
# on two lines.
first: 1
second: 2
group:
  # Within the group.
  inner: 3

  # Far above.

  other: 4
# The same name outside.
inner: 5
"""


@dataclass
class Base:
    """What it is for.

    shared: said in the base. changed: said in the base.
    """

    shared: int = 0
    changed: int = 0


@dataclass
class Options(Base):
    """What these are, as in `alpha: beta`.

    alpha: first; until this semicolon; beta, gamma: of both, with a colon: here. changed: said
    anew
    delta:
    on the next line.

    alpha beta: no meaning of alpha, which is no name here.
    """

    alpha: int = 0
    beta: int = 0
    gamma: list[int] = field(default_factory=list)
    delta: int = 0
    # Said above the field.
    epsilon: int = 0
    unsaid: int = 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file.yaml"
    file.write_text(YAML, encoding="utf-8")
    return file


def test_comment_of_a_file(path: Path) -> None:
    assert file_comment(path)[0] == "python -m train.mtp +model=tiny"
    assert description(path) == "What this file is, in two lines."


def test_comments_of_keys(path: Path) -> None:
    """By the whole key; a comment with an empty line below it belongs to none, nor does the file's own."""
    assert yaml_comments(path) == {
        "first": "Above the first, on two lines.",
        "group.inner": "Within the group.",
        "inner": "The same name outside.",
    }


def test_meanings_of_fields() -> None:
    found = docstring_meanings(Options)
    assert found == {
        "alpha": "first; until this semicolon",
        "beta": "of both, with a colon: here",
        "gamma": "of both, with a colon: here",
        "changed": "said anew",
        "shared": "said in the base",
        "delta": "on the next line",
        "epsilon": "Said above the field",
    }
