"""How long a block drafts: the controller against enumeration of its choices, and decoding that it must not change."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from models.decoding.decoder import Decoder
from models.decoding.length import AdaptiveLength, FixedLength
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter
from models.drafters.stop import DraftStop, with_stop
from models.drafters.text.ngram import NgramDrafter
from models.heads import HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts
from tests.models.decoding.test_decoder_sampled import (
    FALSE_ALARM,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAMPLING,
    VOCAB_SIZE,
    chi_square_p_value,
    exact_law,
)
from tests.models.drafters.test_model import sibling

LONGEST = 8
NUM_BLOCKS = 2000
NOISE = 0.05  # of a block's time, relative
# Kept, given what stands before: hopeless, poor, fair, good, nearly always.
KEPT = (0.0, 0.2, 0.5, 0.8, 0.95)
# Times of blocks of 0 .. 8 drafted tokens: cheap ones, a draft that costs a third of a pass, and a batch whose pass
# costs its width.
TIMES = {
    "cheap": [1.0 + 0.03 * k for k in range(LONGEST + 1)],
    "dear": [1.0 + 0.35 * k for k in range(LONGEST + 1)],
    "wide": [1.0 + 0.9 * k for k in range(LONGEST + 1)],
    "stepped": [1.0, 1.6, 1.6, 1.6, 1.6, 2.6, 2.6, 2.6, 2.6],
}


class World:
    """Blocks whose tokens are kept independently with one probability, in times with noise and a slow drift."""

    def __init__(
        self, kept: float, times: Sequence[float], num_rows: int = 1, held_up: float = 0.0, seed: int = 0
    ) -> None:
        self.kept, self.times, self.num_rows, self.held_up = kept, times, num_rows, held_up
        self.asked: list[int] = []
        self.generator = np.random.default_rng(seed)
        self.seconds = self.tokens = 0.0
        self.num_blocks = 0

    def run(self, length: AdaptiveLength | FixedLength, num_blocks: int) -> float:
        """Tokens a second. A block's first time is three times as long, as for real."""
        length.begin()
        for _ in range(num_blocks):
            asked = length.choose(self.num_rows, LONGEST)
            drift = 1.0 + self.num_blocks / NUM_BLOCKS  # the context grows
            noise = 1.0 + NOISE * self.generator.standard_normal()
            seconds = 0.04 * drift * self.times[asked] * noise * (3.0 if self.num_blocks == 0 else 1.0)
            seconds *= 5.0 if self.generator.random() < self.held_up else 1.0
            self.asked.append(asked)
            passed = self.generator.random((self.num_rows, asked)) < self.kept
            counts = passed.cumprod(axis=1).sum(axis=1).tolist()
            length.observe(asked, counts, seconds)
            self.seconds += seconds
            self.tokens += sum(counts) + self.num_rows
            self.num_blocks += 1
        return self.tokens / self.seconds


def best_rate(kept: float, times: Sequence[float]) -> float:
    """Of the best fixed length in tokens a unit of time, by the formula."""
    return max(sum(kept**i for i in range(k + 1)) / times[k] for k in range(LONGEST + 1))


