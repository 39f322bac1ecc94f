"""Prompts from a local file, JSONL or Parquet: rows with `prompt` or `messages`, each checked; errors name the row.

A row is what its file says: values keep their types, and nothing is added to nested ones.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.text_files import SUFFIXES, find_surrogate, numbered_lines
from train.data.sources.record import Message, Prompt, Split, digest, halve, hash_split, loosened

ROLES = ("system", "user", "assistant")
PARQUET, PARQUET_MAGIC = ".parquet", b"PAR1"
# What a folder's rows are read from.
PATTERNS = ("*.jsonl", f"*{PARQUET}", *(f"*.jsonl{suffix}" for suffix in SUFFIXES))
MAX_DEPTH = 100  # of nested values; deeper ones are tried out
OWN_COLUMNS = ("prompt", "messages", "id", "task", "answer", "split")
EXPECTED = (
    'expected {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, optionally id, task, answer'
)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", row) of every row of a JSONL file, plain or compressed, or a Parquet file; none is an error."""
    if not path.is_file():
        raise ValueError(
            f"data.path={path}: no such file; give a JSONL file (one JSON object a line) or a Parquet file"
        )
    with path.open("rb") as file:
        is_parquet = path.suffix == PARQUET or file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    yield from _read_parquet(path) if is_parquet else _read_lines(path)


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `datasets` and the hub write it. What a row lacks is None there: the format knows no absent keys."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.path={path}: a text in the rows from {number + 1} on is no UTF-8 ({error.reason}, byte "
            f"{error.object[error.start]:#04x}); write it as UTF-8, or as a binary column"
        ) from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"data.path={path}: not a whole Parquet file ({reason}); fetch or write it again") from error
    if not number:
        raise ValueError(f"data.path={path}: the file has no rows; {EXPECTED}")


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines that are not blank; a byte-order mark is allowed."""
    found = False
    for number, line in numbered_lines(path):
        if line.strip():
            found = True
            yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
    if not found:
        raise ValueError(f"data.path={path}: the file has no rows; {EXPECTED}")


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if line.count("[") + line.count("{") > MAX_DEPTH:
            copy.deepcopy(row)  # as is done for each completion: it needs more of the stack than reading
    except (ValueError, RecursionError) as error:  # ValueError: also of an integer with thousands of digits
        reason = getattr(error, "msg", None) or str(error).split(";")[0]
        raise ValueError(f"{place}: not JSON ({reason}): {line.strip()[:60]!r}; {EXPECTED}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: found a {type(row).__name__}, not an object; {EXPECTED}")
    # Only an escape can spell one: what was read from UTF-8 has none.
    if "\\u" in line and (where := find_surrogate(row)) is not None:
        raise ValueError(
            f"{place}: {where} holds half of a character (a lone surrogate such as \\ud83d), which no tokenizer takes "
            "and no file can hold; write the whole character, or U+FFFD in its place"
        )
    return row


def prompt_from_row(row: dict[str, Any], place: str, default_task: str, heldout_fraction: float) -> Prompt:
    """One prompt. A `messages` row that ends in an assistant turn gives that turn as the answer."""
    answer = _optional_text(row, "answer", place)
    if row.get("messages") is not None:
        messages = _checked_messages(row["messages"], place)
        if messages[-1]["role"] == "assistant":
            if answer is not None:
                raise ValueError(
                    f"{place}: an answer twice, as `answer` and as the last of `messages`; keep one of them"
                )
            *messages, last = messages
            answer = last["content"]
        if not messages or messages[-1]["role"] != "user":
            raise ValueError(
                f"{place}: no user turn before the answer; `messages` must hold a user turn to be answered"
            )
    else:
        text = row.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: found {_shown(row)}; {EXPECTED}")
        messages = [{"role": "user", "content": text}]
    content = "\n".join(message["content"] for message in messages)
    return Prompt(
        id=_optional_text(row, "id", place) or f"jsonl-{digest(content)}",
        task=_optional_text(row, "task", place) or default_task,
        messages=tuple(messages),
        split=_row_split(row, content, place) or hash_split(content, heldout_fraction),
        answer=answer,
        columns={key: value for key, value in row.items() if key not in OWN_COLUMNS},
        place=place,
    )


def load(path: Path, default_task: str, heldout_fraction: float) -> list[Prompt]:
    """All prompts of the file, or of a folder's JSONL and Parquet files, in order.

    ValueError for two rows of one id, or of one content in two splits.
    """
    places: dict[str, str] = {}
    named: dict[str, tuple[Split, str]] = {}
    prompts = []
    files = files_in(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"data.path={path}: the folder holds no file of {' or '.join(PATTERNS)}")
    for place, row in (pair for file in files for pair in read_rows(file)):
        prompt = prompt_from_row(row, place, default_task, heldout_fraction)
        if row.get("id") is not None and prompt.id in places:
            raise ValueError(f"{place}: id {prompt.id!r} was used at {places[prompt.id]} already; ids must differ")
        places[prompt.id] = place
        if row.get("split") is not None:
            _require_one_split(named, prompt, place)
        prompts.append(prompt)
    return prompts


def _require_one_split(named: dict[str, tuple[Split, str]], prompt: Prompt, place: str) -> None:
    """ValueError for a prompt that an earlier row puts into another split. Differing case or spaces make no other."""
    split, other = named.setdefault(loosened(prompt.content()), (prompt.split, place))
    if split != prompt.split:
        raise ValueError(
            f"{place}: the prompt of {other} again, there in split {split!r} and here in {prompt.split!r}: splits must "
            "not share prompts; keep one of the two"
        )


def files_in(folder: Path) -> list[Path]:
    """The folder's files of rows, by name."""
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def _checked_messages(messages: Any, place: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: `messages` is {_shown(messages)}, not a list of turns; {EXPECTED}")
    checked = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ROLES or not isinstance(content, str) or not content.strip():
            raise ValueError(
                f"{place}: turn {index} is {_shown(message)}; a turn needs a `role` of {', '.join(ROLES)} and a "
                "`content` that is a string with text in it"
            )
        checked.append({"role": role, "content": content})
    return checked


def _optional_text(row: dict[str, Any], key: str, place: str) -> str | None:
    """A number is taken as text: ids and answers are often numbers."""
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{place}: `{key}` is {_shown(value)}; it must be a string")


def _row_split(row: dict[str, Any], content: str, place: str) -> Split | None:
    """The split that the row names: `validation` is for selection, and `heldout` is halved by content."""
    match row.get("split"):
        case None:
            return None
        case "train":
            return "train"
        case "selection" | "validation":
            return "selection"
        case "test":
            return "test"
        case "heldout":
            return halve(content)
        case other:
            raise ValueError(
                f"{place}: `split` is {_shown(other)}; it must be 'train', 'selection' (or 'validation') or 'test', or "
                "be left out"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
