"""What the decoder returns beside tokens: verdicts, log-probabilities, certificates; each recomputed on another way."""

import math
from collections.abc import Callable

import pytest
import torch

from models.decoding.decoder import Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.sampling import SamplingParams, transform_logits
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.base import Rule
from models.verification.blockwise import BlockVerification
from models.verification.cascades import SpeculativeCascade
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble
from models.verification.fly import FLy
from models.verification.lenience import Lenience
from models.verification.mentored import MentoredDecoding
from models.verification.thresholds import ProbabilityGap, ThresholdSampling, TypicalAcceptance
from models.verification.token import TokenVerification
from tests.models.decoding.scripted import BigramDrafter, random_prompts

VOCAB_SIZE = 20
K = 3
SAMPLING = SamplingParams(1.2, top_k=12)
PARAMS = GenerationParams(24, SAMPLING, seed=5, eos_token_ids=(), logprobs=True)
FLOAT32 = 2e-5  # log-probabilities recomputed in one pass instead of block by block

LOSSLESS: dict[str, Callable[[], Rule]] = {"token": TokenVerification, "block": BlockVerification}
RELAXED: dict[str, Callable[[], Rule]] = {
    "static": lambda: StaticEnsemble(0.5),
    "dynamic": lambda: DynamicEnsemble(
        lambda block: (block.target_probs_BTV[:, :-1] * block.dense_draft_probs()).sum(dim=-1)
    ),
    "lenience": lambda: Lenience(0.4),
    "mentored": lambda: MentoredDecoding(0.3),
    "cascade": lambda: SpeculativeCascade("opt", 0.3),
    "typical": TypicalAcceptance,
    "gap": lambda: ProbabilityGap(5, 0.2),
    "thresholds": lambda: ThresholdSampling(0.2, 0.8),
    "fly": lambda: FLy(0.3, 1),
}
STRICT: dict[str, Callable[[], Rule]] = {
    "static": lambda: StaticEnsemble(1.0),
    "dynamic": lambda: DynamicEnsemble(lambda block: torch.ones_like(block.uniforms_BK)),
    "lenience": lambda: Lenience(1.0),
    "mentored": lambda: MentoredDecoding(0.0),
    "typical": lambda: TypicalAcceptance(1.0, math.inf),
    "gap": lambda: ProbabilityGap(0, 0.2),
    "fly": lambda: FLy(1.0, 1),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)


PROMPTS = random_prompts(10, longest=8, vocab_size=VOCAB_SIZE)


def run(target: Target, rule: Rule, budget: float = math.inf, batch: int = 4) -> list[DecodeResult]:
    decoder = Decoder(target, BigramDrafter(VOCAB_SIZE), K, rule, budget)
    return decoder.generate(PROMPTS, PARAMS, batch)


@torch.no_grad()
def places(target: Target, prompt: list[int], result: DecodeResult) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities, p and q at every token, by transformers' own forward over the whole text."""
    ids_1T = torch.tensor([[*prompt, *result.tokens]])
    logits_TV = target.model(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1].float()
    before = ids_1T[0, len(prompt) - 1 : -1]
    q_TV = transform_logits(BigramDrafter(VOCAB_SIZE).table_VV[before], SAMPLING)
    return logits_TV.log_softmax(dim=-1), transform_logits(logits_TV, SAMPLING), q_TV


@pytest.mark.parametrize("name", [*LOSSLESS, *RELAXED])
def test_what_is_returned(target: Target, name: str) -> None:
    """Log-probabilities under the model, p and nu; verdicts and counters that add up."""
    rule = {**LOSSLESS, **RELAXED}[name]()
    results = run(target, rule)
    for prompt, result in zip(PROMPTS, results, strict=True):
        raw_TV, p_TV, _ = places(target, prompt, result)
        assert len(result.verdicts) == len(result.tokens) == len(result.logprobs)
        for place, (token, logprobs) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
            assert logprobs.model == pytest.approx(raw_TV[place, token].item(), abs=FLOAT32)
            assert logprobs.target == pytest.approx(p_TV[place, token].log().item(), abs=FLOAT32)
            if rule.is_lossless or result.verdicts[place] in ("prefill", "bonus"):
                assert logprobs.verify == (logprobs.target if rule.knows_law else None)
        counters = result.counters
        assert result.verdicts[0] == "prefill"
        assert result.verdicts.count("prefill") == 1
        assert counters.accepted == sum(result.accepted)
        assert counters.relaxed == result.verdicts.count("relaxed")
        assert counters.blocks >= result.verdicts.count("recovered") + result.verdicts.count("bonus")
        if rule.is_lossless:
            assert result.certificate == 0.0
            assert counters.relaxed == 0
    if not rule.is_lossless:
        assert sum(result.counters.relaxed for result in results) > 0
        assert all(result.certificate > 0 for result in results)


