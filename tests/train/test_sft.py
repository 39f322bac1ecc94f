"""`train.sft` on a tiny model: what is learned and exported, that a stopped run ends the same, and what is refused."""

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PrinterCallback

from models.target.model import Target, TargetOptions, load_target
from tests.train.interrupts import interrupt_at
from train import sft as sft_module
from train.data.prompts import DataOptions, Prompt, load_prompts, render_example
from train.distill.lora import LoraOptions
from train.runtime.config import INTERRUPTED
from train.sft import IGNORED, SFTOptions, SFTRunConfig, make_trainer, tune

MAX_STEPS = 6


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *args, **kwargs: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def make_config(folder: Path, **changes: Any) -> SFTRunConfig:
    """20 prompts with the same answer; 6 steps of 4 rows, saved every 2."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = ["train"] * 16 + ["selection"] * 4
    rows = [{"prompt": f"Say {i}.", "answer": "yes yes", "split": split} for i, split in enumerate(splits)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTRunConfig(
        model=TargetOptions(name="tiny", source="random", dtype="float32", device="cpu"),
        work_dir=str(folder),
        data=DataOptions(source="jsonl", path=str(folder / "prompts.jsonl")),
        heldout_examples=3,
        trainer=SFTOptions(
            max_steps=MAX_STEPS,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            warmup_steps=0,
            save_steps=2,
            autocast=False,
        ),
        output_dir=str(folder / "target"),
    )
    return replace(config, **changes)


def weights(folder: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def heldout_loss(target: Target, prompts: list[Prompt]) -> float:
    """Mean over the answers' tokens, computed one text at a time."""
    losses = []
    for prompt in prompts:
        example = render_example(target.tokenizer, prompt)
        ids, learned = torch.tensor([example.input_ids]), torch.tensor(example.loss_mask)[1:]
        logprobs = target.logits(target.hidden(ids))[0, :-1].log_softmax(dim=-1)
        losses.append(-logprobs.gather(1, ids[0, 1:, None])[learned, 0])
    return torch.cat(losses).mean().item()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTRunConfig, float]:
    """A run to its end, and the loss that it ended with."""
    config = make_config(tmp_path_factory.mktemp("whole"))
    return config, tune(config)


def test_answers_are_learned_and_the_folder_is_a_target(whole: tuple[SFTRunConfig, float]) -> None:
    config, loss = whole
    before = load_target(config.model)
    folder = TargetOptions(name=config.output_dir, source="folder", dtype="float32", device="cpu")
    after = load_target(folder)
    assert after.fingerprint() != before.fingerprint()
    assert after.tokenizer_fingerprint() == before.tokenizer_fingerprint()
    assert after.eos_token_ids == before.eos_token_ids
    heldout = [one for one in load_prompts(config.data) if one.split == "selection"][: config.heldout_examples]
    losses = [heldout_loss(target, heldout) for target in (before, after)]
    assert losses[1] < losses[0] / 3
    assert loss == pytest.approx(losses[1], rel=1e-4)
    assert not list(Path(f"{config.output_dir}-training").glob("checkpoint-*"))


def test_only_answers_are_learned(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    target = load_target(config.model)
    examples = [render_example(target.tokenizer, one) for one in load_prompts(config.data)]
    trainer = make_trainer(config, target, examples, examples, tmp_path / "training")
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    for row, example in enumerate(examples[:3]):
        length = len(example.input_ids)
        assert batch["input_ids"][row, :length].tolist() == example.input_ids
        learned = [token if kept else IGNORED for token, kept in zip(example.input_ids, example.loss_mask, strict=True)]
        assert batch["labels"][row, :length].tolist() == learned
        assert (batch["labels"][row, length:] == IGNORED).all()


@pytest.mark.parametrize("rank", [0, 4])
def test_interrupted_run_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[SFTRunConfig, float], rank: int
) -> None:
    config = make_config(tmp_path / "stopped", lora=LoraOptions(rank=rank))
    uninterrupted = whole[0]
    if rank:
        uninterrupted = make_config(tmp_path / "whole", lora=LoraOptions(rank=rank))
        tune(uninterrupted)
    with monkeypatch.context() as patched:
        interrupt_at(patched, sft_module, 3)
        with pytest.raises(SystemExit) as stopped:
            tune(config)
    assert stopped.value.code == INTERRUPTED
    assert not Path(config.output_dir).exists()
    tune(config)
    ours, theirs = weights(config.output_dir), weights(uninterrupted.output_dir)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("rank", [0, 4])
def test_stopped_between_the_last_step_and_the_export_trains_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    config = make_config(tmp_path, lora=LoraOptions(rank=rank))
    # A cosine ends at 0, and a step more would change nothing.
    config = replace(config, trainer=replace(config.trainer, lr_scheduler_type="constant"))
    trained, steps = [], []

    def die(trainer: Any, *args: Any) -> None:
        trained.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        steps.append(trainer.state.global_step)
        raise KeyboardInterrupt

    monkeypatch.setattr(sft_module, "export", die)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tune(config)
    assert steps == [MAX_STEPS, MAX_STEPS]
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_adapters_are_merged_and_the_rest_stays(tmp_path: Path) -> None:
    config = make_config(tmp_path, lora=LoraOptions(rank=4))
    tune(config)
    before, after = load_target(config.model).model.state_dict(), weights(config.output_dir)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


def test_finished_run_is_not_trained_again(tmp_path: Path, whole: tuple[SFTRunConfig, float]) -> None:
    config, loss = whole
    folder = tmp_path / "copy"
    shutil.copytree(config.work_dir, folder)
    again = replace(config, output_dir=str(folder / "target"))
    written = (folder / "target" / "model.safetensors").stat().st_mtime_ns
    assert tune(again) == pytest.approx(loss, rel=1e-5)
    assert (folder / "target" / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": SFTOptions(learning_rate=0.0)}, "trainer.learning_rate=0.0 must be above 0"),
        ({"trainer": SFTOptions(save_steps=0)}, "trainer.save_steps=0 must be at least 1"),
        ({"logger": "paper"}, "logger='paper' is unknown"),
        ({"heldout_examples": 0}, "heldout_examples=0 must be at least 1"),
        ({"data": DataOptions(max_prompts=5)}, "of 5 prompts have no answer to learn from"),
    ],
)
def test_bad_options_are_told_in_a_line_and_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(sft_module, "load_target", lambda *args: pytest.fail("loaded a model"))
    with pytest.raises(ValueError, match=message) as caught:
        tune(make_config(tmp_path, **change))
    assert "\n" not in str(caught.value)


def test_other_options_in_the_same_folder_are_refused(whole: tuple[SFTRunConfig, float]) -> None:
    config = replace(whole[0], trainer=replace(whole[0].trainer, learning_rate=0.5))
    with pytest.raises(ValueError, match="learning_rate"):
        tune(config)
