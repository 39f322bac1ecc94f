"""A real disk that fills up while something is saved: the last good one is whole, and one line says what to do.

After room was made the same command goes on, and ends as if nothing had been.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from eval.frontier.plots import save_figure
from eval.speed.report import write_json
from models.checkpoint import load_ensemble, load_heads, save_ensemble, save_heads
from models.ensemble import EnsembleHead, EnsembleOptions
from models.files import DiskFull
from models.heads import HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target
from rl.diversed import DiversedConfig, train_verifier
from rl.trainer import DiversedTrainer
from scripts.export import main as export
from tests.disks import PAGE_BYTES, SmallDisk, small_disk
from tests.rl import test_diversed as rl_tests
from tests.train import test_mtp as mtp_tests
from tests.train.answers.test_answers import answer
from tests.train.completion_server import serve
from tests.train.heads.test_hidden_cache import OPTIONS as CACHE_OPTIONS
from tests.train.heads.test_hidden_cache import make_examples
from train.distill.lora import LoraOptions
from train.distill.student import Student
from train.heads import hidden_cache
from train.heads.hidden_cache import CachedRows, build_cache
from train.heads.trainer import HeadTrainer
from train.mtp import MTPConfig, train_heads
from train.runtime.checkpoints import newest_first
from train.runtime.jsonl_logger import JsonlLogger

quiet = rl_tests.quiet
__all__ = ["quiet", "small_disk"]

DRAFTER = {"kind": "model", "name": "small", "fingerprint": "0123456789abcdef"}


@pytest.fixture
def target() -> Target:
    return make_tiny_target()


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything below the folder, hidden files and scratch included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(write: Callable[[], Any], disk: SmallDisk, free: int, named: Path) -> None:
    """`write` with so much room fails in one line that names the place, and changes nothing."""
    disk.clear()
    before = files_of(disk.folder)
    disk.leave(free)
    with pytest.raises(DiskFull) as error:
        write()
    message = str(error.value)
    assert str(named) in message
    assert "the disk is full (needs " in message
    assert "give the same command again: what was there before is untouched" in message
    assert "\n" not in message
    disk.clear()
    assert files_of(disk.folder) == before


# Checkpoints and exports


def test_heads(small_disk: SmallDisk, target: Target) -> None:
    folder = small_disk.folder / "heads"

    def save(seed: int) -> None:
        head = build_head(target, HeadOptions("medusa", 3))
        with torch.no_grad():
            next(head.parameters()).add_(seed)
        save_heads(folder, head)

    refused(lambda: save(0), small_disk, 2**13, folder)
    save(0)
    first = load_heads(folder, target).state_dict()
    for free in (0, 2**13):
        refused(lambda: save(1), small_disk, free, folder)
    kept = load_heads(folder, target).state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in first.items())
    save(1)
    assert any(not torch.equal(load_heads(folder, target).state_dict()[name], first[name]) for name in first)


def test_an_ensemble(small_disk: SmallDisk, target: Target) -> None:
    folder = small_disk.folder / "verifier"
    head = EnsembleHead(EnsembleOptions(target_size=32, draft_size=32, kind="mlp", width=256))
    save_ensemble(folder, head, target, DRAFTER)
    with torch.no_grad():
        next(head.parameters()).add_(1.0)
    refused(lambda: save_ensemble(folder, head, target, DRAFTER), small_disk, 2**13, folder)
    assert not torch.equal(next(load_ensemble(folder, target, DRAFTER).parameters()), next(head.parameters()))
    save_ensemble(folder, head, target, DRAFTER)
    assert torch.equal(next(load_ensemble(folder, target, DRAFTER).parameters()), next(head.parameters()))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_draft_model(lora_rank: int, small_disk: SmallDisk) -> None:
    """transformers' own writer, through safetensors."""
    folder = small_disk.folder / "draft"

    def write() -> None:
        Student(make_tiny_target(seed=1), LoraOptions(rank=lora_rank), False).export(folder, torch.float32)

    refused(write, small_disk, 2**14, folder)
    write()
    refused(write, small_disk, 2**14, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.get_input_embeddings().weight, make_tiny_target(seed=1).output_head.weight)


