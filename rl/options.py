"""What a user sets of the trainer, in trl's words, and trl's configuration made from it.

Batches are given for one process, as trl has them; what makes a run the same run is what all processes do together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trl import RLOOConfig

from train.runtime.jsonl_logger import report_to
from train.runtime.ranks import num_ranks

BEST_METRIC = "eval_objective"


@dataclass
class RLOptions:
    """What a user sets of trl's RLOOConfig, by its names.

    per_device_train_batch_size: completions in a micro-step, of each process. steps_per_generation: micro-steps that
    one rollout is cut into, 0 for gradient_accumulation_steps. num_generations: completions a prompt. num_iterations:
    update epochs over a rollout. epsilon, epsilon_high: clipping of the importance ratio; epsilon_high 0 is epsilon.
    max_steps: optimizer steps; 0 means num_train_epochs decide. eval_steps, save_steps: optimizer steps, whole
    rollouts. num_generations_eval: completions of each held-out prompt. rollout_batch_size: rows that decode together
    in a process, 0 for all.
    """

    max_steps: int = 200
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 64
    gradient_accumulation_steps: int = 1
    steps_per_generation: int = 0
    num_generations: int = 8
    num_generations_eval: int = 4
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float = 0.0
    max_completion_length: int = 256
    temperature: float = 1.0
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    max_grad_norm: float = 1.0
    eval_steps: int = 20
    save_steps: int = 20
    logging_steps: int = 1
    save_total_limit: int = 2
    log_completions: bool = False
    seed: int = 0
    rollout_batch_size: int = 0

    @property
    def steps_of_a_rollout(self) -> int:
        """Micro-steps that one rollout is cut into."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def prompts_of_a_rollout(self) -> int:
        """Prompts that are sampled together, by all processes."""
        return self.per_device_train_batch_size * self.steps_of_a_rollout * num_ranks() // self.num_generations

    @property
    def updates_of_a_rollout(self) -> int:
        """Optimizer steps from one rollout to the next."""
        return self.steps_of_a_rollout * self.num_iterations // self.gradient_accumulation_steps

    @property
    def completions_of_an_update(self) -> int:
        """Completions in an optimizer step, of all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * num_ranks()

    def as_one_process(self) -> RLOptions:
        """The options with which one process does the same without accumulation: what a run is known by."""
        num_updates = self.steps_of_a_rollout // self.gradient_accumulation_steps
        return replace(
            self,
            per_device_train_batch_size=self.completions_of_an_update,
            gradient_accumulation_steps=1,
            steps_per_generation=0 if num_updates == 1 else num_updates,
            rollout_batch_size=0,
        )

    def check_sizes(self) -> None:
        """ValueError for a number that nothing can be divided by."""
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name}={getattr(self, name)}: must be at least 1")
        if self.steps_per_generation < 0:
            raise ValueError(
                f"trainer.steps_per_generation={self.steps_per_generation}: must be at least 1, or 0 for "
                "trainer.gradient_accumulation_steps"
            )

    def check(self) -> None:
        """ValueError for options that do not fit each other."""
        self.check_sizes()
        if self.num_generations < 2:
            raise ValueError(
                f"trainer.num_generations={self.num_generations}: must be at least 2, since the other completions of a "
                "prompt are the baseline of each"
            )
        size = self.per_device_train_batch_size * self.steps_of_a_rollout * num_ranks()
        processes = f" * {num_ranks()} processes" if num_ranks() > 1 else ""
        if size % self.num_generations:
            raise ValueError(
                f"a rollout has trainer.per_device_train_batch_size * steps_per_generation{processes} = {size} "
                f"completions: must be a multiple of trainer.num_generations={self.num_generations}"
            )
        if self.steps_of_a_rollout % self.gradient_accumulation_steps:
            raise ValueError(
                f"trainer.steps_per_generation={self.steps_per_generation}: must be a multiple of "
                f"trainer.gradient_accumulation_steps={self.gradient_accumulation_steps}, or 0 for the same"
            )
        for name in ("save_steps", "eval_steps"):
            if getattr(self, name) < 1 or getattr(self, name) % self.updates_of_a_rollout:
                raise ValueError(
                    f"trainer.{name}={getattr(self, name)}: must be a multiple of {self.updates_of_a_rollout}, the "
                    "optimizer steps of one rollout, so that a stopped run can go on exactly"
                )
        if self.save_steps % self.eval_steps:
            raise ValueError(
                f"trainer.save_steps={self.save_steps}: must be a multiple of trainer.eval_steps={self.eval_steps}, so "
                "that what is kept was measured"
            )
        if self.rollout_batch_size < 0 or self.num_generations_eval < 1 or self.max_completion_length < 2:
            raise ValueError(
                f"trainer.rollout_batch_size={self.rollout_batch_size}, "
                f"num_generations_eval={self.num_generations_eval}, "
                f"max_completion_length={self.max_completion_length}: must be at least 0, 1 and 2"
            )


def rloo_config(options: RLOptions, folder: Path, device: str, has_heldout: bool, logger: str) -> RLOOConfig:
    """trl's configuration, with all that has to be otherwise than its defaults."""
    config = RLOOConfig(
        output_dir=str(folder),
        max_steps=options.max_steps or -1,
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=options.per_device_train_batch_size,
        per_device_eval_batch_size=options.num_generations_eval,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        steps_per_generation=options.steps_of_a_rollout,
        num_generations=options.num_generations,
        num_generations_eval=options.num_generations_eval,
        num_iterations=options.num_iterations,
        epsilon=options.epsilon,
        epsilon_high=options.epsilon_high or None,
        max_completion_length=options.max_completion_length,
        temperature=options.temperature,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type=options.lr_scheduler_type,
        max_grad_norm=options.max_grad_norm,
        eval_strategy="steps" if has_heldout else "no",
        eval_steps=options.eval_steps,
        save_strategy="steps",
        save_steps=options.save_steps,
        save_total_limit=options.save_total_limit,
        load_best_model_at_end=has_heldout,
        metric_for_best_model=BEST_METRIC if has_heldout else None,
        greater_is_better=True if has_heldout else None,
        logging_steps=options.logging_steps,
        log_completions=options.log_completions,
        seed=options.seed,
        use_cpu=device == "cpu",
        report_to=report_to(logger),
        beta=0.0,  # no reference model
        bf16=False,  # a head in bf16 loses the updates that are smaller than its spacing
        gradient_checkpointing=False,
        disable_tqdm=None,
        ddp_find_unused_parameters=False,
    )
    # Otherwise each process would train by itself, in silence, and write over what the others write.
    found = config.world_size
    assert found == num_ranks(), f"{num_ranks()} processes were started, and transformers sees {found}"
    return config
