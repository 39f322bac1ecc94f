"""The frame of rewards that are a share of what is asked for, or 1 for all of it. Column: `answer`."""

from collections.abc import Callable, Sequence
from typing import Any

from eval.rewards.loading import Reward, answer_texts, require_column

COUNTS = ("share", "all")
# What is right of a text, given its row's answer; None where the text is of another form.
ShareRight = Callable[[str, str], float | None]


def share_reward(
    name: str, count: str, share_right: ShareRight, to_log: Callable[[Sequence[float | None]], dict[str, float]]
) -> Reward:
    """The reward, in [0, 1]; 0 for None.

    count: share | all (1 only where everything is right). to_log: what a batch's shares say to the log, by name.
    """
    if count not in COUNTS:
        raise ValueError(f"count={count!r} must be one of {', '.join(COUNTS)}")

    def reward(
        completions: Sequence[Any],
        answer: Sequence[Any] | None = None,
        completion_answers: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """trl's signature; one number per completion."""
        answers = require_column(answer, "answer", name, len(completions))
        texts = answer_texts(completions, completion_answers)
        shares = [share_right(text, expected) for text, expected in zip(texts, answers, strict=True)]
        if log_metric is not None and shares:
            for metric, value in to_log(shares).items():
                log_metric(f"{name}/{metric}", value)
        if count == "all":
            return [float(share == 1.0) for share in shares]
        return [share or 0.0 for share in shares]

    return reward
