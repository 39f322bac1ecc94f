"""What the mathematics says a rule does, summed over every text: accepted tokens, law of the output, certificate.

Nothing here samples, and no step takes the places of a block for independent. A rule is asked only for its acceptance
a, its residual R and the distance it reports; what it emits follows from those two, so that a false statement about its
law or distance shows as a contradiction.

Shape suffixes: M models (or prompts), N = V**d texts of d tokens (see `enumerable`), V vocabulary, K drafted tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.theory.enumerable import EnumerableModel, every_draft
from models.verification.base import total_variation
from models.verification.token import LawRule, TokenRule, spend_budget

ROUNDING = 1e-12  # float64, sums over a small vocabulary


@dataclass(frozen=True)
class Place:
    """What a rule does at one place of a block, after every text that reaches it.

    kept_MNV: q a, probability that a token is drafted and accepted. recovered_MNXV: that drafted token x is rejected
    and another drawn in its place. distance_MNX: what the place adds to the certificate. X = 1 where it makes no
    difference which token is rejected (its entry stands for all), else X = V.
    """

    kept_MNV: Tensor
    recovered_MNXV: Tensor
    distance_MNX: Tensor


def judge_places(
    model: EnumerableModel, rule: TokenRule, start: int, num_draft_tokens: int, left_MN: Tensor | None = None
) -> list[Place]:
    """The K places of a block that begins after `start` tokens.

    left_MN: budget still unspent after every text of `start` tokens; None: none is set. With a budget the law is a
    mixture of the rule's own (its part is `share`) and p, for which a `LawRule` then takes the best acceptance.
    """
    block = every_draft(model, start, num_draft_tokens)
    p, q = block.target_probs_BTV[:, :-1], block.dense_draft_probs()
    stats = rule.prepare(block, p, q)
    distances_BK = rule.distance(p, q, *stats)
    kept, residual = q * rule.accept(p, q, *stats), rule.residual(p, q, *stats)
    rejected, total = 1.0 - kept.sum(dim=2, keepdim=True), residual.sum(dim=2, keepdim=True)
    recovered = rejected.clamp(min=0.0) * torch.where(total > 0, residual / total, p)
    if left_MN is not None:
        left_B = left_MN.repeat_interleave(model.vocab_size**num_draft_tokens, dim=1).flatten()
        shares_BK, distances_BK = spend_budget(distances_BK, left_B)
        share = shares_BK[..., None]
        if isinstance(rule, LawRule):
            nu = share * (kept + recovered) + (1.0 - share) * p
            kept, recovered = torch.minimum(q, nu), (nu - q).clamp(min=0.0)
        else:
            kept = share * kept + (1.0 - share) * torch.minimum(p, q)
            recovered = share * recovered + (1.0 - share) * (p - q).clamp(min=0.0)

    return [
        _place(model, start + k, *(values[:, k] for values in (kept, recovered, distances_BK)))
        for k in range(num_draft_tokens)
    ]


def _place(model: EnumerableModel, length: int, kept_BV: Tensor, recovered_BV: Tensor, distance_B: Tensor) -> Place:
    """One place, after texts of `length` tokens, from rows that spell out the whole block."""
    if model.tells_q:
        kept_MNV, recovered_MNV, distance_MN = (
            _once(model, length, rows) for rows in (kept_BV, recovered_BV, distance_B)
        )
        return Place(kept_MNV, recovered_MNV[:, :, None], distance_MN[..., None])
    # The rule takes the drafted token for certain, so that token itself makes a difference.
    q_MNX = model.q[length]
    kept_MNXV, recovered_MNXV, distance_MNX = (
        _once(model, length + 1, rows).unflatten(1, q_MNX.shape[1:]) for rows in (kept_BV, recovered_BV, distance_B)
    )
    accept_MNX = kept_MNXV.diagonal(dim1=2, dim2=3)
    return Place(q_MNX * accept_MNX, q_MNX[..., None] * recovered_MNXV, distance_MNX)


def _once(model: EnumerableModel, length: int, rows: Tensor) -> Tensor:
    """[B, ..] of the block's whole texts -> [M, N, ..] of their first `length` tokens, on which alone it may depend."""
    groups = rows.unflatten(0, (model.num_models, model.vocab_size**length, -1))
    if ((groups - groups[:, :, :1]).abs() > ROUNDING).any():
        raise ValueError(
            "the rule judges a place by the token drafted there, or by later ones: if it takes drafted tokens for "
            "certain, make the model with tells_q=False; if it looks ahead, its law is not known."
        )
    return groups[:, :, 0]


