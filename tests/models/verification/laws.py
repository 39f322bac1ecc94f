"""What the tests of rules that are given by their law share: the law nu in numpy, from which all else follows.

With nu known, acceptance is min(1, nu / q), the residual (nu - q)+, the distance TV(nu, p); a distance budget mixes nu
with p. All of it is computed here once more, row by row in numpy, so that a rule is compared with its formula and not
with its code.
"""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from models.verification.base import Block, Rule, Verdict
from models.verification.token import verify_tokens
from tests.models.verification.enumeration import (
    EXACT,
    Edges,
    Text,
    Toy,
    cumulated,
    fails,
    joint_law,
    output_law,
    planted,
)

# p and q after a text -> nu. The text matters to the dynamic ensemble alone.
Law = Callable[[np.ndarray, np.ndarray, Text], np.ndarray]
Check = Callable[[SimpleNamespace], None]

# vocabulary, drafted tokens, width of the block, one-hot q
SHAPES = ((3, 2, 2, False), (3, 1, 3, False), (3, 0, 2, False), (3, 0, 0, False), (3, 2, 2, True))
DEEP = ((4, 2, 2, False), (3, 3, 3, False))  # these take seconds: for one rule of a family
WORLDS = ((0, False, False), (1, True, False), (2, False, True))  # seed, zeros, p == q


