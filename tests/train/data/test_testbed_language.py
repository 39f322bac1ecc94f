"""The testbed's language: what is promised of prompts, completions and their decisive places."""

from itertools import pairwise

import numpy as np
import pytest

from train.data import testbed_language as language
from train.data.testbed_language import (
    DIGITS,
    DRAFT_DIALECT,
    END,
    IDS,
    MAX_TOKENS,
    MAX_WORDS,
    MIN_WORDS,
    NAMES,
    TARGET_DIALECT,
    TOKENS,
    WORDS,
    Dialect,
    decisive_places,
    draw_answers,
    make_tokenizer,
    prompt_ids,
    prompt_text,
    read_digits,
    write_completions,
)


def spell(ids: list[int]) -> list[str]:
    return [TOKENS[token] for token in ids]


def test_text_and_ids_say_the_same() -> None:
    tokenizer = make_tokenizer()
    (row,) = language.testbed_prompts(1, seed=3, split="test")
    (completion,) = write_completions([row["answer"]], TARGET_DIALECT, seed=3)

    assert len(IDS) == len(TOKENS) <= 64
    assert tokenizer(row["prompt"])["input_ids"] == prompt_ids(row["answer"])
    text = tokenizer.decode(completion, skip_special_tokens=True)
    assert text == " ".join(spell(completion)[:-1])
    assert tokenizer(text)["input_ids"] == completion[:-1]
    assert len(prompt_ids("0000")) + MAX_WORDS * 4 + 2 * 4 + 1 == MAX_TOKENS


def test_unknown_word_is_an_error() -> None:
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer()("we walk unfailingly")


def test_same_seed_same_text() -> None:
    answers = draw_answers(5, seed=1, split="train")
    first, again, other = (write_completions(answers, DRAFT_DIALECT, seed) for seed in (1, 1, 2))

    assert (
        language.testbed_prompts(5, 1, "train")
        == language.testbed_prompts(5, 1, "train")
        != language.testbed_prompts(5, 2, "train")
    )
    assert first == again != other
    assert prompt_text("7251") == "<start> Red 7 Blue 2 Green 5 Gold 1 :"


def test_splits_share_no_prompt_and_treat_digits_alike() -> None:
    sizes = {"train": 8000, "selection": 1000, "test": 1000}
    pools = {split: set(draw_answers(size, 0, split)) for split, size in sizes.items()}

    assert {split: len(pool) for split, pool in pools.items()} == sizes  # without repetition
    assert len(set.union(*pools.values())) == 10_000
    for seed in range(1, 20):
        for split, pool in pools.items():
            assert set(draw_answers(300, seed, split)) <= pool
    for pool in pools.values():
        for place in range(len(NAMES)):
            assert (
                np.unique([answer[place] for answer in pool], return_counts=True)[1].tolist() == [len(pool) / 10] * 10
            )


def test_more_prompts_than_there_are_come_again() -> None:
    drawn = draw_answers(2250, 0, "test")
    assert sorted(drawn[:1000]) == sorted(drawn[1000:2000])
    assert draw_answers(0, 0, "test") == []


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split='eval' is unknown; choose one of train, selection, test"):
        language.testbed_prompts(1, 0, "eval")


@pytest.mark.parametrize("name", ["strangeness", "name_chance", "blind_share"])
def test_dialect_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=1.5: must be in \[0, 1\]"):
        Dialect(**{name: 1.5})


@pytest.mark.parametrize("dialect", [TARGET_DIALECT, DRAFT_DIALECT])
def test_completions_are_well_formed(dialect: Dialect) -> None:
    for completion in write_completions(draw_answers(300, 0, "train"), dialect, seed=5):
        words = spell(completion)
        lengths = np.diff([-1, *(place for place, word in enumerate(words) if word in DIGITS)]) - 2
        assert len(read_digits(" ".join(words[:-1]))) == len(NAMES)
        assert words.count(END) == 1
        assert words[-1] == END
        assert min(lengths) >= MIN_WORDS
        assert max(lengths) <= MAX_WORDS


