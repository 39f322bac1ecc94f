"""Verification of a drafted block as a whole: lossless, and never shorter than token verification.

Block verification, Sun et al. 2024 (arXiv 2403.10444), algorithm 2. Token verification keeps a token or stops; here a
token with p / q > 1 makes up for an earlier one with p / q < 1. Kept is the longest prefix i that passes its own test:

    w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i))      probability, over the verdicts, that x_1 .. x_i are all kept
    S_i = sum (w_i p - q)+ over the token after x_i     what the drafts that go on from x_1 .. x_i leave of w_i
    h_i = S_i / (S_i + 1 - w_i), and h = w at a row's last drafted token
    kept: the largest i with u_i < h_i; then a token from norm((w_i p - q)+), or the bonus from p

Output law: known, p at every place, and the next block needs to know nothing of this one. Accepted tokens expected:
sum over i of E[w_i] under the draft; by the paper's theorem no rule for one draft that is lossless in this sense has
more. A token with p = 0 has w = 0, and so has all that follows it: it is never kept, nor drawn.

Shape suffixes: B rows, K drafted tokens, T = K + 1 places, V vocabulary.
"""

import torch
from torch import Tensor

from ..sampling import sample_from
from .base import Block, Verdict, acceptance_probs, next_weights
from .token import verify_tokens


class BlockVerification:
    """The lossless rule of Sun et al.; one drafted token is judged exactly as token verification judges it."""

    is_lossless = True
    knows_law = True

    def verify(self, block: Block) -> Verdict:
        """Judge one block a row; uniform k decides whether the first k + 1 drafted tokens may be kept."""
        if block.num_draft_tokens == 0:
            return verify_tokens(block)
        weights_BT, left_BK = _weights(block)
        lengths_K = torch.arange(1, block.num_draft_tokens + 1, device=weights_BT.device)
        keep_probs_BK = _keep_probs(weights_BT[:, 1:], left_BK, lengths_K == block.num_drafted_B[:, None])
        passed_BK = (block.uniforms_BK < keep_probs_BK) & (lengths_K <= block.num_drafted_B[:, None])
        num_accepted_B = (passed_BK * lengths_K).amax(dim=1)
        is_bonus_B = num_accepted_B == block.num_drafted_B

        rows_B = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
        p_BV = block.target_probs_BTV[rows_B, num_accepted_B]
        rejected_B = num_accepted_B.clamp(max=block.num_draft_tokens - 1)  # no meaning where is_bonus_B
        if block.draft_probs_BKV is None:
            q_BV = torch.zeros_like(p_BV).scatter_(1, block.draft_tokens_BK[rows_B, rejected_B, None], 1.0)
        else:
            q_BV = block.draft_probs_BKV[rows_B, rejected_B]
        weight_B1 = weights_BT[rows_B, num_accepted_B, None].to(p_BV.dtype)
        residual_BV = (weight_B1 * p_BV - q_BV).clamp(min=0.0)
        next_token_B = sample_from(next_weights(p_BV, residual_BV, is_bonus_B), block.final_uniform_B)
        return Verdict(num_accepted_B, next_token_B, is_bonus_B)


def _weights(block: Block) -> tuple[Tensor, Tensor]:
    """w_0 .. w_K [B, K + 1] and S_1 .. S_{K-1} [B, K - 1], float64."""
    p_BKV, q_BKV = block.target_probs_BTV[:, :-1], block.draft_probs_BKV
    tokens_BK1 = block.draft_tokens_BK[..., None]
    p_x_BK = p_BKV.gather(2, tokens_BK1)[..., 0].double()
    q_x_BK = torch.ones_like(p_x_BK) if q_BKV is None else q_BKV.gather(2, tokens_BK1)[..., 0].double()
    weights = [torch.ones_like(block.final_uniform_B)]
    for p_x_B, q_x_B in zip(p_x_BK.unbind(dim=1), q_x_BK.unbind(dim=1), strict=True):
        weights.append(acceptance_probs(weights[-1] * p_x_B, q_x_B))
    weights_BT = torch.stack(weights, dim=1)
    inner_BK = weights_BT[:, 1:-1]
    if q_BKV is None:  # all but the drafted token is left
        return weights_BT, inner_BK * (1.0 - p_x_BK[:, 1:])
    left_BKV = (inner_BK[..., None].to(p_BKV.dtype) * p_BKV[:, 1:]).sub_(q_BKV[:, 1:]).clamp_(min=0.0)
    return weights_BT, left_BKV.sum(dim=-1).double()


def _keep_probs(weights_BK: Tensor, left_BK: Tensor, is_last_BK: Tensor) -> Tensor:
    """h_1 .. h_K. Where w = 1 and S = 0 nothing but longer prefixes are ever kept: any h does."""
    total_BK = left_BK + (1.0 - weights_BK[:, :-1])
    inner_BK = torch.where(total_BK > 0, left_BK / total_BK, 1.0)
    return torch.where(is_last_BK, weights_BK, torch.cat([inner_BK, weights_BK[:, -1:]], dim=1))
