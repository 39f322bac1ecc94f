"""Decoding with trees by heads of every kind: lossless, greedy and sampled."""

import pytest
import torch

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.heads import HEAD_KINDS
from models.sampling import SamplingParams
from models.target.tiny import FAMILIES, make_tiny_target
from models.verification.blockwise import BlockVerification
from models.verification.token import TokenVerification
from tests.models.decoding.scripted import random_prompts, transformers_generate
from tests.models.decoding.trees import LAW_VOCAB, check_law
from tests.models.drafters.test_heads import make_head
from tests.models.drafters.test_tree import DEPTH, SHAPES, make
from tests.train.heads.test_acceptance import NUM_PROMPTS, train_quickly

NEW_TOKENS = 12
PROMPTS = random_prompts(4, longest=25)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_reference(family: str) -> None:
    target = make_tiny_target(family=family)
    expected = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert [transformers_generate(target, prompt, NEW_TOKENS) for prompt in PROMPTS] == expected
    for kind in HEAD_KINDS:
        head = make_head(target, kind)
        runs = [("static", 4, 4), ("dynamic", 4, 4), ("static", 2, 1), ("dynamic", 3, 1)]
        for shape, depth, max_batch_size in runs if family == "llama" else runs[:2]:
            decoder = Decoder(target, make(head, shape), depth)
            results = decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS), max_batch_size)
            assert [result.tokens for result in results] == expected


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_trained_heads_keep_deep_paths(kind: str) -> None:
    """Heads that know the texts: what they draft at every depth is kept, and the output is the reference's."""
    target = make_tiny_target()
    head = train_quickly(target, kind, DEPTH, None, steps=60)
    prompts = random_prompts(NUM_PROMPTS, longest=12, seed=3)
    expected = [decode_plainly(target, prompt, NEW_TOKENS, eos_token_ids=()) for prompt in prompts]
    for shape in SHAPES:
        for max_batch_size in (1, 4):
            decoder = Decoder(target, make(head, shape), DEPTH)
            results = decoder.generate(prompts, GenerationParams(NEW_TOKENS, eos_token_ids=()), max_batch_size)
            assert [result.tokens for result in results] == expected
            counters = add_up(result.counters for result in results)
            assert min(counters.accepted_at[:3]) > 0
            assert counters.mean_block_length > 1.5


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_the_batch(kind: str, shape: str) -> None:
    target = make_tiny_target()
    head = make_head(target, kind)
    for temperature, rule in ((0.0, None), (1.0, TokenVerification()), (1.0, BlockVerification())):
        params = GenerationParams(NEW_TOKENS, SamplingParams(temperature, top_k=20), seed=3, eos_token_ids=())
        decoder = Decoder(target, make(head, shape), DEPTH, rule)
        alone = decoder.generate(PROMPTS, params, max_batch_size=1)
        assert decoder.generate(PROMPTS, params, max_batch_size=3) == alone


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_near_their_end_have_the_trees_of_all(shape: str) -> None:
    """Three nodes over five tokens: were the tree made for what a batch may still emit, others would be accepted."""
    target = make_tiny_target(seed=3, vocab_size=LAW_VOCAB, num_hidden_layers=1)
    prompts = random_prompts(60, longest=5, vocab_size=LAW_VOCAB)
    params = GenerationParams(5, SamplingParams(1.0), seed=1, eos_token_ids=())
    decoder = Decoder(target, make(make_head(target, "medusa"), shape, num_nodes=3), DEPTH)
    assert decoder.generate(prompts, params, 60) == decoder.generate(prompts, params, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_reduced_vocabulary_and_fewer_tokens_than_children(kind: str, shape: str) -> None:
    """Two tokens may be drafted: a third child never counts; the output is the target's."""
    target = make_tiny_target()
    drafter = make(make_head(target, kind, torch.tensor([40, 140])), shape)
    expected = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    decoder = Decoder(target, drafter, DEPTH)
    assert [r.tokens for r in decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS))] == expected
    sampled = decoder.generate(PROMPTS, GenerationParams(40, SamplingParams(1.0), eos_token_ids=()))
    for result in sampled:
        drafted = zip(result.tokens, result.accepted, strict=True)
        assert all(token in (40, 140) for token, is_accepted in drafted if is_accepted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_law_is_the_targets(kind: str, shape: str) -> None:
    """See `check_law` for N, threshold and false-alarm probability."""
    # An eagle3 head needs three places to read at: before, between and behind two layers.
    target = make_tiny_target(seed=3, vocab_size=LAW_VOCAB, num_hidden_layers=2 if kind == "eagle3" else 1)
    rule = TokenVerification() if kind == "hydra" else BlockVerification()
    drafter = make(make_head(target, kind), shape, num_nodes=6)
    check_law(Decoder(target, drafter, 3, rule), [[3, 4, 1], [2], [4, 4, 3, 1, 0, 2]])
