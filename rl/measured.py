"""What is measured on completions, as means over them, and what is logged of their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from models.decoding.counters import add_up
from rl.policy import acceptance
from rl.rollout import Rollout


@dataclass(frozen=True)
class Measured:
    """Means over completions. acceptance: each one's mean of 1 - w TV; rate: accepted over drafted tokens."""

    reward: float
    acceptance: float
    rate: float
    weight: float
    certificate: float


def measured(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> Measured:
    """Of these completions, of which one at least has verified tokens."""
    judged = [rollout for rollout in rollouts if len(rollout.p_N)]
    return Measured(
        reward=torch.tensor(rewards).mean().item(),
        acceptance=fmean(acceptance(one.weights_N, one.tv_N).mean().item() for one in judged),
        rate=add_up(rollout.counters for rollout in judged).acceptance_rate,
        weight=torch.cat([rollout.weights_N for rollout in judged]).mean().item(),
        certificate=fmean(rollout.certificate for rollout in rollouts),
    )


def length_metrics(lengths_S: Tensor, is_cut_S: Tensor) -> dict[str, float]:
    """Lengths of completions, of all and of those that were not cut off (0 without any), by trl's names."""
    ended_S = lengths_S.new_zeros(1) if is_cut_S.all() else lengths_S[~is_cut_S]
    metrics = {"completions/clipped_ratio": is_cut_S.float().mean().item()}
    for name, values_S in (("length", lengths_S.float()), ("terminated_length", ended_S.float())):
        for statistic in (torch.mean, torch.min, torch.max):
            metrics[f"completions/{statistic.__name__}_{name}"] = statistic(values_S).item()
    return metrics
