"""ROUGE-2 F1 against a reference summary (or another ROUGE), by Google's rouge-score: CNN/DailyMail, XSum and the like.

Columns: `summary`, `highlights` or `reference`, one of them. The tokenizer keeps a-z and 0-9 alone, so that a reference
in another script is an error and not a reward of 0 whatever is written.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from rl.rewards.loading import Reward, completion_text, require_column

NAME = "rouge"
COLUMNS = ("summary", "highlights", "reference")
TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def make_reward(rouge_type: str = "rouge2", use_stemmer: bool = False, column: str = "") -> Reward:
    """The reward, in [0, 1]. use_stemmer: words count by their stem (English). column: "" finds the one there is."""
    if rouge_type not in TYPES:
        raise ValueError(f"rouge_type={rouge_type!r} must be one of {', '.join(TYPES)}")
    if importlib.util.find_spec("rouge_score") is None:
        raise ValueError("reward=rouge needs rouge-score: pip install 'foretoken[eval]'")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([rouge_type], use_stemmer=use_stemmer)

    def rouge(completions: Sequence[Any], **columns: Any) -> list[float]:
        """trl's signature; F1 a completion."""
        name = column or find_column(columns)
        references = require_column(columns.get(name), name, NAME, len(completions))
        rewards = []
        for completion, reference in zip(completions, references, strict=True):
            require_words(reference, name)
            rewards.append(float(scorer.score(reference, completion_text(completion))[rouge_type].fmeasure))
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


def require_words(reference: object, column: str) -> None:
    """ValueError for a reference of which ROUGE's tokenizer leaves nothing."""
    if not isinstance(reference, str) or not any(char.isascii() and char.isalnum() for char in reference):
        raise ValueError(
            f"reward {NAME!r}: column {column!r} holds {reference!r:.80}, in which ROUGE finds no word (it keeps a-z "
            "and 0-9 alone)"
        )
