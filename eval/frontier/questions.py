"""The prompts of a frontier, each with the columns that its reward reads, and the turns in which they are asked.

Prompts, their split and their rendering belong to `train.data.prompts` and `train.data.testbed`; what they are worth,
to the reward.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.text_files import plain_name
from train.data.prompts import DataOptions, load_prompts, render_prompt
from train.data.reward_rows import PROMPT, reward_rows
from train.data.sources.record import Message
from train.data.sources.seen import leave_out
from train.data.testbed import testbed_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("test", "selection", "train")
TESTBED = "testbed"


@dataclass(frozen=True)
class Question:
    """A prompt as text or messages, as token ids, and the other columns of its row (`answer`, `test_list`, ...)."""

    prompt: str | list[Message]
    ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


def task_name(model_source: str, data_source: str, data_path: str) -> str:
    """What prompts are called in tables: the name of their file or of their source."""
    if model_source == TESTBED:
        return TESTBED
    return plain_name(Path(data_path)) if data_path else data_source


def load_questions(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataOptions,
    split: str,
    count: int,
    longest: int,
    seen: Collection[str] = (),
) -> list[Question]:
    """The first `count` prompts of a split that have at most `longest` tokens. ValueError where there are too few.

    seen: fingerprints of prompts that are left out, since a checkpoint has seen them.
    """
    everything = load_prompts(data)
    # Rows of all splits, since training has them too: a row has the columns of all.
    rows = dict(zip((id(prompt) for prompt in everything), reward_rows(everything), strict=True))
    prompts = leave_out([prompt for prompt in everything if prompt.split == split], seen)
    questions: list[Question] = []
    for prompt in prompts:
        ids = render_prompt(tokenizer, prompt, data.chat_template_kwargs)
        if len(ids) <= longest:
            row = rows[id(prompt)]
            questions.append(Question(row.pop(PROMPT), ids, row))
        if len(questions) == count:
            return questions
    raise ValueError(
        f"num_prompts={count}: data.source={data.source} has {len(prompts)} {split} prompts, of which {len(questions)} "
        f"have at most {longest} tokens; ask for fewer, or raise data.heldout_fraction (now {data.heldout_fraction})"
    )


def load_testbed_questions(tokenizer: "PreTrainedTokenizerBase", seed: int, split: str, count: int) -> list[Question]:
    """The testbed's own prompts."""
    rows = testbed_prompts(count, seed, split)
    return [
        Question(row.pop("prompt"), list(ids), row)
        for row, ids in zip(rows, tokenizer([row["prompt"] for row in rows])["input_ids"], strict=True)
    ]


def turns_of(questions: Sequence[Question], prompts_per_turn: int) -> list[list[Question]]:
    """The questions in their order, cut into turns; the last one may be shorter."""
    return [list(questions[i : i + prompts_per_turn]) for i in range(0, len(questions), prompts_per_turn)]