def restricted(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """q on p's support, normalised; p where q has nothing there."""
    inside = np.where(p > 0, q, 0.0)
    return inside / inside.sum() if inside.sum() > 0 else p


def tv(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


def along(law: Law, p: list[np.ndarray], q: list[np.ndarray], draft: Text, budget: float | None) -> list[np.ndarray]:
    """nu at each place of a block along its draft, after the budget."""
    laws, left = [], np.inf if budget is None else budget
    for k in range(len(q)):
        relaxed = law(p[k], q[k], draft[:k])
        distance = tv(relaxed, p[k])
        share = min(distance, left) / distance if distance > 0 else 1.0
        laws.append(share * relaxed + (1.0 - share) * p[k])
        left -= share * distance
    return laws


def law_edges(law: Law, budget: float | None) -> Edges:
    """Edges of the uniforms of a rule with this law."""

    def edges(p: list[np.ndarray], q: list[np.ndarray], draft: Text) -> tuple[list[list[float]], list[float]]:
        laws = along(law, p, q, draft, budget)
        accept = [[min(1.0, laws[k][token] / q[k][token])] for k, token in enumerate(draft)]
        final = list(np.cumsum(p[-1]))
        for k in range(len(draft)):
            final += cumulated(np.maximum(laws[k] - q[k], 0.0))
        return accept, final

    return edges


def stated_steps(law: Law, toy: Toy, num_drafted: int, one_hot: bool, budget: float | None) -> dict[Text, np.ndarray]:
    """Law of the next token after each text: nu within the block, p for the bonus."""
    steps = {}
    for text in toy.p:
        p = [toy.p[text[:k]] for k in range(len(text) + 1)]
        q = [toy.q[text[:k]] for k in range(len(text) + 1)]
        if one_hot:
            q = [np.eye(toy.vocab_size)[np.argmax(row)] for row in q]
        steps[text] = along(law, p, q, text, budget)[-1] if len(text) < num_drafted else p[-1]
    return steps


def check_enumerated(
    rule: Rule, law: Law, shapes: tuple[tuple[int, int, int, bool], ...] = SHAPES, budgets: tuple[float, ...] = ()
) -> None:
    """The joint law of a block is the product of nu at each place, with and without a distance budget."""
    for (vocab_size, num_drafted, width, one_hot), (seed, zeros, same) in itertools.product(shapes, WORLDS):
        if same and num_drafted == 3:
            continue  # seconds, for what two places show
        toy = Toy(vocab_size, num_drafted, seed, zeros, same)
        for budget in (None, *budgets):
            steps = stated_steps(law, toy, num_drafted, one_hot, budget)
            edges = law_edges(law, budget)
            got = output_law(rule.verify, toy, num_drafted, width, one_hot, edges, steps, budget)
            assert np.abs(got - joint_law(steps, vocab_size, num_drafted + 1)).max() < EXACT


@functools.cache
def random_block(
    num_rows: int, vocab_size: int, width: int, seed: int, dtype: torch.dtype, zeros: bool = True, one_hot: bool = False
) -> Block:
    """Random rows of random lengths. Some p and q are 0, some u are 0, some rows have p == q, or supports apart."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(vocab_size, 0.5), (num_rows, width + 1))
    q = rng.dirichlet(np.full(vocab_size, 0.5), (num_rows, width))
    if zeros:
        p *= rng.random(p.shape) < 0.7
        q *= rng.random(q.shape) < 0.7
        p[..., 0] += 1e-3
        q[..., rng.integers(vocab_size)] += 1e-3
        q[rng.random(q.shape[:2]) < 0.05] = np.eye(vocab_size)[-1]
    same = rng.random(num_rows) < 0.1
    q[same] = p[same, :-1]
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    drafts = np.argmax(np.cumsum(q, axis=-1) > rng.random((num_rows, width, 1)) * q.sum(-1, keepdims=True), axis=-1)
    if one_hot:
        q = np.eye(vocab_size)[drafts]
    uniforms = rng.random((num_rows, width)) * (rng.random((num_rows, width)) < 0.9)
    return Block(
        torch.tensor(p, dtype=dtype),
        None if one_hot else torch.tensor(q, dtype=dtype),
        torch.tensor(drafts),
        torch.tensor(rng.integers(0, width + 1, num_rows)),
        torch.tensor(uniforms),
        torch.tensor(rng.random(num_rows)),
    )


def check_verdicts(rule: Rule, law: Law) -> None:
    """Every field of the verdict, row by row, against the formulas: float64, ragged rows, zeros, u = 0, one-hot q."""
    for one_hot in (False, True):
        block = random_block(100, 5, 3, seed=11, dtype=torch.float64, one_hot=one_hot)
        for budget in (None, 0.2):
            budget_B = None if budget is None else torch.full_like(block.final_uniform_B, budget)
            verdict = rule.verify(Block(**{**vars(block), "budget_B": budget_B}))
            for row in range(len(block.num_drafted_B)):
                _check_row(law, block, verdict, row, budget)


def _check_row(law: Law, block: Block, verdict: Verdict, row: int, budget: float | None) -> None:
    num_drafted = int(block.num_drafted_B[row])
    p = list(block.target_probs_BTV[row].numpy())
    q = list(block.dense_draft_probs()[row].numpy())
    draft, uniforms = tuple(block.draft_tokens_BK[row].tolist()), block.uniforms_BK[row].tolist()
    laws = along(law, p, q, draft, budget)
    kept = 0
    while kept < num_drafted and uniforms[kept] < min(1.0, laws[kept][draft[kept]] / q[kept][draft[kept]]):
        kept += 1
    is_bonus = kept == num_drafted
    residual = np.zeros_like(p[0]) if is_bonus else np.maximum(laws[kept] - q[kept], 0.0)
    weights = residual if residual.sum() > 0 else p[kept]
    next_token = int(np.argmax(np.cumsum(weights) > float(block.final_uniform_B[row]) * weights.sum()))
    emitted = [laws[k][draft[k]] for k in range(kept)] + [p[kept][next_token] if is_bonus else laws[kept][next_token]]
    lossless = [min(1.0, p[k][draft[k]] / q[k][draft[k]]) for k in range(len(draft))]

    assert int(verdict.num_accepted_B[row]) == kept
    assert int(verdict.next_token_B[row]) == next_token
    assert bool(verdict.is_bonus_B[row]) == is_bonus
    assert all(p[k][token] > 0 for k, token in enumerate((*draft[:kept], next_token)))
    assert verdict.verify_probs_BT is not None
    assert np.abs(verdict.verify_probs_BT[row, : kept + 1].numpy() - emitted).max() < EXACT
    assert verdict.relaxed_BK is not None
    assert verdict.relaxed_BK[row].tolist() == [k < kept and uniforms[k] >= lossless[k] for k in range(len(draft))]
    assert verdict.distances_BK is not None
    assert verdict.distances_BK.dtype == torch.float64
    distances = [tv(laws[k], p[k]) for k in range(len(draft))]
    assert np.abs(verdict.distances_BK[row].numpy() - distances).max() < EXACT


def check_strict(rule: Rule, budget: float | None = None) -> None:
    """Bit-identical to lossless token verification under the same uniforms, in float32 and float64."""
    for dtype, one_hot in [(torch.float32, False), (torch.float32, True), (torch.float64, False)]:
        block = random_block(2000, 50, 4, seed=5, dtype=dtype, one_hot=one_hot)
        strict = verify_tokens(block)
        budget_B = None if budget is None else torch.full_like(block.final_uniform_B, budget)
        verdict = rule.verify(Block(**{**vars(block), "budget_B": budget_B}))
        assert torch.equal(verdict.num_accepted_B, strict.num_accepted_B)
        assert torch.equal(verdict.next_token_B, strict.next_token_B)
        assert torch.equal(verdict.is_bonus_B, strict.is_bonus_B)
        assert verdict.relaxed_BK is not None
        assert not verdict.relaxed_BK.any()
        assert verdict.distances_BK is not None
        assert verdict.distances_BK.sum() == 0


def check_rows_apart(rule: Rule) -> None:
    """A row's verdict is what it is alone, though its neighbour's logits were NaN."""
    block = random_block(40, 6, 3, seed=9, dtype=torch.float32)
    alone = [rule.verify(Block(*(field[row : row + 1] for field in _tensors(block)))) for row in range(1, 40)]
    p_BTV = block.target_probs_BTV.clone()
    p_BTV[0] = torch.nan
    together = rule.verify(Block(p_BTV, *_tensors(block)[1:]))
    for name in ("num_accepted_B", "next_token_B", "is_bonus_B", "distances_BK", "relaxed_BK"):
        assert torch.equal(getattr(together, name)[1:], torch.cat([getattr(verdict, name) for verdict in alone]))


def _tensors(block: Block) -> list[torch.Tensor]:
    return [field for field in vars(block).values() if field is not None]


def is_caught(checks: list[Check], modules: list[str], right: str, wrong: str) -> bool:
    """Whether one of the checks refuses the modules with `wrong` in place of `right`."""
    mutant = planted(["base", "token", *modules], right, wrong)
    return any(fails(check, mutant) for check in checks)