@pytest.mark.parametrize(("kept", "name"), list(itertools.product(KEPT, TIMES)))
def test_near_the_best_fixed_length(kept: float, name: str) -> None:
    """Within 4% of the best fixed length, plain decoding included: everything, the search for it too, is paid for."""
    shares = []
    for seed in range(3):
        world, length = World(kept, TIMES[name], seed=seed), AdaptiveLength(LONGEST)
        world.run(length, 100)  # as in the bench, where a warm-up comes before what is measured
        for _ in range(5):
            before = world.tokens, world.seconds
            world.run(length, NUM_BLOCKS // 5)
            drift = 1.0 + (world.num_blocks - NUM_BLOCKS / 10) / NUM_BLOCKS
            rate = (world.tokens - before[0]) / (world.seconds - before[1]) * 0.04 * drift
            shares.append(rate / best_rate(kept, TIMES[name]))
    assert np.mean(shares) > 0.96


def test_follows_a_change() -> None:
    """From text that is never guessed to text that always is, and back."""
    length = AdaptiveLength(LONGEST)
    bad, good = World(0.0, TIMES["dear"]), World(0.98, TIMES["dear"])
    for world, num_blocks, least, most in ((bad, 400, 0.0, 1.0), (good, 400, 4.0, 8.0), (bad, 400, 0.0, 1.0)):
        world.run(length, num_blocks)
        world.asked.clear()
        world.run(length, 50)
        assert least <= np.mean(world.asked) <= most


def test_costs_are_kept_for_each_number_of_rows() -> None:
    """Where a wide batch makes drafting lose, a single row still drafts."""
    length = AdaptiveLength(LONGEST)
    one, many = World(0.6, TIMES["cheap"]), World(0.6, TIMES["wide"], num_rows=32)
    for _ in range(3):
        one.run(length, 200)
        many.run(length, 200)
    assert np.median(one.asked[-100:]) > 2
    assert np.median(many.asked[-100:]) == 0


def test_a_block_that_was_held_up_changes_nothing() -> None:
    """One block in ten takes five times as long, whatever its length: still within 8% of the best fixed length."""
    for kept, name in ((0.0, "dear"), (0.8, "dear"), (0.95, "cheap")):
        world = World(kept, TIMES[name], held_up=0.1)
        rate = world.run(AdaptiveLength(LONGEST), NUM_BLOCKS)
        fixed = [World(kept, TIMES[name], held_up=0.1).run(FixedLength(k), NUM_BLOCKS) for k in range(LONGEST + 1)]
        assert rate > 0.92 * max(fixed)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        AdaptiveLength(0)
    target = make_tiny_target()
    with pytest.raises(ValueError, match="length=entropy with NgramDrafter"):
        with_stop(NgramDrafter(target, 1, 3), DraftStop("entropy", 0.5))
    for bad in ({"kind": "often"}, {"threshold": 1.5}, {"threshold": -0.1}, {"scale": 0.0}):
        with pytest.raises(ValueError, match=r"length\."):
            DraftStop(**{"kind": "entropy", "threshold": 0.5, **bad})


class Restless:
    """Asks for every length in turn."""

    def __init__(self, longest: int) -> None:
        self.longest, self.num_blocks = longest, 0
        self.seen: list[tuple[int, list[int]]] = []

    def begin(self) -> None:
        self.num_begun = getattr(self, "num_begun", 0) + 1

    def choose(self, num_rows: int, longest: int) -> int:
        self.num_blocks += 1
        self.asked = min(longest, [0, 0, 0, 2, 0, self.longest, 1][self.num_blocks % 7])
        return self.asked

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        assert asked == self.asked
        assert seconds > 0
        assert max(num_accepted) <= asked
        self.seen.append((asked, list(num_accepted)))


def drafters(target: Target) -> dict[str, object]:
    return {
        "model": ModelDrafter(sibling(target, 0.02), target),
        "mtp": HeadsDrafter(build_head(target, HeadOptions(kind="mtp", num_draft_tokens=4))),
        "hydra": HeadsDrafter(build_head(target, HeadOptions(kind="hydra", num_draft_tokens=4))),
        "medusa": HeadsDrafter(build_head(target, HeadOptions(kind="medusa", num_draft_tokens=4))),
        "ngram": NgramDrafter(target, 1, 3),
    }


@pytest.mark.parametrize("name", ["model", "mtp", "hydra", "medusa", "ngram"])
@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_greedy_with_any_lengths(name: str, max_batch_size: int) -> None:
    """Blocks of 0 .. K tokens in one text, ragged rows that come and go: the reference's tokens."""
    target = make_tiny_target()
    prompts = random_prompts(6, longest=20)
    expected = [decode_plainly(target, prompt, 30) for prompt in prompts]
    length = Restless(4)
    decoder = Decoder(target, drafters(target)[name], 4, length=length)
    results = decoder.generate(prompts, GenerationParams(30), max_batch_size)
    assert [result.tokens for result in results] == expected
    assert {asked for asked, _ in length.seen} >= {0, 1, 2, 4}
    assert sum(sum(accepted) for _, accepted in length.seen) >= sum(r.counters.accepted for r in results)


def test_undrafted_blocks_are_read_later() -> None:
    """A head that skipped blocks drafts what one that read every block drafts."""
    target = make_tiny_target()
    prompts = random_prompts(3, longest=20)
    shares = {}
    for name in ("model", "mtp", "hydra", "medusa"):
        drafter = drafters(target)[name]
        eager, lazy = [
            [r.counters for r in Decoder(target, drafter, 4, length=length).generate(prompts, GenerationParams(40))]
            for length in (FixedLength(4), Every(3))
        ]
        shares[name] = [
            sum(c.accepted_at[0] for c in found) / sum(c.drafted_at[0] for c in found) for found in (eager, lazy)
        ]
    assert shares["model"][0] > 0.5
    assert shares["model"][1] > 0.5


class Every(FixedLength):
    """Drafts in every n-th block alone."""

    def __init__(self, every: int) -> None:
        super().__init__(4)
        self.every, self.num_blocks = every, 0

    def choose(self, num_rows: int, longest: int) -> int:
        self.num_blocks += 1
        return 0 if self.num_blocks % self.every else super().choose(num_rows, longest)


@pytest.mark.parametrize("stop", [None, DraftStop("entropy", 0.35), DraftStop("confidence", 0.15)])
def test_law_with_stops_and_lengths(stop: DraftStop | None) -> None:
    """N = 2000 texts of 3 tokens a prompt: the target's law, false alarm 1e-6 each, whatever ends the drafts."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    drafter = ModelDrafter(sibling(target, 0.3), target)
    length = Restless(3) if stop is None else FixedLength(3)
    prompts = [[5, 7, 4], [9], [3, 3, 8, 10, 6]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    decoder = Decoder(target, with_stop(drafter, stop) if stop else drafter, 3, length=length)
    results = decoder.generate(prompts * NUM_SAMPLES, params, 256)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    drafted = sum(result.counters.drafted for result in results)
    asked = 2 * len(results)
    assert 0.05 * asked < drafted < 0.95 * asked, "the stop must cut some drafts, and not all"


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
@pytest.mark.parametrize("stop", [DraftStop("entropy", 0.2), DraftStop("confidence", 0.05), DraftStop("entropy", 0.0)])
def test_greedy_with_stops(kind: str, stop: DraftStop) -> None:
    target = make_tiny_target()
    prompts = random_prompts(5, longest=20)
    expected = [decode_plainly(target, prompt, 24) for prompt in prompts]
    drafter = with_stop(HeadsDrafter(build_head(target, HeadOptions(kind=kind, num_draft_tokens=4))), stop)
    for max_batch_size in (1, 4):
        results = Decoder(target, drafter, 4).generate(prompts, GenerationParams(24), max_batch_size)
        assert [result.tokens for result in results] == expected


def test_stops_by_hand() -> None:
    """Two rows over three places; entropies ln 1, ln 2, ln 4 are exact."""
    q = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    entropy = DraftStop("entropy", threshold=0.5, scale=0.3)  # 1 - sqrt(.3 H) is 1, .544, .355
    assert entropy.before(q).tolist() == [False, False, True]
    assert entropy.after(torch.tensor([0.0, 1.0])).tolist() == [False, False]
    confidence = DraftStop("confidence", threshold=0.3)
    assert confidence.before(q).tolist() == [False] * 3
    assert confidence.after(torch.tensor([0.29, 0.31])).tolist() == [True, False]
