"""What the processes of a run share: who samples which completions, who updates on which, and what all get to know.

The completions of a rollout are numbered over all processes, and a process samples a piece of them that stands
together. A completion depends on its number and not on who samples it. An update takes completions in an order that
depends on seed and rollout alone, and each process adds what its own ones give: what the head saw stays where it was
sampled. So a run is the same on any number of processes, up to the order in which float32 numbers are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.decoding.rows import stream_seed
from rl.rollout import Rollout, without_features
from train.runtime.ranks import gather_pieces, num_ranks, rank


def piece(count: int) -> range:
    """Which of `count` numbers are this process's; pieces differ by one at most."""
    return range(rank() * count // num_ranks(), (rank() + 1) * count // num_ranks())


def gather_rollouts(mine: Sequence[Rollout], first: int) -> list[Rollout]:
    """The rollouts of all processes, in the order of their numbers, without features; `first`: number of mine[0]."""
    return gather_pieces({first + i: without_features(rollout) for i, rollout in enumerate(mine)})


def deal(count: int, num_steps: int, seed: int, rollout: int) -> list[list[int]]:
    """Numbers of the completions, 0 to count - 1, of each micro-step that a rollout is cut into."""
    generator = torch.Generator().manual_seed(stream_seed(seed, rollout))
    order = torch.randperm(count, generator=generator).tolist()
    size = count // num_steps
    return [sorted(order[step * size : (step + 1) * size]) for step in range(num_steps)]


def require_same_options(options: Mapping[str, Any]) -> None:
    """ValueError, in every process, where they were not all given these options: they would wait for each other."""
    everyones = gather_pieces({rank(): dict(options)})
    for number, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if theirs[name] != value:
                raise ValueError(
                    f"{name} is {value!r} in process 0 and {theirs[name]!r} in process {number}: start all of them "
                    "with the same words; a sweep that draws its values needs a seed (hydra.sweeper.sampler.seed)"
                )
