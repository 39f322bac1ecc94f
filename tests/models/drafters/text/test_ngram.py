"""Prompt lookup against a scan of the whole text."""

import random

import pytest

from models.drafters.text.ngram import NgramDrafter, NgramReader
from models.target.tiny import make_tiny_target


def scanned(text: list[int], min_match: int, max_match: int, count: int) -> list[int]:
    """The definition: for n from the largest down, the latest earlier place of the last n tokens, copied from."""
    for size in range(min(max_match, len(text)), min_match - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                copied = list(text)
                for place in range(count):
                    copied.append(copied[start + size + place])
                return copied[len(text) :]
    return []


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 3), (2, 4), (3, 3), (1, 20)])
@pytest.mark.parametrize("vocab_size", [1, 2, 4, 12])
def test_drafts_are_those_of_a_scan(vocab_size: int, min_match: int, max_match: int) -> None:
    """After every token of random texts, read in pieces of random lengths."""
    rng = random.Random(vocab_size)
    num_found = 0
    for _ in range(5):
        reader, text = NgramReader(min_match, max_match), []
        for _ in range(30):
            piece = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 4))]
            text += piece
            reader.read(piece)
            count = rng.randrange(1, 9)
            expected = scanned(text, min_match, max_match, count)
            assert reader.propose(count) == expected
            num_found += bool(expected)
    assert num_found >= 10 or (min_match, vocab_size) == (3, 12)


def test_the_longest_match_comes_first() -> None:
    """And of two as long the latest; the copy goes on in itself."""

    def drafted(text: str, min_match: int = 1, max_match: int = 3) -> str:
        reader = NgramReader(min_match, max_match)
        reader.read([ord(token) for token in text])
        return "".join(map(chr, reader.propose(4)))

    assert drafted("abcX.bcY.cZ.abc") == "X.bc"
    assert drafted("abcX.bcY.cZ.abc", max_match=2) == "Y.cZ"
    assert drafted("abcX.bcY.cZ.abc", max_match=1) == "Z.ab"
    assert drafted("cZ.abc", min_match=2) == ""
    assert drafted("abab") == "abab"


@pytest.mark.parametrize(("min_match", "max_match"), [(0, 3), (4, 3), (-1, -1)])
def test_limits_out_of_range(min_match: int, max_match: int) -> None:
    with pytest.raises(ValueError, match=rf"drafter.min_match={min_match} and drafter.max_match={max_match}"):
        NgramDrafter(make_tiny_target(), min_match, max_match)
