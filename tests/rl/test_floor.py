"""The reward floor finds the lambda that just holds it, and the alarm rings after enough bad rollouts in a row."""

import inspect
import json
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from rl import floor as floor_module
from rl.floor import CollapseOptions, FloorOptions, RewardFloor, RunState

Code = Any


def follow(floor: RewardFloor, respond: Callable[[float], float], num_rollouts: int) -> list[float]:
    """Lambda after each rollout, where the reward answers lambda at once."""
    found = []
    for _ in range(num_rollouts):
        floor.update(respond(floor.present_lam))
        found.append(floor.present_lam)
    return found


def check_convergence(code: Code = floor_module) -> None:
    """R(lam) = 1 - lam / 10 crosses the floor 0.95 at lam = 0.5, from whatever lambda it sets out."""
    for lam in (0.6, 5.0, 500.0):
        floor = code.RewardFloor(lam, FloorOptions(max_drop=0.05, rate=10.0), lossless_reward=1.0)
        lams = follow(floor, lambda value: max(0.0, 1.0 - value / 10.0), 200)
        assert lams[-1] == pytest.approx(0.5, rel=1e-6)
        assert all(0.0 < value <= lam for value in lams)
    # Where the whole of lam holds the floor, nothing is held back.
    floor = code.RewardFloor(0.3, FloorOptions(max_drop=0.05), lossless_reward=1.0)
    assert follow(floor, lambda value: 1.0 - value / 10.0, 20) == [0.3] * 20
    # Limits of the multiplier: a reward that never comes back, and one that is back at once.
    floor = code.RewardFloor(2.0, FloorOptions(max_drop=0.0, rate=1e6, max_multiplier=9.0), lossless_reward=1.0)
    assert follow(floor, lambda value: -1e300, 3) == pytest.approx([0.2] * 3)
    assert follow(floor, lambda value: 1.1, 1) == [2.0]


def check_fixed(code: Code = floor_module) -> None:
    """Without max_drop, or before lossless decoding was measured, lambda stays."""
    for floor in (
        code.RewardFloor(0.7, FloorOptions(max_drop=None), lossless_reward=1.0),
        code.RewardFloor(0.7, FloorOptions(max_drop=0.1), lossless_reward=None),
    ):
        assert floor.floor is None
        assert follow(floor, lambda value: -5.0, 4) == [0.7] * 4


def check_alarm(code: Code = floor_module) -> None:
    """Three in a row, by either sign; a good rollout between them starts the count anew, and so does an alarm."""
    alarm = code.CollapseAlarm(CollapseOptions(weight=0.01, reward=0.5, patience=3))
    good, low_weight, low_reward = (0.5, 0.9), (0.001, 0.9), (0.5, 0.3)
    rings = []
    for weight, reward in [low_weight] * 2 + [good] + [low_reward] * 2 + [low_weight] + [low_reward] * 2 + [good]:
        rings.append(alarm.observe(weight, reward, 1.0))
    assert [bool(ring) for ring in rings] == [False] * 5 + [True] + [False] * 3
    assert rings[5] == "the mean weight of the target is 0.001 (below collapse.weight=0.01)"
    assert alarm.num_alarms == 1
    both = code.CollapseAlarm(CollapseOptions(weight=0.01, reward=0.5, patience=1)).observe(0.001, 0.1, 1.0)
    assert "mean weight" in both
    assert "mean reward is 0.1 (below collapse.reward=0.5 of lossless decoding's 1)" in both
    # A share of a reward that is not positive says nothing, and 0 switches a sign off.
    quiet = code.CollapseAlarm(CollapseOptions(weight=0.0, reward=0.5, patience=1))
    assert [quiet.observe(0.0, -3.0, lossless) for lossless in (0.0, -1.0, None)] == [None] * 3


def check_state(code: Code = floor_module) -> None:
    """Everything that a run's next step depends on goes through JSON and comes back."""

    def fresh() -> RunState:
        floor = code.RewardFloor(2.0, FloorOptions(max_drop=0.1))
        return code.RunState(floor, code.CollapseAlarm(CollapseOptions(weight=0.5, patience=5)))

    run = fresh()
    run.floor.lossless_reward, run.lossless_heldout = 0.9, {"reward": 0.8, "acceptance": 0.4}
    run.floor.update(0.2)
    run.alarm.observe(0.1, 1.0, 0.9)
    run.alarm.num_alarms = 2
    again = fresh()
    again.load_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert again.floor.present_lam < 2.0


CHECKS = (check_convergence, check_fixed, check_alarm, check_state)


@pytest.mark.parametrize("check", CHECKS)
def test_floor_and_alarm(check: Callable[[Code], None]) -> None:
    check(floor_module)


FAULTS = [
    ("pulled the wrong way", "(self.floor - reward)", "(reward - self.floor)"),
    ("the floor lies above", "lossless_reward - self.options", "lossless_reward + self.options"),
    ("the multiplier may be negative", "max(multiplier, 0.0)", "multiplier"),
    ("no upper limit", "min(max(multiplier, 0.0), self.options.max_multiplier)", "max(multiplier, 0.0)"),
    ("the step is added to nothing", "(1.0 + self.multiplier) * factor", "factor"),
    ("overflow", "min(self.options.rate * (self.floor - reward), 50.0)", "self.options.rate * (self.floor - reward)"),
    ("bad rollouts need not be in a row", "self.count + 1 if signs else 0", "self.count + bool(signs)"),
    ("rings a rollout late", "if self.count < self.options.patience", "if self.count <= self.options.patience"),
    ("rings on and on", "        self.count = 0\n", ""),
    ("a negative reward is a collapse", "lossless_reward > 0.0 and ", ""),
    ("the multiplier is not saved", '"multiplier": self.floor.multiplier', '"multiplier": 0.0'),
    ("the count is not read", 'self.alarm.count = values["collapse_count"]', "pass"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_planted_faults_are_caught(right: str, wrong: str) -> None:
    source = inspect.getsource(floor_module)
    assert right in source
    code = ModuleType("rl.floor")
    code.__dict__["__name__"] = "rl.floor"
    exec(compile(source.replace(right, wrong, 1), "faulty floor", "exec"), code.__dict__)
    assert any(fails(check, code) for check in CHECKS)


def fails(check: Callable[[Code], None], code: Code) -> bool:
    try:
        check(code)
    except (AssertionError, OverflowError, KeyError):
        return True
    return False


def test_options_are_checked() -> None:
    for options in (FloorOptions(max_drop=math.nan), FloorOptions(max_drop=math.inf), FloorOptions(max_multiplier=0.0)):
        with pytest.raises(ValueError, match=r"floor\."):
            options.check()
    for collapse in (CollapseOptions(weight=math.nan), CollapseOptions(reward=-0.1)):
        with pytest.raises(ValueError, match=r"collapse\."):
            collapse.check()
