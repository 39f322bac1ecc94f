"""The order in which things are timed, the clock, and what is told of repeated measurements.

Methods take turns, A B C A B C, so that a machine that grows slower or faster meanwhile does so for all of them. Knows
nothing of what is timed.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Turn:
    """One method's go. `round` counts from 0; it is negative while warming up."""

    name: str
    round: int

    @property
    def is_warmup(self) -> bool:
        return self.round < 0


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of repeated measurements."""

    median: float
    low: float
    high: float
    count: int


def schedule(names: Sequence[str], rounds: int, warmup_rounds: int) -> list[Turn]:
    """Every method once a round, always in the same order; the warm-up's rounds come first."""
    if rounds < 1 or warmup_rounds < 0:
        raise ValueError(f"rounds={rounds} must be at least 1 and warmup_rounds={warmup_rounds} at least 0")
    return [Turn(name, number) for number in range(-warmup_rounds, rounds) for name in names]


def measure(
    turns: Sequence[Turn], run: Callable[[Turn], T], clock: Clock, prepare: Callable[[Turn], None] = lambda turn: None
) -> Iterator[tuple[Turn, float, T]]:
    """Run the turns in order, the warm-up's too: (turn, seconds of `run` alone, its result) as each one ends."""
    for turn in turns:
        prepare(turn)
        started = clock()
        result = run(turn)
        yield turn, clock() - started, result


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no measurement to take a median of")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_clock(device: torch.device) -> Clock:
    """Seconds of wall clock, read when the device is idle."""

    def read() -> float:
        wait_for(device)
        return time.perf_counter()

    return read
