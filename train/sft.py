"""`python -m train.sft +model=NAME data=stories`: supervised tuning of a model, which then is another job's target.

The answers of the data are what it learns to say. Everything else in this project leaves the target as it is; this
makes a new one, a folder of transformers' own format (`+model=tuned` takes it). The trainer is trl's, adapters are
peft's and merged into the weights at the end. The same command goes on where a stopped run was.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import MISSING
from trl import SFTConfig, SFTTrainer

from models.files import require_disk, whole_folder, write_text
from models.target.model import AUTO, Target, TargetOptions, load_target, resolve_device, resolve_dtype
from models.target.placement import require_one_device
from models.target.quantization import NONE
from train.data.examples import examples_digest, require_known_tokens, trim
from train.data.prompts import DataOptions, Example, load_prompts, render_example
from train.distill.lora import LoraOptions, add_lora
from train.runtime.callbacks import GuardGradients, NonFinite, NoStepTooMany, StopOnInterrupt
from train.runtime.checkpoints import last_whole
from train.runtime.config import entry, exit_interrupted
from train.runtime.jsonl_logger import check_logger, log_callbacks, report_to
from train.runtime.provenance import origin
from train.runtime.shards import require_same_run

# Bytes on disk for each weight in training: two checkpoints of weights and both moments of Adam, and the export.
BYTES_PER_WEIGHT, ADAPTED_BYTES_PER_WEIGHT = 28, 5
RECORD = "tuning.json"
IGNORED = -100  # label of a token that is not learned


@dataclass
class SFTOptions:
    """What a user sets of trl's SFTConfig, by its names; max_steps 0: num_train_epochs decide.

    autocast: bfloat16 products over float32 weights, on a machine that has them (see
    `models.target.model.resolve_dtype`).
    """

    max_steps: int = 60
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 12
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    warmup_steps: int = 5
    lr_scheduler_type: str = "cosine"
    max_grad_norm: float = 1.0
    max_length: int = 1024
    logging_steps: int = 5
    save_steps: int = 50
    autocast: bool = True
    seed: int = 0

    def check(self) -> None:
        """ValueError for options out of range."""
        at_least = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": 2}
        at_least |= {"max_steps": 0, "warmup_steps": 0, "logging_steps": 1, "save_steps": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"trainer.{name}={getattr(self, name)} must be at least {least}")
        for name in ("learning_rate", "num_train_epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"trainer.{name}={getattr(self, name)} must be above 0")


@dataclass
class SFTRunConfig:
    """Everything that conf/sft.yaml and the command line may set."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    heldout_examples: int = 32
    lora: LoraOptions = field(default_factory=LoraOptions)
    trainer: SFTOptions = field(default_factory=SFTOptions)
    logger: str = "jsonl"
    output_dir: str = MISSING


class Tuner(NoStepTooMany, SFTTrainer):
    """trl's trainer for supervised tuning."""


