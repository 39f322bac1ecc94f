"""Every row writes what plain decoding writes, whatever the model's own generation config says."""

import pytest
import torch
from transformers import GenerationConfig

import eval.speed.methods
from eval.speed.methods import (
    BARE_PASSES,
    BareForward,
    DecoderMethod,
    GenerateMethod,
    Method,
    WaitingDecoder,
    cut_at_eos,
)
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.drafters.heads import HeadsDrafter
from models.heads import HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts

NEW_TOKENS = 16
GREEDY = SamplingParams()
PROMPTS = random_prompts(5, longest=25)


@pytest.fixture(scope="module")
def target() -> Target:
    target = make_tiny_target()
    # An EOS that greedy text really meets, so that rows end at different places.
    target.eos_token_ids = (decode_plainly(target, PROMPTS[0], NEW_TOKENS)[6],)
    return target


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    outputs = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert len(outputs[0]) < NEW_TOKENS
    return outputs


def heads_decoder(target: Target, num_draft_tokens: int) -> Decoder:
    head = build_head(target, HeadOptions("mtp", 3)).eval()
    return Decoder(target, HeadsDrafter(head), num_draft_tokens)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "generate", "heads-1", "heads-4"])
def test_greedy_rows_agree(target: Target, expected: list[list[int]], kind: str, batch_size: int) -> None:
    methods: dict[str, Method] = {
        "plain": DecoderMethod("", Decoder(target), GREEDY, batch_size),
        "generate": GenerateMethod("", target, GREEDY, batch_size),
        "heads-1": DecoderMethod("", heads_decoder(target, 1), GREEDY, batch_size),
        "heads-4": DecoderMethod("", heads_decoder(target, 4), GREEDY, batch_size),
    }
    outcome = methods[kind].run(PROMPTS, NEW_TOKENS, seed=0)
    assert outcome.tokens == expected
    if outcome.counters:
        assert [counters.emitted for counters in outcome.counters] == [len(tokens) for tokens in expected]


def test_prompt_lookup_agrees(target: Target, expected: list[list[int]]) -> None:
    assert GenerateMethod("", target, GREEDY, 1, prompt_lookup_tokens=3).run(PROMPTS, NEW_TOKENS, 0).tokens == expected


def test_prompt_lookup_takes_one_prompt_at_a_time(target: Target) -> None:
    with pytest.raises(ValueError, match="batch_size=2"):
        GenerateMethod("", target, GREEDY, 2, prompt_lookup_tokens=3)


def test_the_models_own_generation_config_is_kept_out(target: Target, expected: list[list[int]]) -> None:
    own = target.model.generation_config
    banned = expected[1][1]
    hub_like = GenerationConfig(suppress_tokens=[banned], repetition_penalty=1.3, do_sample=True, temperature=5.0)
    target.model.generation_config = hub_like
    try:
        prompt = torch.tensor([PROMPTS[1]])
        theirs = target.model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert banned not in theirs[0, len(PROMPTS[1]) :].tolist()
        assert GenerateMethod("", target, GREEDY, 1).run(PROMPTS, NEW_TOKENS, 0).tokens == expected
        assert target.model.generation_config is hub_like
    finally:
        target.model.generation_config = own


def test_sampled_generate_repeats_by_seed_and_leaves_the_global_stream(target: Target) -> None:
    method = GenerateMethod("", target, SamplingParams(temperature=1.5, top_k=50, min_p=0.01), 2)
    before = torch.random.get_rng_state()
    first, again, other = (method.run(PROMPTS, NEW_TOKENS, seed).tokens for seed in (3, 3, 4))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_waiting_decoder_waits_and_writes_the_same(
    target: Target, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(eval.speed.methods, "wait_for", waits.append)
    decoder = heads_decoder(target, 2)
    twin = WaitingDecoder(target, decoder.drafter, 2)
    outcome = DecoderMethod("", twin, GREEDY, 1).run(PROMPTS, NEW_TOKENS, 0)
    assert outcome.tokens == expected
    assert len(waits) >= 3 * outcome.timings.target_passes > 0


@pytest.mark.parametrize(("max_new_tokens", "passes"), [(100, BARE_PASSES), (3, 3)])
def test_bare_forward(target: Target, max_new_tokens: int, passes: int) -> None:
    outcome = BareForward(target, 2).run(PROMPTS, max_new_tokens, 0)
    assert outcome.tokens == []
    assert outcome.timings.target_passes == passes
    assert outcome.timings.target_s > 0


def test_cut_at_eos() -> None:
    assert cut_at_eos([5, 7, 2, 0, 0], (2, 9)) == [5, 7, 2]
    assert cut_at_eos([5, 9, 2], (2, 9)) == [5, 9]
    assert cut_at_eos([5, 7], ()) == [5, 7]
