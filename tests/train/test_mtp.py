"""`train.mtp` from prompts to a checkpoint, on a tiny target: what is made, and that a stopped run ends the same."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from models.checkpoint import load_heads
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.heads import HEAD_KINDS, HeadOptions
from models.target.model import TargetOptions, load_target
from tests.models.decoding.scripted import random_prompts
from tests.train.copies import copy_run, pin_best
from tests.train.interrupts import interrupt_at
from train import mtp as mtp_module
from train.answers import answers as answers_module
from train.answers.answers import AnswerOptions
from train.data.prompts import DataOptions
from train.heads import hidden_cache as hidden_cache_module
from train.heads import trainer as trainer_module
from train.heads.acceptance import NUM_RANKS
from train.heads.hidden_cache import CacheOptions
from train.heads.losses import HeadLoss, LossOptions, supervised_loss
from train.heads.trainer import HeadTrainer, TrainerOptions
from train.mtp import MTPConfig, PathOptions, train_heads
from train.runtime.callbacks import GuardGradients
from train.runtime.config import INTERRUPTED
from train.runtime.resume import MarkWhole
from train.runtime.shards import MANIFEST

MAX_STEPS = 8
NUM_PROMPTS = 30
# Float32 weights after a few steps whose products were summed in another order.
WEIGHT_TOLERANCE = 2e-4


def make_config(folder: Path, **changes: Any) -> MTPConfig:
    """30 prompts, 24 tokens an answer, 8 steps of 4 rows in epochs of about 6 steps; evaluated and saved every 3."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"Say {i} and {i * i % 17}."} for i in range(NUM_PROMPTS)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = MTPConfig(
        model=TargetOptions(name="tiny", source="random", dtype="float32", device="cpu"),
        work_dir=str(folder),
        data=DataOptions(source="jsonl", path=str(prompts), heldout_fraction=0.2),
        answers=AnswerOptions(max_new_tokens=24, batch_size=8, shard_prompts=8),
        cache=CacheOptions(shard_examples=8, batch_tokens=256),
        heads=HeadOptions(kind="mtp", num_draft_tokens=3),
        loss=LossOptions(ce=0.5, kl=0.5),
        trainer=TrainerOptions(
            max_steps=MAX_STEPS,
            per_device_train_batch_size=4,
            warmup_steps=2,
            eval_steps=3,
            save_steps=3,
            logging_steps=1,
            autocast=False,
        ),
        logger="jsonl",
        paths=PathOptions(str(folder / "answers"), str(folder / "hidden"), str(folder / "heads")),
    )
    return replace(config, **changes)


def with_trainer(config: MTPConfig, **changes: Any) -> MTPConfig:
    return replace(config, trainer=replace(config.trainer, **changes))


def read_log(config: MTPConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.paths.heads) / "log.jsonl").read_text().splitlines()]


def weights_of(config: MTPConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.paths.heads) / "model.safetensors")


def exported(config: MTPConfig) -> tuple[bytes, dict[str, Any]]:
    """The exported tensors' bytes and what was measured."""
    folder = Path(config.paths.heads)
    config_json = json.loads((folder / "config.json").read_text())
    return (folder / "model.safetensors").read_bytes(), config_json["acceptance"]


