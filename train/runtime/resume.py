"""What a run goes on from: which of a trainer's own checkpoints are whole, and whether this job can take one up.

transformers writes a checkpoint file by file, several processes each their part, and takes up whichever has the highest
number. A process that is killed meanwhile leaves one without, say, its optimizer's state, which is then started afresh
in silence. So a checkpoint counts once it is marked, and it is marked when all processes have written their part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from models.files import write_text
from train.heads.trainer import TrainerOptions
from train.runtime.checkpoints import newest_first
from train.runtime.deepspeed_options import zero_stage
from train.runtime.ranks import is_main, num_ranks, wait_for_all
from train.runtime.shards import read_manifest

MARK = "whole.json"
GLOBAL_BATCH = "global_batch"
# What makes up the global batch may change from one start to the next, as long as their product does not.
PER_DEVICE, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


class MarkWhole(TrainerCallback):
    """Marks each checkpoint when all processes have written it, with who they were."""

    def __init__(self, deepspeed: Mapping[str, Any]) -> None:
        self.stage = zero_stage(deepspeed)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wait_for_all()
        if is_main():
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_text(folder / MARK, json.dumps({"num_ranks": num_ranks(), "zero_stage": self.stage}))


def global_batch(options: TrainerOptions) -> int:
    """Examples of one optimizer step, over all processes."""
    return options.per_device_train_batch_size * num_ranks() * options.gradient_accumulation_steps


def trained_with(options: TrainerOptions) -> dict[str, Any]:
    """The trainer's options as a run's manifest holds them: the global batch, not what it is made of."""
    kept = {name: value for name, value in asdict(options).items() if name not in (PER_DEVICE, ACCUMULATION)}
    return {GLOBAL_BATCH: global_batch(options), **{f"trainer.{name}": value for name, value in kept.items()}}


def require_resumable(folder: Path, options: TrainerOptions, deepspeed: Mapping[str, Any]) -> None:
    """ValueError, before anything is loaded, where the run in `folder` cannot go on in this job."""
    before, now = (read_manifest(folder) or {}).get(GLOBAL_BATCH), global_batch(options)
    if before not in (None, now):
        raise ValueError(
            f"{folder} was trained with {before} examples a step, now {now}: trainer.{PER_DEVICE}="
            f"{options.per_device_train_batch_size} x {num_ranks()} processes x trainer.{ACCUMULATION}="
            f"{options.gradient_accumulation_steps}; {_remedy(before, options)}, or choose another paths.heads"
        )
    if (last := next((path for path in newest_first(folder) if (path / MARK).is_file()), None)) is not None:
        _require_same_engine(last, zero_stage(deepspeed))


def _remedy(wanted: int, options: TrainerOptions) -> str:
    """The option that makes the global batch what it was, with the processes that there are."""
    if wanted % num_ranks():
        return f"start a number of processes that divides {wanted}"
    each = wanted // num_ranks()
    if each % options.gradient_accumulation_steps == 0:
        return f"set trainer.{PER_DEVICE}={each // options.gradient_accumulation_steps}"
    return f"set trainer.{PER_DEVICE}={each} trainer.{ACCUMULATION}=1"


def _require_same_engine(last: Path, stage: int) -> None:
    mark = json.loads((last / MARK).read_text(encoding="utf-8"))
    if mark["zero_stage"] != stage:
        was, now = (f"zero{found}" if found else "none" for found in (mark["zero_stage"], stage))
        raise ValueError(
            f"{last} was saved with deepspeed={was}, now deepspeed={now}: their optimizer states differ; "
            f"go on with deepspeed={was}, or choose another paths.heads"
        )
    if stage and mark["num_ranks"] != num_ranks():
        raise ValueError(
            f"{last} was saved by {mark['num_ranks']} processes, now {num_ranks()}: deepspeed's optimizer state is cut "
            f"for their number; start {mark['num_ranks']} processes, or choose another paths.heads"
        )
