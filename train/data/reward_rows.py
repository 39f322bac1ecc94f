"""What a reward is asked about, beside completions: the prompts of the data, each with the columns of its row.

The one reader of rows for training (`rl.prompts`) and measurements (`eval.frontier.questions`): in both a reward sees
the same Python objects. They are those of the file, never those of a table: an absent key stays absent, 1 stays an
integer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from train.data.sources.record import Message, Prompt

PROMPT = "prompt"
# What a reward is called with beside the columns (`eval.rewards.loading.ARGUMENTS`), or trl takes for its own purposes.
RESERVED = (
    *("prompts", "completions", "completion_ids", "completion_answers", "trainer_state", "log_extra", "log_metric"),
    *("completion", "image", "images"),
)


def reward_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """A row for each prompt: `prompt` (text, or messages), `task`, `answer` where it has one, and its other columns.

    All rows have the same columns, in the order in which the prompts bring them; what a row lacks is None. A column
    named `prompt` gives way to the prompt itself. ValueError for a column whose name a reward is called with already.
    """
    rows = [asked_prompt(prompt) | _columns(prompt) for prompt in prompts]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if taken := sorted(set(names) & set(RESERVED)):
        raise ValueError(
            f"the data has columns named {', '.join(taken)}, which rewards are called with or trl takes for itself; "
            "rename them"
        )
    return [{name: row.get(name) for name in names} for row in rows]


def asked_prompt(prompt: Prompt) -> dict[str, str | list[Message]]:
    """{"prompt": text or messages}."""
    return {PROMPT: prompt.text if prompt.text is not None else list(prompt.messages)}


def _columns(prompt: Prompt) -> dict[str, Any]:
    """The prompt's answer is what `data.answer_column` names; a column `task` of the row's own is kept as it is."""
    own = {"task": prompt.task} | {name: value for name, value in prompt.columns.items() if name != PROMPT}
    return own if prompt.answer is None else own | {"answer": prompt.answer}


def fresh(value: Any) -> Any:
    """A copy for one completion: what a reward does to its arguments reaches no other call."""
    return copy.deepcopy(value)
