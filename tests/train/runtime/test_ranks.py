"""Several processes: what a launcher adds to the command line, who writes, and who does what."""

import os
import sys
from pathlib import Path

import pytest

from train import draft
from train.runtime import ranks
from train.runtime.callbacks import StopOnInterrupt
from train.runtime.config import WRITES_NOTHING, words_of_rank


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
    assert words_of_rank(["+model=tiny", "--multirun"]) == ["+model=tiny", *WRITES_NOTHING, "--multirun"]
    assert words_of_rank(["--multirun", "+model=tiny"]) == ["--multirun", "+model=tiny", *WRITES_NOTHING]
    assert words_of_rank(["--multirun"]) == ["--multirun", *WRITES_NOTHING]


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a process that nothing has launched."""
    for name in os.environ:
        if name in ("RANK", "MASTER_ADDR", *ranks.OTHERS) or name.startswith(("ACCELERATE_", "SUBMITIT_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("name", ranks.OTHERS)
def test_strangers_are_refused(alone: pytest.MonkeyPatch, name: str) -> None:
    """Eight processes of srun or mpirun would each train alone into the same folder."""
    ranks.take_up_launcher()
    alone.setenv(name, "1")
    ranks.take_up_launcher()
    alone.setenv(name, "8")
    with pytest.raises(ValueError, match=f"{name}=8, but no RANK is set: .* torchrun"):
        ranks.take_up_launcher()
    alone.setenv("RANK", "0")
    ranks.take_up_launcher()


def test_accelerate_on_cpus_is_refused(alone: pytest.MonkeyPatch) -> None:
    """It sets an address for several, and starts one; --num_processes 1 sets none."""
    alone.setenv("ACCELERATE_MIXED_PRECISION", "no")
    alone.setenv("ACCELERATE_USE_CPU", "True")
    ranks.take_up_launcher()
    alone.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="starts one process on CPUs"):
        ranks.take_up_launcher()
    alone.setenv("RANK", "0")
    ranks.take_up_launcher()


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "trainer.autocast"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "deepspeed=zero1"),
        ("ACCELERATE_USE_FSDP", "true", "deepspeed=zero1"),
    ],
)
def test_accelerates_own_settings_are_refused(alone: pytest.MonkeyPatch, name: str, value: str, instead: str) -> None:
    """In processes that it has launched; transformers sets some of them itself later on."""
    if name != ranks.MADE_BY_ACCELERATE:
        alone.setenv(name, value)
        ranks.take_up_launcher()
        alone.setenv(ranks.MADE_BY_ACCELERATE, "no")
    else:
        alone.setenv(name, value)
    alone.setenv("RANK", "1")
    with pytest.raises(ValueError, match=f"{name}={value} .*{instead}"):
        ranks.take_up_launcher()
