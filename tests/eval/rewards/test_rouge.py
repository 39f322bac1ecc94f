"""The ROUGE reward against ROUGE-2 counted by hand, and what it refuses."""

import random
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.rewards import rouge

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
        ({"summary": ["😀 — !?"]}, "column 'summary' holds '😀 — !\\?'; it must be text with words in it"),
        ({"summary": [""]}, "text with words in it"),
        ({"summary": [[]]}, "a reference text, or a list of them"),
        ({"summary": [["a b", None]]}, "a reference text, or a list of them"),
        ({"summary": [{"text": "a b"}]}, "a reference text, or a list of them"),
        ({"summary": [3]}, "column 'summary' holds 3"),
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


# ---- scripts ----

SCRIPTS = {
    "Korean": ("철수는 사과 12 개를 샀다", "영희는 배 12 개를 팔았다"),
    "Chinese": ("小明买了12个苹果", "老师读完12本书"),
    "Japanese": ("太郎はリンゴを12個買った", "花子が本を12冊読む"),
    "Thai": ("แดงซื้อส้ม 12 ผล", "ครูอ่านจบ 12 เล่ม"),
    "Russian": ("Иван купил 12 яблок", "Мария прочла 12 книг"),
    "Hindi": ("राम ने 12 सेब खरीदे", "सीता ने 12 किताबें पढ़ीं"),
    "Arabic": ("اشترى علي ١٢ تفاحة", "قرأت ليلى ١٢ كتابا"),
    "French": ("Élodie a acheté 12 pâtés", "Noël avait perdu 12 clés"),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("rouge_type", rouge.TYPES)
def test_another_story_with_the_same_digits_earns_little(script: str, rouge_type: str) -> None:
    pytest.importorskip("rouge_score")
    story, other = SCRIPTS[script]
    same, different = rouge.make_reward(rouge_type)(completions=[story, other], summary=[story, story])
    assert same == 1.0
    assert different < 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Naïve café-goers, don't!", ["naïve", "café", "goers", "don", "t"]),
        ("cafe\u0301 ＡＢＣ１", ["café", "abc1"]),
        ("snake_case x2", ["snake", "case", "x2"]),
        ("한국어 요약은 좋다.", ["한국어", "요약은", "좋다"]),
        ("我爱NLP，2024年", ["我", "爱", "nlp", "2024", "年"]),
        ("データの", ["デー", "タ", "の"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("😀 — …", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    pytest.importorskip("rouge_score")
    from eval.rewards.reading.words import UnicodeTokenizer

    assert UnicodeTokenizer().tokenize(text) == words


@given(st.text(st.characters(max_codepoint=127)), st.text(st.characters(max_codepoint=127)), st.booleans())
def test_ascii_text_scores_as_by_rouge_scores_own_tokenizer(first: str, second: str, use_stemmer: bool) -> None:
    scoring = pytest.importorskip("rouge_score.rouge_scorer")
    from eval.rewards.reading.words import UnicodeTokenizer

    types = list(rouge.TYPES)
    own = scoring.RougeScorer(types, use_stemmer=use_stemmer)
    ours = scoring.RougeScorer(types, tokenizer=UnicodeTokenizer(use_stemmer))
    assert ours.score(first, second) == own.score(first, second)


WORDS = st.lists(st.sampled_from(["the", "cats", "sitting", "mat", "U.S.", "3-2", "Running"]), max_size=12).map(
    " ".join
)


@given(WORDS, WORDS, st.booleans())
def test_english_scores_as_by_rouge_scores_own_tokenizer(first: str, second: str, use_stemmer: bool) -> None:
    if first:
        pair = {"completions": [second], "summary": [first]}
        for rouge_type in rouge.TYPES:
            ours, own = (rouge.make_reward(rouge_type, use_stemmer, tokenizer=name) for name in rouge.TOKENIZERS)
            assert ours(**pair) == own(**pair)


def test_rouge_scores_own_tokenizer_refuses_what_it_cannot_see() -> None:
    pytest.importorskip("rouge_score")
    reward = rouge.make_reward(tokenizer="rouge_score")
    with pytest.raises(ValueError, match="tokenizer=rouge_score drops 85%: set tokenizer=unicode"):
        reward(completions=["a b"], summary=["철수는 12 개를 사과 샀다 아주"])
    assert reward(completions=["the café is open all day"], summary=["the café is open all day"]) == [1.0]
    with pytest.raises(ValueError, match="tokenizer='bert' must be one of unicode, rouge_score"):
        rouge.make_reward(tokenizer="bert")


def test_of_several_references_the_best_counts() -> None:
    pytest.importorskip("rouge_score")
    pair = {"completions": ["a b c"] * 2, "summary": [["x y z", "a b c"], ["x y z"]]}
    assert rouge.make_reward()(**pair) == [1.0, 0.0]
