"""Verification token by token: the lossless rule, and the frame of every rule that judges one drafted token at a time.

Lossless, Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p(x) / q(x)), at
the first rejection draw from norm((p - q)+), after a full block draw the bonus from p. The output then has the target's
own law.

Any acceptance a(x) and unnormalised residual R with sum R = 1 - sum q a give the law nu = q a + R. Two families: a
`LawRule` states nu and takes the best acceptance there is for it, min(1, nu / q), with R = (nu - q)+; an `AcceptRule`
states an acceptance no smaller than the lossless one, and draws a rejected place's token as the lossless rule does.

Shape suffixes: B rows, K drafted tokens, T = K + 1 places, V vocabulary.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..sampling import sample_from
from .base import Block, Verdict, acceptance_probs, count_accepted, next_weights, total_variation

Stats = tuple[Tensor, ...]  # what a rule needs of whole distributions, each [..., 1]


class TokenVerification:
    """The lossless rule of Leviathan et al. as an object, for where a `Rule` is wanted."""

    is_lossless = True
    knows_law = True

    def verify(self, block: Block) -> Verdict:
        """Judge one block a row."""
        return verify_tokens(block)


def verify_tokens(block: Block) -> Verdict:
    """The lossless rule: what `verify_with` does for nu = p, touching one distribution a row only."""
    num_draft_tokens = block.num_draft_tokens
    tokens_BK1 = block.draft_tokens_BK[..., None]
    p_x_BK = block.target_probs_BTV[:, :num_draft_tokens].gather(2, tokens_BK1)[..., 0]
    if block.draft_probs_BKV is None:
        q_x_BK = torch.ones_like(p_x_BK)
    else:
        q_x_BK = block.draft_probs_BKV.gather(2, tokens_BK1)[..., 0]
    accept_probs_BK = acceptance_probs(p_x_BK.double(), q_x_BK.double())
    num_accepted_B = count_accepted(block.uniforms_BK, accept_probs_BK, block.num_drafted_B)
    is_bonus_B = num_accepted_B == block.num_drafted_B

    rows_B = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    p_BV = block.target_probs_BTV[rows_B, num_accepted_B]
    if num_draft_tokens == 0:
        return Verdict(num_accepted_B, sample_from(p_BV, block.final_uniform_B), is_bonus_B)
    rejected_B = num_accepted_B.clamp(max=num_draft_tokens - 1)  # no meaning where is_bonus_B
    if block.draft_probs_BKV is None:
        q_BV = torch.zeros_like(p_BV).scatter_(1, tokens_BK1[rows_B, rejected_B], 1.0)
    else:
        q_BV = block.draft_probs_BKV[rows_B, rejected_B]
    weights_BV = next_weights(p_BV, (p_BV - q_BV).clamp(min=0.0), is_bonus_B)
    next_token_B = sample_from(weights_BV, block.final_uniform_B)
    return Verdict(num_accepted_B, next_token_B, is_bonus_B)


def verify_greedy(target_tokens_BK: Tensor, draft_tokens_BK: Tensor, num_drafted_B: Tensor) -> Verdict:
    """Every rule at temperature 0, on ids alone: p is one-hot, so only the target's own tokens are kept.

    target_tokens_BK: argmax of the target's logits, [B, K + 1].
    """
    num_draft_tokens = draft_tokens_BK.shape[1]
    steps_K = torch.arange(num_draft_tokens, device=draft_tokens_BK.device)
    same_BK = (draft_tokens_BK == target_tokens_BK[:, :num_draft_tokens]) & (steps_K < num_drafted_B[:, None])
    num_accepted_B = same_BK.long().cumprod(dim=1).sum(dim=1)
    next_token_B = target_tokens_BK.gather(1, num_accepted_B[:, None])[:, 0]
    return Verdict(num_accepted_B, next_token_B, num_accepted_B == num_drafted_B)


class TokenLaw(ABC):
    """Law, acceptance and residual of one place: elementwise, given what whole distributions have said.

    p, q: [..., V], or the probabilities [..., 1] of certain tokens; stats: [..., 1] each. All three functions must be 0
    where p = 0, so that no token outside the target's support is ever emitted.
    """

    @abstractmethod
    def law(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """nu."""

    @abstractmethod
    def accept(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """a: probability that a drafted token is kept."""

    @abstractmethod
    def residual(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """R: unnormalised law of the token that replaces a rejected one."""


class TokenRule(TokenLaw):
    """A rule that is a `TokenLaw` once `prepare` has seen the whole distributions."""

    is_lossless = False
    knows_law = True

    @abstractmethod
    def prepare(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """Statistics [B, K, 1] of each place; entry k may look at the block up to, and without, drafted token k."""

    def distance(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """TV(nu, p), float64 [..., without V]."""
        return total_variation(self.law(p, q, *stats), p)

    def verify(self, block: Block) -> Verdict:
        """Judge one block a row."""
        return verify_with(self, block)


class LawRule(TokenRule):
    """A rule given by its law nu: acceptance min(1, nu / q), residual (nu - q)+."""

    def accept(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.accept`."""
        return acceptance_probs(self.law(p, q, *stats), q)

    def residual(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.residual`."""
        return (self.law(p, q, *stats) - q).clamp(min=0.0)


class AcceptRule(TokenRule):
    """A rule given by an acceptance a >= min(1, p / q); its residual is the lossless rule's, norm((p - q)+).

    Law: nu = q a + (1 - sum q a) norm((p - q)+). The last two of its stats are 1 - sum q a and TV(p, q).
    """

    @abstractmethod
    def accept_stats(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """What `accept` needs of whole distributions."""

    def prepare(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """See `TokenRule.prepare`."""
        stats = self.accept_stats(block, p_BKV, q_BKV)
        rejected = self.refused(p_BKV, q_BKV, *stats).sum(dim=-1, keepdim=True)
        return (*stats, rejected, (p_BKV - q_BKV).clamp_(min=0.0).sum(dim=-1, keepdim=True))

    def refused(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """q (1 - a), over the whole vocabulary; here for rules that have a cheaper form of it."""
        return q * (1.0 - self.accept(p, q, *stats))

    def law(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.law`."""
        rejected, distance = stats[-2:]
        scale = torch.where(distance > 0, rejected / distance, 0.0)
        return q * self.accept(p, q, *stats) + self.residual(p, q, *stats) * scale

    def residual(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.residual`. Unscaled: bit for bit what the lossless rule draws from."""
        return (p - q).clamp(min=0.0)

    def distance(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """TV(nu, p) = TV(p, q) - sum q (1 - a): nu is at least p just where q is, since a >= min(1, p / q)."""
        rejected, distance = stats[-2:]
        return (distance - rejected)[..., 0].double().clamp(0.0, 1.0)


class _WithinBudget(TokenLaw):
    """What follows `rule` with probability `share` [..., 1], its last stat, and the lossless one otherwise.

    Law share nu + (1 - share) p: its distance is share TV(nu, p). share = 0 is the lossless rule, bit for bit.
    """

    def __init__(self, rule: TokenRule) -> None:
        self.rule = rule

    def law(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        return _mix(self.rule.law(p, q, *stats[:-1]), p, stats[-1])

    def accept(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        if isinstance(self.rule, LawRule):
            return acceptance_probs(self.law(p, q, *stats), q)
        return _mix(self.rule.accept(p, q, *stats[:-1]), acceptance_probs(p, q), stats[-1])

    def residual(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        if isinstance(self.rule, LawRule):
            return (self.law(p, q, *stats) - q).clamp(min=0.0)
        return _mix(self.rule.residual(p, q, *stats[:-1]), (p - q).clamp(min=0.0), stats[-1])


def _mix(relaxed: Tensor, strict: Tensor, share: Tensor) -> Tensor:
    return share.to(strict.dtype) * relaxed + (1.0 - share).to(strict.dtype) * strict


def spend_budget(distances_BK: Tensor, budget_B: Tensor) -> tuple[Tensor, Tensor]:
    """(share [B, K] of each place's distance that the budget allows, distance [B, K] spent there), float64.

    Place after place: one that is reached has spent what the places before it in the block spent.
    """
    left_B = budget_B.clamp(min=0.0)
    shares, spent = [], []
    for distance_B in distances_BK.unbind(dim=1):
        spent_B = torch.minimum(distance_B, left_B)
        shares.append(torch.where(distance_B > 0, spent_B / distance_B, 1.0))
        spent.append(spent_B)
        left_B = left_B - spent_B
    return torch.stack(shares, dim=1), torch.stack(spent, dim=1)


def verify_with(rule: TokenRule, block: Block) -> Verdict:
    """Judge one block a row by a rule that goes token by token."""
    if block.num_draft_tokens == 0:
        return verify_tokens(block)
    p_BKV = block.target_probs_BTV[:, :-1]
    q_BKV = block.dense_draft_probs()
    stats = rule.prepare(block, p_BKV, q_BKV)
    distances_BK = rule.distance(p_BKV, q_BKV, *stats)
    place: TokenLaw = rule
    if block.budget_B is not None:
        shares_BK, distances_BK = spend_budget(distances_BK, block.budget_B)
        place, stats = _WithinBudget(rule), (*stats, shares_BK[..., None])

    # Drafted tokens, in float64.
    tokens_BK1 = block.draft_tokens_BK[..., None]
    p_x, q_x = p_BKV.gather(2, tokens_BK1).double(), q_BKV.gather(2, tokens_BK1).double()
    wide = tuple(stat.double() for stat in stats)
    accept_BK = place.accept(p_x, q_x, *wide)[..., 0]
    num_accepted_B = count_accepted(block.uniforms_BK, accept_BK, block.num_drafted_B)
    is_bonus_B = num_accepted_B == block.num_drafted_B

    # The token after them.
    rows_B = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    rejected_B = num_accepted_B.clamp(max=block.num_draft_tokens - 1)  # no meaning where is_bonus_B
    p_BV, q_BV = block.target_probs_BTV[rows_B, num_accepted_B], q_BKV[rows_B, rejected_B]
    stats_B = tuple(stat[rows_B, rejected_B] for stat in stats)
    weights_BV = next_weights(p_BV, place.residual(p_BV, q_BV, *stats_B), is_bonus_B)
    next_token_B = sample_from(weights_BV, block.final_uniform_B)

    # What became of it.
    steps_K = torch.arange(block.num_draft_tokens, device=num_accepted_B.device)
    relaxed_BK = (block.uniforms_BK >= acceptance_probs(p_x, q_x)[..., 0]) & (steps_K < num_accepted_B[:, None])
    p_y, q_y = p_BV.gather(1, next_token_B[:, None]).double(), q_BV.gather(1, next_token_B[:, None]).double()
    next_B1 = torch.where(is_bonus_B[:, None], p_y, place.law(p_y, q_y, *(stat.double() for stat in stats_B)))
    drafted_BK = place.law(p_x, q_x, *wide)[..., 0]
    verify_probs_BT = torch.cat([drafted_BK, drafted_BK[:, :1]], dim=1).scatter(1, num_accepted_B[:, None], next_B1)
    return Verdict(num_accepted_B, next_token_B, is_bonus_B, verify_probs_BT, distances_BK, relaxed_BK)
