"""Counts by hand, and of transformers' prompt lookup against what its own loop says that it matched."""

import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import eval.speed.passes
from eval.speed.methods import GenerateMethod
from eval.speed.passes import count_blocks, count_passes
from models.decoding.counters import Counters, add_up
from models.sampling import SamplingParams
from models.target.tiny import make_tiny_target
from tests.eval.planting import planted
from tests.models.decoding.scripted import random_prompts

# candidates of each pass, tokens, (blocks, drafted, accepted, emitted)
BY_HAND: list[tuple[list[list[int]], list[int], tuple[int, int, int, int]]] = [
    ([[1, 2], [4, 5]], [1, 2, 3, 4, 9], (2, 4, 3, 5)),  # kept whole with a bonus; then one kept, one recovered
    ([[1, 2], [4, 5, 6]], [1, 2, 3, 4], (2, 3, 3, 4)),  # the second pass ends at a kept token: the others do not count
    ([[1, 2]], [9], (1, 2, 0, 1)),  # nothing kept
    ([[1, 2]], [1, 9], (1, 2, 1, 2)),  # the recovered token ends it
    ([[1], []], [1, 3, 8], (2, 1, 1, 3)),  # a last pass without candidates
]


@pytest.mark.parametrize(("candidates", "tokens", "expected"), BY_HAND)
def test_counts_by_hand(candidates: list[list[int]], tokens: list[int], expected: tuple[int, ...]) -> None:
    counters = count_blocks(candidates, tokens)
    assert (counters.blocks, counters.drafted, counters.accepted, counters.emitted) == expected
    assert sum(counters.drafted_at) == counters.drafted
    assert sum(counters.accepted_at) == counters.accepted


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("num_emitted = min(num_kept + 1, len(rest))", "num_emitted = num_kept + 1"),
        ("num_kept if num_emitted == num_kept else len(drafted)", "len(drafted)"),
        ("if a != b), min(len(drafted), len(rest)))", "if a != b), 0)"),
    ],
)
def test_planted_faults_in_counting(right: str, wrong: str) -> None:
    code = planted(eval.speed.passes, right, wrong)

    def counts(candidates: list[list[int]], tokens: list[int]) -> tuple[int, ...] | None:
        try:
            found: Counters = code.count_blocks(candidates, tokens)
        except ValueError:
            return None
        return (found.blocks, found.drafted, found.accepted, found.emitted)

    assert any(counts(candidates, tokens) != expected for candidates, tokens, expected in BY_HAND)


def test_counts_that_do_not_add_up_are_told() -> None:
    with pytest.raises(ValueError, match="emitted 3 tokens, and its passes account for 1"):
        count_blocks([[5]], [1, 2, 3])


@pytest.mark.parametrize(("candidates", "tokens"), [(candidates, tokens) for candidates, tokens, _ in BY_HAND])
def test_passes_show_their_candidates(candidates: list[list[int]], tokens: list[int]) -> None:
    """Behind the prompt in the first pass, behind the last settled token in the others."""
    settled = [[7, 8, 9], *[[0]] * (len(candidates) - 1)]
    shown = [torch.tensor([[*before, *drafted]]) for before, drafted in zip(settled, candidates, strict=True)]
    assert count_passes(shown, 3, tokens) == count_blocks(candidates, tokens)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.3)])
def test_prompt_lookup_is_counted(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass a block, the prompt's included; kept is what transformers matched, and a kept token that ends it."""
    matched: list[int] = []

    def note(self: PromptLookupCandidateGenerator, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        matched.append(num_matches)

    monkeypatch.setattr(PromptLookupCandidateGenerator, "update_candidate_strategy", note)
    target, prompts = make_tiny_target(), random_prompts(4, longest=20)
    method = GenerateMethod("", target, sampling, 1, prompt_lookup_tokens=3)
    outcome = method.run(prompts, 40, seed=0)
    total = add_up(outcome.counters)
    assert total.blocks == len(matched)
    assert total.emitted == sum(matched) + len(matched) == sum(map(len, outcome.tokens))
    assert sum(matched) <= total.accepted <= sum(matched) + len(prompts)
    assert 0 < total.accepted < total.drafted
    assert len(total.drafted_at) == 3
    assert total.mean_block_length == total.emitted / total.blocks > 1
    assert not target.model._forward_pre_hooks
    assert GenerateMethod("", target, sampling, 1).run(prompts, 4, seed=0).counters == []
