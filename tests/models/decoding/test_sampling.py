"""transform_logits against transformers' own warpers; sample_from as an exact inverse CDF."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.decoding.sampling import SamplingParams, sample_from, transform_logits

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


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("with_ties", [False, True])
def test_equals_transformers_warpers(params: SamplingParams, with_ties: bool) -> None:
    logits_BV = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 3
    if with_ties:
        logits_BV = logits_BV.round()
    assert torch.equal(transform_logits(logits_BV, params), warp(logits_BV, params))


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


def test_sample_from_never_gives_probability_zero() -> None:
    """At both ends of the interval, for weights whose sum is not exactly one."""
    generator = torch.Generator().manual_seed(0)
    probs_BV = torch.rand(500, 40, generator=generator) * (torch.rand(500, 40, generator=generator) < 0.2)
    probs_BV[:, 20] = 0.3
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
