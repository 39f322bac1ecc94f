"""Links within README.md and docs/ lead somewhere: files that are there, headings that are there."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(path: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, a hyphen for each space."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    broken = []
    for found in LINK.finditer(without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"\w+://", found["path"]):
            continue
        target = path.parent / found["path"] if found["path"] else path
        if not target.exists() or (found["anchor"] and found["anchor"] not in anchors(target)):
            broken.append(found[0])
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, & more\n[here](#a-title--more) [code](#code) `[no](link)`\n[gone](gone.md) [x](https://x.org/#y)\n"
        "```text\n# code\n[no](link)\n```\n"
    )
    assert broken_links(page) == ["[code](#code)", "[gone](gone.md)"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
