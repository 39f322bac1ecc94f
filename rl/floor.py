"""Holding the reward while acceptance is bought: lambda under a reward floor, and the alarm for a collapsed head.

Pure state machines: they see a number or two after each rollout, and run no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

ACTIONS = ("restore", "stop", "warn")


@dataclass
class FloorOptions:
    """How lambda is held back where it costs reward.

    max_drop: most that the mean reward may lie below lossless decoding's on the same prompts; None: lambda is fixed.
    rate: how fast the multiplier follows a violation. max_multiplier: lambda never falls below
    lam / (1 + max_multiplier). prompts: training prompts on which lossless decoding is measured before training.
    """

    max_drop: float | None = None
    rate: float = 5.0
    max_multiplier: float = 1e4
    prompts: int = 32

    def check(self) -> None:
        """ValueError for an option out of range."""
        if self.max_drop is not None and not 0.0 <= self.max_drop < math.inf:
            raise ValueError(
                f"floor.max_drop={self.max_drop}: must be at least 0, the reward that may be lost against lossless "
                "decoding; null leaves lam fixed"
            )
        for name in ("rate", "max_multiplier"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"floor.{name}={getattr(self, name)}: must be above 0")
        if self.prompts < 1:
            raise ValueError(f"floor.prompts={self.prompts}: must be at least 1")


@dataclass
class CollapseOptions:
    """When a head counts as collapsed, and what is done about it.

    weight: mean w below this; 0 never. reward: mean reward below this share of lossless decoding's; 0 never. patience:
    rollouts in a row. action: restore (go back to the best checkpoint with half the lambda), stop, or warn.
    """

    weight: float = 0.005
    reward: float = 0.5
    patience: int = 3
    action: str = "restore"

    def check(self) -> None:
        """ValueError for an option out of range."""
        for name in ("weight", "reward"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"collapse.{name}={getattr(self, name)}: must be in [0, 1); 0 switches it off")
        if self.patience < 1:
            raise ValueError(f"collapse.patience={self.patience}: must be at least 1")
        if self.action not in ACTIONS:
            raise ValueError(f"collapse.action={self.action!r} is unknown; choose one of {', '.join(ACTIONS)}")


@dataclass
class RewardFloor:
    """Maximise R + lam A subject to R >= floor, by a Lagrange multiplier m >= 0 on the constraint.

    The Lagrangian (1 + m) R + lam A - m floor has the gradient of R + lam / (1 + m) A, up to a factor that the
    optimizer takes out: `lam` is the most that acceptance is ever worth, and m holds it back. Dual ascent goes by
    factors, 1 + m <- (1 + m) exp(rate (floor - R)), clipped: the right m may be anything from 0 to thousands, and a
    head can collapse within a few updates.
    """

    lam: float
    options: FloorOptions
    lossless_reward: float | None = None
    multiplier: float = 0.0

    @property
    def floor(self) -> float | None:
        """The reward to hold; None: no floor."""
        if self.options.max_drop is None or self.lossless_reward is None:
            return None
        return self.lossless_reward - self.options.max_drop

    @property
    def present_lam(self) -> float:
        """What acceptance is worth now."""
        return self.lam / (1.0 + self.multiplier)

    def update(self, reward: float) -> None:
        """Take in a rollout's mean reward."""
        if self.floor is not None:
            self.hold_back(math.exp(min(self.options.rate * (self.floor - reward), 50.0)))

    def hold_back(self, factor: float) -> None:
        """Divide the present lambda by this factor, within the limits."""
        multiplier = (1.0 + self.multiplier) * factor - 1.0
        self.multiplier = min(max(multiplier, 0.0), self.options.max_multiplier)


@dataclass
class CollapseAlarm:
    """Counts the rollouts in a row that look collapsed."""

    options: CollapseOptions
    count: int = 0
    num_alarms: int = 0

    def observe(self, weight: float, reward: float, lossless_reward: float | None) -> str | None:
        """What is wrong, once it has been so for `patience` rollouts; the count then starts anew."""
        signs = []
        if weight < self.options.weight:
            signs.append(f"the mean weight of the target is {weight:.2g} (below collapse.weight={self.options.weight})")
        if lossless_reward is not None and lossless_reward > 0.0 and reward < self.options.reward * lossless_reward:
            signs.append(
                f"the mean reward is {reward:.3g} (below collapse.reward={self.options.reward} of lossless decoding's "
                f"{lossless_reward:.3g})"
            )
        self.count = self.count + 1 if signs else 0
        if self.count < self.options.patience:
            return None
        self.count = 0
        self.num_alarms += 1
        return " and ".join(signs)


@dataclass
class RunState:
    """What a run knows beside weights, optimizer and random states; a checkpoint holds it as JSON."""

    floor: RewardFloor
    alarm: CollapseAlarm
    # Mean reward and acceptance of lossless decoding on the held-out prompts.
    lossless_heldout: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Numbers alone; options come from the command."""
        return {
            "lossless_reward": self.floor.lossless_reward,
            "multiplier": self.floor.multiplier,
            "collapse_count": self.alarm.count,
            "num_alarms": self.alarm.num_alarms,
            "lossless_heldout": dict(self.lossless_heldout),
        }

    def load_json(self, values: dict[str, Any]) -> None:
        """The reverse of `to_json`."""
        self.floor.lossless_reward = values["lossless_reward"]
        self.floor.multiplier = values["multiplier"]
        self.alarm.count = values["collapse_count"]
        self.alarm.num_alarms = values["num_alarms"]
        self.lossless_heldout = dict(values["lossless_heldout"])
