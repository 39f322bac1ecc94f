"""One sitting of the bench: all methods, turn by turn and group by group, with what each took and wrote."""

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tqdm import tqdm

from eval.speed.acceptance import compare_outputs
from eval.speed.memory import PeakMemory
from eval.speed.methods import BARE, PLAIN, DecoderMethod, Method, Outcome, WaitingDecoder
from eval.speed.results import Counted, Row, Run, summarise
from eval.speed.timing import Clock, Turn, measure, schedule
from eval.tasks import BenchGroup
from models.decoding.counters import add_up
from models.target.model import Target

PARTS = " (parts)"


@dataclass(frozen=True)
class SessionOptions:
    """How often each method runs. Outputs are compared where they ought to be equal, that is in greedy decoding."""

    rounds: int
    warmup_rounds: int
    batch_size: int
    seed: int
    is_compared: bool


@dataclass
class Session:
    """What has been measured. `is_complete` is False where it was stopped before its end."""

    methods: list[str]
    parts_of: Mapping[str, str]
    memory_kind: str
    runs: list[Run] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    is_complete: bool = False

    def rows(self, group: str | None = None) -> list[Row]:
        """The table's rows over one group of prompts, or over all."""
        runs = [run for run in self.runs if group in (None, run.group)]
        counted = [entry for entry in self.counted if group in (None, entry.group)]
        return summarise(runs, counted, self.methods, self.parts_of)

    @property
    def groups(self) -> list[str]:
        """Names of the groups that are done."""
        return list(dict.fromkeys(run.group for run in self.runs))


def make_parts(methods: Sequence[Method]) -> list[Method]:
    """Twins of this project's decoders that wait for the device, where its work outlives the call (a GPU's does)."""
    return [
        DecoderMethod(
            method.name + PARTS,
            WaitingDecoder(
                method.decoder.target,
                method.decoder.drafter,
                method.decoder.num_draft_tokens,
                method.decoder.judge.rule,
                method.decoder.judge.distance_budget,
                method.decoder.length,
            ),
            method.sampling,
            method.batch_size,
        )
        for method in methods
        if isinstance(method, DecoderMethod)
    ]


class _Interrupts:
    """Ctrl-C as ever, and once more at the next turn, for an exception raised inside a callback of C code is lost.

    It also works where a shell that started the bench in the background has SIGINT ignored.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._before: Any = None

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise what a library has swallowed."""
        if self._is_pending:
            raise KeyboardInterrupt


def run_session(
    target: Target,
    groups: Sequence[BenchGroup],
    methods: Sequence[Method],
    parts: Sequence[Method],
    options: SessionOptions,
    clock: Clock,
) -> Session:
    """Measure. Ctrl-C ends it early with the groups that are done, and goes on upwards where none is."""
    memory = PeakMemory(target.device)
    parts_of = {method.name.removesuffix(PARTS): method.name for method in parts}
    session = Session([method.name for method in methods if method.name != BARE], parts_of, memory.kind)
    by_name = {method.name: method for method in (*methods, *parts)}
    turns = schedule(list(by_name), options.rounds, options.warmup_rounds)
    total = sum(_work(turn, group, options) for group in groups for turn in turns)
    bar = tqdm(total=total, unit="token", unit_scale=True, desc="measuring", dynamic_ncols=True)
    with bar, _Interrupts() as interrupts:
        for group in groups:
            try:
                runs, outcomes = _measure_group(group, by_name, turns, memory, options, clock, bar, interrupts)
                counted = _count(target, group, outcomes, session.methods, options)
            except KeyboardInterrupt:
                if not session.runs:
                    raise
                return session
            session.counted += counted
            session.runs += runs
    session.is_complete = True
    return session


def _measure_group(
    group: BenchGroup,
    by_name: Mapping[str, Method],
    turns: Sequence[Turn],
    memory: PeakMemory,
    options: SessionOptions,
    clock: Clock,
    bar: tqdm,
    interrupts: "_Interrupts",
) -> tuple[list[Run], dict[str, Outcome]]:
    """Every counted turn, and what each method gave in the first of them."""

    def prepare(turn: Turn) -> None:
        interrupts.check()
        bar.set_postfix_str(f"{group.name}, {turn.name}{', warming up' if turn.is_warmup else ''}")
        memory.start()

    def run(turn: Turn) -> Outcome:
        prompts = group.prompts[: options.batch_size] if _is_short(turn) else group.prompts
        return by_name[turn.name].run(prompts, group.max_new_tokens, options.seed)

    runs: list[Run] = []
    outcomes: dict[str, Outcome] = {}
    for turn, seconds, outcome in measure(turns, run, clock, prepare):
        bar.update(_work(turn, group, options))
        if not turn.is_warmup:
            num_tokens = sum(map(len, outcome.tokens))
            runs.append(Run(group.name, turn.name, turn.round, seconds, num_tokens, memory.read(), outcome.timings))
            outcomes.setdefault(turn.name, outcome)
    return runs, outcomes


def _count(
    target: Target, group: BenchGroup, outcomes: Mapping[str, Outcome], methods: Sequence[str], options: SessionOptions
) -> list[Counted]:
    counted = []
    for name in methods:
        outcome, plain = outcomes[name], outcomes[PLAIN]
        agreement = None
        if options.is_compared and name != PLAIN:
            agreement = compare_outputs(target, group.prompts, outcome.tokens, plain.tokens)
        counters = add_up(outcome.counters) if outcome.counters else None
        certificate = sum(outcome.certificates) if outcome.certificates else None
        counted.append(Counted(group.name, name, counters, agreement, certificate))
    return counted


def _is_short(turn: Turn) -> bool:
    """One batch is enough to warm up, and to learn the shares of the parts."""
    return turn.is_warmup or turn.name.endswith(PARTS)


def _work(turn: Turn, group: BenchGroup, options: SessionOptions) -> int:
    """Most tokens of a turn, for the progress bar."""
    if turn.name == BARE:
        return 0
    num_prompts = min(len(group.prompts), options.batch_size) if _is_short(turn) else len(group.prompts)
    return num_prompts * group.max_new_tokens
