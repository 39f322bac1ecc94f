"""The numbers of a told story (data=stories): the share that is right, or 1 for all. Column: `answer`, a right story.

A story names both numbers and twice their sum. The wording earns nothing. A text with more numbers, or fewer, gets 0.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rl.rewards.loading import Reward, completion_text, require_column

NAME = "stories"
COUNTS = ("share", "all")
NUMBER = re.compile(r"[0-9]+")


def make_reward(count: str = "share") -> Reward:
    """The reward, in [0, 1]. count: share (of the numbers that are right) | all (1 only where every one is)."""
    if count not in COUNTS:
        raise ValueError(f"count={count!r} must be one of {', '.join(COUNTS)}")

    def stories(
        completions: Sequence[Any],
        answer: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """trl's signature; one number a completion. Logs the share of completions with every number right."""
        answers = require_column(answer, "answer", NAME, len(completions))
        pairs = zip(completions, answers, strict=True)
        shares = [share_right(completion_text(completion), story) for completion, story in pairs]
        if log_metric is not None and shares:
            log_metric("stories/all_right", sum(share == 1.0 for share in shares) / len(shares))
        return [float(share == 1.0) for share in shares] if count == "all" else shares

    return stories


def share_right(text: str, story: str) -> float:
    """Share of the story's numbers that the text has in the same place; 0 where it has more or fewer of them."""
    expected = NUMBER.findall(story) if isinstance(story, str) else []
    if not expected:
        raise ValueError(f"reward {NAME!r}: column 'answer' holds {story!r:.80}; it must be a story with numbers in it")
    found = NUMBER.findall(text)
    if len(found) != len(expected):
        return 0.0
    return sum(int(ours) == int(theirs) for ours, theirs in zip(found, expected, strict=True)) / len(expected)
