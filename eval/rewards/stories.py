"""The numbers of a told story (data=stories): the share that is right, or 1 for all. Column: `answer`, a right story.

A story names both numbers and twice their sum. The wording earns nothing. A text with more numbers, or fewer, gets 0.
"""

import re
from collections.abc import Sequence

from eval.rewards.loading import Reward
from eval.rewards.reading.columns import refuse
from eval.rewards.shares import share_reward

NAME = "stories"
NUMBER = re.compile(r"[0-9]+")


def make_reward(count: str = "share") -> Reward:
    """The reward, in [0, 1]. count: share (of the numbers that are right) | all (1 only where every one is)."""
    return share_reward(NAME, count, share_right, to_log)


def to_log(shares: Sequence[float | None]) -> dict[str, float]:
    """The share of completions with every number right."""
    return {"all_right": sum(share == 1.0 for share in shares) / len(shares)}


def share_right(text: str, story: str) -> float:
    """Share of the story's numbers that the text has in the same place; 0 where it has more or fewer of them."""
    expected = NUMBER.findall(story) if isinstance(story, str) else []
    if not expected:
        refuse(story, NAME, "answer", "a story with numbers in it")
    found = NUMBER.findall(text)
    if len(found) != len(expected):
        return 0.0
    return sum(int(ours) == int(theirs) for ours, theirs in zip(found, expected, strict=True)) / len(expected)
