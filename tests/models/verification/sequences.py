"""Whole sequences through a rule's real verdicts, every way that they can go: the oracle of what a decode comes to.

Each block of each state (text so far, budget left) is judged by `rule.verify` itself, once for every draft and every
cell of every uniform (see `enumeration`). The cells' edges come from plain statements of the rules in numpy, here.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from models.verification.base import Block, Rule
from tests.models.verification.enumeration import Text, cells, cumulated

# p, q at one context -> (a, R), where no budget cuts in
Statement = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
Tables = tuple[Mapping[Text, np.ndarray], Mapping[Text, np.ndarray]]  # p and q after each text


@dataclass
class Tally:
    """Law of the output, expectations a sequence, and the largest certificate of any."""

    law: dict[Text, float] = field(default_factory=lambda: defaultdict(float))
    accepted: float = 0.0
    blocks: float = 0.0
    certificate: float = 0.0
    largest: float = 0.0


def static_ensemble(weight: float) -> Statement:
    """nu = w p + (1 - w) q', q' restricted to p's support."""

    def state(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inside = np.where(p > 0, q, 0.0)
        nu = weight * p + (1 - weight) * inside / inside.sum() if inside.sum() > 0 else p
        return ratio(nu, q), np.maximum(nu - q, 0.0)

    return state


def lenience(factor: float) -> Statement:
    """a = min(1, p / (l q)), residual as in the lossless rule."""

    def state(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        accept = ratio(p, factor * q)
        return accept, scaled(np.maximum(p - q, 0.0), 1.0 - (q * accept).sum())

    return state


def two_thresholds(single: float, acc: float) -> Statement:
    """For a one-hot q: a = min(1, p / acc), 1 where p >= single; a rejected token's place goes to p without it."""

    def state(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        accept = np.where(p >= single, 1.0, np.minimum(1.0, p / acc)) * (p > 0)
        return accept, scaled(np.maximum(p - q, 0.0), 1.0 - (q * accept).sum())

    return state


def ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(1, p / q), 0 where q is."""
    return np.minimum(1.0, np.divide(p, q, out=np.zeros_like(p), where=q > 0))


def scaled(weights: np.ndarray, total: float) -> np.ndarray:
    """Weights that sum to `total`, or zeros."""
    return weights * (total / weights.sum()) if weights.sum() > 0 else weights


def within_budget(
    state: Statement, is_law: bool, p: np.ndarray, q: np.ndarray, left: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """(a, R, distance spent) of one place: the law is moved towards p until its distance fits into what is left."""
    accept, residual = state(p, q)
    nu = q * accept + residual
    distance = np.abs(nu - p).sum() / 2
    spent = min(distance, max(left, 0.0))
    share = spent / distance if distance > 0 else 1.0
    if is_law:
        nu = share * nu + (1 - share) * p
        return ratio(nu, q), np.maximum(nu - q, 0.0), spent
    lossless = np.maximum(p - q, 0.0)
    return share * accept + (1 - share) * ratio(p, q), share * residual + (1 - share) * lossless, spent


def decode_by_verdicts(
    rule: Rule,
    state: Statement,
    is_law: bool,
    tables: Tables,
    length: int,
    num_draft_tokens: int,
    budget: float | None = None,
    tells_q: bool = True,
) -> Tally:
    """Decode `length` tokens block by block; no block drafts what could not be emitted.

    state, is_law: what the rule should do, and whether it is stated by its law. They say where the cells' edges lie.
    tells_q: whether the rule sees what tokens are drafted from, or must take them for certain.
    """
    p, q = tables
    vocab_size = len(p[()])
    rng = np.random.default_rng(7)
    tally = Tally()
    states: dict[tuple[Text, float], float] = {((), 0.0): 1.0}  # (text, certificate so far) -> probability
    while states:
        rows = []
        for (text, spent), weight in states.items():
            tally.blocks += weight
            num_drafted = min(num_draft_tokens, length - len(text) - 1)
            left = np.inf if budget is None else budget - spent
            for draft in itertools.product(range(vocab_size), repeat=num_drafted):
                places = [text + draft[:k] for k in range(num_drafted + 1)]
                draft_weight = weight * np.prod([q[places[k]][draft[k]] for k in range(num_drafted)])
                if draft_weight == 0:
                    continue
                edges, final, unspent = [], cumulated(p[places[-1]]), left
                for k, token in enumerate(draft):
                    q_k = q[places[k]] if tells_q else np.eye(vocab_size)[token]
                    accept, residual, cost = within_budget(state, is_law, p[places[k]], q_k, unspent)
                    edges.append([accept[token]])
                    final = final + cumulated(residual)
                    unspent -= cost
                for combination in itertools.product(*(cells(place, rng) for place in edges), cells(final, rng)):
                    middles, sizes = zip(*combination, strict=True)
                    rows.append((text, spent, draft, left, middles, draft_weight * np.prod(sizes)))
        states = _next_states(rule, rows, tables, length, num_draft_tokens, budget is not None, tells_q, tally)
    return tally


def _next_states(
    rule: Rule, rows: list, tables: Tables, length: int, width: int, has_budget: bool, tells_q: bool, tally: Tally
) -> dict[tuple[Text, float], float]:
    """Let the rule judge all rows at once, and gather what they lead to."""
    p, q = tables
    padding = [width - len(draft) for _, _, draft, *_ in rows]
    contexts = [
        [text + draft[:k] for k in range(len(draft) + 1)] + [()] * pad
        for (text, _, draft, *_), pad in zip(rows, padding, strict=True)
    ]
    uniforms = [[*row[4][:-1], *[0.0] * pad] for row, pad in zip(rows, padding, strict=True)]
    verdict = rule.verify(
        Block(
            torch.tensor(np.array([[p[context] for context in places] for places in contexts])),
            torch.tensor(np.array([[q[context] for context in places[:-1]] for places in contexts]))
            if tells_q
            else None,
            torch.tensor([[*row[2], *[0] * pad] for row, pad in zip(rows, padding, strict=True)]),
            torch.tensor([len(row[2]) for row in rows]),
            torch.tensor(uniforms, dtype=torch.float64),
            torch.tensor([row[4][-1] for row in rows], dtype=torch.float64),
            torch.tensor([row[3] for row in rows], dtype=torch.float64) if has_budget else None,
        )
    )
    distances = verdict.distances_BK.tolist() if verdict.distances_BK is not None else [[0.0] * width] * len(rows)
    outcomes = zip(rows, verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), distances, strict=True)
    states: dict[tuple[Text, float], float] = defaultdict(float)
    for (text, spent, draft, _, _, weight), num_accepted, next_token, distance in outcomes:
        tally.accepted += weight * num_accepted
        emitted = (*text, *draft[:num_accepted], next_token)
        total = spent + sum(distance[: min(num_accepted + 1, len(draft))])
        if len(emitted) < length:
            states[emitted, total] += weight
            continue
        tally.law[emitted] += weight
        tally.certificate += weight * total
        tally.largest = max(tally.largest, total)
    return states
