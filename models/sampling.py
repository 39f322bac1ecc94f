"""Logits -> probabilities: the one place where temperature, top-k, top-p and min-p live.

Target and drafter both come through `transform_logits`, so that p and q are what tokens are really drawn from. Sampling
itself (`sample_from`) takes its uniform number as an argument: whoever owns the random stream owns the randomness.

Shape suffixes: V vocabulary; leading dimensions are free.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 256


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or a positive number.")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or the number of tokens to keep.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]; 1 switches it off.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1]; 0 switches it off.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def transform_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities float32 [..., V] (float64 for float64 logits) that a token is drawn from.

    Greedy: one-hot at the first maximum. Otherwise temperature, top-k, top-p, min-p, in this order, as transformers'
    logits warpers have it. Ties: all tokens equal to the k-th stay; of equal tokens at the edge of the nucleus the
    higher ids do, where transformers leaves the choice to an unstable sort.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if params.is_greedy:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0)
    if params.temperature != 1.0:
        scores = scores / params.temperature
    if params.top_k:
        kth = torch.topk(scores, min(params.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if params.top_p < 1.0:
        scores = _keep_nucleus(scores, params.top_p)
    if params.min_p > 0.0:
        probs = scores.softmax(dim=-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
    return scores.softmax(dim=-1)


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Mask out the least likely tokens that together have at most 1 - top_p; the most likely one always stays.

    V tokens of at most (1 - top_p) / V each are never more than that together, so only the others need sorting: some
    hundred of a peaked distribution over 50k tokens, at a tenth of the time.
    """
    probs = scores.softmax(dim=-1)
    num_candidates = max(1, int((probs >= (1.0 - top_p) / probs.shape[-1]).sum(dim=-1).max()))  # 0 where all is NaN
    ids = torch.topk(probs, num_candidates, sorted=False).indices.sort(dim=-1).values
    ascending, order = torch.sort(probs.gather(-1, ids), dim=-1, stable=True)
    ids = ids.gather(-1, order)
    cumulated = ascending.double().cumsum(dim=-1)
    drop = cumulated + (1.0 - cumulated[..., -1:]) <= 1.0 - top_p
    drop[..., -1] = False
    kept_scores = scores.gather(-1, ids).masked_fill(drop, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(-1, ids, kept_scores)


def sample_from(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token [...] at which the cumulated probabilities [..., V] first exceed `uniform` [...], a number in [0, 1).

    Inverse CDF in float64; the weights need not sum to one. Strict, so that a token of probability zero is never drawn.
    Sums over chunks of the vocabulary come first, and only one chunk is cumulated token by token: a fifth of the time.
    """
    vocab_size = probs.shape[-1]
    if vocab_size <= CHUNK_TOKENS:
        return _first_above(probs.double(), _threshold(probs.double().sum(dim=-1), uniform.double()))
    if vocab_size % CHUNK_TOKENS:
        probs = F.pad(probs, (0, -vocab_size % CHUNK_TOKENS))
    chunks = probs.unflatten(-1, (-1, CHUNK_TOKENS))
    sums = chunks.sum(dim=-1).double()
    cumulated = sums.cumsum(dim=-1)
    threshold = _threshold(cumulated[..., -1], uniform.double())
    chunk = _first_above(sums, threshold)[..., None]
    before = cumulated.gather(-1, chunk)[..., 0] - sums.gather(-1, chunk)[..., 0]
    inside = chunks.gather(-2, chunk[..., None].expand(*chunk.shape, CHUNK_TOKENS))[..., 0, :]
    return chunk[..., 0] * CHUNK_TOKENS + _first_above(inside.double(), threshold - before)


def _threshold(total: Tensor, uniform: Tensor) -> Tensor:
    """uniform * total, which may round up to total, held below it: otherwise nothing would exceed it."""
    return torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))


def _first_above(weights: Tensor, threshold: Tensor) -> Tensor:
    """The first place [...] of positive weight at which the cumulated weights [..., N] exceed the threshold [...].

    Where rounding leaves none above it, the last place of positive weight.
    """
    is_positive = weights > 0
    is_above = (weights.cumsum(dim=-1) > threshold[..., None]) & is_positive
    places = torch.arange(weights.shape[-1], device=weights.device)
    last_positive = torch.where(is_positive, places, 0).amax(dim=-1)
    return torch.where(is_above.any(dim=-1), is_above.to(torch.uint8).argmax(dim=-1), last_positive)
