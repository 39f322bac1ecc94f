"""Saying in one line what is wrong with a place that should hold a model.

A folder is looked at before transformers is asked: what transformers says of one that lacks a file is about something
else. What the hub refuses is told by the type of its error, never by the words in it, which may be the user's own.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from httpx2 import TransportError
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
# In the order in which transformers looks for them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
INDEX = ".index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model", "*.tiktoken",
)  # fmt: skip
GIT_LFS = b"version https://git-lfs"
NUM_NAMED = 6
# What our own folders hold, by their config's kind, and where they are given.
OURS = {
    "heads": "draft heads of train.mtp: give it as checkpoint=FOLDER",
    "ensemble": "an ensemble head of rl.diversed: give it in checkpoints=[FOLDER] of eval.pareto, or as --ensemble",
}
OUT_OF_REACH = (LocalEntryNotFoundError, OfflineModeIsEnabled, TransportError, ConnectionError, TimeoutError)


def require_model(folder: Path) -> None:
    """ValueError unless the folder holds a whole transformers model: config.json, weights and a tokenizer."""
    require_folder(folder)
    config = _read_object(folder / CONFIG) if (folder / CONFIG).is_file() else None
    if config is not None:
        _require_no_heads(folder, config)
    weights = _weights(folder, config or {})
    missing = [] if config is not None else [CONFIG]
    missing += [] if weights is not None else [f"weights ({WEIGHTS[0]})"]
    missing += [] if holds_tokenizer(folder) else [f"tokenizer files ({TOKENIZER_FILES[0]})"]
    if missing:
        listed = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        raise ValueError(
            f"model.name={str(folder)!r} lacks {listed} (it holds: {_held(folder)}); point it at a folder written by "
            "save_pretrained, of the model and of its tokenizer"
        )
    assert config is not None
    assert weights is not None
    if not config.get("model_type"):
        raise ValueError(
            f"{folder / CONFIG} has no model_type, so it does not say which architecture this is; export it again"
        )
    _require_whole(weights)


def require_folder(folder: Path) -> None:
    """ValueError unless this is a folder that can be read."""
    if folder.is_file():
        raise ValueError(
            f"model.name={str(folder)!r} is a file; give the folder that holds it, written by save_pretrained"
        )
    if not folder.is_dir():
        raise ValueError(f"model.name={str(folder)!r} is not a folder; give an existing folder or a hub name")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"model.name={str(folder)!r} cannot be read (permission denied); change its permissions")


def holds_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer's own files are there; tokenizer_config.json alone holds no vocabulary."""
    if any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return True
    if not (folder / TOKENIZER_CONFIG).is_file():
        return False
    # Some have files of other names, and those that take bytes or characters have none.
    name = _read_object(folder / TOKENIZER_CONFIG).get("tokenizer_class")
    found = tokenizer_class_from_name(name) if isinstance(name, str) else None
    if found is None or not hasattr(found, "vocab_files_names"):
        return False
    names = [file for file in found.vocab_files_names.values() if file is not None]
    return not names or any((folder / file).is_file() for file in names)


def _require_no_heads(folder: Path, config: dict[str, Any]) -> None:
    """ValueError for trained parts of a model, which have a config.json, too."""
    if config.get("format_version") is not None and "kind" in config:
        held = OURS.get(str(config["kind"]), f"a checkpoint of kind {config['kind']!r}")
        target = config.get("target")
        named = f", which was made for {target['name']!r}" if isinstance(target, dict) and target.get("name") else ""
        raise ValueError(f"model.name={str(folder)!r} holds {held}; model.name takes the target itself{named}")
    if "speculators_model_type" in config or str(config.get("model_type")) in ("medusa", "eagle"):
        raise ValueError(
            f"model.name={str(folder)!r} holds draft heads in a server's format; model.name takes the target itself"
        )


def _weights(folder: Path, config: dict[str, Any]) -> list[Path] | None:
    """The files that transformers reads the weights from; None where there are none.

    ValueError for an index that cannot be read, or names files that are not there.
    """
    named = config.get("transformers_weights")
    first = next((folder / name for name in ([named] if named else WEIGHTS) if (folder / name).is_file()), None)
    if first is None or not first.name.endswith(INDEX):
        return None if first is None else [first]
    weight_map = _read_object(first).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{first} has no weight_map; fetch or export the model again")
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"model.name={str(folder)!r} lacks {len(missing)} of the {len(names)} files that {first.name} names, such "
            f"as {', '.join(missing[:3])}; fetch or export it again"
        )
    return [folder / name for name in names]


def _require_whole(weights: list[Path]) -> None:
    """ValueError for a file of weights that is cut short. Its header says how long it is: the weights stay unread."""
    for path in weights:
        try:
            with path.open("rb") as file:
                start = file.read(len(GIT_LFS))
            if start == GIT_LFS:
                raise ValueError(f"{path} is a pointer of git-lfs and not the weights; run `git lfs pull` there")
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif not start or (start.startswith(b"PK") and not zipfile.is_zipfile(path)):
                raise SafetensorError("its end is missing")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); fetch or export it again") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON ({error}); fetch or export the model again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object; fetch or export the model again")
    return found


def _held(folder: Path) -> str:
    names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    return ", ".join(names[:NUM_NAMED]) + (", ..." if names[NUM_NAMED:] else "") or "nothing"


def load_error_message(name: str, error: BaseException) -> str:
    """One line with what transformers says of a model that it did not load."""
    return f"model {name!r} could not be loaded: {' '.join(str(error).split())[:300]}"


def hub_message(name: str, error: BaseException) -> str | None:
    """What the hub, or the way to it, has against a name, and what to do; None where it is none of that."""
    errors = list(_chain(error))

    def has(*types: type[BaseException]) -> bool:
        return any(isinstance(error, types) for error in errors)

    statuses = [error.response.status_code for error in errors if isinstance(error, HfHubHTTPError)]
    if has(RevisionNotFoundError):
        return f"model {name!r} has no such revision; check model.revision"
    if has(DisabledRepoError):
        return f"model {name!r} is disabled on the hub; choose another model"
    # A gated one is a kind of not found, in their classes, too.
    if has(GatedRepoError) or (any(status in (401, 403) for status in statuses) and not has(RepositoryNotFoundError)):
        return (
            f"model {name!r} is gated or private: accept its licence on its hub page, then run `hf auth login` or set "
            "HF_TOKEN; or set model.name to a local folder"
        )
    if has(RepositoryNotFoundError, HFValidationError):
        return (
            f"model {name!r} is neither a folder here nor a repository on the hub that you may see; check model.name, "
            "and if it is private run `hf auth login` or set HF_TOKEN"
        )
    if statuses and statuses[0] != 404:
        return f"model {name!r} could not be fetched: the hub answers with status {statuses[0]}; try again later"
    if has(*OUT_OF_REACH):
        return (
            f"model {name!r} could not be fetched: the hub is out of reach and the local cache does not have it. Go "
            "online once, set model.name to a local folder, or use +model=smollm2, which needs no hub"
        )
    if has(PermissionError):
        return (
            f"model {name!r} could not be stored: the hub's cache cannot be written; set HF_HOME to a folder that can"
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those behind it."""
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [other for other in (found.__cause__, found.__context__) if other is not None]
