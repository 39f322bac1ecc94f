"""Stops and incremental text, on a tokenizer of one token a byte."""

import pytest

from models.decoding.stops import IncrementalText, StopChecker
from models.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", ["plain", "한국어 문장", "naïve café", "a👍🏽b", "", " two  spaces "])
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    incremental = IncrementalText(TOKENIZER)
    pieces = [incremental.add(token) for token in encode(text)]
    assert "".join(pieces) == incremental.text == text
    assert not any("\ufffd" in piece for piece in pieces)
    if text == "한국어 문장":
        assert [piece for piece in pieces if piece] == list(text)


def test_special_tokens_give_no_text() -> None:
    incremental = IncrementalText(TOKENIZER)
    for token in [*encode("a"), 2, *encode("b")]:
        incremental.add(token)
    assert incremental.text == "ab"


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("one. two", (". ",), "one"),
        ("문장. 끝", ("장.",), "문"),
        ("aab", ("aab", "ab"), ""),  # both end at the same token: the earlier beginning cuts
        ("aaa", ("aa",), ""),
        ("abcabd", ("abd",), "abc"),
    ],
)
def test_stop_string_ends_with_its_last_character(text: str, stops: tuple[str, ...], cut: str) -> None:
    checker = StopChecker(100, (), stops, TOKENIZER)
    for token in encode(text):
        if checker.add(token):
            break
    assert checker.reason == "stop"
    assert checker.text is not None
    assert checker.text.text[: checker.stop_at] == cut


def test_first_stop_wins() -> None:
    """At one token: EOS before stop string before length."""
    for limit, eos, stops, reason in [
        (1, (encode("x")[0],), ("x",), "eos"),
        (1, (), ("x",), "stop"),
        (1, (), ("y",), "length"),
        (2, (), ("y",), None),
    ]:
        checker = StopChecker(limit, eos, stops, TOKENIZER)
        assert checker.add(encode("x")[0]) is (reason is not None)
        assert checker.reason == reason
