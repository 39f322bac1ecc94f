"""Prompts from datasets: four known ones and any other, from the hub or from a local file of the same rows.

`datasets` is imported only when the hub is asked, since that takes seconds and needs a network.
"""

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.text_files import plain_name
from train.data.sources import jsonl
from train.data.sources.record import Prompt, Split, digest, hash_split


@dataclass(frozen=True)
class HubSet:
    """Where the rows are and how one becomes a prompt: `instruction` is formatted with the prompt column's text.

    others: the splits that the set has beside `split`, which are kept: see MEANING.
    """

    dataset: str
    config: str
    split: str
    prompt_column: str
    answer_column: str
    task: str
    instruction: str = "{}"
    others: tuple[str, ...] = ()


# What a set's own split is for. Rows of another one (train) are split by their content.
MEANING: dict[str, Split] = {"validation": "selection", "test": "test"}
# Rows that a stream is shuffled among; they are read before the first prompt comes.
SHUFFLED_ROWS = 10_000
PART = re.compile(r"\w+-\d+-of-\d+")
KNOWN = {
    "gsm8k": HubSet("openai/gsm8k", "main", "train", "question", "answer", "maths", others=("test",)),
    "mbpp": HubSet(
        "google-research-datasets/mbpp", "full", "train", "text", "code", "code",
        others=("validation", "test"),
    ),
    "cnn_dailymail": HubSet(
        "abisee/cnn_dailymail", "3.0.0", "train", "article", "highlights", "summarise",
        "Summarise the following news article in three sentences.\n\n{}", ("validation", "test"),
    ),
    "xsum": HubSet(
        "EdinburghNLP/xsum", "", "train", "document", "summary", "summarise",
        "Summarise the following article in one sentence.\n\n{}", ("validation", "test"),
    ),
}  # fmt: skip


def load(
    name: str,
    hub_set: HubSet,
    path: str,
    heldout_fraction: float,
    max_rows: int = 0,
    seed: int = 0,
    streaming: bool = False,
) -> list[Prompt]:
    """Rows of `path` (a JSONL or Parquet file, or a folder with those of the splits), else of the hub.

    A set's own splits are kept where they are there; held-out rows of `hub_set.split` go to a split that it lacks, and
    to training where it lacks none. Of the hub's sets, which may be large, only `max_rows` rows drawn by the seed are
    turned into prompts (0: all), and of its other splits half the held-out share of that each; streaming: without
    fetching the others, see `_hub_rows`.
    """
    others = [split for split in hub_set.others if heldout_fraction and (not path or _has_split(Path(path), split))]
    meanings = {hub_set.split: MEANING.get(hub_set.split)} | {split: MEANING[split] for split in others}
    own = {meaning for meaning in meanings.values() if meaning}
    prompts = []
    for split, meaning in meanings.items():
        part = replace(hub_set, split=split)
        limit = max_rows if split == hub_set.split else math.ceil(max_rows * heldout_fraction / 2)
        for place, row in _rows(name, part, path, limit, seed, streaming):
            prompt = _prompt_from_row(name, hub_set, row, place, heldout_fraction)
            prompts.append(replace(prompt, split=meaning or _where_lacking(prompt.split, own)))
    return prompts


def _rows(
    name: str, hub_set: HubSet, path: str, max_rows: int, seed: int, streaming: bool
) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if path:
        return (pair for file in _files_of_split(Path(path), hub_set.split) for pair in jsonl.read_rows(file))
    return _hub_rows(name, hub_set, max_rows, seed, streaming)


def _where_lacking(split: Split, own: Collection[Split]) -> Split:
    """Where a row of the training split goes that content puts here, in a set with these held-out splits of its own."""
    if split == "train" or not own:
        return split
    return next((lacking for lacking in MEANING.values() if lacking not in own), "train")


