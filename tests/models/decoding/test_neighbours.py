"""A row draws from its own random stream alone: the same tokens whatever stands beside it.

Randomness is assigned per row: prompt i has the stream `rows.stream_seed(seed, first_stream + i)`, and each block takes
2 K + 1 numbers from it, K for the draft and K + 1 for the verdict, however many of them are used.
"""

import dataclasses

import pytest

from models.decoding.decoder import Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.drafters.base import Drafter
from models.drafters.universal import METHODS, make_universal
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.base import Rule
from models.verification.options import RULES, VerifierOptions, make_rule
from tests.models.decoding.recorded import PARAMETERS, TREES, K, make_drafters, make_dynamic
from tests.models.decoding.scripted import random_prompts
from tests.models.drafters.universal.vocabularies import make_toy_draft, make_toy_target

# So that rows stop after 5 to 23 tokens each, at the context's end.
CONTEXT_LENGTH = 40
PROMPTS = [prompt[:12] * 3 for prompt in random_prompts(6, longest=12, seed=6)]
TOY_PROMPTS = [[7, 5, 4, 8], [7], [1, 2, 3, 4, 4, 8, 6], [5, 4], [11, 10], [5, 4, 7, 1, 4, 11]]
SAMPLED = SamplingParams(0.9, top_k=40, top_p=0.95)
# The others choose by what they learn from all rows, and by the clock.
NAMES = [name for name, _ in make_drafters(make_tiny_target()) if name != "hybrid"]


def check_neighbours(target: Target, drafter: Drafter, rule: Rule | None, prompts: list[list[int]], num: int) -> None:
    """Batches of 6 and 4, and each row by itself with its stream's number: the same tokens, verdicts and counters."""
    decoder = Decoder(target, drafter, min(K, drafter.max_draft_tokens or K), rule)
    params = GenerationParams(num, SAMPLED, seed=17, eos_token_ids=())
    together = seen(decoder.generate(prompts, params))
    assert seen(decoder.generate(prompts, params, max_batch_size=4)) == together
    for index, prompt in enumerate(prompts):
        alone = decoder.generate([prompt], dataclasses.replace(params, first_stream=index))
        assert seen(alone) == together[index : index + 1]


def seen(results: list[DecodeResult]) -> list[tuple[object, ...]]:
    """All but the certificates, float32 sums that depend in their last bits on how wide a pass is."""
    return [(result.tokens, result.verdicts, result.finish_reason, result.counters) for result in results]


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_and_rule(name: str) -> None:
    target = make_tiny_target(max_position_embeddings=CONTEXT_LENGTH)
    drafter = dict(make_drafters(target))[name]
    kinds = ("lossless", "block") if name in TREES else tuple(RULES)
    for kind in kinds:
        check_neighbours(target, drafter, make_rule(VerifierOptions(kind, **PARAMETERS.get(kind, {}))), PROMPTS, 24)
    if name in ("heads mtp", "model"):
        check_neighbours(target, drafter, make_dynamic(target), PROMPTS, 24)


@pytest.mark.parametrize("context_length", [512, 20])
@pytest.mark.parametrize("method", METHODS)
def test_universal_drafters(method: str, context_length: int) -> None:
    """Also where texts outgrow the draft model's context: what is dropped of them, and when, is a row's own."""
    target = make_toy_target()
    draft = make_toy_draft(num_hidden_layers=1, max_position_embeddings=context_length)
    check_neighbours(target, make_universal(method, draft, target), None, TOY_PROMPTS, 30)
