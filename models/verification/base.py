"""What every rule takes and gives, and the three formulas that most of them share.

A rule is a pure function of a `Block` to a `Verdict`: no model, no cache, no random generator, float32 or float64, CPU
or GPU. Rows do not see each other.

Shape suffixes: B rows, K drafted tokens, T = K + 1 places, V vocabulary, H hidden.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """One drafted block a row.

    target_probs_BTV: p, entry k given the first k drafted tokens. draft_probs_BKV: q, exactly what drafted token k was
    drawn from; None for a drafter without a distribution, q = one-hot. num_drafted_B: tokens of a row that count; what
    lies behind is padding. uniforms_BK, final_uniform_B: float64 in [0, 1), independent of each other and of the draft.
    budget_B: float64, distance from the target that the row may still spend; None: as much as the rule wants.
    """

    target_probs_BTV: Tensor
    draft_probs_BKV: Tensor | None
    draft_tokens_BK: Tensor
    num_drafted_B: Tensor
    uniforms_BK: Tensor
    final_uniform_B: Tensor
    budget_B: Tensor | None = None
    # What a learned rule may look at: the target's last hidden state at each place, and the drafter's at each drafted
    # token; entry k has seen the tokens before drafted token k, never that token.
    target_hidden_BTH: Tensor | None = None
    draft_hidden_BKH: Tensor | None = None

    @property
    def num_draft_tokens(self) -> int:
        """K, padding included."""
        return self.draft_tokens_BK.shape[1]

    def dense_draft_probs(self) -> Tensor:
        """q [B, K, V], one-hot where the drafter has no distribution."""
        if self.draft_probs_BKV is not None:
            return self.draft_probs_BKV
        return torch.zeros_like(self.target_probs_BTV[:, :-1]).scatter_(2, self.draft_tokens_BK[..., None], 1.0)


@dataclass(frozen=True)
class Verdict:
    """What becomes of one block.

    verify_probs_BT: nu of the emitted token at each place 0 .. num_accepted (behind them unspecified); None: nu is p,
    or the rule does not know its law. distances_BK: float64, what place k adds to the certificate if it is reached,
    TV(nu, p) for a rule with a known law; None: the rule is lossless. relaxed_BK: accepted here, though lossless token
    verification would have rejected it under the same uniform; None: never.
    """

    num_accepted_B: Tensor  # int64, 0 .. num_drafted
    next_token_B: Tensor  # int64: the recovered token, or the bonus after a fully accepted block
    is_bonus_B: Tensor  # bool
    verify_probs_BT: Tensor | None = None
    distances_BK: Tensor | None = None
    relaxed_BK: Tensor | None = None


class Rule(Protocol):
    """A verification rule. `is_lossless`: its output has the target's own law. `knows_law`: it can tell nu."""

    is_lossless: bool
    knows_law: bool

    def verify(self, block: Block) -> Verdict:
        """Judge one block a row."""
        ...


def acceptance_probs(p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of drafted tokens, elementwise; 0 where q(x) = 0, since q cannot have given such a token."""
    return torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1.0)


def next_weights(p_BV: Tensor, residual_BV: Tensor, is_bonus_B: Tensor) -> Tensor:
    """Weights [B, V] of the token after the accepted ones: the residual's, or p's where that token is a bonus.

    A residual of 0 belongs to a place where nothing is ever rejected (p == q, say); p then, never NaN.
    """
    return torch.where((is_bonus_B | (residual_BV.sum(dim=-1) <= 0))[:, None], p_BV, residual_BV)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """TV(p, q) = sum |p - q| / 2 over the last dimension, float64 [...], between 0 and 1."""
    return ((p - q).abs().sum(dim=-1).double() / 2).clamp(max=1.0)


def count_accepted(uniforms_BK: Tensor, accept_probs_BK: Tensor, num_drafted_B: Tensor) -> Tensor:
    """Length [B] of the prefix of drafted tokens that pass u < a (strict: a token with a = 0 never does)."""
    steps_K = torch.arange(accept_probs_BK.shape[1], device=accept_probs_BK.device)
    passed_BK = (uniforms_BK < accept_probs_BK) & (steps_K < num_drafted_B[:, None])
    return passed_BK.long().cumprod(dim=1).sum(dim=1)