def tune(config: SFTRunConfig) -> float:
    """Train and export; returns the loss on held-out answers (the metric for sweeps), in nats a token."""
    check_options(config)
    prompts = load_prompts(config.data)
    without = [prompt.id for prompt in prompts if prompt.answer is None]
    if without:
        raise ValueError(
            f"data.source={config.data.source}: {len(without)} of {len(prompts)} prompts have no answer to learn from "
            f"(the first is {without[0]!r}); use data=stories, gsm8k, or a jsonl file with answers"
        )
    # Updates of bfloat16 weights are mostly lost in rounding: float32 weights, bfloat16 products where there are any.
    target = load_target(replace(config.model, dtype="float32"))
    kwargs = config.data.chat_template_kwargs
    used = [one for one in prompts if one.split != "test"]
    examples = trim([render_example(target.tokenizer, one, kwargs) for one in used], config.trainer.max_length)
    require_known_tokens(target, examples)
    train = [one for one in examples if one.split == "train"]
    heldout = [one for one in examples if one.split == "selection"][: config.heldout_examples]
    if not train or not heldout:
        raise ValueError(
            f"data.source={config.data.source} gives {len(train)} training and {len(heldout)} selection examples "
            "within trainer.max_length, and both are needed; use more prompts, or another data.heldout_fraction"
        )
    folder = Path(config.output_dir)
    training = folder.with_name(f"{folder.name}-training")
    made_from = {"holds": "tuning", "model": target.fingerprint(), "text": examples_digest(examples)}
    require_same_run(training, made_from, lora=config.lora, trainer=config.trainer)
    if (folder / RECORD).is_file():
        print(f"{folder} holds the tuned model already")
        return float(json.loads((folder / RECORD).read_text(encoding="utf-8"))["heldout_loss"])
    weights = sum(parameter.numel() for parameter in target.model.parameters())
    needed = weights * (ADAPTED_BYTES_PER_WEIGHT if config.lora.rank else BYTES_PER_WEIGHT)
    require_disk(folder, needed, "tuning", "give another output_dir, or train adapters alone (lora.rank=16)")
    trainer = make_trainer(config, target, train, heldout, training)
    interrupt = StopOnInterrupt()
    for callback in (GuardGradients(), interrupt):
        trainer.add_callback(callback)
    last = last_whole(training)
    if last:
        print(f"going on from {last}")
    else:
        print(f"loss on held-out answers before: {_heldout_loss(trainer):.3f} nats a token")
    try:
        trainer.train(resume_from_checkpoint=last)
    except NonFinite as error:
        raise ValueError(f"{error}; lower trainer.learning_rate, or raise trainer.warmup_steps") from error
    finally:
        interrupt.restore()
    if interrupt.interrupted:
        exit_interrupted(trainer.state.global_step)
    loss = _heldout_loss(trainer)
    record = {**origin("train.sft", ("transformers", "trl", "peft")), "config": asdict(config), "heldout_loss": loss}
    export(trainer, target, folder, record)
    for checkpoint in training.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    print(f"the tuned model is in {folder}: loss on held-out answers {loss:.3f} nats a token")
    return loss


def check_options(config: SFTRunConfig) -> None:
    """ValueError for an option out of range, before anything is loaded."""
    check_logger(config.logger)
    if config.model.quantization != NONE:
        raise ValueError(
            f"model.quantization={config.model.quantization}: tuning changes plain weights; leave it out here, and "
            "quantise what was tuned"
        )
    require_one_device(config.model.device_map, "train.sft")
    if config.heldout_examples < 1:
        raise ValueError(f"heldout_examples={config.heldout_examples} must be at least 1")
    config.trainer.check()


def make_trainer(
    config: SFTRunConfig, target: Target, train: list[Example], heldout: list[Example], folder: Path
) -> Tuner:
    """The trainer, on texts that are rendered as everywhere in this project; prompts are not learned."""
    options, device = config.trainer, resolve_device(config.model.device)
    target.model.requires_grad_(True)  # without adapters; peft freezes it
    arguments = SFTConfig(
        output_dir=str(folder),
        **{name: value for name, value in asdict(options).items() if name not in ("max_steps", "autocast")},
        max_steps=options.max_steps or -1,
        data_seed=options.seed,
        save_strategy="steps",
        save_total_limit=1,
        eval_strategy="no",
        per_device_eval_batch_size=options.per_device_train_batch_size,
        bf16=options.autocast and resolve_dtype(AUTO, device) == "bfloat16",
        use_cpu=device == "cpu",
        gradient_checkpointing=False,
        report_to=report_to(config.logger),
        dataloader_num_workers=0,
    )
    return Tuner(
        model=add_lora(target.model, config.lora, options.seed) if config.lora.rank else target.model,
        args=arguments,
        train_dataset=_dataset(train),
        eval_dataset=_dataset(heldout),
        processing_class=target.tokenizer,
        callbacks=log_callbacks(config.logger, folder),
    )


def _dataset(examples: list[Example]) -> Dataset:
    """Token ids, and labels that leave out what is no answer."""
    labels = [
        [token if learned else IGNORED for token, learned in zip(one.input_ids, one.loss_mask, strict=True)]
        for one in examples
    ]
    return Dataset.from_dict({"input_ids": [one.input_ids for one in examples], "labels": labels})


def _heldout_loss(trainer: Tuner) -> float:
    return float(trainer.evaluate()["eval_loss"])


def export(trainer: Tuner, target: Target, folder: Path, record: dict[str, Any]) -> None:
    """The model, adapters merged, with its tokenizer and how it came about, whole or not at all."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch)
        target.tokenizer.save_pretrained(scratch)
        write_text(scratch / RECORD, json.dumps(record, indent=1) + "\n")


@entry(SFTRunConfig, "sft")
def main(config: SFTRunConfig) -> float:
    """Entry point."""
    return tune(config)


if __name__ == "__main__":
    main()
