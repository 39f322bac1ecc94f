"""Real jobs of one or several processes on a small task, and what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from train.runtime.presets import CONF

NUM_TRAIN = 161  # no number of whole steps: the last one of an epoch has few examples
NUM_HELDOUT = 6
GLOBAL_BATCH = 8
# Float32 weights whose gradients were summed in another order, after Adam's steps at a rate of 1e-3.
WEIGHT_TOLERANCE = 1e-5
# Sums over a step's tokens in another order, as the log rounds them: to 4 places a head.
LOG_TOLERANCE = 1.5e-4
POLL_S = 0.002
PATIENCE_S = 300.0
ON_CPU = {"DS_ACCELERATOR": "cpu"}  # for deepspeed, which otherwise looks for a GPU
LAUNCHER_WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def torchrun(num_ranks: int) -> list[str]:
    """The words before a module's name that start it so often; plain Python for one."""
    several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    return [sys.executable, "-m", *(several if num_ranks > 1 else [])]


def deepspeed(num_ranks: int) -> list[str]:
    """The same for deepspeed's launcher, on a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["deepspeed.launcher.runner", f"--num_accelerators={num_ranks}", f"--master_port={port}", "--module"]
    return [sys.executable, "-m", *launcher]


def words(folder: Path, num_ranks: int, *more: str, kind: str = "medusa", max_steps: int = 40) -> list[str]:
    """train.mtp's options in `folder`, whose prompts are made; the global batch is the same for every num_ranks."""
    rows = [
        {"prompt": f"Say {i} and {i * i % 17}.", "split": "train" if i < NUM_TRAIN else "selection"}
        for i in range(NUM_TRAIN + NUM_HELDOUT)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        "+model=tiny",
        "data=jsonl",
        "data.path=prompts.jsonl",
        "answers.max_new_tokens=24",
        "answers.batch_size=4",
        "answers.shard_prompts=4",
        "cache.shard_examples=1",
        "cache.batch_tokens=256",
        f"heads={kind}",
        "heads.num_draft_tokens=3",
        "heads.own_output_head=true",
        "loss.ce=0.5",
        f"trainer.max_steps={max_steps}",
        f"trainer.per_device_train_batch_size={GLOBAL_BATCH // num_ranks}",
        "trainer.warmup_steps=2",
        "trainer.max_grad_norm=0.1",
        "trainer.eval_steps=10",
        "trainer.save_steps=10",
        "trainer.logging_steps=1",
        "trainer.autocast=false",
        "work_dir=work",
        *more,
    ]


def environment(**more: str) -> dict[str, str]:
    """Of a process that no launcher has started, on one thread, with this project's packages."""
    apart = {name: value for name, value in os.environ.items() if name not in LAUNCHER_WORDS}
    path = os.pathsep.join(filter(None, [str(CONF.parent), os.environ.get("PYTHONPATH", "")]))
    return {**apart, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(folder: Path, command: list[str], **more: str) -> subprocess.Popen[str]:
    """The command in `folder`, whose output goes to files beside it."""
    folder.mkdir(exist_ok=True)
    number = len(list(folder.glob("*.out")))
    with (folder / f"{number}.out").open("w") as out, (folder / f"{number}.err").open("w") as err:
        return subprocess.Popen(command, cwd=folder, env=environment(**more), stdout=out, stderr=err, text=True)


def finish(folder: Path, process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, and what it last wrote to both streams."""
    code = wait(process)
    number = len(list(folder.glob("*.out"))) - 1
    return code, (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text()


def wait(process: subprocess.Popen[str]) -> int:
    """Its exit code; a job that hangs is ended, and is an error."""
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise


def run(folder: Path, command: list[str], **more: str) -> tuple[int, str, str]:
    """Start, and wait."""
    return finish(folder, start(folder, command, **more))


def kill_when(process: subprocess.Popen[str], began: Callable[[], bool], rank: int, num_ranks: int) -> float:
    """SIGKILL to one of the job's processes as soon as `began`; the seconds until all of the job has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not began():
        assert process.poll() is None, "the job ended before it could be killed"
        assert time.monotonic() < deadline, "the stage did not begin"
        time.sleep(POLL_S)
    os.kill(process.pid if num_ranks == 1 else pid_of_rank(process.pid, rank), signal.SIGKILL)
    killed = time.monotonic()
    wait(process)
    return time.monotonic() - killed


def pid_of_rank(launcher: int, rank: int) -> int:
    """The process below the launcher that has this rank, by its environment."""
    parents: dict[int, int] = {}
    of_rank: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                of_rank.append(int(folder.name))
        except OSError:
            continue  # ended meanwhile
    for pid in of_rank:
        above = parents[pid]
        while above in parents and above != launcher:
            above = parents[above]
        if above == launcher:
            return pid
    raise AssertionError(f"no process of rank {rank}")


def last_step(folder: Path) -> int:
    """The last step in the log of the heads in `folder`, 0 before there is one."""
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


def files_of(folder: Path, pattern: str) -> dict[str, bytes]:
    """Files below `folder` by their names in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob(pattern))}


def log_of(folder: Path) -> list[dict[str, float]]:
    """The training log's lines, but for the last, which sums up what the last start did.

    Without the epoch, which transformers counts in passes: a short last step may have fewer of them.
    """
    lines = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: line[name] for name in line if name != "epoch"} for line in lines if "train_runtime" not in line]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The exported weights, which are those of the best step, and the last checkpoint's, as its trainer names them."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    exported, trained = load_file(folder / "model.safetensors"), load_file(last / "model.safetensors")
    # Under deepspeed single numbers are vectors, and the head may be a part of what is trained.
    plain = {f"last {name.removeprefix('head.')}": tensor.view(-1) for name, tensor in trained.items()}
    return {f"exported {name}": tensor for name, tensor in exported.items()} | plain


def require_same(one: Path, two: Path, weights: float = 0.0, log: float = 0.0) -> None:
    """Two trainings took the same steps, with the same loss and gradient at each, and ended with the same weights."""
    first, second = log_of(one), log_of(two)
    assert [line.keys() for line in first] == [line.keys() for line in second]
    for this, that in zip(first, second, strict=True):
        assert that == pytest.approx(this, rel=0, abs=log), f"step {this['step']}"
    tensors, others = weights_of(one), weights_of(two)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=weights)
