"""Sampled decoding on a real run: the law by chi-square, seeds, and rows that do not depend on their neighbours."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams, stream_seed
from models.processors.prefix import ProcessorParams, Processors
from models.sampling import SamplingParams, transform_logits
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import BigramDrafter, random_prompts

VOCAB_SIZE = 12
NUM_SAMPLES = 2000  # of each prompt
NUM_TOKENS = 3
MIN_EXPECTED = 5.0  # cells with fewer expected samples are put together
FALSE_ALARM = 1e-6  # chance that correct code fails, were the seed drawn anew
SAMPLING = SamplingParams(temperature=1.4, top_k=5, top_p=0.95)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)


@torch.no_grad()
def exact_law(target: Target, prompt: list[int], sampling: SamplingParams, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    """The target's joint law of num_tokens tokens, by running it on every text."""
    texts = list(itertools.product(range(target.vocab_size), repeat=num_tokens))
    ids_BT = torch.tensor([[*prompt, *text] for text in texts])
    logits_BKV = target.model(input_ids=ids_BT).logits[:, len(prompt) - 1 : -1]
    probs_BKV = transform_logits(logits_BKV.double(), sampling)
    return probs_BKV.gather(2, torch.tensor(texts)[:, :, None]).prod(dim=1)[:, 0].numpy()


def chi_square_p_value(samples: list[list[int]], law: np.ndarray, vocab_size: int = VOCAB_SIZE) -> float:
    cells = np.array(samples) @ vocab_size ** np.arange(len(samples[0]) - 1, -1, -1)
    observed, expected = np.bincount(cells, minlength=len(law)).astype(float), law * len(samples)
    if observed[law == 0].sum() > 0:
        return 0.0  # a token of probability zero was emitted
    rare = expected < MIN_EXPECTED
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize(("num_draft_tokens", "max_batch_size"), [(0, 256), (1, 256), (2, 256), (4, 133)])
def test_law_is_the_targets(target: Target, num_draft_tokens: int, max_batch_size: int) -> None:
    """N = 2000 texts of 3 tokens a prompt, ragged neighbours; refused below p = 1e-6, the false-alarm rate of each."""
    drafter = BigramDrafter(VOCAB_SIZE) if num_draft_tokens else None
    prompts = [[5, 7, 4], [9], [3, 3, 8, 10, 6]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    decoder = Decoder(target, drafter, num_draft_tokens)
    results = decoder.generate(prompts * NUM_SAMPLES, params, max_batch_size)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    if num_draft_tokens:
        rate = np.mean([result.counters.acceptance_rate for result in results])
        assert 0.05 < rate < 0.8, "the drafter must be bad, but not hopeless, for the test to mean anything"


PROCESSORS = ProcessorParams(repetition_penalty=1.5, presence_penalty=0.5, no_repeat_ngram_size=2)


@torch.no_grad()
def exact_processed_law(target: Target, prompt: list[int]) -> np.ndarray:
    """The target's joint law with PROCESSORS, text by text."""
    law = np.zeros((VOCAB_SIZE,) * NUM_TOKENS)
    processing = Processors(PROCESSORS, (), VOCAB_SIZE)

    def fill(text: tuple[int, ...], weight: float) -> None:
        if len(text) == NUM_TOKENS:
            law[text] = weight
            return
        logits_V = target.model(input_ids=torch.tensor([[*prompt, *text]])).logits[0, -1]
        for token, prob in enumerate(transform_logits(processing.apply(logits_V, prompt, text).double(), SAMPLING)):
            if prob > 0:
                fill((*text, token), weight * prob.item())

    fill((), 1.0)
    return law.ravel()


def test_law_with_processors(target: Target) -> None:
    """N = 2000 a prompt, false alarm 1e-6 each, batches of ragged rows: penalties that depend on the whole prefix."""
    prompts = [[5, 7, 4], [9], [3, 3, 8, 10, 6]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=(), processors=PROCESSORS)
    results = Decoder(target, BigramDrafter(VOCAB_SIZE), 2).generate(prompts * NUM_SAMPLES, params, 256)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_processed_law(target, prompt)) > FALSE_ALARM
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) < FALSE_ALARM


def test_chi_square_has_power(target: Target) -> None:
    """The same test with the same N refuses samples at a temperature a quarter lower."""
    other = SamplingParams(SAMPLING.temperature * 0.75, SAMPLING.top_k, SAMPLING.top_p)
    params = GenerationParams(NUM_TOKENS, other, seed=11, eos_token_ids=())
    results = Decoder(target).generate([[5, 7, 4]] * NUM_SAMPLES, params, 256)
    assert (
        chi_square_p_value([result.tokens for result in results], exact_law(target, [5, 7, 4], SAMPLING)) < FALSE_ALARM
    )


def sample(
    target: Target, prompts: list[list[int]], seed: int, num_draft_tokens: int, batch: int | None = None
) -> list[list[int]]:
    drafter = BigramDrafter(target.vocab_size) if num_draft_tokens else None
    params = GenerationParams(20, SamplingParams(1.0, top_p=0.9), seed=seed)
    return [r.tokens for r in Decoder(target, drafter, num_draft_tokens).generate(prompts, params, batch)]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_seeds_and_neighbours(num_draft_tokens: int) -> None:
    """The same seed repeats whatever the batch size; another differs; equal prompts in one call differ as well."""
    target = make_tiny_target()
    prompts = random_prompts(6, longest=20)
    first = sample(target, prompts, seed=1, num_draft_tokens=num_draft_tokens)
    for batch in (1, 2, 3, 4, 6):
        assert sample(target, prompts, 1, num_draft_tokens, batch) == first
    others = sample(target, [*prompts[:2], [40] * 30, *prompts[3:]], 1, num_draft_tokens)
    assert others[:2] == first[:2]
    assert others[3:] == first[3:]
    assert sample(target, prompts, 2, num_draft_tokens) != first
    twice = sample(target, [prompts[0]] * 2, 1, num_draft_tokens)
    assert twice[0] == first[0]
    assert twice[1] != twice[0]


def test_streams_differ_by_seed_and_prompt() -> None:
    seeds = {stream_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