def expected_accepted(model: EnumerableModel, rule: TokenRule, num_draft_tokens: int, start: int = 0) -> Tensor:
    """Expected accepted tokens [M] of one block that begins after `start` tokens of the target's own.

    sum over t and drafts x_1 .. x_t of prod_{i <= t} q_i(x_i) a_i(x_i): P(at least t tokens are kept), summed over t.
    """
    reach_MN = model.target_law(start)
    expected_M = torch.zeros(model.num_models, dtype=torch.float64)
    for place in judge_places(model, rule, start, num_draft_tokens):
        reach_MN = (reach_MN[..., None] * place.kept_MNV).flatten(1)
        expected_M = expected_M + reach_MN.sum(dim=1)
    return expected_M


def averaged_accepted(model: EnumerableModel, rule: TokenRule, num_draft_tokens: int, start: int = 0) -> Tensor:
    """The estimate [M] that takes places for independent: sum over t of the product of the mean rates. It is wrong.

    The rate of place i is averaged over drafts from q; but the place is reached through tokens that were *accepted*.
    """
    draft_MN = model.target_law(start)
    product_M = torch.ones(model.num_models, dtype=torch.float64)
    expected_M = torch.zeros_like(product_M)
    places = judge_places(model, rule, start, num_draft_tokens)
    for place, q_MNV in zip(places, model.q[start:], strict=False):
        product_M = product_M * (draft_MN[..., None] * place.kept_MNV).sum(dim=(1, 2))
        expected_M = expected_M + product_M
        draft_MN = (draft_MN[..., None] * q_MNV).flatten(1)
    return expected_M


def expected_accepted_blockwise(model: EnumerableModel, num_draft_tokens: int, start: int = 0) -> Tensor:
    """Expected accepted tokens [M] of one block under block verification (Sun et al. 2024, arXiv 2403.10444).

    From its definition: the longest i with u_i < h_i is kept, so P(at least t are kept | draft) is
    1 - prod_{i >= t} (1 - h_i).
    """
    block = every_draft(model, start, num_draft_tokens)
    p_BTV, q_BKV = block.target_probs_BTV, block.dense_draft_probs()
    draft_MN = model.target_law(start)
    for q_MNV in model.q[start : start + num_draft_tokens]:
        draft_MN = (draft_MN[..., None] * q_MNV).flatten(1)
    weight_B = torch.ones_like(draft_MN).flatten()
    fails = []  # 1 - h_i for i = 1 .. K
    for k, token_B in enumerate(block.draft_tokens_BK.unbind(dim=1)):
        p_x_B, q_x_B = (probs[:, k].gather(1, token_B[:, None])[:, 0] for probs in (p_BTV, q_BKV))
        weight_B = torch.where(q_x_B > 0, weight_B * p_x_B / q_x_B, 0.0).clamp(max=1.0)
        if k == num_draft_tokens - 1:
            fails.append(1.0 - weight_B)
        else:
            surplus_B = (weight_B[:, None] * p_BTV[:, k + 1] - q_BKV[:, k + 1]).clamp(min=0.0).sum(dim=1)
            total_B = surplus_B + 1.0 - weight_B
            # 0 / 0 where w = 1 and p = q at the next place: more than i tokens are then kept for certain.
            fails.append(torch.where(total_B > 0, (1.0 - weight_B) / total_B, 0.0))
    kept_KB = torch.stack([1.0 - torch.stack(fails[k:]).prod(dim=0) for k in range(num_draft_tokens)])
    return (draft_MN * kept_KB.sum(dim=0).view_as(draft_MN)).sum(dim=1)


