"""Lossless token verification: pure functions from probabilities, drafted tokens and uniforms to a verdict.

Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p(x) / q(x)), at the first
rejection draw from norm((p - q)+), after a full block draw the bonus from p. The output then has the target's own law.
No model, no cache and no random generator here. float32 or float64.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.decoding.sampling import sample_from


@dataclass(frozen=True)
class Verdict:
    """What becomes of one block."""

    num_accepted_B: Tensor  # int64, 0 .. num_drafted
    next_token_B: Tensor  # int64: the recovered token, or the bonus after a fully accepted block
    is_bonus_B: Tensor  # bool


def acceptance_probs(p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of drafted tokens, elementwise; 0 where q(x) = 0, since q cannot have given such a token."""
    return torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1.0)


def residual_probs(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+) over the last dimension. Where p == q nothing is ever rejected: the result is p, never NaN."""
    excess = (p - q).clamp(min=0.0)
    mass = excess.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def count_accepted(uniforms_BK: Tensor, accept_probs_BK: Tensor, num_drafted_B: Tensor) -> Tensor:
    """Length [B] of the prefix of drafted tokens that pass u < a (strict: a token with a = 0 never does)."""
    steps_K = torch.arange(accept_probs_BK.shape[1], device=accept_probs_BK.device)
    passed_BK = (uniforms_BK < accept_probs_BK) & (steps_K < num_drafted_B[:, None])
    return passed_BK.long().cumprod(dim=1).sum(dim=1)


def verify_tokens(
    target_probs_BKV: Tensor,
    draft_probs_BKV: Tensor | None,
    draft_tokens_BK: Tensor,
    num_drafted_B: Tensor,
    uniforms_BK: Tensor,
    final_uniform_B: Tensor,
) -> Verdict:
    """Judge one block a row.

    target_probs_BKV: p [B, K + 1, V], entry k given the first k drafted tokens. draft_probs_BKV: q [B, K, V] that
    drafted token k was drawn from; None for a drafter without a distribution, q = one-hot. num_drafted_B: tokens of a
    row that count; what lies behind is padding. uniforms_BK, final_uniform_B: numbers in [0, 1), independent of each
    other and of the draft.
    """
    num_draft_tokens = draft_tokens_BK.shape[1]
    p_x_BK = target_probs_BKV[:, :num_draft_tokens].gather(2, draft_tokens_BK[:, :, None])[..., 0]
    if draft_probs_BKV is None:
        q_x_BK = torch.ones_like(p_x_BK)
    else:
        q_x_BK = draft_probs_BKV.gather(2, draft_tokens_BK[:, :, None])[..., 0]
    accept_probs_BK = acceptance_probs(p_x_BK.double(), q_x_BK.double())
    num_accepted_B = count_accepted(uniforms_BK, accept_probs_BK, num_drafted_B)
    is_bonus_B = num_accepted_B == num_drafted_B

    rows_B = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    p_BV = target_probs_BKV[rows_B, num_accepted_B]
    if num_draft_tokens == 0:
        return Verdict(num_accepted_B, sample_from(p_BV, final_uniform_B), is_bonus_B)
    rejected_B = num_accepted_B.clamp(max=num_draft_tokens - 1)  # no meaning where is_bonus_B
    if draft_probs_BKV is None:
        q_BV = torch.zeros_like(p_BV).scatter_(1, draft_tokens_BK[rows_B, rejected_B][:, None], 1.0)
    else:
        q_BV = draft_probs_BKV[rows_B, rejected_B]
    next_probs_BV = torch.where(is_bonus_B[:, None], p_BV, residual_probs(p_BV, q_BV))
    return Verdict(num_accepted_B, sample_from(next_probs_BV, final_uniform_B), is_bonus_B)


def verify_greedy(target_tokens_BK: Tensor, draft_tokens_BK: Tensor, num_drafted_B: Tensor) -> Verdict:
    """`verify_tokens` at temperature 0, on ids alone: p and q are one-hot, so only the target's own tokens are kept.

    target_tokens_BK: argmax of the target's logits, [B, K + 1].
    """
    num_draft_tokens = draft_tokens_BK.shape[1]
    steps_K = torch.arange(num_draft_tokens, device=draft_tokens_BK.device)
    same_BK = (draft_tokens_BK == target_tokens_BK[:, :num_draft_tokens]) & (steps_K < num_drafted_B[:, None])
    num_accepted_B = same_BK.long().cumprod(dim=1).sum(dim=1)
    next_token_B = target_tokens_BK.gather(1, num_accepted_B[:, None])[:, 0]
    return Verdict(num_accepted_B, next_token_B, num_accepted_B == num_drafted_B)