def _prompt_from_row(name: str, hub_set: HubSet, row: Mapping[str, Any], place: str, heldout_fraction: float) -> Prompt:
    text = row.get(hub_set.prompt_column)
    if isinstance(text, list):  # a column of chat messages
        prompt = jsonl.prompt_from_row({"messages": text}, place, hub_set.task, heldout_fraction)
        return replace(prompt, columns=_other_columns(hub_set, row))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{place}: column {hub_set.prompt_column!r} holds {text!r}, not text; the columns are "
            f"{', '.join(sorted(row))}: set data.prompt_column to the one with the prompt"
        )
    answer = row.get(hub_set.answer_column) if hub_set.answer_column else None
    if answer is not None and not isinstance(answer, str):
        raise ValueError(
            f"{place}: column {hub_set.answer_column!r} holds {answer!r}, not text; set data.answer_column to a column "
            "of text, or leave it empty"
        )
    message = {"role": "user", "content": hub_set.instruction.replace("{}", text.strip())}
    split = hash_split(text.strip(), heldout_fraction)
    id = f"{name}-{digest(text.strip())}"
    return Prompt(
        id, hub_set.task, (message,), split=split, answer=answer, columns=_other_columns(hub_set, row), place=place
    )


def _other_columns(hub_set: HubSet, row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != hub_set.prompt_column}


def _has_split(path: Path, split: str) -> bool:
    """Whether a folder holds files of this split beside others."""
    return path.is_dir() and len(jsonl.files_in(path)) > 1 and any(_of_split(path, split))


def _of_split(path: Path, split: str) -> tuple[list[Path], list[Path]]:
    """The folder's file of the split, and its parts as the hub names them (train-00000-of-00002.parquet)."""
    files = jsonl.files_in(path)
    parts = [file for file in files if PART.fullmatch(plain_name(file)) and file.name.startswith(f"{split}-")]
    return [file for file in files if plain_name(file) == split], parts


def _files_of_split(path: Path, split: str) -> list[Path]:
    """The split's own file, or its parts; or the only file."""
    if not path.is_dir():
        return [path]
    files = jsonl.files_in(path)
    of_split, parts = _of_split(path, split)
    if len(of_split) == 1 or (not of_split and parts) or len(files) == 1:
        return of_split or parts or files
    names = ", ".join(file.name for file in files) or "no JSONL or Parquet file"
    raise ValueError(f"data.path={path}: found {names}; give the file itself, or a folder that holds {split}.jsonl")


def _hub_rows(
    name: str, hub_set: HubSet, max_rows: int, seed: int, streaming: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A fair draw where all is fetched; a stream is shuffled in a window of SHUFFLED_ROWS, and begins at its start."""
    try:
        rows = _open(hub_set, streaming)
        if streaming:
            drawn = rows.shuffle(seed=seed, buffer_size=SHUFFLED_ROWS).take(max_rows)
            yield from ((f"{hub_set.dataset} row {index} of the stream", row) for index, row in enumerate(drawn))
            return
    except Exception as error:  # the hub's client raises a dozen kinds; each means that there are no rows to be had
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        offline = " (HF_HUB_OFFLINE is set: only sets in the local cache can be read)" if _offline() else ""
        raise ValueError(
            f"data={name}: cannot read {hub_set.dataset!r} from the hub{offline}: {reason}. Give a local JSONL file "
            "with data.path=FILE, set HF_HUB_OFFLINE=1 if the set is in the cache already, or take data=instructions, "
            "which needs no download"
        ) from error
    if 0 < max_rows < len(rows):
        rows = rows.shuffle(seed=seed).select(range(max_rows))
    for index, row in enumerate(rows):
        yield f"{hub_set.dataset} row {index}", row


def _open(hub_set: HubSet, streaming: bool) -> Any:
    from datasets import load_dataset

    how = {"streaming": True} if streaming else {}
    return load_dataset(hub_set.dataset, hub_set.config or None, split=hub_set.split, **how)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
