"""The datasets of a run: prompts as trl takes them, with every column that a reward may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from rl.rewards.loading import TRL_ARGUMENTS
from train.data import DataOptions, load_prompts
from train.prompts.record import Prompt
from train.prompts.seen import seen_record
from train.testbed import testbed_prompts

TESTBED_PROMPTS = 2048  # of 8000; a run sees a part of them
RESERVED = (*TRL_ARGUMENTS, "completion", "image", "images")


def load_datasets(data: DataOptions, max_heldout: int) -> tuple[Dataset, Dataset | None]:
    """Training and selection prompts (None with max_heldout = 0) of a source. ValueError where there are none."""
    prompts = load_prompts(data)
    train = [to_row(prompt) for prompt in prompts if prompt.split == "train"]
    heldout = [to_row(prompt) for prompt in prompts if prompt.split == "selection"][:max_heldout]
    if not train or (max_heldout and not heldout):
        raise ValueError(
            f"data.source={data.source} gives {len(train)} training and {len(heldout)} selection prompts, and both are "
            "needed; use more prompts (data.max_prompts), another data.heldout_fraction, or heldout_prompts=0 to go "
            "without a best checkpoint"
        )
    return to_dataset(train), to_dataset(heldout) if max_heldout else None


def load_testbed_datasets(data: DataOptions, max_heldout: int) -> tuple[Dataset, Dataset | None]:
    """The testbed's own prompts; of `data` only max_prompts and the seed count."""
    train = testbed_prompts(data.max_prompts or TESTBED_PROMPTS, data.seed, "train")
    heldout = testbed_prompts(max_heldout, data.seed, "selection")
    return to_dataset(train), to_dataset(heldout) if max_heldout else None


def prompts_record(train: Dataset, selection: Dataset | None) -> dict[str, Any]:
    """Which prompts a head is trained on and chosen by, for its checkpoint."""
    chosen_by = [] if selection is None else selection["prompt"]
    return seen_record([*(("train", one) for one in train["prompt"]), *(("selection", one) for one in chosen_by)])


def to_row(prompt: Prompt) -> dict[str, Any]:
    """A row with `prompt` (text, or messages) and the columns of its source; `answer` and `task` where it has them."""
    row = {key: value for key, value in prompt.columns.items() if key != "prompt"}
    row["prompt"] = prompt.text if prompt.text is not None else list(prompt.messages)
    row["task"] = prompt.task
    if prompt.answer is not None:
        row["answer"] = prompt.answer
    return row


def to_dataset(rows: Sequence[dict[str, Any]]) -> Dataset:
    """Rows as a dataset; a column that a row lacks is None there.

    ValueError for a column of mixed types, or one whose name trl needs for itself.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if taken := sorted(set(names) & set(RESERVED)):
        raise ValueError(f"the data has columns named {', '.join(taken)}, which trl uses for itself; rename them")
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name, values in columns.items():
        try:
            Dataset.from_dict({name: values})
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"column {name!r} of the data holds values of different types ({error}); make all of it text, or leave "
                "it out"
            ) from error
    return Dataset.from_dict(columns)
