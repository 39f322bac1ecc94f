"""The time that processors take counts where lengths are chosen: it is part of what a block is seen to take."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.decoding.decoder import Decoder
from models.decoding.length import CALIBRATION, AdaptiveLength
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.drafters.hybrid import HybridDrafter
from models.drafters.text.ngram import NgramDrafter
from models.heads import HeadOptions, build_head
from models.processors.prefix import ProcessorParams
from models.target.model import Target
from models.target.tiny import make_tiny_target

LONGEST = 4
PASS, PAUSE = 1.0, 3.0  # seconds of a target pass, and of a slow processor at one place
NUM_CALIBRATED = 3 * CALIBRATION  # blocks with which the controller begins


class Clock:
    """Time goes by where it is told to alone, so that no other program changes what is chosen."""

    now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


class Slow:
    """Takes its time at each place, and says what comes next: two tokens in turns."""

    depends_only_on_prefix = True

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.clock.spend(self.seconds)
        return torch.full_like(scores, -1.0).index_fill(1, torch.tensor([7 + input_ids.shape[1] % 2]), 1.0)


class Recorded(AdaptiveLength):
    """Remembers what was asked for and how long it took."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.seen: list[tuple[int, float]] = []

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        self.seen.append((asked, seconds))
        super().observe(asked, num_accepted, seconds)


def slow_target(clock: Clock) -> Target:
    target = make_tiny_target()
    target.model.base_model.register_forward_pre_hook(lambda *_: clock.spend(PASS))
    return target


def decode(clock: Clock, drafter_name: str, seconds: float, num_tokens: int = 110) -> Recorded:
    target = slow_target(clock)
    length = Recorded(LONGEST)
    head = HeadsDrafter(build_head(target, HeadOptions(kind="mtp", num_draft_tokens=LONGEST)))
    drafter = {"text": NgramDrafter(target, 1, 3), "heads": head}[drafter_name]
    processors = ProcessorParams(custom=(Slow(clock, seconds),))
    Decoder(target, drafter, LONGEST, length=length).generate(
        [[7, 8] * 4], GenerationParams(num_tokens, eos_token_ids=(), processors=processors)
    )
    return length


@pytest.mark.parametrize("drafter", ["text", "heads"])
def test_a_block_is_seen_to_take_the_processors_time(clock: Clock, drafter: str) -> None:
    """Text drafters ask no processor; heads ask it at each drafted place as well, and the target once more."""
    seen = decode(clock, drafter, PAUSE).seen
    assert len(seen) > NUM_CALIBRATED
    for asked, seconds in seen[:NUM_CALIBRATED]:
        if drafter == "heads":
            assert seconds == PASS + (2 * asked + 1) * PAUSE
        else:  # it may find less than it was asked for
            assert PASS + PAUSE <= seconds <= PASS + (asked + 1) * PAUSE
    assert max(seconds for _, seconds in seen) >= PASS + (LONGEST + 1) * PAUSE


def test_a_slow_processor_makes_blocks_shorter(clock: Clock) -> None:
    """The processor decides both sides' tokens, so that all drafts are kept: they pay, until each asks it twice."""
    chosen = {}
    for seconds in (0.0, PAUSE):
        asked = [count for count, _ in decode(clock, "heads", seconds).seen[NUM_CALIBRATED:]]
        chosen[seconds] = sum(asked) / len(asked)
    assert chosen[0.0] > 2.0
    assert chosen[PAUSE] < 1.0


def test_the_hybrid_sees_it(clock: Clock) -> None:
    """What it thinks a pass takes holds the processor's time at all of its places."""
    target = slow_target(clock)
    head = HeadsDrafter(build_head(target, HeadOptions(kind="mtp", num_draft_tokens=LONGEST)))
    drafter = HybridDrafter(NgramDrafter(target, 1, 3), head)
    processors = ProcessorParams(custom=(Slow(clock, PAUSE),))
    Decoder(target, drafter, LONGEST).generate(
        [[7, 8] * 4], GenerationParams(60, eos_token_ids=(), processors=processors)
    )
    times = next(iter(drafter._times.values()))
    assert times.target.seconds(LONGEST) == pytest.approx(PASS + (LONGEST + 1) * PAUSE, rel=0.02)
