"""The decoder's output on a real (tiny) model has the law that theory states for each rule, by chi-square.

Each test: N = 2500 texts a prompt in batches of ragged rows; the joint law of 4 tokens and the law at each output
position are refused below p = 1e-6, the false-alarm rate of each comparison were the seed drawn anew.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from eval.theory.enumerable import EnumerableModel, TableDrafter, from_target
from eval.theory.exact import decode_exactly
from models.decoding.decoder import Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.base import Rule
from models.verification.blockwise import BlockVerification
from models.verification.cascades import SpeculativeCascade
from models.verification.ensemble import StaticEnsemble
from models.verification.fly import FLy
from models.verification.lenience import Lenience
from models.verification.mentored import MentoredDecoding
from models.verification.thresholds import ProbabilityGap, ThresholdSampling, TypicalAcceptance
from models.verification.token import TokenRule, TokenVerification

VOCAB_SIZE = 5
NUM_TOKENS = 4
NUM_SAMPLES = 2500  # of each prompt
K = 3
FALSE_ALARM = 1e-6
MIN_EXPECTED = 5.0  # cells with fewer expected samples are put together
PROMPTS = [[1, 4, 2], [3], [0, 2, 2, 4, 1, 1]]
SAMPLING = SamplingParams(temperature=1.3, top_k=4)
LOSSLESS: list[Rule] = [TokenVerification(), BlockVerification()]
RELAXED: list[TokenRule] = [
    StaticEnsemble(0.4),
    Lenience(0.3),
    MentoredDecoding(0.2),
    SpeculativeCascade("opt", 0.3),
    TypicalAcceptance(),
    ProbabilityGap(3, 0.2),
    ThresholdSampling(0.3, 0.7),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target(seed=1, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def drafter() -> TableDrafter:
    return TableDrafter(torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 1.5)


@pytest.fixture(scope="module")
def tables(target: Target, drafter: TableDrafter) -> EnumerableModel:
    return from_target(target, drafter, PROMPTS, depth=NUM_TOKENS + 1, sampling=SAMPLING)


def decode(target: Target, drafter: TableDrafter, rule: Rule, budget: float = math.inf) -> list[list[DecodeResult]]:
    """The results of each prompt."""
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=7, eos_token_ids=())
    results = Decoder(target, drafter, K, rule, budget).generate(PROMPTS * NUM_SAMPLES, params, 256)
    return [results[place :: len(PROMPTS)] for place in range(len(PROMPTS))]


def p_value(observed: np.ndarray, law: np.ndarray) -> float:
    expected = law * observed.sum()
    if observed[law == 0].sum() > 0:
        return 0.0  # a token of probability zero was emitted
    rare = expected < MIN_EXPECTED
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def smallest_p_value(results: list[DecodeResult], law_N: torch.Tensor) -> float:
    """Over the joint law and the law at each position."""
    shape = (VOCAB_SIZE,) * NUM_TOKENS
    joint = np.zeros(shape)
    for result in results:
        joint[tuple(result.tokens)] += 1
    law = law_N.clamp(min=0.0).numpy().reshape(shape)
    law[law < 1e-12] = 0.0
    found = [p_value(joint.ravel(), law.ravel())]
    for position in range(NUM_TOKENS):
        others = tuple(axis for axis in range(NUM_TOKENS) if axis != position)
        found.append(p_value(joint.sum(axis=others), law.sum(axis=others)))
    return min(found)


@pytest.mark.parametrize("rule", LOSSLESS, ids=lambda rule: type(rule).__name__)
def test_lossless_law(target: Target, drafter: TableDrafter, tables: EnumerableModel, rule: Rule) -> None:
    law_MN = tables.target_law(NUM_TOKENS)
    for results, law_N in zip(decode(target, drafter, rule), law_MN, strict=True):
        assert smallest_p_value(results, law_N) > FALSE_ALARM


@pytest.mark.parametrize("budget", [math.inf, 0.5], ids=["free", "budget"])
@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: type(rule).__name__)
def test_relaxed_law(
    target: Target, drafter: TableDrafter, tables: EnumerableModel, rule: TokenRule, budget: float
) -> None:
    """And not the target's. The certificates' mean is what theory says, within four standard errors."""
    if isinstance(rule, ThresholdSampling):
        tables = replace(tables, tells_q=False)  # it takes the drafted tokens as given
    exact = decode_exactly(tables, rule, NUM_TOKENS, K, None if budget == math.inf else budget, start=1)
    runs = decode(target, drafter, rule, budget)
    for place, results in enumerate(runs):
        assert smallest_p_value(results, exact.law_MN[place]) > FALSE_ALARM
        certificates = np.array([result.certificate for result in results])
        assert certificates.max() <= budget
        error = 4 * certificates.std() / NUM_SAMPLES**0.5 + 1e-6
        assert certificates.mean() == pytest.approx(exact.certificate_M[place].item(), abs=error)
    if budget == math.inf:
        laws = tables.target_law(NUM_TOKENS)
        relaxed = [smallest_p_value(results, law_N) < FALSE_ALARM for results, law_N in zip(runs, laws, strict=True)]
        assert any(relaxed), "the rule must relax enough for the test to mean anything"


def test_fly_keeps_to_its_certificate(target: Target, drafter: TableDrafter, tables: EnumerableModel) -> None:
    """Its law is unknown; the distance of the samples' law from the target's stays below certificate and noise."""
    for results, law_N in zip(decode(target, drafter, FLy(0.1, 1)), tables.target_law(NUM_TOKENS), strict=True):
        joint = np.zeros((VOCAB_SIZE,) * NUM_TOKENS)
        for result in results:
            joint[tuple(result.tokens)] += 1
        law = law_N.numpy()
        distance = np.abs(joint.ravel() / NUM_SAMPLES - law).sum() / 2
        noise = np.sqrt(law * (1 - law) / NUM_SAMPLES).sum() / 2 * 1.3
        assert distance <= np.mean([result.certificate for result in results]) + noise
        assert sum(result.counters.relaxed for result in results) > 0
