"""Faults that other implementations have had, each shown not to be ours. Those of single rules are with the rules."""

import itertools

import numpy as np
import pytest
import torch

from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.base import Draft
from models.drafters.heads import HeadsDrafter
from models.heads import HeadOptions, build_head
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import BigramDrafter, ScriptedDrafter, random_prompts
from tests.models.decoding.test_decoder_sampled import (
    FALSE_ALARM,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAMPLING,
    VOCAB_SIZE,
    chi_square_p_value,
    exact_law,
)

PROMPTS = random_prompts(6, longest=12)
FILTERS = [
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=7),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(1.0, min_p=0.1),
]


class GreedyBigramDrafter(BigramDrafter):
    """Always the most likely token, and no distribution, even where the target samples."""

    def propose(self, state, num_draft_tokens, params, uniforms_BK, processor=None):  # type: ignore[no-untyped-def]
        draft = super().propose(state, num_draft_tokens, SamplingParams(), None, processor)
        return Draft(draft.tokens_BK)


class SoftGreedyDrafter(GreedyBigramDrafter):
    """The fault: greedy tokens, handed in with the soft distribution that they were not drawn from."""

    def propose(self, state, num_draft_tokens, params, uniforms_BK, processor=None):  # type: ignore[no-untyped-def]
        tokens_BK = super().propose(state, num_draft_tokens, params, uniforms_BK).tokens_BK
        before_BK = torch.cat([torch.tensor(state)[:, None], tokens_BK[:, :-1]], dim=1)
        return Draft(tokens_BK, transform_logits(self.table_VV[before_BK], params))


@pytest.mark.parametrize(("kind", "is_right"), [(GreedyBigramDrafter, True), (SoftGreedyDrafter, False)])
def test_greedy_draft_under_a_sampling_target(kind: type[BigramDrafter], is_right: bool) -> None:
    """q is one-hot then. N = 2000, false alarm 1e-6; the fault with a soft q is seen at the same N."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    results = Decoder(target, kind(VOCAB_SIZE), 2).generate([[5, 7, 4]] * NUM_SAMPLES, params, 256)
    p_value = chi_square_p_value([result.tokens for result in results], exact_law(target, [5, 7, 4], SAMPLING))
    assert (p_value > FALSE_ALARM) == is_right


@pytest.mark.parametrize("sampling", FILTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_q_is_what_was_sampled_from(sampling: SamplingParams, dtype: str) -> None:
    """Under the target's own transforms, in float32 like p, and each token is the one its uniform picks from it."""
    target = make_tiny_target(dtype=dtype)
    head = build_head(target, HeadOptions(num_draft_tokens=3)).to(target.dtype).eval()
    drafter = HeadsDrafter(head)
    state = drafter.start([[5]] * 4)
    generator = torch.Generator().manual_seed(0)
    hidden_BTH = torch.randn(4, 6, target.hidden_size, generator=generator).to(target.dtype)
    ids_BT = torch.randint(3, 259, (4, 6), generator=generator)
    drafter.absorb(state, hidden_BTH, ids_BT, [6, 4, 6, 1])
    uniforms_BK = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    draft = drafter.propose(state, 3, sampling, uniforms_BK)
    assert draft.probs_BKV is not None
    assert draft.probs_BKV.dtype == transform_logits(target.logits(hidden_BTH), sampling).dtype == torch.float32
    assert torch.equal(draft.tokens_BK, sample_from(draft.probs_BKV, uniforms_BK))
    for k in range(3):
        logits_BV = target.hide_padding(head.logits(draft.hidden_BKH[:, k], k + 1))
        assert torch.equal(draft.probs_BKV[:, k], transform_logits(logits_BV, sampling))


@pytest.mark.parametrize("num_draft_tokens", [2, 5])
def test_first_stop_in_a_block_wins(num_draft_tokens: int) -> None:
    """EOS just before, at, and just behind the length limit, wherever the block's edges fall."""
    target = make_tiny_target()
    prompt = PROMPTS[0]
    endless = decode_plainly(target, prompt, 40, eos_token_ids=())
    drafter = ScriptedDrafter(target, {tuple(prompt): endless})
    for place in (3, 4, 5, 6, 7, 8):
        eos = endless[place]
        first = endless.index(eos)
        for limit in (first, first + 1, first + 2, first + 4):
            if limit == 0:
                continue
            params = GenerationParams(limit, eos_token_ids=(eos,))
            (result,) = Decoder(target, drafter, num_draft_tokens).generate([prompt], params)
            assert result.tokens == endless[: min(limit, first + 1)]
            assert result.finish_reason == ("length" if limit <= first else "eos")
            assert result.counters.emitted == len(result.tokens)
            assert result.counters.accepted == sum(result.accepted)


