"""Several processes: what a launcher adds to the command line, who writes, and that two end as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from train import draft, ranks
from train.config import WRITES_NOTHING, words_of_rank
from train.presets import CONF
from train.trainer import StopOnInterrupt

# Float32 weights whose gradients were summed in another order, after 8 steps of Adam at a rate of 1e-3.
WEIGHT_TOLERANCE = 1e-5
NUM_TRAIN = 24  # whole steps of 4 in an epoch: nothing is repeated to fill one up
MAX_STEPS = 8


def test_local_rank_is_taken_from_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the deepspeed launcher puts it first, and as older ones spell it; all else stays."""
    monkeypatch.delenv("RANK", raising=False)
    words = ["+model=tiny", "trainer.seed=1", "--cfg", "job"]
    assert words_of_rank(["--local_rank=0", *words]) == words
    assert words_of_rank([*words, "--local-rank=3"]) == words
    assert words_of_rank(words) == words


def test_only_the_first_process_writes_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert words_of_rank(["--local_rank=1", "+model=tiny"]) == ["+model=tiny", *WRITES_NOTHING]


def test_every_piece_is_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks.is_mine(index) for index in range(3)] == [True] * 3
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        done += [index for index in range(8) if ranks.is_mine(index)]
    assert sorted(done) == list(range(8))


def test_alone_nothing_is_waited_for() -> None:
    ranks.join("cpu")
    ranks.wait_for_all()
    with ranks.main_first():
        assert (ranks.any_rank(True), ranks.any_rank(False)) == (True, False)
    assert ranks.gather_pieces({2: "c", 0: "a"}) == ["a", "c"]


def test_a_launchers_signal_is_no_second_one() -> None:
    """Ctrl-C reaches the launcher, too, which then ends its processes by another signal."""
    stop = StopOnInterrupt()
    stop._note(2, None)
    stop._note(15, None)
    assert stop.interrupted
    with pytest.raises(KeyboardInterrupt):
        stop._note(2, None)


def environment() -> dict[str, str]:
    apart = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**apart, "PYTHONPATH": os.pathsep.join([str(CONF.parent), os.environ.get("PYTHONPATH", "")])}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


def test_commands_for_one_process_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded or written, with the rank that speaks."""
    monkeypatch.setattr(sys, "argv", ["x", "--local_rank=1", "+model=tiny", f"work_dir={tmp_path}"])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        draft.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("rank 1: error: WORLD_SIZE=2: draft runs in one process")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def words_of_training(folder: Path, batch_size: int) -> list[str]:
    rows = [
        {"prompt": f"Say {i} and {i * i % 17}.", "split": "train" if i < NUM_TRAIN else "heldout"}
        for i in range(NUM_TRAIN + 6)
    ]
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "+model=tiny",
        "data=jsonl",
        "data.path=prompts.jsonl",
        "answers.max_new_tokens=24",
        "answers.batch_size=8",
        "answers.shard_prompts=8",
        "cache.shard_examples=8",
        "cache.batch_tokens=256",
        "heads=medusa",
        "heads.num_draft_tokens=3",
        "heads.own_output_head=true",
        "loss.ce=0.5",
        f"trainer.max_steps={MAX_STEPS}",
        f"trainer.per_device_train_batch_size={batch_size}",
        "trainer.warmup_steps=2",
        "trainer.eval_steps=3",
        "trainer.save_steps=3",
        "trainer.logging_steps=1",
        "trainer.autocast=false",
        "work_dir=work",
    ]


def files_of(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob(pattern))}


@pytest.mark.slow
def test_two_processes_end_as_one(tmp_path: Path) -> None:
    """The same answers and hidden states to the byte, and the same heads; one writes the log and the options.

    With output heads of their own, which are used behind the forward that is watched for gradients.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    single = run(one, "train.mtp", *words_of_training(one, 4))
    assert single.returncode == 0, single.stderr
    both = run(two, *TORCHRUN, "train.mtp", "--local_rank=0", *words_of_training(two, 2))
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("heads are in") == 1
    for pattern in ("work/answers/*", "work/hidden/*/*.safetensors"):
        assert files_of(one, pattern) == files_of(two, pattern)
        assert len(files_of(one, pattern)) >= 4
    heads = [folder / "work" / "medusa" for folder in (one, two)]
    configs = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in heads]
    assert configs[0]["provenance"]["num_examples"] == NUM_TRAIN
    lines = [(folder / "log.jsonl").read_text(encoding="utf-8").splitlines() for folder in heads]
    assert len(lines[0]) == len(lines[1])
    losses = [[line["loss"] for line in map(json.loads, of) if "loss" in line] for of in lines]
    assert len(losses[0]) == MAX_STEPS
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    weights = [load_file(folder / "model.safetensors") for folder in heads]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=WEIGHT_TOLERANCE)
    assert configs[1]["acceptance"]["mean_block_length"] == pytest.approx(
        configs[0]["acceptance"]["mean_block_length"], abs=1e-3
    )
