"""The trainers' own checkpoints, `checkpoint-N` folders: written whole or removed, and the last whole one found.

transformers writes them file by file under their final name, and goes on from whichever has the highest number. Here a
save that fails leaves no folder behind, and a folder that was cut short (a crash, a full disk, an incomplete copy) is
passed over, with a line that says so.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import Trainer

from models.files import telling_full, write_text
from train.runtime.ranks import is_main, main_first

STATE_NAME = "trainer_state.json"
WEIGHTS = "*model*.safetensors"
# deepspeed's name for the folder of a step's shards, optimizer included
SHARDS = "global_step*"
BEST = "best_model_checkpoint"


class WholeCheckpoints(Trainer):
    """Comes first among a trainer's bases: a checkpoint that cannot be written to its end is removed."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        is_new = not folder.exists()
        try:
            with telling_full(folder):
                self._write_checkpoint(model, trial, folder)
        except BaseException:
            if is_new and self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _write_checkpoint(self, model: nn.Module, trial: Any, folder: Path) -> None:
        """All files of the checkpoint. A trainer with some of its own writes them here, first."""
        super()._save_checkpoint(model, trial)


def last_whole(folder: Path, also: tuple[str, ...] = ()) -> str | None:
    """The newest whole checkpoint in `folder`, None where there is none; says which ones are passed over, and why.

    also: names of files that one must hold besides transformers' own.
    """
    for path in newest_first(folder):
        reason = why_not_whole(path, also)
        if reason is None:
            _take_best_from_here(path)
            return str(path)
        print(f"passing over {path}, which is not whole ({reason}); its steps are done again")
    return None


def _take_best_from_here(path: Path) -> None:
    """Have the state name the best checkpoint of its own folder: transformers notes a path, and folders are copied."""
    file = path / STATE_NAME
    state = json.loads(file.read_text(encoding="utf-8"))
    best = state.get(BEST)
    if best is not None and best != (here := str(path.parent / Path(best).name)):
        write_text(file, json.dumps(state | {BEST: here}, indent=2, sort_keys=True) + "\n")


def remove_unfinished(folder: Path, last_files: tuple[str, ...]) -> None:
    """Remove what a killed run left half written: transformers would count it among those to keep, or as the best.

    last_files: JSON files that are written when the others are there, those of all processes.
    """
    with main_first():
        for path in newest_first(folder) if is_main() else ():
            if not all(_is_json(path / name) for name in last_files):
                print(f"{path} was not finished when its run was killed; it is removed")
                shutil.rmtree(path)


def _is_json(file: Path) -> bool:
    try:
        _open_json(file)
    except (OSError, ValueError):
        return False
    return True


def newest_first(folder: Path) -> Iterator[Path]:
    """The checkpoints in `folder`, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name.rpartition("-")[2].isdigit()]
    yield from sorted(found, key=lambda path: -int(path.name.rpartition("-")[2]))


def why_not_whole(path: Path, also: tuple[str, ...] = ()) -> str | None:
    """What is missing or cut short in this checkpoint, or in the best one that it will come back to; None: nothing."""
    try:
        state: dict[str, Any] = json.loads((path / STATE_NAME).read_text(encoding="utf-8"))
        best = state.get(BEST)
    except FileNotFoundError:
        return f"it lacks {STATE_NAME}"
    except (ValueError, AttributeError) as error:
        return f"{STATE_NAME} is no readable JSON: {error}"
    if missing := [name for name in also if not (path / name).is_file()]:
        return f"it lacks {missing[0]}"
    # Without one of them transformers restores neither, in silence.
    needed = [] if any(path.glob(SHARDS)) else [WEIGHTS, "optimizer.pt", "scheduler.pt", "rng_state*.pth"]
    if lacking := [pattern for pattern in needed if not any(path.glob(pattern))]:
        return f"it lacks {lacking[0]}"
    for file in sorted(path.rglob("*")):
        if (reason := _why_unreadable(file)) is not None:
            return f"{file.relative_to(path)} is damaged or cut short: {reason}"
    there = path if best is None else path.parent / Path(best).name
    if there != path and (reason := why_not_whole(there, also)) is not None:
        return f"its best one, {there.name}: {reason}"
    return None


def _why_unreadable(file: Path) -> str | None:
    checks: dict[str, Callable[[Path], None]] = {
        ".safetensors": _open_tensors,
        ".pt": _open_archive,
        ".pth": _open_archive,
        ".bin": _open_archive,
        ".json": _open_json,
    }
    check = checks.get(file.suffix)
    if check is None or not file.is_file():
        return None
    try:
        check(file)
    except Exception as error:  # safetensors raises a type of its own
        return " ".join(str(error).split())[:120]
    return None


def _open_tensors(file: Path) -> None:
    with safe_open(file, framework="pt"):  # its header says how long the file must be
        pass


def _open_archive(file: Path) -> None:
    with zipfile.ZipFile(file):  # its table of contents is its end
        pass


def _open_json(file: Path) -> None:
    json.loads(file.read_text(encoding="utf-8"))
