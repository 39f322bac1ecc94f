"""Planted differences are found where they are, with the gap that transformers' own logits give."""

import math

import pytest
import torch
from torch import Tensor

from eval.speed.acceptance import Agreement, Difference, compare_outputs, first_difference, gap_at, join
from models.decoding.reference import decode_plainly
from models.target.model import Target
from models.target.tiny import make_tiny_target

PROMPT = [5, 80, 41, 13]
PLACE = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target()


@pytest.fixture(scope="module")
def output(target: Target) -> list[int]:
    return decode_plainly(target, PROMPT, 9, eos_token_ids=())


@torch.no_grad()
def next_logits(target: Target, context: list[int]) -> Tensor:
    return target.model(input_ids=torch.tensor([context])).logits[0, -1].float()


@pytest.mark.parametrize(
    ("tokens", "others", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([], [], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([4, 2], [], 0)],
)
def test_first_difference(tokens: list[int], others: list[int], place: int | None) -> None:
    assert first_difference(tokens, others) == place


def test_identical_outputs(target: Target, output: list[int]) -> None:
    agreement = compare_outputs(target, [PROMPT, PROMPT], [output, output], [list(output), list(output)])
    assert agreement == Agreement(2)
    assert agreement.num_identical == 2
    assert agreement.largest_gap == 0


@pytest.mark.parametrize("rank", [1, 2, 50])
def test_planted_difference(target: Target, output: list[int], rank: int) -> None:
    """The second best token is off by the top-2 gap; a worse one by more."""
    logits = next_logits(target, PROMPT + output[:PLACE])
    order = logits.argsort(descending=True).tolist()
    assert order[0] == output[PLACE]
    planted = [*output[:PLACE], order[rank], 0, 0]
    agreement = compare_outputs(target, [PROMPT, PROMPT], [output, planted], [output, output])
    (difference,) = agreement.differences
    assert (difference.prompt, difference.place) == (1, PLACE)
    assert (difference.token, difference.other) == (order[rank], output[PLACE])
    assert difference.gap == pytest.approx(float(logits[order[0]] - logits[order[rank]]), rel=1e-5)
    assert agreement.num_identical == 1
    assert agreement.largest_gap == difference.gap > 0


def test_wrong_tokens_cannot_hide_behind_a_near_tie(target: Target, output: list[int]) -> None:
    """Two bad tokens with nearly equal logits: far from the best all the same."""
    logits = next_logits(target, PROMPT + output[:PLACE])
    order = logits.argsort(descending=True).tolist()
    assert gap_at(target, PROMPT + output[:PLACE], order[100], order[101]) == pytest.approx(
        float(logits[order[0]] - logits[order[101]]), rel=1e-5
    )


def test_one_that_ended_early_is_no_near_tie(target: Target, output: list[int]) -> None:
    agreement = compare_outputs(target, [PROMPT], [output[:3]], [output])
    assert agreement.differences == (Difference(0, 3, None, output[3], math.inf),)


def test_bfloat16_gap_is_in_bfloat16() -> None:
    target = make_tiny_target(dtype="bfloat16")
    logits = next_logits(target, PROMPT)
    best, second = logits.argsort(descending=True)[:2].tolist()
    assert gap_at(target, PROMPT, best, second) == float(logits[best] - logits[second])


def test_join_counts_prompts_on() -> None:
    one = Agreement(3, (Difference(2, 0, 1, 2, 0.5),))
    other = Agreement(4, (Difference(0, 7, 3, 4, 1.5),))
    total = join([one, other])
    assert [difference.prompt for difference in total.differences] == [2, 3]
    assert (total.num_sequences, total.num_identical, total.largest_gap) == (7, 5, 1.5)
