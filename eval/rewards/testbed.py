"""Digits that the testbed's prompt decides: the share that is right, or 1 if all are. Column: `answer`, the digits.

The wording earns nothing. A text that is not well formed (`train.data.testbed_language.read_digits`) gets 0.
"""

from collections.abc import Sequence

from eval.rewards.loading import Reward
from eval.rewards.reading.columns import refuse
from eval.rewards.shares import share_reward
from train.data.testbed_language import DIGITS, NAMES, read_digits

NAME = "testbed"


def make_reward(count: str = "share") -> Reward:
    """The reward, in [0, 1]. count: share (of the digits that are right) | all (1 only where every one is)."""
    return share_reward(NAME, count, share_right, to_log)


def to_log(shares: Sequence[float | None]) -> dict[str, float]:
    """How many texts are well formed, and how many of their digits are right."""
    formed = [share for share in shares if share is not None]
    logged = {"well_formed": len(formed) / len(shares)}
    return logged | {"digit_accuracy": sum(formed) / len(formed)} if formed else logged


def share_right(text: str, expected: str) -> float | None:
    """Share of the text's digits that are the expected ones; None where it is not well formed."""
    if not isinstance(expected, str) or len(expected) != len(NAMES) or set(expected) - set(DIGITS):
        refuse(expected, NAME, "answer", f"text of {len(NAMES)} digits, as train.data.testbed.testbed_prompts gives it")
    digits = read_digits(text)
    if digits is None:
        return None
    return sum(ours == theirs for ours, theirs in zip(digits, expected, strict=True)) / len(NAMES)
