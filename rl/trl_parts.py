"""The small things that trl and transformers ask for: a model that holds the head, a sampler, a reward, a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    ProgressCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.utils import RepeatSampler

from eval.rewards.loading import ARGUMENTS, check_rewards
from models.ensemble import EnsembleHead
from models.target.model import Target
from train.data.reward_rows import fresh
from train.runtime.callbacks import StopOnInterrupt


class HeadPolicyConfig(PretrainedConfig):
    """What trl asks a model's configuration for."""

    model_type = "foretoken_ensemble"


class HeadPolicy(PreTrainedModel):
    """The head as trl's model: nothing but the head is in it."""

    config_class = HeadPolicyConfig

    def __init__(self, head: EnsembleHead, target: Target) -> None:
        special = {"pad_token_id": target.tokenizer.pad_token_id, "eos_token_id": list(target.eos_token_ids)}
        super().__init__(HeadPolicyConfig(**special))
        self.generation_config = GenerationConfig(**special)
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] -> w [...]."""
        return self.head(features)


class ShortProgress(ProgressCallback):
    """transformers' progress bar; of a line of the log it shows what tells how training goes, and not all of it."""

    SHOWN = ("objective", "reward", "acceptance", "weight", "lam", "certificate")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Nothing of a line without any of these."""
        names = [f"{prefix}{name}" for prefix in ("", "eval_") for name in self.SHOWN]
        shown = {name: f"{logs[name]:.4g}" for name in names if logs and name in logs}
        if state.is_world_process_zero and self.training_bar is not None and shown:
            self.training_bar.write(", ".join(f"{name} {value}" for name, value in shown.items()))


class StopAfterRollout(StopOnInterrupt):
    """As its parent, but it stops where the next rollout would begin: a checkpoint carries no rollouts."""

    def __init__(self, updates_of_a_rollout: int) -> None:
        super().__init__()
        self.updates_of_a_rollout = updates_of_a_rollout

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.updates_of_a_rollout == 0:
            super().on_step_end(args, state, control, **kwargs)


class EpochSampler(RepeatSampler):
    """trl's, but an epoch's order depends on seed and epoch alone, so that a resumed run sees the same prompts."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self.generator.manual_seed(self.seed * 1_000_003 + epoch)


def checked_reward(reward: Callable[..., Any], name: str) -> Callable[..., list[float]]:
    """The reward function, which must give a number for every completion, and gets copies of prompts and columns."""

    def checked(prompts: Sequence[Any], **kwargs: Any) -> list[float]:
        columns = {key: list(map(fresh, value)) for key, value in kwargs.items() if key not in ARGUMENTS}
        try:
            values = reward(prompts=list(map(fresh, prompts)), **(kwargs | columns))
        except Exception as error:
            raise ValueError(
                f"reward {name!r} raised {type(error).__name__}: {error}; make it return a number for every completion"
            ) from error
        return check_rewards(values, len(prompts), name)

    checked.__name__ = name
    return checked