def test_decisive_places_are_the_digits() -> None:
    for completion in write_completions(draw_answers(100, 0, "train"), DRAFT_DIALECT, seed=6):
        assert decisive_places(completion) == [word in DIGITS for word in spell(completion)]
        # Decisive is a place, whatever stands there, and it is known before its token is.
        for place in range(len(completion)):
            replaced = [*completion[:place], IDS["we"]]
            assert decisive_places(replaced)[place] == decisive_places(completion)[place]
    assert decisive_places([]) == []
    assert decisive_places([IDS["7"]]) == [False]


def test_digits_are_right_unless_blind() -> None:
    """4000 digits, a share of 0.6 drawn blindly: 0.46 right, +-0.04 is more than five standard deviations."""
    answers = draw_answers(1000, 0, "train")
    read = [read_digits(" ".join(spell(ids)[:-1])) for ids in write_completions(answers, DRAFT_DIALECT, 7, 400)]
    right = [sum(map(str.__eq__, digits, answer)) / 4 for digits, answer in zip(read, answers, strict=True)]

    assert right[:400] == [1.0] * 400
    assert abs(np.mean(right[400:]) - 0.46) < 0.04
    sure = write_completions(answers, TARGET_DIALECT, 7)
    assert [read_digits(" ".join(spell(ids)[:-1])) for ids in sure] == answers


def test_words_follow_the_dialect() -> None:
    """Bigrams and name chances of 4000 texts against the chain; bounds are over five standard deviations."""
    for dialect in (TARGET_DIALECT, DRAFT_DIALECT):
        counts = np.zeros((len(WORDS) + 1, len(WORDS)))
        asked, named = 0, 0
        for completion in write_completions(draw_answers(4000, 0, "train"), dialect, seed=8):
            place = 0  # words since the last digit
            for before, word in pairwise([":", *spell(completion)]):
                if word in WORDS:
                    counts[WORDS.index(before) if before in WORDS else -1, WORDS.index(word)] += 1
                if MIN_WORDS <= place < MAX_WORDS:
                    asked, named = asked + 1, named + (word in NAMES)
                place = place + 1 if word in WORDS else 0
        totals = counts.sum(axis=1, keepdims=True)
        error = np.abs(counts / totals - dialect.chain()) / np.sqrt(0.25 / totals)
        assert error.max() < 5
        assert abs(named / asked - dialect.name_chance) < 5 * 0.5 / asked**0.5


def test_dialects_disagree_as_much_as_stated() -> None:
    ours, theirs = TARGET_DIALECT.chain(), DRAFT_DIALECT.chain()
    assert np.allclose(ours.sum(axis=1), 1.0)
    assert 0.4 < np.abs(ours - theirs).sum(axis=1).mean() / 2 < 0.5
    assert np.array_equal(ours, Dialect(name_chance=0.9).chain())


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("we red 1 we blue 2 we green 3 we gold 4", "1234"),
        ("  we all\nred 1 we blue 2 we green 3 we  gold 4 ", "1234"),
        ("we red 1 we blue 2 we green 3", None),  # cut off
        ("we red 1 we green 2 we blue 3 we gold 4", None),  # order
        ("we red 1 we red 1 we blue 2 we green 3 we gold 4", None),  # twice
        ("we red 1 we blue 2 we green 3 we gold 4 we", None),  # goes on
        ("we red 1 we blue 2 we green 3 we gold 4 4", None),
        ("we red 1 5 we blue 2 we green 3 we gold 4", None),  # two digits
        ("we red we blue 2 we green 3 we gold 4", None),  # no digit
        ("red 1 we blue 2 we green 3 we gold 4", None),  # no words
        ("We red 1 we blue 2 we green 3 we gold 4", None),  # a word of another language
        ("we Red 1 we blue 2 we green 3 we gold 4", None),  # a key
        ("we red 12 we blue 2 we green 3 we gold 4", None),
        ("", None),
    ],
)
def test_reading_digits(text: str, digits: str | None) -> None:
    assert read_digits(text) == digits
