"""A sitting with methods that the test makes up and a clock that it moves: order, warm-up, medians, Ctrl-C."""

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from eval.speed.methods import BARE, PLAIN, DecoderMethod, Outcome
from eval.speed.session import PARTS, SessionOptions, _Interrupts, make_parts, run_session
from eval.tasks import BenchGroup
from models.decoding.counters import Timings
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target

GROUPS = [BenchGroup("chat", "short", 4, [[5], [6], [7]]), BenchGroup("maths", "long", 6, [[8], [9], [10]])]
OPTIONS = SessionOptions(rounds=3, warmup_rounds=1, batch_size=2, seed=11, is_compared=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target()


@dataclass
class Machine:
    """The clock, and who was asked for what in which order."""

    now: float = 0.0
    calls: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


@dataclass
class FakeMethod:
    """Answers with the target's own greedy tokens; its n-th call takes the n-th of `seconds`, over and over."""

    name: str
    machine: Machine
    target: Target
    seconds: Sequence[float]
    stops_at: int = -1
    planted: bool = False
    num_calls: int = 0

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        self.machine.calls.append((self.name, tuple(prompt[0] for prompt in prompts), max_new_tokens, seed))
        if self.num_calls == self.stops_at:
            raise KeyboardInterrupt
        self.machine.now += self.seconds[self.num_calls % len(self.seconds)]
        self.num_calls += 1
        if self.name == BARE:
            return Outcome([], timings=Timings(target_s=0.5, target_passes=5))
        tokens = [decode_plainly(self.target, prompt, max_new_tokens, eos_token_ids=()) for prompt in prompts]
        if self.planted:
            tokens[-1][2] = (tokens[-1][2] + 1) % self.target.vocab_size
        return Outcome(tokens)


def test_order_and_prompts_of_the_turns(target: Target) -> None:
    machine = Machine()
    methods = [FakeMethod(name, machine, target, [1.0]) for name in (PLAIN, "B", BARE)]
    session = run_session(target, GROUPS, methods, [], OPTIONS, machine.clock)
    assert [call[0] for call in machine.calls] == [PLAIN, "B", BARE] * 4 * len(GROUPS)
    assert [call[1:] for call in machine.calls[:3]] == [((5, 6), 4, 11)] * 3  # warm-up: one batch
    assert [call[1:] for call in machine.calls[3:12]] == [((5, 6, 7), 4, 11)] * 9
    assert [call[1:] for call in machine.calls[15:]] == [((8, 9, 10), 6, 11)] * 9
    assert session.is_complete
    assert session.groups == ["chat short", "maths long"]
    assert session.methods == [PLAIN, "B"]


def test_medians_leave_out_the_warmup(target: Target) -> None:
    """Seconds of a group: warm-up, then three rounds, the third ten times as slow for both."""
    machine = Machine()
    plain = FakeMethod(PLAIN, machine, target, [99.0, 6.0, 6.0, 60.0])
    fast = FakeMethod("fast", machine, target, [99.0, 2.0, 3.0, 20.0])
    session = run_session(target, GROUPS[:1], [plain, fast], [], OPTIONS, machine.clock)
    row = {row.method: row for row in session.rows()}["fast"]
    assert (row.tokens_per_s.low, row.tokens_per_s.median, row.tokens_per_s.high) == (12 / 20, 4, 6)
    speedup = row.speedup_over_plain
    assert (speedup.low, speedup.median, speedup.high) == pytest.approx((2, 3, 3))
    assert row.num_tokens == 12


def test_planted_difference_shows(target: Target) -> None:
    machine = Machine()
    methods = [
        FakeMethod(PLAIN, machine, target, [1.0]),
        FakeMethod("honest", machine, target, [1.0]),
        FakeMethod("planted", machine, target, [1.0], planted=True),
    ]
    session = run_session(target, GROUPS, methods, [], OPTIONS, machine.clock)
    plain, honest, planted = session.rows()
    assert plain.agreement is None
    assert honest.agreement.num_identical == honest.agreement.num_sequences == 6
    assert [(d.prompt, d.place) for d in planted.agreement.differences] == [(2, 2), (5, 2)]
    assert planted.agreement.largest_gap > 0


def test_sampled_outputs_are_not_compared(target: Target) -> None:
    machine = Machine()
    methods = [FakeMethod(name, machine, target, [1.0], planted=name == "B") for name in (PLAIN, "B")]
    options = SessionOptions(1, 0, 2, 0, is_compared=False)
    session = run_session(target, GROUPS, methods, [], options, machine.clock)
    assert [row.agreement for row in session.rows()] == [None, None]


@pytest.mark.parametrize("stops_at", [4, 6, 7])
def test_ctrl_c_keeps_the_groups_that_are_done(target: Target, stops_at: int) -> None:
    machine = Machine()
    methods = [
        FakeMethod(PLAIN, machine, target, [1.0]),
        FakeMethod("B", machine, target, [1.0], stops_at=stops_at),
    ]
    session = run_session(target, GROUPS, methods, [], OPTIONS, machine.clock)
    assert not session.is_complete
    assert session.groups == ["chat short"]
    assert [row.num_tokens for row in session.rows()] == [12, 12]


def test_ctrl_c_before_anything_is_done(target: Target) -> None:
    machine = Machine()
    methods = [FakeMethod(PLAIN, machine, target, [1.0], stops_at=3)]
    with pytest.raises(KeyboardInterrupt):
        run_session(target, GROUPS, methods, [], OPTIONS, machine.clock)


def test_waiting_twins_have_no_row_of_their_own(target: Target) -> None:
    machine = Machine()
    plain = DecoderMethod(PLAIN, Decoder(target), SamplingParams(), 2)
    other = FakeMethod("other", machine, target, [1.0])
    parts = make_parts([plain, other])
    assert [method.name for method in parts] == [PLAIN + PARTS]
    session = run_session(target, GROUPS, [plain, other], parts, OPTIONS, lambda: next(ticks))
    assert [row.method for row in session.rows()] == [PLAIN, "other"]
    told = [run.timings for run in session.runs if run.method == PLAIN + PARTS]
    assert len(told) == 6
    expected = sum(1e3 * one.target_s for one in told) / sum(one.target_passes for one in told)
    spread = session.rows()[0].pass_ms
    assert spread.low <= expected <= spread.high


ticks = iter(range(10_000))


def test_an_interrupt_that_a_library_swallowed_stops_at_the_next_turn() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _Interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is before
