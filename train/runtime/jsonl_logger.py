"""Where a run is logged to. The default: one JSON object a line beside the checkpoints, no account needed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from models.files import telling_full, write_text

WANDB, NO_LOGGER = "wandb", "none"
LOGGERS = ("jsonl", "tensorboard", WANDB, NO_LOGGER)


def check_logger(name: str, log_checkpoint: bool = False) -> None:
    """ValueError for a logger that there is not, or that is not installed, or that takes no checkpoints."""
    if name not in LOGGERS:
        raise ValueError(f"logger={name!r} is unknown; choose one of {', '.join(LOGGERS)}")
    if name in (WANDB, "tensorboard") and find_spec(name) is None:
        raise ValueError(f"logger={name} needs a package that is not installed: pip install 'foretoken[{name}]'")
    if log_checkpoint and name != WANDB:
        raise ValueError(f"log_checkpoint=true with logger={name}: only logger={WANDB} takes checkpoints")


def report_to(name: str) -> list[str]:
    """The logger as transformers' `report_to` has it: those that are transformers' own."""
    return [] if name in (NO_LOGGER, "jsonl") else [name]


def log_callbacks(name: str, folder: Path) -> list[TrainerCallback]:
    """The logger as a callback, where it is our own."""
    return [JsonlLogger(folder / "log.jsonl")] if name == "jsonl" else []


class JsonlLogger(TrainerCallback):
    """Appends every log line with its step to `path`. A resumed run first drops the lines of steps it does again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        old = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        kept = [line for line in old if _step(line) <= state.global_step] if state.global_step else []
        write_text(self.path, "".join(line + "\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            line = json.dumps({"step": state.global_step, **logs}) + "\n"
            with telling_full(self.path, len(line)), self.path.open("a", encoding="utf-8") as file:
                file.write(line)


def _step(line: str) -> float:
    """The step of a logged line; a line cut short by a crash counts as beyond any step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
