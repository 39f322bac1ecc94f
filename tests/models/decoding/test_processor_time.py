"""The time that processors take counts where lengths are chosen: it is part of what a block is seen to take."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.decoding.decoder import Decoder
from models.decoding.drafters.heads import HeadsDrafter
from models.decoding.drafters.hybrid import HybridDrafter
from models.decoding.drafters.ngram import NgramDrafter
from models.decoding.length import CALIBRATION, AdaptiveLength
from models.decoding.processors import ProcessorParams
from models.decoding.rows import GenerationParams
from models.heads import HeadOptions, build_head
from models.tiny import make_tiny_target

LONGEST, PAUSE = 4, 0.02  # seconds a place, some ten passes of the tiny target
PASS = 0.008  # seconds that a slower target takes
NUM_CALIBRATED = 3 * CALIBRATION  # blocks with which the controller begins


class Slow:
    """Takes its time at each place, and says what comes next: the same token as long as it lasts."""

    depends_only_on_prefix = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.full_like(scores, -1.0).index_fill(1, torch.tensor([7 + input_ids.shape[1] % 2]), 1.0)


class Recorded(AdaptiveLength):
    """Remembers what was asked for and how long it took."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.seen: list[tuple[int, float]] = []

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        self.seen.append((asked, seconds))
        super().observe(asked, num_accepted, seconds)


def decode(drafter_name: str, seconds: float, num_tokens: int = 110, pass_seconds: float = 0.0) -> Recorded:
    target = make_tiny_target()
    target.model.register_forward_pre_hook(lambda *_: time.sleep(pass_seconds))
    length = Recorded(LONGEST)
    head = HeadsDrafter(build_head(target, HeadOptions(kind="mtp", num_draft_tokens=LONGEST)))
    drafter = {"text": NgramDrafter(target, 1, 3), "heads": head}[drafter_name]
    processors = ProcessorParams(custom=(Slow(seconds),))
    Decoder(target, drafter, LONGEST, length=length).generate(
        [[7, 8] * 4], GenerationParams(num_tokens, eos_token_ids=(), processors=processors)
    )
    return length


@pytest.mark.parametrize("drafter", ["text", "heads"])
def test_a_block_is_seen_to_take_the_processors_time(drafter: str) -> None:
    """Text drafters ask no processor; heads ask it at each drafted place as well."""
    for asked, seconds in decode(drafter, PAUSE, num_tokens=40).seen:
        places = 1 if drafter == "text" else 1 + asked
        assert seconds >= places * PAUSE


def test_a_slow_processor_makes_blocks_shorter() -> None:
    """The processor decides both sides' tokens, so that all drafts are kept: they pay, until each asks it twice."""
    chosen = {}
    for seconds in (0.0, 3 * PASS):
        asked = [count for count, _ in decode("heads", seconds, pass_seconds=PASS).seen[NUM_CALIBRATED:]]
        chosen[seconds] = sum(asked) / len(asked)
    assert chosen[0.0] > 2.0
    assert chosen[3 * PASS] < 1.0


def test_the_hybrid_sees_it() -> None:
    """What it thinks a pass takes, and a step of its second source, holds the processors' time at these places."""
    target = make_tiny_target()
    head = HeadsDrafter(build_head(target, HeadOptions(kind="mtp", num_draft_tokens=LONGEST)))
    drafter = HybridDrafter(NgramDrafter(target, 1, 3), head)
    processors = ProcessorParams(custom=(Slow(PAUSE),))
    Decoder(target, drafter, LONGEST).generate(
        [[7, 8] * 4], GenerationParams(60, eos_token_ids=(), processors=processors)
    )
    times = next(iter(drafter._times.values()))
    assert times.target.seconds(LONGEST) >= (1 + LONGEST) * PAUSE * 0.8