def test_padding_rows_are_never_emitted() -> None:
    """264 rows in the output head, 259 tokens: the five others win every argmax, and are still not there."""
    target = make_tiny_target(family="qwen3")
    assert (target.vocab_size, target.num_tokens) == (264, 259)
    with torch.no_grad():
        target.output_head.weight[target.num_tokens :] = 3.0 * target.output_head.weight[: 264 - target.num_tokens]
    ids_1T = torch.tensor([PROMPTS[0]])
    assert target.model(input_ids=ids_1T).logits[0].argmax(dim=-1).max() >= target.num_tokens, "the trap must be set"
    drafter = BigramDrafter(target.vocab_size)
    for temperature, decoder in itertools.product((0.0, 1.5), (Decoder(target), Decoder(target, drafter, 3))):
        params = GenerationParams(30, SamplingParams(temperature), eos_token_ids=(), logprobs=True)
        for result in decoder.generate(PROMPTS, params):
            assert max(result.tokens) < target.num_tokens
            assert result.finish_reason == "length"
    assert max(decode_plainly(target, PROMPTS[0], 30, eos_token_ids=())) < target.num_tokens


SICK = 200  # a token whose embedding is no number


def sick_target(value: float) -> Target:
    target = make_tiny_target(family="qwen3")  # its output head is not tied to the embedding
    with torch.no_grad():
        target.model.get_input_embeddings().weight[SICK] = value
    return target


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [SamplingParams(), *FILTERS], ids=str)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_sick_row_harms_no_other(value: float, sampling: SamplingParams, drafts: int) -> None:
    """NaN in a row's hidden states, keys and values: it ends, and rows beside it or in its place later are well."""
    target, healthy = sick_target(value), make_tiny_target(family="qwen3")
    prompts = [[p if p != SICK else 1 + p for p in prompt] for prompt in random_prompts(9, longest=12)]
    ill = [prompt if place % 3 else [*prompt, SICK] for place, prompt in enumerate(prompts)]
    drafter = BigramDrafter(target.vocab_size) if drafts else None
    if drafter is not None:
        drafter.table_VV[:, SICK] = -np.inf
    params = GenerationParams(14, sampling, seed=2, eos_token_ids=(SICK,))
    for batch in (2, 4, 9):
        expected = Decoder(healthy, drafter, drafts).generate(prompts, params, batch)
        results = Decoder(target, drafter, drafts).generate(ill, params, batch)
        for place, (result, well) in enumerate(zip(results, expected, strict=True)):
            if place % 3 == 0:
                assert (result.tokens, result.finish_reason) == ([], "invalid")
            else:
                assert (result.tokens, result.finish_reason) == (well.tokens, well.finish_reason)


def test_a_row_that_falls_ill_keeps_what_it_has() -> None:
    """The first emitted token's embedding is NaN: that token is returned, and nothing is made up behind it."""
    healthy = make_tiny_target(family="qwen3")
    first = decode_plainly(healthy, PROMPTS[0], 1)[0]
    target = make_tiny_target(family="qwen3")
    with torch.no_grad():
        target.model.get_input_embeddings().weight[first] = torch.nan
    for drafter, drafts in ((None, 0), (BigramDrafter(target.vocab_size), 3)):
        (result,) = Decoder(target, drafter, drafts).generate([PROMPTS[0]], GenerationParams(8, eos_token_ids=()))
        assert (result.tokens, result.finish_reason) == ([first], "invalid")
        assert result.counters.emitted == 1
        assert result.counters.accepted == 0


class SickDrafter(BigramDrafter):
    """After some tokens its distribution is NaN."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.table_VV[::2] = torch.nan


def test_a_sick_drafter_costs_drafts_alone() -> None:
    """N = 2000, false alarm 1e-6: the law is still the target's."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    results = Decoder(target, SickDrafter(VOCAB_SIZE), 3).generate([[5, 7, 4]] * NUM_SAMPLES, params, 256)
    law = exact_law(target, [5, 7, 4], SAMPLING)
    assert chi_square_p_value([result.tokens for result in results], law) > FALSE_ALARM
    assert sum(result.counters.accepted for result in results) > 0
