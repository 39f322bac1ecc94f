"""From the target's ids to the draft model's and back: every split of texts that re-tokenise."""

import itertools

import pytest

from models.drafters.universal.spelling import num_incomplete_bytes
from models.drafters.universal.translation import LOOK_BEHIND_TOKENS, Transcript, Translator, num_common
from tests.models.drafters.universal.vocabularies import END, ENGLISH, KINDS, TEXT, make_model

EXACT_KINDS = ("bytes", "byte_bpe", "fallback_bpe")  # these write any text, and give it back
PAIRS = [(target, draft) for target, draft in itertools.product(KINDS, KINDS) if target != draft]


def translator(target: str, draft: str) -> Translator:
    return Translator(make_model(draft), make_model(target))


def settled(translate: Translator, ids: list[int]) -> Transcript:
    transcript = translate.start()
    translate.append(transcript, ids)
    return transcript


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_text_in_pieces_is_the_text_at_once(target: str, draft: str) -> None:
    """Whatever number of tokens comes at a time."""
    translate = translator(target, draft)
    ids = translate.target_spelling.encode((TEXT + ENGLISH).encode())
    whole = settled(translate, ids)
    if target in EXACT_KINDS and draft in EXACT_KINDS:
        assert whole.ids == [*translate.prefix, *translate.spelling.encode((TEXT + ENGLISH).encode())]
    for size in (1, 2, 5):
        transcript = translate.start()
        for start in range(0, len(ids), size):
            translate.append(transcript, ids[start : start + size])
        assert transcript.ids == whole.ids
        assert transcript.target_tail == whole.target_tail
        assert len(transcript.target_tail) <= LOOK_BEHIND_TOKENS
        assert transcript.num_target_tokens == len(ids)


def test_num_common() -> None:
    assert num_common([1, 2, 3], [1, 2, 4, 3]) == 2
    assert num_common([1, 2], [1, 2, 4]) == num_common([1, 2, 4], [1, 2]) == 2
    assert num_common([], [1]) == 0


def test_growing_words_are_tokenized_anew() -> None:
    """The draft model has whole words, the target brings them byte by byte."""
    translate = translator("bytes", "byte_bpe")
    transcript, shrinks = translate.start(), 0
    for end, index in enumerate(translate.target_spelling.encode(TEXT.encode()), start=1):
        before = len(transcript.ids)
        translate.append(transcript, [index])
        assert translate.spelling.spell(transcript.ids) == TEXT.encode()[:end]
        shrinks += len(transcript.ids) < before
    assert shrinks > 5


def test_words_longer_than_the_window() -> None:
    """A token that begins before the window is found by looking further behind."""
    translate = translator("byte_bpe", "fallback_bpe")
    ids = translate.target_spelling.encode(("고" * 40 + ENGLISH).encode())
    transcript = translate.start()
    for index in ids:
        translate.append(transcript, [index])
    assert transcript.ids == settled(translate, ids).ids


def test_cut_characters() -> None:
    """Read byte by byte where the draft model can, else kept until the character is whole."""
    first, *others = "고".encode()
    by_bytes = translator("bytes", "byte_bpe")
    transcript = settled(by_bytes, by_bytes.target_spelling.encode(bytes([first])))
    assert transcript.ids == [by_bytes.spelling.id_of[bytes([first])]]
    assert transcript.pending == b""
    whole = translator("bytes", "wordpiece")
    transcript = settled(whole, whole.target_spelling.encode(b"The " + bytes([first])))
    assert transcript.pending == b" " + bytes([first])
    assert transcript.ids == settled(whole, whole.target_spelling.encode(b"The ")).ids
    whole.append(transcript, whole.target_spelling.encode(bytes(others)))
    assert transcript.pending == b""
    assert transcript.ids == settled(whole, whole.target_spelling.encode("The 고".encode())).ids


@pytest.mark.parametrize("target", KINDS)
def test_drafted_text_goes_on_from_any_place(target: str) -> None:
    """Every split of the text: the ids spell what was drafted, up to a character that it only begins."""
    translate = translator(target, "bytes")
    spelling, data = translate.target_spelling, TEXT.encode()
    for seam in range(0, len(data), 1 if target in EXACT_KINDS else 5):
        if target not in EXACT_KINDS and num_incomplete_bytes(data[:seam]):
            continue
        transcript = settled(translate, spelling.encode(data[:seam]))
        tail = list(transcript.target_tail)
        for end in (seam, seam + 1, seam + 4, seam + 20):
            ids = translate.to_target(transcript, data[seam:end])
            assert transcript.target_tail == tail
            drafted = data[seam:end]
            if target in EXACT_KINDS:
                assert spelling.spell(ids) == drafted[: max(0, len(drafted) - num_incomplete_bytes(data[:end]))]
            else:
                assert spelling.spell(ids) is not None


def test_drafted_text_is_the_tokenizers_own() -> None:
    """Where a token ends at the seam, what follows is what the tokenizer makes of the whole text."""
    translate = translator("byte_bpe", "bytes")
    ids = translate.target_spelling.encode(TEXT.encode())
    for place in range(1, len(ids) - 3):
        data = translate.target_spelling.spell(ids[place:]) or b""
        assert translate.to_target(settled(translate, ids[:place]), data) == ids[place:]


def test_a_token_across_the_seam() -> None:
    """ "The" is one token; after a settled "T" the rest of it is written with the longest tokens, then all as ever."""
    translate = translator("byte_bpe", "bytes")
    spelling = translate.target_spelling
    assert len(spelling.encode(b"The")) == 1
    ids = translate.to_target(settled(translate, spelling.encode(b"T")), b"he cat sat")
    assert ids == [*spelling.longest_match(b"he"), *spelling.encode(b" cat sat")]


def test_unknown_characters_end_a_draft() -> None:
    translate = translator("unigram", "bytes")
    transcript = settled(translate, translate.target_spelling.encode(b"The"))
    assert translate.to_target(transcript, " cat 고 cat".encode()) == translate.to_target(transcript, b" cat ")


def test_special_tokens() -> None:
    """By name or by role, at their place; the target's BOS is the draft model's own; others are left out."""
    translate = translator("fallback_bpe", "byte_bpe")
    ours, theirs = translate.target_spelling, translate.spelling
    cat = ours.encode(b"cat")
    ids = settled(translate, [1, *cat, ours.specials[END], *cat]).ids
    assert ids == [*theirs.encode(b"cat"), theirs.specials[END], *theirs.encode(b"cat")]
    back = translator("byte_bpe", "fallback_bpe")
    assert back.prefix == [1]
    assert settled(back, back.target_spelling.encode(b"cat")).ids == [1, *back.spelling.encode(b"cat")]
    same = Translator(make_model("fallback_bpe"), make_model("fallback_bpe"))
    assert settled(same, [1, *cat]).ids == [1, *cat]
    transcript = settled(translate, [*cat, ours.specials[END]])
    assert transcript.num_fixed == len(transcript.ids)
    assert transcript.target_tail == []


def test_leading_spaces() -> None:
    """A tokenizer that puts a space before each text, on either side."""
    translate = translator("unigram", "bytes")
    assert translate.spelling.spell(settled(translate, translate.target_spelling.encode(b" cat")).ids) == b"cat"
    back = translator("bytes", "unigram")
    assert back.spelling.spell(settled(back, back.target_spelling.encode(b"cat")).ids) == b" cat"
