"""One sitting of the frontier: every point answers the same prompts, with the same seeds, turn by turn.

A turn is a few prompts; all points take it one after another before any takes the next one, so that a machine that
grows slower meanwhile does so for all of them. Runs what decodes; computes no figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from eval.frontier.points import Point
from eval.frontier.questions import Question, turns_of
from eval.frontier.scoring import Reward
from eval.speed.methods import Outcome
from eval.speed.session import _Interrupts
from eval.speed.timing import Clock, Turn, measure
from models.decoding.counters import Counters
from models.decoding.rows import stream_seed
from models.decoding.stops import Detokenizer

WARMUP_TOKENS = 8


@dataclass(frozen=True)
class SamplingPlan:
    """How much is sampled. samples: completions of each prompt. seed: completion i of turn t depends on it, i and t."""

    samples: int
    prompts_per_turn: int
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """One completion. prompt, sample: its numbers. None: the method does not tell."""

    point: str
    prompt: int
    sample: int
    text: str
    num_tokens: int
    reward: float
    counters: Counters | None
    certificate: float | None


@dataclass(frozen=True)
class TimedTurn:
    """What one point took for all completions of a turn."""

    point: str
    turn: int
    seconds: float
    num_tokens: int


@dataclass
class Sitting:
    """What has been measured, whole turns only. stopped_by: what ended it before its end, Ctrl-C or a failure."""

    samples: list[Sample] = field(default_factory=list)
    turns: list[TimedTurn] = field(default_factory=list)
    stopped_by: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all prompts were asked."""
        return self.stopped_by is None

    @property
    def num_prompts(self) -> int:
        """Prompts that every point has answered."""
        return len({sample.prompt for sample in self.samples})


def run_sitting(
    points: Sequence[Point],
    questions: Sequence[Question],
    reward: Reward,
    tokenizer: Detokenizer,
    plan: SamplingPlan,
    clock: Clock,
) -> Sitting:
    """Measure. Ctrl-C or a failure ends it early with the turns that are done, and goes on upwards where none is."""
    sitting = Sitting()
    total = len(points) * len(questions) * plan.samples
    bar = tqdm(total=total, unit="completion", desc="measuring", dynamic_ncols=True)
    with bar, _Interrupts() as interrupts:
        try:
            bar.set_postfix_str("warming up")
            for point in points:
                interrupts.check()
                point.method.run([questions[0].ids], min(WARMUP_TOKENS, plan.max_new_tokens), plan.seed)
            done = 0
            for number, asked in enumerate(turns_of(questions, plan.prompts_per_turn)):
                timed, samples = [], []
                for turn, seconds, outcome in _take_turn(points, number, asked, plan, clock, bar, interrupts):
                    timed.append(TimedTurn(turn.name, number, seconds, sum(map(len, outcome.tokens))))
                    samples += _judge(points[len(timed) - 1], outcome, asked, done, reward, tokenizer, plan)
                    bar.update(len(outcome.tokens))
                sitting.turns += timed
                sitting.samples += samples
                done += len(asked)
        except (KeyboardInterrupt, Exception) as stop:
            if not sitting.samples:
                raise
            sitting.stopped_by = stop
    return sitting


def _take_turn(
    points: Sequence[Point],
    number: int,
    asked: Sequence[Question],
    plan: SamplingPlan,
    clock: Clock,
    bar: tqdm,
    interrupts: _Interrupts,
) -> Iterator[tuple[Turn, float, Outcome]]:
    """Every point's go at these prompts."""
    methods = {point.name: point.method for point in points}
    prompts = [question.ids for question in asked for _ in range(plan.samples)]

    def prepare(turn: Turn) -> None:
        interrupts.check()
        bar.set_postfix_str(turn.name)

    def run(turn: Turn) -> Outcome:
        return methods[turn.name].run(prompts, plan.max_new_tokens, stream_seed(plan.seed, turn.round))

    return measure([Turn(point.name, number) for point in points], run, clock, prepare)


def _judge(
    point: Point,
    outcome: Outcome,
    asked: Sequence[Question],
    first: int,
    reward: Reward,
    tokenizer: Detokenizer,
    plan: SamplingPlan,
) -> list[Sample]:
    """The completions of one turn, prompt by prompt, with their rewards. first: number of its first prompt."""
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outcome.tokens]
    rewards = reward.score(
        [question for question in asked for _ in range(plan.samples)], texts, outcome.tokens, tokenizer
    )
    # A decoder that tells no certificates is lossless; a peer that tells none may be anything.
    certificates: Sequence[float | None] = outcome.certificates or [0.0 if point.decoder else None] * len(texts)
    return [
        Sample(
            point.name,
            first + i // plan.samples,
            i % plan.samples,
            texts[i],
            len(outcome.tokens[i]),
            rewards[i],
            outcome.counters[i] if outcome.counters else None,
            certificates[i],
        )
        for i in range(len(texts))
    ]
