"""Stops and incremental text, on a tokenizer of one token a byte; stop strings on tokenizers of every kind."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from models.decoding.rows import GenerationParams
from models.decoding.stops import IncrementalText, StopChecker, TokenBytes
from models.target.tiny import make_tiny_tokenizer
from tests.models.drafters.universal.vocabularies import CORPUS, END, KINDS, make_tokenizer

TOKENIZER = make_tiny_tokenizer()
WRITES = TokenBytes(TOKENIZER)


@functools.cache
def stop_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """As `make_tokenizer`, but every kind can write the text that transformers' criterion reads tokens behind."""
    if kind not in ("wordpiece", "unigram"):
        return make_tokenizer(kind)
    corpus, special = [*CORPUS, "abcdef abcdef"] * 4, ["[UNK]", END]
    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        backend.train_from_iterator(corpus, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    else:
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="[UNK]")
        backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token=END)


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


def stopped(text: str, stops: tuple[str, ...], prompt: str = "") -> str:
    """The text that is left of tokens of which the last one stops."""
    checker = StopChecker(100, (), stops, WRITES, TOKENIZER.encode(prompt, add_special_tokens=False))
    tokens = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        tokens.append(token)
        if checker.add(token):
            break
    assert checker.reason == "stop"
    return checker.text(tokens, TOKENIZER)


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("one. two", (". ",), "one"),
        ("문장. 끝", ("장.",), "문"),
        ("aab", ("aab", "ab"), ""),  # both end at the same token: the earlier beginning cuts
        ("aaa", ("aa",), ""),
        ("abcabd", ("abd",), "abc"),
        ("ab<|start|>c", ("<|start|>",), "ab"),  # a special token, which the text has not
        ("ab<|start|>c", ("b<|start|>",), "a"),
        ("<|start|>ab", ("|>a",), ""),
        ("<|start|>👍🏽b", ("🏽",), "👍"),
    ],
)
def test_stop_string_ends_with_its_last_character(text: str, stops: tuple[str, ...], cut: str) -> None:
    assert stopped(text, stops) == cut


@pytest.mark.parametrize(("prompt", "text"), [("a\n", "\nb"), ("Q: x\nA", ": y"), ("한", "국"), ("<|start|>", "a")])
def test_stop_string_may_begin_in_the_prompt(prompt: str, text: str) -> None:
    """Nothing of the output is left then; one that lies in the prompt alone is none."""
    assert stopped(text + "more", (prompt[-1] + text[0],), prompt) == ""
    checker = StopChecker(100, (), (prompt,), WRITES, encode(prompt))
    assert not any(checker.add(token) for token in encode("zzz"))


def pieces_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Texts of a few characters, or of any ids: special ones, half characters, and one that no token has."""
    tokenizer = stop_tokenizer(kind)
    cut = st.builds(
        lambda text, start, size: tokenizer.encode(text[start % len(text) :][:size], add_special_tokens=False),
        st.sampled_from(CORPUS),
        st.integers(0, 200),
        st.integers(1, 12),
    )
    return st.one_of(cut, st.lists(st.integers(0, len(tokenizer)), max_size=4))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[int], list[int], list[str]]:
    """(kind of tokenizer, prompt, output, stop strings), the latter mostly cut out of what the tokens write."""
    kind = draw(st.sampled_from(KINDS))
    tokenizer = stop_tokenizer(kind)
    tokens = [token for part in draw(st.lists(pieces_of(kind), min_size=1, max_size=6)) for token in part]
    start = draw(st.integers(0, len(tokens)))
    writes = TokenBytes(tokenizer)
    text = b"".join(writes.of(token) or b"" for token in tokens).decode(errors="ignore")
    cut = st.builds(
        lambda start, size: text[start % max(1, len(text)) :][:size], st.integers(0, 200), st.integers(1, 8)
    )
    strange = st.text("ab T.고양\n🙂<|end|>", min_size=1, max_size=4)
    stops = draw(st.lists(st.one_of(cut, cut, cut, strange, st.just("<|end|>")), min_size=1, max_size=3))
    return kind, tokens[:start], tokens[start:], [stop for stop in stops if stop]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_stops_are_those_of_transformers(case: tuple[str, list[int], list[int], list[str]]) -> None:
    """At every token; and the text that is left begins the whole text, without any stop string's end."""
    kind, prompt, output, stops = case
    tokenizer = stop_tokenizer(kind)
    assume(stops)
    try:
        criterion = StopStringCriteria(tokenizer, stops)
    except ValueError:  # no token ends any of them
        assume(False)
    writes = TokenBytes(tokenizer)
    checker = StopChecker(1000, (), stops, writes, prompt)
    for place, token in enumerate(output):
        expected = bool(criterion(torch.tensor([[*prompt, *output[: place + 1]]]), None))
        assert checker.add(token) == expected
        if expected:
            check_text(checker, output[: place + 1], tokenizer)
            break


def check_text(checker: StopChecker, output: list[int], tokenizer: Any) -> None:
    whole = tokenizer.decode(output, skip_special_tokens=True)
    left = checker.text(output, tokenizer)
    assert whole.startswith(left.rstrip("\ufffd"))
    assert len(left) < len(whole) or not whole or output[-1] in tokenizer.all_special_ids


@pytest.mark.parametrize("kind", KINDS)
def test_what_tokens_write_is_what_transformers_reads(kind: str) -> None:
    """The whole vocabulary, token by token."""
    tokenizer = stop_tokenizer(kind)
    writes = TokenBytes(tokenizer)
    mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
    written, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=mode)
    for text, token in zip(written, ids, strict=True):
        assert writes.of(token) == (text if isinstance(text, bytes) else text.encode())
    assert writes.of(len(tokenizer) + 1) is None


def test_a_tokenizer_that_hides_its_text_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"q": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"stop_strings with .*, of which none of abcdef, a, .*eos_token_ids"):
        TokenBytes(tokenizer)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_strings has '\\ud83d': half a character"):
        GenerationParams(stop_strings=("a", "\ud83d"))


def test_first_stop_wins() -> None:
    """At one token: EOS before stop string before length."""
    for limit, eos, stops, reason in [
        (1, (encode("x")[0],), ("x",), "eos"),
        (1, (), ("x",), "stop"),
        (1, (), ("y",), "length"),
        (2, (), ("y",), None),
    ]:
        checker = StopChecker(limit, eos, stops, WRITES)
        assert checker.add(encode("x")[0]) is (reason is not None)
        assert checker.reason == reason
