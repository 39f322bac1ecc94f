"""The generated stories: right sums, free wording between them, and held-out sums that no training prompt has."""

import math
import random
import re
from collections import Counter

import pytest

from train.data.prompts import DataOptions, load_prompts
from train.data.sources import stories
from train.data.sources.record import Prompt


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_prompts(DataOptions(source="stories"))


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_every_number_of_a_story_is_right(prompts: list[Prompt]) -> None:
    assert len(prompts) > 3900
    for prompt in prompts:
        a, b = numbers(prompt.content())
        assert stories.MIN_NUMBER <= min(a, b) <= max(a, b) <= stories.MAX_NUMBER
        assert prompt.answer is not None
        assert numbers(prompt.answer) == [a, b, a + b, a + b]
        assert prompt.answer.endswith(f"\n#### {a + b}")
        assert not set("{}") & set(prompt.answer)
        assert "  " not in prompt.answer


def test_held_out_sums_are_in_no_training_prompt(prompts: list[Prompt]) -> None:
    pairs: dict[str, set[tuple[int, ...]]] = {"train": set(), "selection": set(), "test": set()}
    for prompt in prompts:
        pairs[prompt.split].add(tuple(sorted(numbers(prompt.content()))))
    assert sum(map(len, pairs.values())) == len(set.union(*pairs.values()))
    counts = Counter(prompt.split for prompt in prompts)
    assert 0.03 < counts["selection"] / len(prompts) < 0.07
    assert 0.03 < counts["test"] / len(prompts) < 0.07


def test_wording_is_free() -> None:
    """One prompt has thousands of stories: as many as its slots' choices, less the numbers."""
    texts = [stories.tell(random.Random(seed), "Rosa", "maps", 2, 3) for seed in range(3000)]
    assert len(set(texts)) > 2990
    slots = (stories.WEATHERS, stories.TIMES, stories.MOVES, stories.PLACES, stories.MOODS, stories.GIVERS)
    slots += (stories.HANDS, stories.ENDS, stories.TOTALS)
    assert math.prod(map(len, slots)) > 10**8
    assert all(len(set(slot)) == len(slot) for slot in slots)


def test_same_seed_same_stories_and_another_seed_others() -> None:
    first, again, other = (stories.generate(seed, 0.1) for seed in (0, 0, 1))
    assert first == again
    assert len({one.answer for one in first} & {one.answer for one in other}) == 0
