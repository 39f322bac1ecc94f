"""Bytes of tokens and tokens of bytes, for tokenizers of every kind."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from models.drafters.universal.spelling import NO_TOKEN, Spelling, num_incomplete_bytes
from tests.models.drafters.universal.vocabularies import (
    CODE,
    CORPUS,
    EMOJI,
    END,
    ENGLISH,
    KINDS,
    KOREAN,
    make_tokenizer,
)


def spelling_of(kind: str) -> Spelling:
    tokenizer = make_tokenizer(kind)
    return Spelling(tokenizer, max(tokenizer.get_vocab().values()) + 1, frozenset([tokenizer.eos_token_id]))


@pytest.mark.parametrize("kind", ["bytes", "byte_bpe", "fallback_bpe"])
def test_any_text_comes_back(kind: str) -> None:
    """Texts cut anywhere, inside characters too: bytes that begin or end one are written one by one."""
    spelling = spelling_of(kind)
    for text in CORPUS:
        data = text.encode()
        for start in range(12):
            piece = data[start : len(data) - start]
            assert spelling.spell(spelling.encode(piece)) == piece
    assert spelling.spell(spelling.encode(b"a\xf0\x9fb\x80")) == b"a\xf0\x9fb\x80"


def test_unigram_writes_what_it_knows() -> None:
    """Spaces are kept as they are, none is put before a text, and what it does not know is not text."""
    spelling = spelling_of("unigram")
    assert spelling.has_dummy_prefix
    for text in (ENGLISH, CODE, "cat  ", " cat"):
        assert spelling.spell(spelling.encode(text.encode())) == text.encode()
    assert spelling.spell(spelling.encode(KOREAN.encode())) is None
    assert spelling.encode(b"\xea\xb3")[-2:] == [NO_TOKEN, NO_TOKEN]


def test_word_pieces_are_words_with_a_space() -> None:
    spelling = spelling_of("wordpiece")
    assert spelling.has_dummy_prefix
    assert spelling.spell(spelling.encode(b"The cat sat.")) == b" The cat sat."
    assert spelling.spell(spelling.encode(EMOJI.rstrip().encode())) == b" " + EMOJI.rstrip().encode()
    assert [source for _, source in spelling.pieces(b"The  cat\n")] == [b"The", b"  cat", b"\n"]
    assert spelling.encode(b"cat\n")[-1] == NO_TOKEN


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_no_text(kind: str) -> None:
    """Spelled out in a text they are its letters, though not to the tokenizer itself, which stays as it was."""
    tokenizer, spelling = make_tokenizer(kind), spelling_of(kind)
    before = tokenizer.backend_tokenizer.to_str()
    eos = tokenizer.eos_token_id
    assert spelling.spelled[eos] is None
    assert spelling.specials[END] == eos
    assert eos not in spelling.encode(END.encode())
    assert tokenizer.encode(END, add_special_tokens=False) == [eos]
    assert tokenizer.backend_tokenizer.to_str() == before


def test_of_twins_the_written_one_counts() -> None:
    """A byte token beside the letter that it spells."""
    spelling, vocabulary = spelling_of("fallback_bpe"), make_tokenizer("fallback_bpe").get_vocab()
    assert spelling.spelled[vocabulary["a"]] == spelling.spelled[vocabulary["<0x61>"]] == b"a"
    assert vocabulary["<0x61>"] < vocabulary["a"] == spelling.id_of[b"a"]
    assert spelling.id_of[b"\xea"] == vocabulary["<0xEA>"]


def test_longest_match() -> None:
    spelling = spelling_of("byte_bpe")
    for text in CORPUS:
        ids = spelling.longest_match(text.encode())
        assert spelling.spell(ids) == text.encode()
        end = 0
        for index in ids:
            longest = max((token for token in spelling.id_of if text.encode().startswith(token, end)), key=len)
            assert spelling.spelled[index] == longest
            end += len(longest)
    assert spelling_of("unigram").longest_match("at고".encode()) == spelling_of("unigram").longest_match(b"at")


def test_num_incomplete_bytes() -> None:
    """Against Python's own decoder."""
    data = "aé고🙂b".encode()
    for end in range(len(data) + 1):
        complete = len(data[:end].decode("utf-8", "ignore").encode())
        assert num_incomplete_bytes(data[:end]) == end - complete
    assert num_incomplete_bytes(b"\x80\x80") == num_incomplete_bytes(b"a\xff") == num_incomplete_bytes(b"") == 0


def test_unknown_decoders_are_refused() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, END: 1}, unk_token=END))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    with pytest.raises(ValueError, match=r"decoder is none does not say which bytes.*ByteLevel, Metaspace"):
        Spelling(tokenizer, 2)
    with pytest.raises(ValueError, match="tokenizer object has no tokenizers backend"):
        Spelling(object(), 2)
