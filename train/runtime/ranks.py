"""Several processes at one job, as torchrun, deepspeed or accelerate start them: who is who, and what they agree on.

A process by itself is rank 0 of 1, and everything here then costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# How many processes MPI or srun has started, which say their numbers in words of their own.
OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# `accelerate launch` sets this in every process, and these where its settings ask for it.
MADE_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
ACCELERATE_SAYS = {
    "ACCELERATE_MIXED_PRECISION": ("no", "and choose trainer.autocast=true or false"),
    "ACCELERATE_USE_DEEPSPEED": ("false", "choose deepspeed=zero1 or zero2, and launch with --multi_gpu"),
    "ACCELERATE_USE_FSDP": ("false", "choose deepspeed=zero1 or zero2, and launch with --multi_gpu"),
}

# A process that has more prompts to answer than another is waited for. One that dies ends the job at once all the same,
# by its launcher.
PATIENCE = timedelta(days=2)
# Of gloo, and of NCCL.
LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


def take_up_launcher() -> None:
    """Learn who this process is from a launcher that says it in other words than torchrun's: submitit.

    ValueError where several have been started that know nothing of each other, and each would do, and write, the same;
    and where accelerate's settings say what this project's own options say.
    """
    if MADE_BY_ACCELERATE in os.environ:
        _check_accelerate()
    if "RANK" in os.environ:
        return
    if "SUBMITIT_EXECUTOR" in os.environ:
        from submitit.helpers import TorchDistributedEnvironment

        task = TorchDistributedEnvironment()
        if task.world_size > 1:
            task.export(set_cuda_visible_devices=False, overwrite=True)
        return
    for name in OTHERS:
        if int(os.environ.get(name, "1")) > 1:
            raise ValueError(
                f"{name}={os.environ[name]}, but no RANK is set: the processes do not know each other; start one a "
                "machine, and let it be torchrun --nproc-per-node N -m"
            )


def _check_accelerate() -> None:
    """ValueError for settings of accelerate that would be ignored, or would overrule options in silence."""
    for name, (unset, instead) in ACCELERATE_SAYS.items():
        if (value := os.environ.get(name, unset).lower()) != unset:
            raise ValueError(f"{name}={value} comes from accelerate's settings: leave it at {unset}, {instead}")
    # As accelerate 1.15 starts one process on CPUs when several are asked for (utils/launch.py).
    if (
        os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        and "MASTER_ADDR" in os.environ
        and "RANK" not in os.environ
    ):
        raise ValueError(
            "accelerate launch starts one process on CPUs, however many --num_processes asks for; "
            "use torchrun --nproc-per-node N -m"
        )


def rank() -> int:
    """Number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Processes at this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is the process that prints, logs and writes what all have in common."""
    return rank() == 0


def is_mine(index: int) -> bool:
    """Whether this process does piece `index` of work that is dealt out; who does which depends on nothing else."""
    return index % num_ranks() == rank()


def join(device: str) -> None:
    """Meet the others, where there are any. transformers and accelerate take up what is made here."""
    if num_ranks() == 1 or dist.is_initialized():
        return
    if is_cuda := device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=PATIENCE)


def wait_for_all() -> None:
    """Returns when every process is here."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def main_first() -> Iterator[None]:
    """The others begin when the first has ended, and find what it has made."""
    if not is_main():
        wait_for_all()
    yield
    if is_main():
        wait_for_all()


@contextmanager
def told_of_lost_peers() -> Iterator[None]:
    """ConnectionError, in one line, in place of the many in which torch tells that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not any(sign in str(error) for sign in LOST_PEER):
            raise
        raise ConnectionError("another process of this job has ended; what it said tells why") from error


def any_rank(flag: bool) -> bool:
    """Whether it holds in any process; the same answer in all of them, which must all ask."""
    if not dist.is_initialized():
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Their sum over all processes, which must all ask; the same in each of them."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather_pieces(mine: Mapping[int, T]) -> list[T]:
    """Everyone's pieces by their numbers, in order, in every process."""
    parts: list[Mapping[int, T]] = [mine]
    if dist.is_initialized():
        parts = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
    pieces = {index: piece for part in parts for index, piece in part.items()}
    return [pieces[index] for index in sorted(pieces)]
