"""transform_logits against transformers' own warpers; sample_from as an exact inverse CDF."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.sampling import SamplingParams, sample_from, transform_logits

ROUNDING = 1e-6  # float32 softmax over 50 terms, added up in another order
PARAMS = [
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(1.7, top_k=1),
    SamplingParams(1.0, top_k=5),
    SamplingParams(1.0, top_k=1000),
    SamplingParams(1.0, top_p=0.5),
    SamplingParams(0.6, top_p=0.01),
    SamplingParams(0.8, top_p=0.95),
    SamplingParams(1.0, min_p=0.2),
    SamplingParams(1.3, min_p=1.0),
    SamplingParams(0.6, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(2.0, top_k=7, top_p=0.4, min_p=0.3),
]


def warp(logits_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' `generate` samples from."""
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(logits_BV), 1, dtype=torch.long), logits_BV).softmax(dim=-1)


def make_logits(with_ties: bool) -> torch.Tensor:
    logits_BV = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 3
    return logits_BV.round() if with_ties else logits_BV


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_equals_transformers_warpers(params: SamplingParams) -> None:
    """Without ties exactly; with ties up to the choice among equal tokens, which their unstable sort leaves open."""
    logits_BV = make_logits(with_ties=False)
    assert torch.equal(transform_logits(logits_BV, params), warp(logits_BV, params))
    logits_BV = make_logits(with_ties=True)
    ours_BV, theirs_BV = transform_logits(logits_BV, params), warp(logits_BV, params)
    assert (ours_BV.sort().values - theirs_BV.sort().values).abs().max() < ROUNDING
    if params.top_p == 1.0:
        assert torch.equal(ours_BV, theirs_BV)


@pytest.mark.parametrize("with_ties", [False, True])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_nucleus_by_brute_force(top_p: float, with_ties: bool) -> None:
    """Drop tokens one by one, least likely and lowest id first, while the dropped ones stay within 1 - top_p."""
    logits_BV = make_logits(with_ties)
    probs_BV = transform_logits(logits_BV, SamplingParams(1.0, top_p=top_p))
    for logits_V, kept_V in zip(logits_BV, probs_BV > 0, strict=True):
        weights = logits_V.softmax(dim=-1).double()
        dropped, mass = set(), 0.0
        for token in sorted(range(len(weights)), key=lambda i: (weights[i].item(), i))[:-1]:
            mass += weights[token].item()
            if mass > 1.0 - top_p:
                break
            dropped.add(token)
        assert set(range(len(weights))) - dropped == set(kept_V.nonzero()[:, 0].tolist())


def test_leading_dimensions_are_free() -> None:
    logits_BTV = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(1)) * 3
    flat = transform_logits(logits_BTV.reshape(12, 50), PARAMS[-1])
    assert torch.equal(transform_logits(logits_BTV, PARAMS[-1]).reshape(12, 50), flat)


def test_greedy_is_one_hot_at_the_first_maximum() -> None:
    probs_BV = transform_logits(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), SamplingParams())
    assert probs_BV.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_half_precision_logits_give_float32() -> None:
    logits_V = torch.randn(9).bfloat16()
    assert torch.equal(transform_logits(logits_V, PARAMS[1]), transform_logits(logits_V.float(), PARAMS[1]))


def test_sample_from_is_the_inverse_cdf() -> None:
    """Every cell of the unit interval belongs to its token, down to the neighbouring float at each edge."""
    probs_V = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    below = 1.0 - 2.0**-53
    expected = {0.0: 1, 0.25 * below: 1, 0.25: 3, 0.75 * below: 3, 0.75: 4, below: 4}
    for uniform, token in expected.items():
        assert sample_from(probs_V, torch.tensor(uniform, dtype=torch.float64)).item() == token


@pytest.mark.parametrize("vocab_size", [7, 256, 257, 1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sample_from_of_large_vocabularies(vocab_size: int, dtype: torch.dtype) -> None:
    """Chunk by chunk it finds what numpy finds in one go; float32 sums may move an edge by their rounding."""
    generator = torch.Generator().manual_seed(0)
    weights_V = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 8
    weights_V[torch.rand(vocab_size, generator=generator) < 0.5] = 0.0
    weights_V = weights_V.to(dtype)
    uniforms_N = torch.rand(5000, generator=generator, dtype=torch.float64)
    edges_V = np.cumsum(weights_V.double().numpy())
    expected = np.searchsorted(edges_V, uniforms_N.numpy() * edges_V[-1], side="right")
    found = sample_from(weights_V.expand(5000, -1), uniforms_N).numpy()
    assert (weights_V.numpy()[found] > 0).all()
    assert (found == expected).mean() == 1.0 if dtype == torch.float64 else (found == expected).mean() > 0.998


@pytest.mark.parametrize("vocab_size", [40, 800])
def test_sample_from_never_gives_probability_zero(vocab_size: int) -> None:
    """At both ends of the interval, for weights whose sum is not exactly one; whole chunks may be zero."""
    generator = torch.Generator().manual_seed(0)
    probs_BV = torch.rand(500, vocab_size, generator=generator) * (
        torch.rand(500, vocab_size, generator=generator) < 0.2
    )
    probs_BV[:, 20] = 0.3
    probs_BV[:, :20] = 0.0
    probs_BV[::2, 21:] = 0.0
    probs_BV /= probs_BV.sum(dim=-1, keepdim=True)
    for uniform in (0.0, 1.0 - 2.0**-53):
        tokens_B = sample_from(probs_BV, torch.full((500,), uniform, dtype=torch.float64))
        assert (probs_BV.gather(1, tokens_B[:, None]) > 0).all()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
    ],
)
def test_refuses_values_out_of_range(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}: must be"):
        SamplingParams(**{option: value})