def assert_ends_alike(config: MTPConfig, uninterrupted: MTPConfig) -> None:
    """Bit-identical tensors, the same measurements, and log lines for the same steps."""
    assert exported(config) == exported(uninterrupted)

    def lines(log: list[dict[str, Any]]) -> list[tuple[int, bool]]:
        return [(line["step"], "eval_block_length" in line) for line in log if "train_runtime" not in line]

    ours, theirs = read_log(config), read_log(uninterrupted)
    assert lines(ours) == lines(theirs)
    for key in ("eval_block_length", "learning_rate", "loss_head1"):
        assert [line[key] for line in ours if key in line] == [line[key] for line in theirs if key in line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> MTPConfig:
    config = make_config(tmp_path_factory.mktemp("whole"))
    train_heads(config)
    return config


@pytest.fixture
def config(tmp_path: Path, uninterrupted: MTPConfig) -> MTPConfig:
    """Answers and hidden states are there already."""
    shutil.copytree(uninterrupted.work_dir, tmp_path / "run", ignore=shutil.ignore_patterns("heads"))
    return make_config(tmp_path / "run")


def test_everything_is_made(uninterrupted: MTPConfig) -> None:
    """The checkpoint loads, has the weights that were trained, and the measurements that the log ends with."""
    folder = Path(uninterrupted.paths.heads)
    target = load_target(uninterrupted.model)
    head = load_heads(folder, target)
    assert all(torch.equal(head.state_dict()[name], tensor) for name, tensor in weights_of(uninterrupted).items())
    written = json.loads((folder / "config.json").read_text())
    assert written["target"]["fingerprint"] == target.fingerprint()
    assert written["provenance"]["steps"] == MAX_STEPS
    assert written["provenance"]["loss"]["ce"] == 0.5
    log = read_log(uninterrupted)
    evaluations = {line["step"]: line["eval_block_length"] for line in log if "eval_block_length" in line}
    assert set(evaluations) >= {3, 6}
    # The best of the evaluations is what was kept.
    assert written["acceptance"]["mean_block_length"] == pytest.approx(max(evaluations.values()), abs=1e-6)
    assert 1.0 <= written["acceptance"]["mean_block_length"] <= 4.0
    assert len(written["acceptance"]["acceptance_at"]) == 3
    shares = written["acceptance"]["accuracy_by_rank"]
    assert [len(row) for row in shares] == [NUM_RANKS] * 3
    assert all(0.0 <= share <= sum(row) <= 1.0 for row in shares for share in row)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, MAX_STEPS + 1))
    assert all({f"loss_head{k}", f"top1_head{k}"} <= set(line) for line in steps for k in (1, 2, 3))


def test_training_is_deterministic(config: MTPConfig, uninterrupted: MTPConfig) -> None:
    train_heads(config)
    assert_ends_alike(config, uninterrupted)


def test_another_seed_gives_other_heads(config: MTPConfig, uninterrupted: MTPConfig) -> None:
    train_heads(with_trainer(config, seed=1))
    assert exported(config)[0] != exported(uninterrupted)[0]


# Stopped and started again


