"""`train.draft` from prompts to a folder that decodes, on a tiny target: what is made, and that a stopped run ends the
same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.model import load_model_drafter
from models.target.model import TargetOptions, load_target
from tests.train.interrupts import interrupt_at
from train import draft as draft_module
from train.answers.answers import AnswerOptions, read_answers
from train.data.prompts import DataOptions
from train.distill import trainer as trainer_module
from train.distill.cut import CutOptions
from train.distill.lora import LoraOptions
from train.distill.losses import DistillOptions, distill_loss
from train.draft import RECORD, DraftConfig, PathOptions, train_draft
from train.heads.hidden_cache import CacheOptions
from train.heads.trainer import TrainerOptions
from train.runtime.config import INTERRUPTED

MAX_STEPS = 8
# Adam's first step is the gradient's sign: a rounding error of a tiny gradient may turn it, by this much.
WEIGHT_TOLERANCE = 2 * 2e-3 + 1e-6
NUM_PROMPTS = 30


def make_config(folder: Path, **changes: Any) -> DraftConfig:
    """One layer cut from three; 30 prompts, 24 tokens an answer, 8 steps of 4 rows; evaluated and saved every 3."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"Say {i} and {i * i % 17}."} for i in range(NUM_PROMPTS)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DraftConfig(
        model=TargetOptions(name="tiny", source="random", dtype="float32", device="cpu"),
        work_dir=str(folder),
        data=DataOptions(source="jsonl", path=str(prompts), heldout_fraction=0.2),
        answers=AnswerOptions(max_new_tokens=24, batch_size=8, shard_prompts=8),
        cache=CacheOptions(shard_examples=8, batch_tokens=256),
        cut=CutOptions(layers=1),
        trainer=TrainerOptions(
            max_steps=MAX_STEPS,
            per_device_train_batch_size=4,
            learning_rate=2e-3,
            warmup_steps=2,
            eval_steps=3,
            save_steps=3,
            logging_steps=1,
            autocast=False,
        ),
        logger="jsonl",
        paths=PathOptions(str(folder / "answers"), str(folder / "hidden"), str(folder / "draft")),
    )
    return replace(config, **changes)


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"lora": LoraOptions(rank=4)},
    "on-policy": {"distil": DistillOptions(loss="reverse_kl", on_policy=0.5), "cache": CacheOptions(enabled=False)},
    "sibling": {"cut": CutOptions(), "distil": DistillOptions(loss="jsd", train_embeddings=True, max_heldout=3)},
}


def with_trainer(config: DraftConfig, **changes: Any) -> DraftConfig:
    return replace(config, trainer=replace(config.trainer, **changes))


def read_log(config: DraftConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.paths.draft) / "log.jsonl").read_text().splitlines()]


def weights_of(config: DraftConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.paths.draft) / "model.safetensors")


def record_of(config: DraftConfig) -> dict[str, Any]:
    return json.loads((Path(config.paths.draft) / RECORD).read_text())


def exported(config: DraftConfig) -> tuple[bytes, dict[str, Any]]:
    """The exported tensors' bytes and what was measured."""
    return (Path(config.paths.draft) / "model.safetensors").read_bytes(), record_of(config)["acceptance"]