@pytest.mark.parametrize("server", ["vllm", "hf"])
def test_exports(server: str, small_disk: SmallDisk, target: Target, tmp_path: Path, capsys: Any) -> None:
    """The command ends with code 2 and the line."""
    save_heads(tmp_path / "heads", build_head(target, HeadOptions("medusa", 3)))
    out = small_disk.folder / "out"
    words = [str(tmp_path / "heads"), str(out), "--to", server]
    small_disk.leave(2**13)
    assert export(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {out} could not be written, the disk is full (needs ")
    assert said.count("\n") == 1
    assert small_disk.names() == []
    small_disk.clear()
    assert export(words) == 0
    before = files_of(out)
    small_disk.leave(2**13)
    assert export(words) == 2
    assert files_of(out) == before


def test_results(small_disk: SmallDisk) -> None:
    """The bench's JSON, the frontier's drawings."""
    figure = Figure()
    figure.subplots().plot(range(500), range(500))
    path, stem = small_disk.folder / "out" / "bench.json", small_disk.folder / "out" / "pareto"
    write_json(path, {"rows": [1]})
    refused(lambda: write_json(path, {"rows": list(range(9000))}), small_disk, 2**13, path)
    refused(lambda: save_figure(figure, stem), small_disk, 2**12, stem.with_suffix(".png"))
    write_json(path, {"rows": list(range(9000))})
    assert all(place.stat().st_size > 2**12 for place in save_figure(figure, stem))


# Text and hidden states


def test_answers(small_disk: SmallDisk, tmp_path: Path) -> None:
    """Whole shards stay and are not made again; the run ends as one that had room."""
    folder = small_disk.folder / "answers"
    small_disk.leave(2 * PAGE_BYTES)  # for the manifest and a shard
    with pytest.raises(DiskFull, match=r"shard-00001\.jsonl could not be written, the disk is full"):
        answer(folder)
    kept = files_of(folder)
    assert kept.keys() == {"manifest.json", "shard-00000.jsonl"}
    small_disk.clear()
    times = {name: (folder / name).stat().st_mtime_ns for name in kept}
    assert answer(folder) == answer(tmp_path / "roomy")
    assert all((folder / name).stat().st_mtime_ns == time for name, time in times.items())


def test_answers_from_a_server(small_disk: SmallDisk, target: Target, tmp_path: Path) -> None:
    """What had been noted is not asked for again."""
    folder = small_disk.folder / "answers"
    with serve(target) as server:
        options = {"engine": "server", "url": server.url, "batch_size": 1}
        small_disk.leave(PAGE_BYTES)
        with pytest.raises(DiskFull, match=r"part-00000\.jsonl could not be written, the disk is full"):
            answer(folder, **options)
        small_disk.leave(PAGE_BYTES)
        with pytest.raises(DiskFull, match=r"shard-00000\.jsonl could not be written, the disk is full"):
            answer(folder, **options)
        assert len((folder / "part-00000.jsonl").read_text().splitlines()) == 4
        small_disk.clear()
        server.answered.clear()
        assert answer(folder, **options) == answer(tmp_path / "roomy")
        assert len(server.answered) == 4 + 6  # the probes, and what had not been noted


def rows_of(cached: CachedRows) -> list[torch.Tensor]:
    hidden = [cached[index].hidden for index in range(len(cached))]
    return [row.clone() for row in hidden if row is not None]


def test_hidden_states(small_disk: SmallDisk, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others fill the disk after the check before all work."""
    monkeypatch.setattr(hidden_cache, "require_disk", lambda *args: None)
    folder = small_disk.folder / "hidden"
    small_disk.leave(6 * 4096)
    with pytest.raises(DiskFull, match=r"shard-0000[12]\.safetensors could not be written, the disk is full"):
        build_cache(target, make_examples(), CACHE_OPTIONS, folder, "text", False)
    kept = files_of(folder)
    assert "shard-00000.safetensors" in kept
    assert len([name for name in kept if name.startswith("shard")]) < 3
    small_disk.clear()
    rows = rows_of(build_cache(target, make_examples(), CACHE_OPTIONS, folder, "text", False))
    roomy = rows_of(build_cache(target, make_examples(), CACHE_OPTIONS, tmp_path / "roomy", "text", False))
    assert all(torch.equal(one, other) for one, other in zip(rows, roomy, strict=True))
    assert kept.items() <= files_of(folder).items()


# Training


def test_a_log(small_disk: SmallDisk) -> None:
    """A resumed run drops the lines of steps that it does again: the old log stays where the new one has no room."""
    path = small_disk.folder / "log.jsonl"
    logger = JsonlLogger(path)
    path.write_text("".join(f'{{"step": {step}, "text": "{"x" * 50}"}}\n' for step in range(200)))
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=150)
    nothing: Any = None
    refused(lambda: logger.on_train_begin(nothing, state, nothing), small_disk, PAGE_BYTES, path)
    small_disk.leave(PAGE_BYTES)
    with pytest.raises(DiskFull, match=r"log\.jsonl could not be written"):
        logger.on_log(nothing, state, nothing, {"text": "x" * 2**14})
    small_disk.clear()
    logger.on_train_begin(nothing, state, nothing)  # a line that was cut is dropped
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(151))


def fill_before_step(monkeypatch: pytest.MonkeyPatch, trainer: type, step: int, disk: SmallDisk, free: int) -> None:
    """The disk fills up right before the checkpoint of this step."""
    original = trainer._save_checkpoint  # type: ignore[attr-defined]

    def save(self: Any, *args: Any) -> None:
        if self.state.global_step == step:
            disk.leave(free)
        original(self, *args)

    monkeypatch.setattr(trainer, "_save_checkpoint", save)


@pytest.fixture(scope="module")
def roomy_heads(tmp_path_factory: pytest.TempPathFactory) -> MTPConfig:
    config = mtp_tests.make_config(tmp_path_factory.mktemp("roomy"))
    train_heads(config)
    return config


# Enough for nothing; for the weights, and not for the optimizer (torch's writer); for all but the last files.
@pytest.mark.parametrize(
    "share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5, pytest.param(0.99, marks=pytest.mark.slow)]
)
def test_training_heads(
    share: float, roomy_heads: MTPConfig, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_disk.folder / "heads"
    shutil.copytree(roomy_heads.work_dir, small_disk.folder / "work", ignore=shutil.ignore_patterns("heads"))
    config = mtp_tests.make_config(small_disk.folder / "work")
    config = replace(config, paths=replace(config.paths, heads=str(folder)))
    a_checkpoint = next(newest_first(Path(roomy_heads.paths.heads)))
    size = sum(path.stat().st_size for path in a_checkpoint.iterdir())
    with monkeypatch.context() as patch:
        fill_before_step(patch, HeadTrainer, 6, small_disk, int(share * size))
        with pytest.raises(DiskFull, match="checkpoint-6 could not be written, the disk is full"):
            train_heads(config)
    assert [path.name for path in newest_first(folder)] == ["checkpoint-3"]
    small_disk.clear()
    train_heads(config)
    mtp_tests.assert_ends_alike(config, roomy_heads)


@pytest.mark.slow
def test_training_a_verifier(small_disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy: DiversedConfig = rl_tests.make_config(tmp_path / "roomy")
    train_verifier(roomy)
    config = replace(roomy, work_dir=str(small_disk.folder), output_dir=str(small_disk.folder / "out"))
    with monkeypatch.context() as patch:
        fill_before_step(patch, DiversedTrainer, 4, small_disk, 2**13)
        with pytest.raises(DiskFull, match="the disk is full"):
            train_verifier(config)
    assert [path.name for path in newest_first(small_disk.folder / "out")] == ["checkpoint-2"]
    small_disk.clear()
    train_verifier(config)
    rl_tests.assert_ends_alike(config, roomy)
