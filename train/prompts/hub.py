"""Prompts from datasets: four known ones and any other, from the hub or from a local file of the same rows.

`datasets` is imported only when the hub is asked, since that takes seconds and needs a network.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from train.prompts import jsonl
from train.prompts.record import Prompt, digest, hash_split


@dataclass(frozen=True)
class HubSet:
    """Where the rows are and how one becomes a prompt: `instruction` is formatted with the prompt column's text."""

    dataset: str
    config: str
    split: str
    prompt_column: str
    answer_column: str
    task: str
    instruction: str = "{}"


# Rows that a stream is shuffled among; they are read before the first prompt comes.
SHUFFLED_ROWS = 10_000
PART = re.compile(r"\w+-\d+-of-\d+")
KNOWN = {
    "gsm8k": HubSet("openai/gsm8k", "main", "train", "question", "answer", "maths"),
    "mbpp": HubSet("google-research-datasets/mbpp", "full", "train", "text", "code", "code"),
    "cnn_dailymail": HubSet(
        "abisee/cnn_dailymail", "3.0.0", "train", "article", "highlights", "summarise",
        "Summarise the following news article in three sentences.\n\n{}",
    ),
    "xsum": HubSet(
        "EdinburghNLP/xsum", "", "train", "document", "summary", "summarise",
        "Summarise the following article in one sentence.\n\n{}",
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
    """Rows of `path` (a JSONL or Parquet file, or a folder with those of the split), else of the hub.

    Of the hub's sets, which may be large, only `max_rows` rows drawn by the seed are turned into prompts (0: all);
    streaming: without fetching the others, see `_hub_rows`.
    """
    rows: Iterable[tuple[str, Mapping[str, Any]]]
    if path:
        rows = (pair for file in _files_of_split(Path(path), hub_set.split) for pair in jsonl.read_rows(file))
    else:
        rows = _hub_rows(name, hub_set, max_rows, seed, streaming)
    return [_prompt_from_row(name, hub_set, row, place, heldout_fraction) for place, row in rows]


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
    return Prompt(id, hub_set.task, (message,), split=split, answer=answer, columns=_other_columns(hub_set, row))


def _other_columns(hub_set: HubSet, row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != hub_set.prompt_column}


def _files_of_split(path: Path, split: str) -> list[Path]:
    """The split's own file, or its parts as the hub names them (train-00000-of-00002.parquet); or the only file."""
    if not path.is_dir():
        return [path]
    files = jsonl.files_in(path)
    of_split = [file for file in files if file.stem == split]
    parts = [file for file in files if PART.fullmatch(file.stem) and file.stem.startswith(f"{split}-")]
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