def assert_ends_alike(config: DraftConfig, uninterrupted: DraftConfig) -> None:
    """Bit-identical tensors, the same measurements, and log lines for the same steps."""
    assert exported(config) == exported(uninterrupted)
    ours, theirs = ([line for line in read_log(one) if "train_runtime" not in line] for one in (config, uninterrupted))
    assert [(line["step"], "eval_acceptance" in line) for line in ours] == [
        (line["step"], "eval_acceptance" in line) for line in theirs
    ]
    for key in ("eval_block_length", "eval_acceptance", "learning_rate", "acceptance", "grad_norm"):
        assert [line[key] for line in ours if key in line] == [line[key] for line in theirs if key in line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> DraftConfig:
    config = make_config(tmp_path_factory.mktemp("whole"))
    train_draft(config)
    return config


@pytest.fixture
def config(tmp_path: Path, uninterrupted: DraftConfig) -> DraftConfig:
    """Answers and hidden states are there already."""
    shutil.copytree(uninterrupted.work_dir, tmp_path / "run", ignore=shutil.ignore_patterns("draft"))
    return make_config(tmp_path / "run")


def test_the_exported_folder_decodes(uninterrupted: DraftConfig) -> None:
    """As `model.draft=FOLDER drafter=model` loads it: greedy decoding gives the target's own text."""
    folder = Path(uninterrupted.paths.draft)
    target = load_target(uninterrupted.model)
    named = replace(uninterrupted.model, source="folder", draft=str(folder))
    drafter = load_model_drafter(named, target)
    assert len(drafter.draft.layers()) == 1
    prompts = [list(target.tokenizer(text)["input_ids"]) for text in ("Say 3 and 9.", "Say 12", "?", "Say 1 and 1.")]
    results = Decoder(target, drafter, 3).generate(prompts, GenerationParams(24))
    assert [result.tokens for result in results] == [decode_plainly(target, prompt, 24) for prompt in prompts]
    assert sum(sum(result.accepted) for result in results) > 0


def test_what_was_measured_and_logged(uninterrupted: DraftConfig) -> None:
    record = record_of(uninterrupted)
    before, fitted, after = (record["acceptance"][stage] for stage in ("before", "fitted", "after"))
    assert after["acceptance"] > max(before["acceptance"], fitted["acceptance"])
    assert fitted != before
    assert record["steps"] == MAX_STEPS
    log = read_log(uninterrupted)
    evaluations = [line for line in log if "eval_block_length" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 8]
    # The best of the evaluations is what was kept.
    best = max(evaluations, key=lambda line: line["eval_block_length"])
    assert after["mean_block_length"] == pytest.approx(best["eval_block_length"], abs=1e-6)
    assert after["acceptance"] == pytest.approx(best["eval_acceptance"], abs=1e-6)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, MAX_STEPS + 1))
    assert all({"acceptance", "agreement"} <= set(line) for line in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("step", [1, 3, 6, 7])
def test_interrupted_training_ends_the_same(
    step: int,
    config: DraftConfig,
    uninterrupted: DraftConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """In mid-epoch, at a saved step, in the second epoch, in the last step."""
    interrupt_at(monkeypatch, draft_module, step)
    with pytest.raises(SystemExit) as stop:
        train_draft(config)
    assert stop.value.code == INTERRUPTED
    assert f"stopped at step {step + 1}; the same command goes on" in capsys.readouterr().out
    assert not (Path(config.paths.draft) / "model.safetensors").exists()
    monkeypatch.undo()
    train_draft(config)
    assert_ends_alike(config, uninterrupted)


def test_a_finished_run_run_again_changes_nothing(config: DraftConfig, uninterrupted: DraftConfig) -> None:
    first = train_draft(config)
    assert train_draft(config) == first
    assert_ends_alike(config, uninterrupted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_interrupted_and_end_the_same(
    variant: str, config: DraftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA, the draft's own answers, a model that is no cut: what a stopped run makes is what a whole one does."""
    stopped = with_trainer(replace(config, **VARIANTS[variant]), max_steps=5)
    whole = replace(stopped, paths=PathOptions(config.paths.answers, str(tmp_path / "h"), str(tmp_path / "whole")))
    stopped = replace(stopped, paths=replace(whole.paths, draft=str(tmp_path / "stopped")))
    train_draft(whole)
    interrupt_at(monkeypatch, draft_module, 3)
    with pytest.raises(SystemExit):
        train_draft(stopped)
    monkeypatch.undo()
    train_draft(stopped)
    assert_ends_alike(stopped, whole)
    acceptance = record_of(whole)["acceptance"]
    assert ("fitted" in acceptance) == (variant != "sibling")
    assert acceptance["after"]["acceptance"] > acceptance["before"]["acceptance"]


def test_accumulated_gradients_are_those_of_a_larger_batch(config: DraftConfig, tmp_path: Path) -> None:
    """All rows in one batch, or in batches of three: the same step."""
    constant = with_trainer(
        config, max_steps=1, lr_scheduler_type="constant", warmup_steps=0, eval_steps=1, save_steps=1
    )
    num_rows = sum(answer.split == "train" for answer in read_answers(Path(config.paths.answers)))
    weights, norms = [], []
    for size in (num_rows, 3):
        one = with_trainer(constant, per_device_train_batch_size=size, gradient_accumulation_steps=-(-num_rows // size))
        one = replace(one, paths=replace(config.paths, draft=str(tmp_path / f"by{size}")))
        train_draft(one)
        weights.append(weights_of(one))
        norms.append(next(line["grad_norm"] for line in read_log(one) if "grad_norm" in line))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=WEIGHT_TOLERANCE, rtol=0, msg=name)


def test_other_options_do_not_go_on_from_an_old_run(config: DraftConfig) -> None:
    """They would export the old draft under the new options' name."""
    short = with_trainer(config, max_steps=1)
    train_draft(short)
    for changed, named in [
        (with_trainer(short, learning_rate=0.5), r"trainer\.learning_rate is 0\.002, now 0\.5"),
        (replace(short, cut=CutOptions(layers=2)), r"started_from is"),
        (replace(short, cut=CutOptions(layers=1, fit_tokens=0)), r"cut\.fit_tokens is 16384, now 0"),
        (replace(short, lora=LoraOptions(rank=2)), r"lora\.rank is 0, now 2"),
        (replace(short, distil=DistillOptions("tv")), r"distil\.loss is 'kl', now 'tv'"),
    ]:
        with pytest.raises(ValueError, match=rf"draft holds the work of another run: .*{named}"):
            train_draft(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cut": CutOptions(layers=3)}, r"cut\.layers=3 must be at least 1 and less than the target's 3 layers"),
        ({"trainer": TrainerOptions(eval_steps=4, save_steps=6)}, r"trainer\.save_steps=6: must be a multiple"),
        ({"logger": "papyrus"}, r"logger='papyrus' is unknown"),
    ],
)
def test_options_that_do_not_fit_stop_before_any_prompt_is_answered(
    changes: dict[str, Any], message: str, config: DraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_module, "load_texts", None)
    with pytest.raises(ValueError, match=message):
        train_draft(replace(config, **changes))


def test_a_non_finite_loss_keeps_the_last_good_weights(config: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says so, and a folder that loads."""
    calls = iter(range(1, 100))

    def poisoned(*args: Any) -> Any:
        sums = distill_loss(*args)
        return sums if next(calls) < 3 else replace(sums, total=sums.total * float("nan"))

    monkeypatch.setattr(trainer_module, "distill_loss", poisoned)
    with pytest.raises(
        ValueError, match=r"the loss is nan at step 2; the weights of the last good step are in .*finite"
    ):
        train_draft(config)
    kept = Path(config.paths.draft) / "last-finite"
    assert len(load_target(TargetOptions(str(kept), "draft", "folder", "float32", "cpu")).layers()) == 1


def test_a_changed_target_is_noticed(config: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(trainer: Any, folder: Path) -> None:
        with torch.no_grad():
            trainer.target.output_head.weight.add_(0.5)

    monkeypatch.setattr(draft_module, "_fit", spoil)
    with pytest.raises(AssertionError, match="the target's weights have changed"):
        train_draft(config)


def test_own_answers_are_new_each_step_and_counted(config: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed is used once, and the loss is divided by the tokens that were written, not by those they replace."""
    seeds, counts = [], []
    compute_loss, anew = trainer_module.DistillTrainer.compute_loss, trainer_module.answer_anew

    def recorded(*args: Any) -> Any:
        seeds.append(args[-1])
        return anew(*args)

    def checked(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert "hidden" not in inputs
        counts.append((int(num_items_in_batch), int(inputs["labels"].ne(-100).sum())))
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    monkeypatch.setattr(trainer_module, "answer_anew", recorded)
    monkeypatch.setattr(trainer_module.DistillTrainer, "compute_loss", checked)
    train_draft(with_trainer(replace(config, distil=DistillOptions(on_policy=1.0)), max_steps=4))
    assert len(set(seeds)) == len(seeds) == 4
    assert all(num_items == written for num_items, written in counts)
