"""Which checkpoint a run goes on from, and with how many processes it may."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train.heads.trainer import TrainerOptions
from train.runtime.resume import MARK, MarkWhole, require_resumable, trained_with
from train.runtime.shards import require_same_run

ZERO2 = {"zero_optimization": {"stage": 2}}


def save(folder: Path, step: int, is_whole: bool = True, deepspeed: dict[str, Any] | None = None) -> Path:
    """A checkpoint's folder as the trainer leaves it, or as it is when a process is killed while it is written."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    if is_whole:
        told = {"args": SimpleNamespace(output_dir=str(folder)), "state": SimpleNamespace(global_step=step)}
        MarkWhole(deepspeed or {}).on_save(**told, control=None)  # type: ignore[arg-type]
    return checkpoint


def processes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(number))


def test_marks_say_who_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process alone marks, and says how many they were."""
    processes(monkeypatch, 4)
    checkpoint = save(tmp_path, 5, deepspeed=ZERO2)
    assert json.loads((checkpoint / MARK).read_text()) == {"num_ranks": 4, "zero_stage": 2}
    monkeypatch.setenv("RANK", "1")
    assert not (save(tmp_path, 6) / MARK).exists()


def begin(folder: Path, options: TrainerOptions) -> None:
    require_same_run(folder, {"holds": "heads"} | trained_with(options))


@pytest.mark.parametrize("parts", [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1)])
def test_the_same_global_batch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...]) -> None:
    begin(tmp_path, TrainerOptions(per_device_train_batch_size=8))
    each, number, accumulation = parts
    processes(monkeypatch, number)
    options = TrainerOptions(per_device_train_batch_size=each, gradient_accumulation_steps=accumulation)
    require_resumable(tmp_path, options, {})
    begin(tmp_path, options)


@pytest.mark.parametrize(
    ("parts", "remedy"),
    [
        ((8, 2, 1), "set trainer.per_device_train_batch_size=4,"),
        ((4, 1, 4), "set trainer.per_device_train_batch_size=2,"),
        ((4, 2, 3), "set trainer.per_device_train_batch_size=4 trainer.gradient_accumulation_steps=1,"),
        ((2, 3, 1), "start a number of processes that divides 8,"),
    ],
)
def test_another_global_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...], remedy: str
) -> None:
    """In one line that says what to set."""
    begin(tmp_path, TrainerOptions(per_device_train_batch_size=8))
    each, number, accumulation = parts
    processes(monkeypatch, number)
    options = TrainerOptions(per_device_train_batch_size=each, gradient_accumulation_steps=accumulation)
    with pytest.raises(ValueError, match=remedy) as refused:
        require_resumable(tmp_path, options, {})
    now = each * number * accumulation
    assert f"was trained with 8 examples a step, now {now}: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_other_options_are_another_run(tmp_path: Path) -> None:
    begin(tmp_path, TrainerOptions())
    require_resumable(tmp_path, TrainerOptions(seed=3), {})
    with pytest.raises(ValueError, match=r"trainer\.seed is 0, now 3"):
        begin(tmp_path, TrainerOptions(seed=3))


def test_another_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO the optimizer's state is cut for the number of processes; without, one has all of it."""
    options = TrainerOptions()
    save(tmp_path / "plain", 5)
    require_resumable(tmp_path / "plain", options, {})
    with pytest.raises(ValueError, match="saved with deepspeed=none, now deepspeed=zero2"):
        require_resumable(tmp_path / "plain", options, ZERO2)
    processes(monkeypatch, 2)
    save(tmp_path / "split", 5, deepspeed=ZERO2)
    require_resumable(tmp_path / "plain", options, {})
    require_resumable(tmp_path / "split", options, ZERO2)
    processes(monkeypatch, 4)
    with pytest.raises(ValueError, match=r"saved by 2 processes, now 4: .* start 2 processes"):
        require_resumable(tmp_path / "split", options, ZERO2)
    with pytest.raises(ValueError, match="saved with deepspeed=zero2, now deepspeed=none"):
        require_resumable(tmp_path / "split", options, {})