@dataclass(frozen=True)
class Outcome:
    """What a whole decode comes to, exactly.

    law_MN: of the output, N = V**length. The others are expectations a sequence: drafted tokens kept, blocks, and the
    certificate; and the largest certificate that any sequence has.
    """

    law_MN: Tensor
    accepted_M: Tensor
    blocks_M: Tensor
    certificate_M: Tensor
    largest_certificate_M: Tensor


def decode_exactly(
    model: EnumerableModel,
    rule: TokenRule,
    length: int,
    num_draft_tokens: int,
    budget: float | None = None,
    start: int = 0,
) -> Outcome:
    """Decode `length` tokens block by block, every way that it can go.

    The first `start` tokens come from p (the prefill's), then blocks of at most K drafted tokens follow; as in the
    decoder none drafts what it could not emit, so the last token is never a drafted one. A bonus comes from p, so the
    law depends on where blocks begin, and with a budget (a sequence's, over all its blocks) on what they have spent:
    each way to cut the text into blocks is followed by itself.
    """
    model.require_depth(length)
    law_MN = torch.zeros(model.num_models, model.vocab_size**length, dtype=torch.float64)
    accepted_M, blocks_M, certificate_M, largest_M = torch.zeros(4, model.num_models, dtype=torch.float64)
    weight_MN = model.target_law(start)
    waiting = [(start, weight_MN, torch.zeros_like(weight_MN))]
    while waiting:
        place, weight_MN, spent_MN = waiting.pop()
        if place == length:
            law_MN += weight_MN
            certificate_M += (weight_MN * spent_MN).sum(dim=1)
            largest_M = torch.maximum(largest_M, torch.where(weight_MN > 0, spent_MN, 0.0).amax(dim=1))
            continue
        blocks_M += weight_MN.sum(dim=1)
        num_drafted = min(num_draft_tokens, length - place - 1)
        for num_kept, weight, spent in _follow_block(model, rule, place, num_drafted, weight_MN, spent_MN, budget):
            accepted_M += num_kept * weight.sum(dim=1)
            waiting.append((place + num_kept + 1, weight, spent))
    return Outcome(law_MN, accepted_M, blocks_M, certificate_M, largest_M)


def _follow_block(
    model: EnumerableModel,
    rule: TokenRule,
    start: int,
    num_drafted: int,
    weight_MN: Tensor,
    spent_MN: Tensor,
    budget: float | None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each way that the block can end: (tokens kept, P of every text after it, certificate after that text)."""
    left_MN = None if budget is None else budget - spent_MN
    places = judge_places(model, rule, start, num_drafted, left_MN) if num_drafted else []
    for num_kept, place in enumerate(places):
        total_MNX = spent_MN[..., None] + place.distance_MNX
        for recovered_MNV, total_MN in zip(place.recovered_MNXV.unbind(dim=2), total_MNX.unbind(dim=2), strict=True):
            weight = (weight_MN[..., None] * recovered_MNV).flatten(1)
            yield num_kept, weight, total_MN.repeat_interleave(model.vocab_size, dim=1)
        weight_MN = (weight_MN[..., None] * place.kept_MNV).flatten(1)
        spent_MN = total_MNX.expand_as(place.kept_MNV).flatten(1)
    bonus_MN = (weight_MN[..., None] * model.p[start + num_drafted]).flatten(1)
    yield num_drafted, bonus_MN, spent_MN.repeat_interleave(model.vocab_size, dim=1)


def output_distance(model: EnumerableModel, outcome: Outcome, length: int) -> Tensor:
    """TV [M] between the law of the output and the law of the target's own: what the certificate bounds."""
    return total_variation(outcome.law_MN, model.target_law(length))
