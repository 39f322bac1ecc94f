"""Low-rank adapters, by peft: what a user sets of them, and how they come into a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class LoraOptions:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on every linear layer but the output head.

    rank: 0 trains the weights themselves. alpha: adapters count alpha / rank times.
    """

    rank: int = 0
    alpha: float = 32.0

    def __post_init__(self) -> None:
        if self.rank < 0 or not self.alpha > 0:
            raise ValueError(f"lora.rank={self.rank} must be at least 0, and lora.alpha={self.alpha} above 0")


def add_lora(model: PreTrainedModel, options: LoraOptions, seed: int) -> Any:
    """peft's wrapper around the model, whose linear layers get adapters in place; they start from the seed alone."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)
