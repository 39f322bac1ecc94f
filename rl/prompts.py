"""The datasets of a run: prompts as trl takes them, with every column that a reward may ask for.

trl wants a table; the rows themselves stay outside of it, since Arrow would change them (`train.data.reward_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from train.data.prompts import DataOptions, load_prompts
from train.data.reward_rows import PROMPT, reward_rows
from train.data.sources.seen import seen_record
from train.data.testbed import testbed_prompts

TESTBED_PROMPTS = 2048  # of 8000; a run sees a part of them


def load_datasets(data: DataOptions, max_heldout: int) -> tuple[Dataset, Dataset | None]:
    """Training and selection prompts (None with max_heldout = 0) of a source. ValueError where there are none."""
    prompts = load_prompts(data)
    rows = list(zip((prompt.split for prompt in prompts), reward_rows(prompts), strict=True))
    train = [row for split, row in rows if split == "train"]
    heldout = [row for split, row in rows if split == "selection"][:max_heldout]
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
    chosen_by = [] if selection is None else [row[PROMPT] for row in selection]
    return seen_record([*(("train", row[PROMPT]) for row in train), *(("selection", one) for one in chosen_by)])


def to_dataset(rows: Sequence[dict[str, Any]]) -> Dataset:
    """Rows of the same columns as a dataset that gives them as they are.

    ValueError where some prompts are text and some are messages: trl takes a rollout's prompts for all of one kind.
    """
    if len({isinstance(row[PROMPT], str) for row in rows}) > 1:
        raise ValueError(
            "the data mixes raw text (data=stdlib) with chats, and a rollout takes prompts of one kind; leave one out"
        )

    def look_up(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        return {name: [rows[number][name] for number in batch["row"]] for name in rows[0]}

    return Dataset.from_dict({"row": list(range(len(rows)))}).with_transform(look_up)
