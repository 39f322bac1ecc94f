"""`python -m train.draft +model=NAME`: train a draft model for a target, from prompts to a folder that decodes.

What is trained is `model.draft`, or with `cut.layers=N` a few of the target's own layers. It is distilled towards the
target (DistillSpec, Zhou et al. 2024, arXiv 2310.08461) on the answers that `train.mtp` uses, too. Each stage keeps
what it made; the same command goes on where a stopped run was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from transformers import set_seed

from models.files import write_text
from models.target.model import Target, TargetOptions, load_target
from models.target.placement import require_one_device
from train.answers.answers import AnswerOptions
from train.data.examples import first_texts
from train.data.prompts import DataOptions
from train.data.texts import load_texts
from train.distill.cut import CutOptions, fit_start
from train.distill.lora import LoraOptions
from train.distill.losses import DistillOptions
from train.distill.measure import HeldOut, Measured
from train.distill.student import Student, start_draft
from train.distill.trainer import DistillTrainer
from train.heads.hidden_cache import CacheOptions, split_rows
from train.heads.trainer import TrainerOptions, early_stopping, require_unchanged, training_arguments
from train.runtime.callbacks import GuardGradients, NonFinite, StopOnInterrupt
from train.runtime.checkpoints import last_whole
from train.runtime.config import entry, exit_interrupted
from train.runtime.jsonl_logger import check_logger, log_callbacks
from train.runtime.provenance import origin
from train.runtime.shards import require_same_run

RECORD = "training.json"


@dataclass
class PathOptions:
    """Where each stage keeps its work."""

    answers: str = MISSING
    hidden: str = MISSING
    draft: str = MISSING


@dataclass
class DraftConfig:
    """Everything that conf/draft.yaml and the command line may set."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    cut: CutOptions = field(default_factory=CutOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    distil: DistillOptions = field(default_factory=DistillOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    logger: str = "jsonl"
    paths: PathOptions = field(default_factory=PathOptions)


def train_draft(config: DraftConfig) -> float:
    """Run all stages; returns the held-out mean block length (the metric for sweeps)."""
    check_logger(config.logger)
    require_one_device(config.model.device_map, "train.draft")
    set_seed(config.trainer.seed)
    target = load_target(config.model)
    fingerprint = target.fingerprint()
    folder = Path(config.paths.draft)
    # Options that do not fit show here, and not after hours of answering prompts.
    draft = start_draft(target, config.model, config.cut)
    arguments = training_arguments(config.trainer, folder, target.device.type, config.logger)
    train, selection, digest, prompts = load_texts(
        target, config.data, config.answers, Path(config.paths.answers), config.trainer.max_length
    )
    selection = selection[: config.distil.max_heldout or None]
    models = {"target_fingerprint": fingerprint, "started_from": draft.fingerprint()}
    made_from = {"holds": "draft model", **models, "text_fingerprint": digest}
    require_same_run(folder, made_from, cut=config.cut, lora=config.lora, distil=config.distil, trainer=config.trainer)
    train_rows, selection_rows = split_rows(target, train, selection, config.cache, Path(config.paths.hidden), digest)
    heldout_task = HeldOut(target, selection_rows, config.answers.sampling(), config.distil.num_draft_tokens)
    measured = {"before": _tell("before", heldout_task.measure(draft))}
    if config.cut.layers and config.cut.fit_tokens:
        fit_start(draft, target, first_texts(train, config.cut.fit_tokens))
        measured["fitted"] = _tell("fitted", heldout_task.measure(draft))
    student = Student(draft, config.lora, config.distil.train_embeddings, config.trainer.seed)
    interrupt = StopOnInterrupt()
    callbacks = [GuardGradients(), interrupt, *early_stopping(config.trainer), *log_callbacks(config.logger, folder)]
    trainer = DistillTrainer(
        student, heldout_task, config.distil, args=arguments, train_dataset=train_rows, callbacks=callbacks
    )
    try:
        _fit(trainer, folder)
    finally:
        interrupt.restore()
    if interrupt.interrupted:
        exit_interrupted(trainer.state.global_step)
    student.export(folder, target.dtype)
    # What was written is what is measured, as decoding will load it.
    exported = load_target(_exported_options(target, folder))
    measured["after"] = _tell("after", heldout_task.measure(exported))
    acceptance = {stage: asdict(found) for stage, found in measured.items()} | {"on": "held-out answers, simulated"}
    record = provenance(config, digest, len(train), trainer) | {"prompts": prompts, "acceptance": acceptance}
    write_record(folder, record)
    require_unchanged(target, fingerprint)
    print(f"the draft is in {folder}: use it with model.draft={folder} drafter=model")
    return measured["after"].mean_block_length


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """How the draft in `folder` came about and what it measured, beside its weights."""
    write_text(folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _tell(stage: str, found: Measured) -> Measured:
    """Print what was measured, and give it back."""
    rates = " / ".join(f"{rate:.2f}" for rate in found.acceptance_at)
    print(
        f"{stage}: held-out acceptance {found.acceptance:.3f} (sum of min(p, q)), equal first guesses "
        f"{found.agreement:.3f}, mean block length {found.mean_block_length:.2f} (kept at place 1..K: {rates})",
        flush=True,
    )
    return found


def _exported_options(target: Target, folder: Path) -> TargetOptions:
    dtype = str(target.dtype).removeprefix("torch.")
    return TargetOptions(str(folder), "draft", "folder", dtype, str(target.device))


def _fit(trainer: DistillTrainer, folder: Path) -> None:
    """Train, from the last checkpoint where there is one. A non-finite loss keeps the weights of the last good step."""
    last = last_whole(folder)
    if last:
        print(f"going on from {last}")
    try:
        trainer.train(resume_from_checkpoint=last)
    except NonFinite as error:
        kept = folder / "last-finite"
        trainer.student.export(kept, trainer.target.dtype)
        raise ValueError(
            f"{error}; the weights of the last good step are in {kept}. "
            "Lower trainer.learning_rate, or raise trainer.warmup_steps, with another paths.draft"
        ) from error


def provenance(config: DraftConfig, text_digest: str, num_examples: int, trainer: DistillTrainer) -> dict[str, Any]:
    """How a draft came about: command, commit, versions, text and settings."""
    return {
        **origin("train.draft", ("transformers", "accelerate", "peft")),
        "text_fingerprint": text_digest,
        "num_examples": num_examples,
        "steps": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "config": asdict(config),
    }


@entry(DraftConfig, "draft")
def main(config: DraftConfig) -> float:
    """Entry point."""
    return train_draft(config)


if __name__ == "__main__":
    main()
