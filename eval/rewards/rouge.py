"""ROUGE-2 F1 against a reference summary (or another ROUGE), by Google's rouge-score: CNN/DailyMail, XSum and the like.

Columns: `summary`, `highlights` or `reference`, one of them; of several references the best counts. `words` says what a
word is; tokenizer="rouge_score" takes rouge-score's own, for comparing with published figures. That one keeps a-z and
0-9 alone, so that it refuses a reference of which it would drop much.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from eval.rewards.loading import Reward, answer_texts, require_column
from eval.rewards.reading.columns import refuse, texts_of

NAME = "rouge"
COLUMNS = ("summary", "highlights", "reference")
TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
TOKENIZERS = ("unicode", "rouge_score")
MAX_UNSEEN = 0.1  # share of a reference that rouge-score's own tokenizer may drop: names and loan words


def make_reward(
    rouge_type: str = "rouge2", use_stemmer: bool = False, column: str = "", tokenizer: str = "unicode"
) -> Reward:
    """The reward, in [0, 1]. use_stemmer: words count by their stem (English). column: "" finds the one there is.

    tokenizer: unicode (words of any script) | rouge_score (its own, a-z and 0-9 alone).
    """
    if rouge_type not in TYPES:
        raise ValueError(f"rouge_type={rouge_type!r} must be one of {', '.join(TYPES)}")
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer={tokenizer!r} must be one of {', '.join(TOKENIZERS)}")
    if importlib.util.find_spec("rouge_score") is None:
        raise ValueError("reward=rouge needs rouge-score: pip install 'foretoken[eval]'")
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    from eval.rewards.reading.words import UnicodeTokenizer

    words = (UnicodeTokenizer if tokenizer == "unicode" else DefaultTokenizer)(use_stemmer)
    scorer = RougeScorer([rouge_type], tokenizer=words)

    def rouge(
        completions: Sequence[Any], completion_answers: Sequence[str] | None = None, **columns: Any
    ) -> list[float]:
        """trl's signature; F1 per completion."""
        name = column or find_column(columns)
        rows = require_column(columns.get(name), name, NAME, len(completions))
        texts = answer_texts(completions, completion_answers)
        rewards = []
        for text, row in zip(texts, rows, strict=True):
            references = texts_of(row, NAME, name, "a reference text, or a list of them")
            require_words(references, name, words, tokenizer)
            rewards.append(float(scorer.score_multi(references, text)[rouge_type].fmeasure))
        return rewards

    return rouge


def find_column(columns: Mapping[str, Any]) -> str:
    """The one column of COLUMNS that the dataset has."""
    found = [name for name in COLUMNS if columns.get(name) is not None]
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else "has none of them"
        raise ValueError(
            f"reward {NAME!r} needs a reference summary in one column of {', '.join(COLUMNS)}; the dataset {has}: set "
            "reward.options.column"
        )
    return found[0]


def require_words(references: Sequence[str], column: str, words: Any, tokenizer: str) -> None:
    """ValueError for a reference in which there is no word, or of which the tokenizer would drop much."""
    from eval.rewards.reading.words import unseen_share

    for reference in references:
        if tokenizer == "rouge_score" and (share := unseen_share(reference)) > MAX_UNSEEN:
            expected = f"text in a-z and 0-9, of which tokenizer=rouge_score drops {share:.0%}: set tokenizer=unicode"
            refuse(reference, NAME, column, expected)
        if not words.tokenize(reference):
            refuse(reference, NAME, column, "text with words in it, of which ROUGE finds none")
