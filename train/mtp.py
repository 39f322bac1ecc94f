"""`python -m train.mtp +model=NAME`: train draft heads on a frozen target, from prompts to an exported checkpoint.

The stages are: prompts, the target's answers, their hidden states, training, export. Each keeps what it made; the same
command goes on where a stopped run was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from transformers import set_seed

from models.checkpoint import CONFIG_NAME, WEIGHTS_NAME, save_heads
from models.heads import HeadOptions, build_head
from models.target.model import TargetOptions, load_target, resolve_device
from train.answers.answers import AnswerOptions
from train.data.examples import first_texts, most_frequent_tokens
from train.data.prompts import DataOptions
from train.data.texts import load_texts
from train.heads.hidden_cache import CacheOptions, split_rows
from train.heads.losses import LossOptions
from train.heads.trainer import HeadTrainer, TrainerOptions, early_stopping, require_unchanged, training_arguments
from train.runtime.callbacks import GuardGradients, NonFinite, StopOnInterrupt
from train.runtime.checkpoints import last_whole, remove_unfinished
from train.runtime.config import entry, exit_interrupted
from train.runtime.deepspeed_options import check_deepspeed, compile_nothing
from train.runtime.jsonl_logger import check_logger, log_callbacks
from train.runtime.provenance import origin
from train.runtime.ranks import is_main, join, main_first
from train.runtime.resume import MARK, MarkWhole, require_resumable, trained_with
from train.runtime.shards import require_same_run
from train.runtime.wandb_run import log_artifact


@dataclass
class PathOptions:
    """Where each stage keeps its work."""

    answers: str = MISSING
    hidden: str = MISSING
    heads: str = MISSING


@dataclass
class MTPConfig:
    """Everything that conf/mtp.yaml and the command line may set."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    heads: HeadOptions = field(default_factory=HeadOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    logger: str = "jsonl"
    log_checkpoint: bool = False
    paths: PathOptions = field(default_factory=PathOptions)


def train_heads(config: MTPConfig) -> float:
    """Run all stages; returns the held-out mean block length (the metric for sweeps)."""
    check_logger(config.logger, config.log_checkpoint)
    check_deepspeed(config.deepspeed)
    set_seed(config.trainer.seed)
    folder = Path(config.paths.heads)
    require_resumable(folder, config.trainer, config.deepspeed)
    device = resolve_device(config.model.device)
    if config.deepspeed:
        compile_nothing(device)
    join(device)
    with main_first():
        target = load_target(config.model)
    fingerprint = target.fingerprint()
    # Options that do not fit show here, and not after hours of answering prompts.
    build_head(target, replace(config.heads, own_output_head=False))
    arguments = training_arguments(config.trainer, folder, target.device.type, config.logger, config.deepspeed)
    train, selection, digest, prompts = load_texts(
        target, config.data, config.answers, Path(config.paths.answers), config.trainer.max_length
    )
    made_from = {"holds": "heads", "target_fingerprint": fingerprint, "text_fingerprint": digest}
    require_same_run(folder, made_from | trained_with(config.trainer), heads=config.heads, loss=config.loss)
    draft_vocab = most_frequent_tokens(train, config.heads.draft_vocab_size, target.vocab_size)
    head = build_head(target, config.heads, draft_vocab)
    remove_unfinished(folder, (MARK,))
    last = last_whole(folder, (MARK,))
    if last is None:
        head.fit_start(first_texts(train, config.trainer.start_tokens))
    train_rows, selection_rows = split_rows(
        target, train, selection, config.cache, Path(config.paths.hidden), digest, draft_vocab is not None, head.reads
    )
    interrupt = StopOnInterrupt()
    trainer = HeadTrainer(
        head,
        config.loss,
        config.answers.sampling(),
        args=arguments,
        train_dataset=train_rows,
        eval_dataset=selection_rows,
        callbacks=[
            GuardGradients(),
            interrupt,
            MarkWhole(config.deepspeed),
            *early_stopping(config.trainer),
            *log_callbacks(config.logger, folder),
        ],
    )
    try:
        _fit(trainer, folder, last)
    finally:
        interrupt.restore()
    if interrupt.interrupted:
        exit_interrupted(trainer.state.global_step)
    simulated = trainer.simulate(selection_rows)
    acceptance = {
        "mean_block_length": simulated.mean_block_length,
        "acceptance_at": simulated.acceptance_at,
        "accuracy_by_rank": trainer.accuracy_by_rank(selection_rows),
        "on": "held-out answers, simulated",
    }
    head = trainer.finished()
    if is_main():
        record = provenance(config, digest, len(train), trainer) | {"prompts": prompts}
        save_heads(folder, head, record, acceptance)
    if config.log_checkpoint:
        log_artifact("heads", f"heads-{folder.name}", [folder / CONFIG_NAME, folder / WEIGHTS_NAME])
    require_unchanged(target, fingerprint)
    rates = " / ".join(f"{rate:.2f}" for rate in simulated.acceptance_at)
    print(
        f"heads are in {folder}: mean block length {simulated.mean_block_length:.2f} on held-out answers "
        f"(kept at place 1..K: {rates})"
    )
    return simulated.mean_block_length


def _fit(trainer: HeadTrainer, folder: Path, last: str | None) -> None:
    """Train, from the last checkpoint where there is one. A non-finite loss keeps the weights of the last good step."""
    if last:
        print(f"going on from {last}")
    try:
        trainer.train(resume_from_checkpoint=last)
    except NonFinite as error:
        raise ValueError(
            f"{error}; {_keep_last_finite(trainer, folder, error)}. "
            "Lower trainer.learning_rate, or raise trainer.warmup_steps, with another paths.heads"
        ) from error


def _keep_last_finite(trainer: HeadTrainer, folder: Path, error: NonFinite) -> str:
    """Save the weights of the last good step where this process has them; says where they are.

    deepspeed's engine has no place for a guard between gradients and step, and under stage 3 all processes must save.
    """
    if trainer.args.deepspeed:
        return f"the weights of the last good checkpoint are in {last_whole(folder) or 'none yet'}"
    kept = folder / "last-finite"
    save_heads(kept, trainer.head, {"stopped": str(error)})
    return f"the weights of the last good step are in {kept}"


def provenance(config: MTPConfig, text_digest: str, num_examples: int, trainer: HeadTrainer) -> dict[str, Any]:
    """How a checkpoint came about: command, commit, versions, text and settings."""
    return {
        **origin("train.mtp", ("transformers", "accelerate")),
        "text_fingerprint": text_digest,
        "num_examples": num_examples,
        "steps": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "data": asdict(config.data),
        "answers": asdict(config.answers),
        "loss": asdict(config.loss),
        "trainer": asdict(config.trainer),
    }


@entry(MTPConfig, "mtp", many_processes=True)
def main(config: MTPConfig) -> float:
    """Entry point."""
    return train_heads(config)


if __name__ == "__main__":
    main()
