"""deepspeed=: what its files in conf/deepspeed leave to transformers, and whether it can be had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

# "auto" is what the other training options say. No bf16 section: deepspeed would keep the heads in bfloat16, and lose
# the updates that are smaller than its spacing. The optimizer is torch's own, as without deepspeed.
FROM_OPTIONS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
SHARED_MEMORY_OP = "deepspeed_shm_comm"
# The stage under which weights are split, too.
SHARDS_WEIGHTS = 3


def check_deepspeed(options: Mapping[str, Any]) -> None:
    """ValueError where deepspeed is asked for and not installed, or nothing has launched this process for it."""
    if not options:
        return
    if find_spec("deepspeed") is None:
        raise ValueError(
            "deepspeed=zero1|zero2|zero3 needs a package that is not installed: pip install 'foretoken[deepspeed]'"
        )
    if "RANK" not in os.environ:
        raise ValueError(
            "deepspeed=zero1|zero2|zero3 needs a launcher: start with deepspeed --module train.mtp, or with "
            "torchrun --nproc-per-node N -m train.mtp"
        )


def compile_nothing(device: str) -> None:
    """Keep deepspeed on CPUs from compiling its own all-reduce, for which gloo serves.

    It takes minutes on a slow machine, and a job that is ended meanwhile leaves a lock that the next one waits for.
    Call before the processes meet.
    """
    if device.startswith("cpu"):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False


def zero_stage(options: Mapping[str, Any]) -> int:
    """Which ZeRO stage is asked for; 0 where nothing is split, with deepspeed or without."""
    return int(options.get("zero_optimization", {}).get("stage", 0))


def complete(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration as transformers takes it; None without deepspeed."""
    return {**FROM_OPTIONS, **options} if options else None
