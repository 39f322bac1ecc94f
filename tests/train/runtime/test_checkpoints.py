"""The trainers' checkpoints: one that is cut short is passed over with its reason, and the run still ends the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.train.test_mtp import assert_ends_alike, config, make_config, uninterrupted, with_trainer
from train.mtp import MTPConfig, train_heads
from train.runtime import checkpoints as checkpoints_module
from train.runtime.checkpoints import last_whole, newest_first, remove_unfinished, why_not_whole

__all__ = ["config", "uninterrupted"]

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture
def saved(uninterrupted: MTPConfig, tmp_path: Path) -> Path:
    """The checkpoints of a finished run: of its best step, and of its last."""
    shutil.copytree(uninterrupted.paths.heads, tmp_path / "heads")
    return tmp_path / "heads"


def steps_of(folder: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in newest_first(folder)]


def test_whole_ones(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest by its number, not by its name or time; other folders are no checkpoints."""
    newest = steps_of(saved)[0]
    assert all(why_not_whole(path) is None for path in newest_first(saved))
    shutil.copytree(saved / f"checkpoint-{newest}", saved / "checkpoint-10")
    shutil.copytree(saved / f"checkpoint-{newest}", saved / "checkpoint-9")
    (saved / "checkpoint-best").mkdir()
    (saved / "checkpoint-99").touch()
    assert last_whole(saved) == str(saved / "checkpoint-10")
    assert capsys.readouterr().out == ""
    assert last_whole(saved / "nowhere") is None


def test_unfinished_ones_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those without one of the files that come last, or with one that is cut short; and it is told."""
    files = {8: {"a": "{}", "b": "{}"}, 9: {"a": "{}"}, 10: {"b": "{}"}, 11: {"a": "{}", "b": '{"epoch": 1.'}}
    for step, texts in files.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name, text in texts.items():
            (tmp_path / f"checkpoint-{step}" / name).write_text(text)
    remove_unfinished(tmp_path, ("a", "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rpartition("-")[2] for line in told] == ["11", "10", "9"]


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99, None], ids=["empty", "half", "nearly whole", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_every_file_counts(name: str, keep: float | None, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut anywhere, or missing: without some of them transformers would go on otherwise, in silence."""
    newest = saved / f"checkpoint-{steps_of(saved)[0]}"
    file = newest / name
    content = file.read_bytes()
    file.unlink()
    if keep is not None:
        file.write_bytes(content[: int(keep * len(content))])
    found, told = last_whole(saved), capsys.readouterr().out
    assert found != str(newest)
    assert told.startswith(f"passing over {newest}, which is not whole (")
    assert (name if keep is not None else name.split(".")[0].removesuffix("_state")) in told
    assert told.endswith("; its steps are done again\n")
    assert told.count("\n") == 1 + (found is None)


def test_a_damaged_best_one_counts(saved: Path) -> None:
    """A run that went on would come back to it at its end, and keep what it finds."""
    newest = saved / f"checkpoint-{steps_of(saved)[0]}"
    best = Path(json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"]).name
    if best == newest.name:
        best = "checkpoint-1"
        state = json.loads((newest / "trainer_state.json").read_text())
        (newest / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": f"elsewhere/{best}"}))
        shutil.copytree(newest, saved / best)
    assert why_not_whole(newest) is None
    (saved / best / "optimizer.pt").write_bytes(b"PK")
    assert (
        why_not_whole(newest) == f"its best one, {best}: optimizer.pt is damaged or cut short: File is not a zip file"
    )
    shutil.rmtree(saved / best)
    assert why_not_whole(newest) == f"its best one, {best}: it lacks trainer_state.json"


def test_deepspeeds_shards(tmp_path: Path) -> None:
    """The optimizer is in them, and each is looked at."""
    shards = tmp_path / "global_step3"
    shards.mkdir()
    (tmp_path / "trainer_state.json").write_text("{}")
    torch.save({"a": torch.zeros(3)}, shards / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert why_not_whole(tmp_path) is None
    (shards / "mp_rank_00_model_states.pt").write_bytes(b"PK\3\4 and no end")
    assert why_not_whole(tmp_path) == (
        "global_step3/mp_rank_00_model_states.pt is damaged or cut short: File is not a zip file"
    )


def test_files_of_ones_own(saved: Path) -> None:
    newest = saved / f"checkpoint-{steps_of(saved)[0]}"
    assert why_not_whole(newest, ("own.json",)) == "it lacks own.json"
    (newest / "own.json").write_text('{"half')
    assert str(why_not_whole(newest, ("own.json",))).startswith("own.json is damaged or cut short")


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_a_cut_checkpoint_ends_the_same(
    step: int,
    config: MTPConfig,
    uninterrupted: MTPConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one: training goes on from the one before it, or from the start. The same heads, bit for bit."""
    train_heads(with_trainer(config, save_total_limit=9))
    folder = Path(config.paths.heads)
    for path in newest_first(folder):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    (folder / "model.safetensors").unlink()
    (folder / "manifest.json").unlink()
    cut = folder / f"checkpoint-{step}" / "optimizer.pt"
    cut.write_bytes(cut.read_bytes()[:-100])
    capsys.readouterr()
    train_heads(config)
    told = capsys.readouterr().out
    assert f"passing over {folder / f'checkpoint-{step}'}, which is not whole (optimizer.pt is damaged" in told
    assert (f"going on from {folder / 'checkpoint-3'}" in told) == (step == 6)
    assert_ends_alike(config, uninterrupted)


def test_a_save_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does Ctrl-C in its midst; a folder that was there before is not touched."""
    config = make_config(tmp_path)
    original = checkpoints_module.Trainer._save_rng_state

    def fail(self: checkpoints_module.Trainer, output_dir: str) -> None:
        if output_dir.endswith("checkpoint-6"):
            raise KeyboardInterrupt
        original(self, output_dir)

    monkeypatch.setattr(checkpoints_module.Trainer, "_save_rng_state", fail)
    with pytest.raises(KeyboardInterrupt):
        train_heads(config)
    assert steps_of(Path(config.paths.heads)) == [3]