@pytest.mark.parametrize("step", [1, 3, 4, 6, 7])
def test_interrupted_training_ends_the_same(
    step: int,
    config: MTPConfig,
    uninterrupted: MTPConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """In mid-epoch, at a saved step, in the second epoch, in the last step."""
    before = signal.getsignal(signal.SIGINT)
    interrupt_at(monkeypatch, mtp_module, step)
    with pytest.raises(SystemExit) as stop:
        train_heads(config)
    assert stop.value.code == INTERRUPTED
    assert f"stopped at step {step + 1}; the same command goes on" in capsys.readouterr().out
    assert not (Path(config.paths.heads) / "model.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    train_heads(config)
    assert_ends_alike(config, uninterrupted)


def test_an_interrupted_eagle3_head_ends_the_same(
    config: MTPConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads three layers more out of the cache, and has an output head of its own over a part of the vocabulary."""
    heads = HeadOptions("eagle3", num_draft_tokens=3, own_output_head=True, draft_vocab_size=100)
    hidden = str(tmp_path / "wide")
    stopped, whole = (
        replace(config, heads=heads, paths=replace(config.paths, hidden=hidden, heads=str(tmp_path / name)))
        for name in ("stopped", "whole")
    )
    train_heads(whole)
    interrupt_at(monkeypatch, mtp_module, 4)
    with pytest.raises(SystemExit):
        train_heads(stopped)
    monkeypatch.undo()
    train_heads(stopped)
    assert_ends_alike(stopped, whole)


def test_interrupted_at_an_epochs_end(
    config: MTPConfig, uninterrupted: MTPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(GuardGradients):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(mtp_module, "GuardGradients", Interrupting)
    with pytest.raises(SystemExit):
        train_heads(config)
    monkeypatch.undo()
    train_heads(config)
    assert_ends_alike(config, uninterrupted)


@pytest.mark.parametrize("then", ["gone", "other"])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_run_goes_on_in_a_copy_of_its_folder(
    is_pinned: bool,
    then: str,
    config: MTPConfig,
    uninterrupted: MTPConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit as it would have ended; its best checkpoint is the copy's; transformers notes the old path."""
    interrupt_at(monkeypatch, mtp_module, 4)
    with pytest.raises(SystemExit):
        train_heads(config)
    monkeypatch.undo()
    copy_run(Path(config.work_dir), tmp_path / "copy", then)
    copied = make_config(tmp_path / "copy")
    best = pin_best(Path(copied.paths.heads)) if is_pinned else None
    train_heads(copied)
    assert "does not exist" not in capfd.readouterr().err
    if best is None:
        assert_ends_alike(copied, uninterrupted)
    else:
        wanted = load_file(best / "model.safetensors")
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights_of(copied).items())


def test_interrupted_again_and_again(
    config: MTPConfig, uninterrupted: MTPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (0, 2, 5):
        interrupt_at(monkeypatch, mtp_module, step)
        with pytest.raises(SystemExit):
            train_heads(config)
        monkeypatch.undo()
    train_heads(config)
    assert_ends_alike(config, uninterrupted)


@pytest.mark.parametrize("step", [2, 5])
def test_a_second_interrupt_stops_at_once(
    step: int, config: MTPConfig, uninterrupted: MTPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is saved then; the run goes on from the last checkpoint, or from the start."""
    interrupt_at(monkeypatch, mtp_module, step, times=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_heads(config)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    train_heads(config)
    assert_ends_alike(config, uninterrupted)


@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("part", ["_save_optimizer_and_scheduler", "_save_rng_state", "on_save"])
def test_ended_while_a_checkpoint_is_written(
    part: str,
    saves: int,
    config: MTPConfig,
    uninterrupted: MTPConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """It is removed, at once where its writing fails, else by the next start; and the one before is taken."""
    owner: Any = MarkWhole if part == "on_save" else HeadTrainer
    monkeypatch.setattr(owner, part, raise_at_call(getattr(owner, part), saves))
    with pytest.raises(KeyboardInterrupt):
        train_heads(config)
    folder = Path(config.paths.heads)
    there = get_last_checkpoint(str(folder))
    is_left = part == "on_save"  # all is written, but its mark
    assert len(list(folder.glob("checkpoint-*"))) == saves - (not is_left)
    capsys.readouterr()
    monkeypatch.undo()
    train_heads(config)
    told = capsys.readouterr().out
    assert (f"{there} was not finished when its run was killed; it is removed" in told) is is_left
    assert ("going on from" in told) == (saves == 2)
    assert_ends_alike(config, uninterrupted)


def raise_at_call(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    calls = iter(range(1, 1000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("stage", ["answers", "hidden states"])
def test_interrupted_before_training(
    stage: str, tmp_path: Path, uninterrupted: MTPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was whole is kept as it is, the rest is made, and all files come out alike."""
    config = make_config(tmp_path)
    if stage == "answers":
        folder = Path(config.paths.answers)
        monkeypatch.setattr(answers_module, "write_answers", raise_at_call(answers_module.write_answers, 3))
    else:
        folder = Path(config.paths.hidden) / "train"
        monkeypatch.setattr(hidden_cache_module, "save_file", raise_at_call(hidden_cache_module.save_file, 3))
    with pytest.raises(KeyboardInterrupt):
        train_heads(config)
    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(path.name.split(".")[0] for path in made) == ["manifest", "shard-00000", "shard-00001"]
    monkeypatch.undo()
    train_heads(config)
    assert all(path.stat().st_mtime_ns == time for path, time in made.items())
    assert_ends_alike(config, uninterrupted)
    for name in ("answers", "hidden"):
        ours, theirs = Path(config.work_dir) / name, Path(uninterrupted.work_dir) / name
        files = sorted(path.relative_to(ours) for path in ours.rglob("*.*") if path.name != MANIFEST)
        assert files == sorted(path.relative_to(theirs) for path in theirs.rglob("*.*") if path.name != MANIFEST)
        assert all((ours / file).read_bytes() == (theirs / file).read_bytes() for file in files)


def test_a_finished_run_run_again_changes_nothing(config: MTPConfig, uninterrupted: MTPConfig) -> None:
    first = train_heads(config)
    assert train_heads(config) == first
    assert_ends_alike(config, uninterrupted)


def test_other_options_do_not_go_on_from_an_old_run(config: MTPConfig) -> None:
    """They would export the old heads under the new options' name."""
    train_heads(with_trainer(config, max_steps=2))
    for changed, named in [
        (with_trainer(config, max_steps=2, learning_rate=0.5), r"trainer\.learning_rate is 0\.001, now 0\.5"),
        (replace(config, heads=replace(config.heads, num_draft_tokens=5)), r"heads\.num_draft_tokens is 3, now 5"),
        (replace(config, loss=LossOptions(tv=1.0)), r"loss\.tv is 0\.0, now 1\.0"),
    ]:
        with pytest.raises(ValueError, match=rf"heads holds the work of another run: .*{named}"):
            train_heads(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": HeadOptions(kind="eagle9")}, r"heads\.kind='eagle9' is unknown"),
        ({"heads": HeadOptions(kind="mtp", num_layers=9)}, r"heads\.num_layers=9"),
        ({"trainer": TrainerOptions(eval_steps=4, save_steps=6)}, r"trainer\.save_steps=6: must be a multiple of"),
    ],
)
def test_options_that_do_not_fit_stop_before_any_prompt_is_answered(
    changes: dict[str, Any], message: str, config: MTPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_module, "load_texts", None)
    with pytest.raises(ValueError, match=message):
        train_heads(replace(config, **changes))


# Variants


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("draft_vocab_size", [0, 100])
def test_cached_and_online_heads_are_the_same(
    kind: str, draft_vocab_size: int, config: MTPConfig, tmp_path: Path
) -> None:
    """For every kind: the cache changes nothing but the order of sums."""
    heads = HeadOptions(kind=kind, num_draft_tokens=3, draft_vocab_size=draft_vocab_size)
    shutil.rmtree(config.paths.hidden)
    cached = with_trainer(replace(config, heads=heads), lr_scheduler_type="constant", max_steps=6)
    online = replace(
        cached, cache=CacheOptions(enabled=False), paths=replace(config.paths, heads=str(tmp_path / "online"))
    )
    for one in (cached, online):
        train_heads(one)
    ours, theirs = weights_of(cached), weights_of(online)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=WEIGHT_TOLERANCE, rtol=0, msg=name)
    target = load_target(config.model)
    loaded = load_heads(Path(cached.paths.heads), target)
    assert (loaded.draft_vocab is None) == (draft_vocab_size == 0)


def test_bfloat16_products_still_train_float32_weights(config: MTPConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)  # emulated, where it is not
    train_heads(with_trainer(config, autocast=True))
    assert all(tensor.dtype == torch.float32 for tensor in weights_of(config).values())
    losses = [line["loss"] for line in read_log(config) if "loss" in line]
    assert losses[-1] < losses[0]


def test_sampled_answers(tmp_path: Path) -> None:
    """At temperature 1 the held-out block length is an expectation, and the whole way runs."""
    config = make_config(tmp_path, answers=AnswerOptions(temperature=1.0, max_new_tokens=24, batch_size=8))
    assert 1.0 < train_heads(with_trainer(config, max_steps=3)) < 4.0


def test_early_stopping(config: MTPConfig) -> None:
    """With nothing to learn from, the second evaluation is not better than the first."""
    train_heads(with_trainer(config, learning_rate=0.0, patience=1, max_steps=30))
    evaluated = [line["step"] for line in read_log(config) if "eval_block_length" in line]
    assert evaluated == [3, 6]
    assert json.loads((Path(config.paths.heads) / "config.json").read_text())["provenance"]["steps"] == 6


@pytest.mark.parametrize("step", [4, 7, 8])
def test_early_stopping_counts_on_after_an_interrupt(
    step: int, config: MTPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that has stopped early stays stopped."""
    flat = with_trainer(config, learning_rate=0.0, patience=2, max_steps=30)
    interrupt_at(monkeypatch, mtp_module, step)
    with pytest.raises(SystemExit):
        train_heads(flat)
    monkeypatch.undo()
    for _ in range(2):
        train_heads(flat)
        assert [line["step"] for line in read_log(flat) if "eval_block_length" in line] == [3, 6, 9]


@pytest.mark.parametrize("logger", ["none", "tensorboard"])
def test_loggers(logger: str, config: MTPConfig) -> None:
    train_heads(with_trainer(replace(config, logger=logger), max_steps=2))
    files = {path.name.split(".")[0] for path in Path(config.paths.heads).rglob("*") if path.is_file()}
    assert "log" not in files
    assert ("events" in files) == (logger == "tensorboard")


def test_unknown_logger_is_refused_before_the_target_loads(config: MTPConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_module, "load_target", None)
    with pytest.raises(ValueError, match=r"logger='papyrus' is unknown; choose one of jsonl, tensorboard, wandb, none"):
        train_heads(replace(config, logger="papyrus"))


def test_no_heldout_text_is_an_error(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(ValueError, match=r"gives \d+ training and 0 selection examples.*data\.heldout_fraction"):
        train_heads(replace(config, data=replace(config.data, heldout_fraction=0.0)))


# When training goes wrong


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_numbers_keep_the_last_good_weights(
    where: str, config: MTPConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in the fifth step: one line that says so, and the weights of the fourth, which load."""
    steady = with_trainer(config, lr_scheduler_type="constant", warmup_steps=0, eval_steps=4, save_steps=4)
    good = with_trainer(replace(steady, paths=replace(config.paths, heads=str(tmp_path / "good"))), max_steps=4)
    train_heads(good)
    calls = iter(range(1, 100))

    def poisoned(*args: Any) -> HeadLoss:
        loss = supervised_loss(*args)
        if next(calls) < 5:
            return loss
        if where == "gradient":
            loss.total.register_hook(lambda grad: grad * float("nan"))
            return loss
        return replace(loss, total=loss.total * float("nan"))

    monkeypatch.setattr(trainer_module, "supervised_loss", poisoned)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        ValueError, match=rf"the {where}.*at step 4; the weights of the last good step are in .*last-finite"
    ):
        train_heads(steady)
    assert signal.getsignal(signal.SIGINT) is before
    kept = load_file(Path(steady.paths.heads) / "last-finite" / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights_of(good).items())
    load_heads(Path(steady.paths.heads) / "last-finite", load_target(config.model))


def test_target_is_bit_identical_after_training(config: MTPConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor, and a change would be noticed."""
    targets = []

    def load(options: TargetOptions) -> Any:
        targets.append(load_target(options))
        return targets[-1]

    monkeypatch.setattr(mtp_module, "load_target", load)
    train_heads(with_trainer(replace(config, heads=HeadOptions("mtp", 3, own_output_head=True)), max_steps=3))
    fresh = load_target(config.model).model.state_dict()
    trained = targets[0].model.state_dict()
    assert fresh.keys() == trained.keys()
    assert all(torch.equal(fresh[name], tensor) for name, tensor in trained.items())

    def spoil(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            targets[-1].output_head.weight.add_(0.5)
        return {}

    monkeypatch.setattr(mtp_module, "provenance", spoil)
    shutil.rmtree(config.paths.heads)
    with pytest.raises(AssertionError, match="the target's weights have changed"):
        train_heads(with_trainer(config, max_steps=1))


def test_a_target_in_float16(tmp_path: Path) -> None:
    """Hidden states, heads and decoding are in float16; text is plain decoding's, but for ties to within its steps."""
    config = make_config(tmp_path)
    config = replace(config, model=replace(config.model, dtype="float16"))
    train_heads(config)
    target = load_target(config.model)
    head = load_heads(config.paths.heads, target)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float16}
    prompts = random_prompts(5, longest=20, seed=3)
    params = GenerationParams(24)
    plain = Decoder(target).generate(prompts, params)
    drafted = Decoder(target, HeadsDrafter(head), 3).generate(prompts, params)
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        at = next((i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0] != pair[1]), None)
        if at is not None:
            logits_V = target.logits(target.hidden(torch.tensor([prompt + one.tokens[:at]])))[0, -1]
            assert (
                abs(logits_V[one.tokens[at]] - logits_V[other.tokens[at]]) < 2**-7
            )  # four steps of numbers of order 2
