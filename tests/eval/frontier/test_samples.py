"""A sitting with methods that the test makes up and a clock that it moves: order, seeds, rewards, Ctrl-C."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import eval.frontier.samples
from eval.frontier.points import DYNAMIC, LOSSLESS, PEER, PLAIN, Point
from eval.frontier.questions import Question
from eval.frontier.samples import SamplingPlan, Sitting, run_sitting
from eval.frontier.scoring import Reward
from eval.speed.methods import Outcome
from models.decoding.counters import Counters
from tests.eval.planting import fails, planted

QUESTIONS = [Question(f"prompt {n}", [n], {"answer": n}) for n in range(5)]
PLAN = SamplingPlan(samples=2, prompts_per_turn=2, max_new_tokens=9, seed=11)


class Words:
    """A tokenizer whose tokens are their numbers."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class Machine:
    """The clock, and who was asked for what in which order."""

    now: float = 0.0
    calls: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


@dataclass
class FakeMethod:
    """Answers prompt n with [n, place in the call]; its calls take so many seconds, and call `stops_at` is Ctrl-C."""

    name: str
    machine: Machine
    seconds: float
    certificates: bool = False
    stops_at: int = -1
    num_calls: int = 0

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        self.machine.calls.append((self.name, tuple(prompt[0] for prompt in prompts), max_new_tokens, seed))
        if self.num_calls == self.stops_at:
            raise KeyboardInterrupt
        self.num_calls += 1
        self.machine.now += self.seconds
        tokens = [[prompt[0], place] for place, prompt in enumerate(prompts)]
        counters = [Counters(emitted=2) for _ in prompts]
        return Outcome(tokens, counters, certificates=[0.25 * prompt[0] for prompt in prompts] * self.certificates)


def double(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
    """The reward: 2 x the prompt's number; the text must be that prompt's."""
    assert [text.split()[0] for text in completions] == [str(number) for number in answer]
    return [2.0 * number for number in answer]


def sit(code: Any = eval.frontier.samples, stops_at: int = -1) -> tuple[Sitting, Machine]:
    machine = Machine()
    decoder: Any = object()
    points = [
        Point("plain", PLAIN, FakeMethod("plain", machine, 1.0), decoder),
        Point("token", LOSSLESS, FakeMethod("token", machine, 2.0), decoder),
        Point("lam", DYNAMIC, FakeMethod("lam", machine, 3.0, certificates=True, stops_at=stops_at), decoder),
        Point("peer", PEER, FakeMethod("peer", machine, 4.0)),
    ]
    return code.run_sitting(points, QUESTIONS, Reward("double", double), Words(), PLAN, machine.clock), machine


def check_order_and_seeds(code: Any) -> None:
    """All points take a turn before any takes the next; a turn's prompts and seed are the same for all of them."""
    _, machine = sit(code)
    assert [call[0] for call in machine.calls] == ["plain", "token", "lam", "peer"] * 4
    warm, *turns = [machine.calls[i : i + 4] for i in range(0, 16, 4)]
    assert {call[1:3] for call in warm} == {((0,), 8)}
    for calls, prompts in zip(turns, [(0, 0, 1, 1), (2, 2, 3, 3), (4, 4)], strict=True):
        assert {call[1:3] for call in calls} == {(prompts, 9)}
        assert len({call[3] for call in calls}) == 1
    assert len({calls[0][3] for calls in turns}) == 3


def check_samples(code: Any) -> None:
    sitting, _ = sit(code)
    assert sitting.is_complete
    assert sitting.num_prompts == 5
    ours = [sample for sample in sitting.samples if sample.point == "lam"]
    assert [(sample.prompt, sample.sample) for sample in ours] == [(n, i) for n in range(5) for i in range(2)]
    assert [sample.reward for sample in ours] == [2.0 * n for n in range(5) for _ in range(2)]
    assert [sample.certificate for sample in ours] == [0.25 * n for n in range(5) for _ in range(2)]
    assert [sample.text for sample in ours[:4]] == ["0 0", "0 1", "1 2", "1 3"]
    assert all(sample.num_tokens == 2 for sample in sitting.samples)
    others = {sample.point: sample.certificate for sample in sitting.samples}
    assert (others["token"], others["plain"], others["peer"]) == (0.0, 0.0, None)
    times = {(one.point, one.turn): (one.seconds, one.num_tokens) for one in sitting.turns}
    assert times["lam", 0] == (3.0, 8)
    assert times["peer", 2] == (4.0, 4)
    assert len(times) == 12


CHECKS = [check_order_and_seeds, check_samples]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sitting(check: Any) -> None:
    check(eval.frontier.samples)


@pytest.mark.parametrize(("stops_at", "num_prompts"), [(2, 2), (3, 4)])
def test_ctrl_c_keeps_the_turns_that_are_done(stops_at: int, num_prompts: int) -> None:
    """Its first call warms up, its second is turn 0."""
    sitting, _ = sit(stops_at=stops_at)
    assert not sitting.is_complete
    assert sitting.num_prompts == num_prompts
    by_point = Counter(sample.point for sample in sitting.samples)
    assert by_point == dict.fromkeys(("plain", "token", "lam", "peer"), num_prompts * PLAN.samples)
    assert {turn.turn for turn in sitting.turns} == set(range(num_prompts // 2))


def test_a_failure_keeps_the_turns_that_are_done() -> None:
    """Hours of samples are not lost to one reward that is no number."""
    machine = Machine()
    decoder: Any = object()
    points = [Point("plain", PLAIN, FakeMethod("plain", machine, 1.0), decoder)]

    def sometimes(answer: list[int], **kwargs: Any) -> list[float]:
        return [float("nan") if number == 4 else 1.0 for number in answer]

    sitting = run_sitting(points, QUESTIONS, Reward("mine", sometimes), Words(), PLAN, machine.clock)
    assert sitting.num_prompts == 4
    assert not sitting.is_complete
    assert "reward 'mine', completion 0 of 2: nan" in str(sitting.stopped_by)


@pytest.mark.parametrize("stops_at", [0, 1])
def test_ctrl_c_before_anything_is_done(stops_at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        sit(stops_at=stops_at)


def test_a_reward_that_fails_ends_it_after_one_turn() -> None:
    machine = Machine()
    decoder: Any = object()
    points = [Point("plain", PLAIN, FakeMethod("plain", machine, 1.0), decoder)]

    def no_number(completions: list[str], **kwargs: Any) -> list[Any]:
        return [None for _ in completions]

    with pytest.raises(ValueError, match="None; every completion needs a number"):
        run_sitting(points, QUESTIONS, Reward("broken", no_number), Words(), PLAN, machine.clock)
    assert len(machine.calls) == 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("in asked for _ in range(plan.samples)]\n\n", "in [*asked, *asked]]\n\n"),
        ("stream_seed(plan.seed, turn.round)", "plan.seed"),
        ("stream_seed(plan.seed, turn.round)", "stream_seed(plan.seed, hash(turn.name))"),
        ("first + i // plan.samples", "i // plan.samples"),
        ("i % plan.samples", "i // plan.samples"),
        ("done += len(asked)", "done += 1"),
        ("0.0 if point.decoder else None", "0.0"),
        ("min(WARMUP_TOKENS, plan.max_new_tokens)", "plan.max_new_tokens"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    code = planted(eval.frontier.samples, right, wrong)
    assert any(fails(check, code) for check in CHECKS)
