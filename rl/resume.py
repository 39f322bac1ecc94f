"""What makes a run the same run: the same options and batches, on any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.options import RLOptions
from train.runtime.ranks import num_ranks
from train.runtime.shards import ShardFolder, read_manifest

STATE_NAME = "diversed_state.json"
PER_DEVICE = "trainer.per_device_train_batch_size"
PER_ROLLOUT = "trainer.steps_per_generation"


def require_same_batch(folder: Path, options: RLOptions) -> None:
    """ValueError for a folder whose run takes other batches than these options and this number of processes make."""
    manifest = read_manifest(folder)
    if manifest is None or PER_DEVICE not in manifest:
        return
    size, num_updates = manifest[PER_DEVICE], manifest.get(PER_ROLLOUT) or 1
    ours = options.as_one_process()
    if (size, num_updates) == (ours.per_device_train_batch_size, ours.steps_per_generation or 1):
        return
    raise ValueError(
        f"the run in {folder} takes {size} completions an optimizer step and {num_updates} such steps for a rollout, "
        f"now {ours.per_device_train_batch_size} and {ours.steps_per_generation or 1} "
        f"({PER_DEVICE}={options.per_device_train_batch_size} * "
        f"gradient_accumulation_steps={options.gradient_accumulation_steps} * {num_ranks()} processes, "
        f"steps_per_generation={options.steps_per_generation}); {_remedy(size, num_updates, options)}, or choose "
        "another output_dir"
    )


def _remedy(completions: int, num_updates: int, options: RLOptions) -> str:
    steps = options.gradient_accumulation_steps
    size, rest = divmod(completions, num_ranks() * steps)
    if rest:
        return f"start a number of processes that, times gradient_accumulation_steps={steps}, divides {completions}"
    rollout = 0 if num_updates == 1 else num_updates * steps
    return f"set {PER_DEVICE}={size} {PER_ROLLOUT}={rollout}"


def require_same_run(folder: Path, made_from: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """ValueError for a folder that holds a head of other options or another pair: going on would mix the two.

    made_from: what it holds, and fingerprints. options: nested ones, the trainer's `as_one_process`.
    """
    ShardFolder(folder, {**made_from, **flat(options)}, suffix="")


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their names on the command line."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
