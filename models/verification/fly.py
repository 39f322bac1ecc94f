"""FLy: a rejected token is kept where the target is unsure and goes along with what was drafted after it.

Li et al. 2025 (arXiv 2511.22972). There a mismatch is a drafted token that is not the target's greedy one. It is kept
where the target's entropy, normalised to [0, 1], reaches a threshold and none of the W drafted tokens after it is a
mismatch; where fewer than W follow it is not kept. Here a mismatch is a drafted token that lossless token verification
rejects under its uniform.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Block, Verdict, acceptance_probs
from .thresholds import entropy_nats
from .token import spend_budget, verify_tokens


class FLy:
    """Keep a mismatch at place k if H(p_k) / ln V > entropy and each of the next `window` drafted tokens passes the
    lossless test under its own uniform.

    entropy in [0, 1]; 1 is lossless, since no distribution is above it. window >= 1. ValueError for anything else.
    p is what tokens are drawn from, after the sampling transforms; p = 0: never kept, never drawn. Deviation: at
    temperature 0 p is one-hot, which leaves the lossless rule. (The published code takes the entropy, in nats, of the
    three likeliest tokens only.)

    Law: unknown, since tokens drafted later decide. Certificate, by coupling: run the lossless rule beside this one,
    with the same drafts and uniforms. At the first place k where the two part, u_k >= a_k, and u_j < a_j for each j of
    the window. Given the drafts these uniforms are independent of each other and of those before k, which decide
    whether the lossless run reaches k; so the two part at k with its chance to reach k, times
        charge_k = (1 - a_k) prod_{j in window} a_j        (0 where the gate is shut or the window does not fit).
    This run reaches k whenever the lossless one does, so TV(law of the output, law of the target's own output) <=
    chance that they part <= E[sum of the charges of all places reached]. No charge looks at a uniform: if one did, then
    under a budget the uniforms of a window would decide what later places may still spend, and the bound would fail.
    Under a budget a mismatch is kept for u_k < a_k + share (1 - a_k) only, and the charge is that share of it.
    """

    is_lossless = False
    knows_law = False

    def __init__(self, entropy: float, window: int) -> None:
        if not 0.0 <= entropy <= 1.0:
            raise ValueError(f"entropy={entropy}: must be in [0, 1], in units of ln V; 1 is lossless.")
        if window < 1:
            raise ValueError(f"window={window}: must be 1 or more, the tokens that have to pass after a kept mismatch.")
        self.entropy = entropy
        self.window = window

    def verify(self, block: Block) -> Verdict:
        """Judge one block a row: the lossless verdict under u = 0, which always passes, where a mismatch is kept."""
        if block.num_draft_tokens == 0:
            return verify_tokens(block)
        steps_K = torch.arange(block.num_draft_tokens, device=block.draft_tokens_BK.device)
        is_drafted_BK = steps_K < block.num_drafted_B[:, None]
        accept_BK = _accept_probs(block) * is_drafted_BK
        may_keep_BK = self._gate(block) & (accept_BK > 0)
        charges_BK = torch.where(may_keep_BK, (1.0 - accept_BK) * self._ahead(accept_BK), 0.0)
        limits_BK = torch.ones_like(accept_BK)
        if block.budget_B is not None:
            shares_BK, charges_BK = spend_budget(charges_BK, block.budget_B)
            limits_BK = accept_BK + shares_BK * (1.0 - accept_BK)

        passed_BK = block.uniforms_BK < accept_BK
        window_passed_BK = self._ahead(passed_BK.double()) > 0
        kept_BK = may_keep_BK & window_passed_BK & ~passed_BK & (block.uniforms_BK < limits_BK)
        verdict = verify_tokens(replace(block, uniforms_BK=block.uniforms_BK.masked_fill(kept_BK, 0.0)))
        relaxed_BK = kept_BK & (steps_K < verdict.num_accepted_B[:, None])
        return replace(verdict, distances_BK=charges_BK, relaxed_BK=relaxed_BK)

    def _gate(self, block: Block) -> Tensor:
        """Bool [B, K]: unsure enough. The last `window` places can never be kept, so nothing is computed for them."""
        num_places = max(0, block.num_draft_tokens - self.window)
        p_BKV = block.target_probs_BTV[:, :num_places]
        shares_BK = entropy_nats(p_BKV)[..., 0] / math.log(p_BKV.shape[-1])
        return F.pad(shares_BK.clamp(max=1.0) > self.entropy, (0, block.num_draft_tokens - num_places))

    def _ahead(self, values_BK: Tensor) -> Tensor:
        """Product [B, K] of the values of the next `window` places; 0 where there are fewer."""
        return F.pad(values_BK, (0, self.window))[:, 1:].unfold(1, self.window, 1).prod(dim=-1)


def _accept_probs(block: Block) -> Tensor:
    """min(1, p / q) of the drafted tokens, float64 [B, K]."""
    tokens_BK1 = block.draft_tokens_BK[..., None]
    p_x = block.target_probs_BTV[:, :-1].gather(2, tokens_BK1).double()
    q = block.draft_probs_BKV
    q_x = torch.ones_like(p_x) if q is None else q.gather(2, tokens_BK1).double()
    return acceptance_probs(p_x, q_x)[..., 0]
