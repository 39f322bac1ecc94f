"""Order of turns, the clock and the medians, with a clock that the test moves."""

import pytest

from eval.speed.timing import Spread, Turn, measure, schedule, spread


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_methods_take_turns() -> None:
    turns = schedule(["A", "B", "C"], rounds=2, warmup_rounds=1)
    assert [turn.name for turn in turns] == ["A", "B", "C"] * 3
    assert [turn.round for turn in turns] == [-1, -1, -1, 0, 0, 0, 1, 1, 1]
    assert [turn.is_warmup for turn in turns] == [True] * 3 + [False] * 6


def test_only_run_is_timed() -> None:
    clock = FakeClock()
    takes = {("A", 0): 1.0, ("B", 0): 2.5, ("A", 1): 4.0, ("B", 1): 0.5}

    def prepare(turn: Turn) -> None:
        clock.now += 1000

    def run(turn: Turn) -> str:
        clock.now += takes[turn.name, turn.round]
        return f"{turn.name}{turn.round}"

    found = []
    for turn, seconds, result in measure(schedule(["A", "B"], 2, 0), run, clock, prepare):
        clock.now += 77  # what the caller does between turns
        found.append((turn, seconds, result))
    assert [(turn.name, turn.round) for turn, _, _ in found] == list(takes)
    assert [seconds for _, seconds, _ in found] == list(takes.values())
    assert [result for _, _, result in found] == ["A0", "B0", "A1", "B1"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], Spread(3.0, 3.0, 3.0, 1)), ([9, 1, 2], Spread(2, 1, 9, 3)), ([4, 1, 2, 8], Spread(3, 1, 8, 4))],
)
def test_spread(values: list[float], expected: Spread) -> None:
    assert spread(values) == expected


def test_nothing_to_tell_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measurement"):
        spread([])
    with pytest.raises(ValueError, match="rounds=0"):
        schedule(["A"], 0, 1)
