"""The ROUGE reward against ROUGE-2 counted by hand, and what it refuses."""

import random
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from rl.rewards import rouge

TEXTS = [
    "The cat sat on the mat.",
    "the cat sat on the mat",
    "A cat sat on a mat, and the dog lay by the door.",
    "the the the the cat cat sat",
    "Storms closed 3 of 12 airports on Monday; flights resumed on Tuesday.",
    "Airports closed.",
    "storm closing airport flight resuming",
    "cat",
    "",
    *(" ".join(random.Random(seed).choices(["the", "cat", "sat", "on", "a"], k=5 + 3 * seed)) for seed in range(6)),
]


def rouge2_f1(reference: str, text: str) -> float:
    """Twice the shared bigrams over all bigrams of both, each shared as often as in the one that has it less often."""
    first, second = (Counter(pairwise(re.findall("[a-z0-9]+", side.lower()))) for side in (reference, text))
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 0.0


@pytest.mark.parametrize("column", rouge.COLUMNS)
def test_equals_bigrams_counted_by_hand(column: str) -> None:
    pytest.importorskip("rouge_score")
    pairs = [(reference, text) for reference in TEXTS if reference for text in TEXTS]
    rewards = rouge.make_reward()(
        prompts=[""] * len(pairs),
        completions=[text for _, text in pairs],
        trainer_state=None,
        **{column: [reference for reference, _ in pairs]},
    )
    assert rewards == pytest.approx([rouge2_f1(*pair) for pair in pairs], abs=1e-12)
    assert 0.0 < max(rewards) == 1.0
    assert len(set(rewards)) > 10


def test_stemmer_and_other_rouges() -> None:
    pytest.importorskip("rouge_score")
    pair = {"completions": ["storm closing airports"], "summary": ["storms closed airport"]}
    assert rouge.make_reward()(**pair) == [0.0]
    assert rouge.make_reward(use_stemmer=True)(**pair) == [1.0]
    assert rouge.make_reward("rouge1")(completions=["a b"], summary=["b c"]) == [0.5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "one column of summary, highlights, reference; the dataset has none of them"),
        ({"summary": ["a b"], "highlights": ["a b"]}, "has summary and highlights: set reward.options.column"),
        ({"summary": ["안녕하세요 여러분"]}, "in which ROUGE finds no word"),
        ({"summary": [None]}, "column 'summary' holds None"),
        ({"summary": ["a", "b"]}, "has 2 values for 1 completions"),
    ],
)
def test_faulty_data_is_an_error_and_no_reward(columns: dict[str, Any], message: str) -> None:
    pytest.importorskip("rouge_score")
    with pytest.raises(ValueError, match=message):
        rouge.make_reward()(completions=["a b"], **columns)


def test_column_by_name() -> None:
    pytest.importorskip("rouge_score")
    reward = rouge.make_reward(column="short")
    assert reward(completions=["a b"], short=["a b"], summary=["c d"]) == [1.0]
    with pytest.raises(ValueError, match="needs the dataset column 'short'"):
        reward(completions=["a b"], summary=["c d"])


def test_bad_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rouge_type='rouge3' must be one of rouge1, rouge2"):
        rouge.make_reward("rouge3")
    monkeypatch.setattr(rouge.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs rouge-score: pip install 'foretoken\[eval\]'"):
        rouge.make_reward()
