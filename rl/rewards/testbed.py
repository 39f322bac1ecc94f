"""Digits that the testbed's prompt decides: the share that is right, or 1 if all are. Column: `answer`, the digits.

The wording earns nothing. A text that is not well formed (`train.testbed_language.read_digits`) gets 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rl.rewards.loading import Reward, completion_text, require_column
from train.testbed_language import DIGITS, NAMES, read_digits

NAME = "testbed"
COUNTS = ("share", "all")


def make_reward(count: str = "share") -> Reward:
    """The reward, in [0, 1]. count: share (of the digits that are right) | all (1 only where every one is)."""
    if count not in COUNTS:
        raise ValueError(f"count={count!r} must be one of {', '.join(COUNTS)}")

    def testbed(
        completions: Sequence[Any],
        answer: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """trl's signature; one number a completion. Logs how many texts are well formed, and their digits right."""
        answers = require_column(answer, "answer", NAME, len(completions))
        pairs = zip(completions, answers, strict=True)
        shares = [share_right(completion_text(completion), expected) for completion, expected in pairs]
        formed = [share for share in shares if share is not None]
        if log_metric is not None and shares:
            log_metric("testbed/well_formed", len(formed) / len(shares))
            if formed:
                log_metric("testbed/digit_accuracy", sum(formed) / len(formed))
        if count == "all":
            return [float(share == 1.0) for share in shares]
        return [share or 0.0 for share in shares]

    return testbed


def share_right(text: str, expected: str) -> float | None:
    """Share of the text's digits that are the expected ones; None where it is not well formed."""
    if not isinstance(expected, str) or len(expected) != len(NAMES) or set(expected) - set(DIGITS):
        raise ValueError(
            f"reward {NAME!r}: column 'answer' holds {expected!r:.80}; it must be text of {len(NAMES)} digits, as "
            "train.testbed.testbed_prompts gives it"
        )
    digits = read_digits(text)
    if digits is None:
        return None
    return sum(ours == theirs for ours, theirs in zip(digits, expected, strict=True)) / len(NAMES)