def test_static_ensemble_by_hand(target: Target) -> None:
    """nu = w p + (1 - w) q restricted to p's support; the certificate is (1 - w) TV(p, that q) over verified tokens."""
    for prompt, result in zip(PROMPTS, run(target, StaticEnsemble(0.5)), strict=True):
        _, p_TV, q_TV = places(target, prompt, result)
        q_TV = torch.where(p_TV > 0, q_TV, 0.0)
        q_TV /= q_TV.sum(dim=-1, keepdim=True)
        total = 0.0
        for place, (token, verdict) in enumerate(zip(result.tokens, result.verdicts, strict=True)):
            if verdict in ("prefill", "bonus"):
                continue
            nu_V = (p_TV[place] + q_TV[place]) / 2
            assert result.logprobs[place].verify == pytest.approx(nu_V[token].log().item(), abs=FLOAT32)
            total += (p_TV[place] - nu_V).abs().sum().item() / 2
        assert result.certificate == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("name", STRICT)
def test_strict_end_is_lossless_bit_for_bit(target: Target, name: str) -> None:
    expected = run(target, TokenVerification())
    results = run(target, STRICT[name]())
    assert [(r.tokens, r.verdicts) for r in results] == [(r.tokens, r.verdicts) for r in expected]
    assert all(result.certificate < 1e-5 for result in results), "float32 rounding alone"


@pytest.mark.parametrize("name", RELAXED)
def test_distance_budget(target: Target, name: str) -> None:
    """0 is lossless bit for bit, inf is no budget, and what lies between is never passed."""
    rule, free = RELAXED[name](), run(target, RELAXED[name]())
    # The thresholds take drafts as given, so their strict end is the lossless rule for such drafts.
    strict = ThresholdSampling(1.0, 1.0) if name == "thresholds" else TokenVerification()
    nothing = run(target, rule, budget=0.0)
    assert [r.tokens for r in nothing] == [r.tokens for r in run(target, strict)]
    assert all(r.certificate == 0.0 and r.counters.relaxed == 0 for r in nothing)
    largest = max(r.certificate for r in free)
    assert [r.tokens for r in run(target, rule, budget=1.1 * largest)] == [r.tokens for r in free]
    for budget in (0.1, 0.37 * largest):
        some = run(target, rule, budget)
        assert all(r.certificate <= budget for r in some)
        assert max(r.certificate for r in some) > 0.5 * budget


@pytest.mark.parametrize("name", [*LOSSLESS, *RELAXED])
def test_rows_do_not_see_each_other(target: Target, name: str) -> None:
    rule = {**LOSSLESS, **RELAXED}[name]()
    alone = run(target, rule, 2.0, batch=1)
    for batch in (3, 10):
        for result, single in zip(run(target, rule, 2.0, batch), alone, strict=True):
            assert (result.tokens, result.verdicts) == (single.tokens, single.verdicts)
            assert result.certificate == pytest.approx(single.certificate, abs=1e-5)


@pytest.mark.parametrize("name", RELAXED)
def test_temperature_zero_is_greedy(target: Target, name: str) -> None:
    """A rule has nothing to relax where the target has one token, and says so."""
    params = GenerationParams(12, eos_token_ids=())
    decoder = Decoder(target, BigramDrafter(VOCAB_SIZE), K, RELAXED[name]())
    with pytest.warns(UserWarning, match=r"temperature=0 .* relaxes nothing"):
        results = decoder.generate(PROMPTS, params)
    assert [r.tokens for r in results] == [r.tokens for r in Decoder(target).generate(PROMPTS, params)]


def test_logprobs_only_where_asked_for(target: Target) -> None:
    params = GenerationParams(4, SAMPLING, eos_token_ids=())
    assert all(r.logprobs is None for r in Decoder(target, BigramDrafter(VOCAB_SIZE), K).generate(PROMPTS, params))


@pytest.mark.parametrize("budget", [-0.1, math.nan])
def test_bad_budget(target: Target, budget: float) -> None:
    with pytest.raises(ValueError, match=r"distance_budget=.* must be at least 0"):
        Decoder(target, BigramDrafter(VOCAB_SIZE), K, StaticEnsemble(0.5), budget)
