"""Independent reference, in numpy, of rules given by their acceptance, and the checks that all of them pass.

A rule keeps x ~ q with probability a(x) and draws norm((p - q)+) otherwise. Under a budget it follows the lossless rule
with probability 1 - share, where share is as much of TV(nu, p) as the places before have left.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from models.verification import token
from models.verification.base import Block, Rule
from tests.models.verification.enumeration import EXACT, Edges, Text, Toy, cumulated, joint_law, output_law

Accept = Callable[[np.ndarray, np.ndarray], np.ndarray]  # p, q -> a

# Vocabulary, tokens drafted, width of the block, one-hot q, zeros, p == q, budget.
CASES = [
    (3, 0, 0, False, False, False, None),
    (3, 0, 2, False, False, False, 0.1),
    (3, 1, 2, False, True, True, None),
    (3, 1, 2, False, False, False, 0.05),
    (4, 2, 3, True, True, False, None),
    (4, 2, 3, True, False, False, 0.15),
    (3, 2, 2, False, True, False, 10.0),
    (3, 2, 2, False, True, False, 0.15),
    (4, 2, 2, False, True, False, None),
    (3, 3, 3, False, False, False, None),
]


def lossless(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.array([min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0 for x in range(len(p))])


def law(p: np.ndarray, q: np.ndarray, accept: np.ndarray) -> np.ndarray:
    """What comes of drawing from q, keeping with `accept`, and drawing norm((p - q)+) otherwise."""
    excess = np.maximum(p - q, 0.0)
    rejected = np.sum(q * (1.0 - accept))
    return q * accept + (rejected * excess / excess.sum() if excess.sum() > 0 else 0.0)


def distance(nu: np.ndarray, p: np.ndarray) -> float:
    return float(np.abs(nu - p).sum() / 2)


def spend(nu: np.ndarray, p: np.ndarray, left: float) -> tuple[float, float]:
    """(share, distance spent) at a place."""
    wanted = distance(nu, p)
    return (min(wanted, left) / wanted, min(wanted, left)) if wanted > 0 else (1.0, 0.0)


def proposal(toy: Toy, text: Text, one_hot: bool) -> np.ndarray:
    return np.eye(toy.vocab_size)[int(np.argmax(toy.q[text]))] if one_hot else toy.q[text]


def stated(toy: Toy, num_drafted: int, one_hot: bool, accept: Accept, budget: float | None) -> dict[Text, np.ndarray]:
    """The law after each text of at most num_drafted tokens: share nu + (1 - share) p, and p after a full block."""
    rest: dict[Text, np.ndarray] = {}
    left = {(): np.inf if budget is None else budget}
    for text, p in toy.p.items():  # shorter texts come first
        rest[text] = p
        if len(text) < num_drafted:
            q = proposal(toy, text, one_hot)
            nu = law(p, q, accept(p, q))
            share, spent = spend(nu, p, left[text])
            rest[text] = share * nu + (1.0 - share) * p
            left |= {(*text, x): left[text] - spent for x in range(toy.vocab_size)}
    return rest


def edges_of(accept: Accept, budget: float | None) -> Edges:
    def edges(p: Sequence[np.ndarray], q: Sequence[np.ndarray], draft: Text) -> tuple[list[list[float]], list[float]]:
        left = np.inf if budget is None else budget
        places, final = [], list(np.cumsum(p[-1]))
        for k, x in enumerate(draft):
            share, spent = spend(law(p[k], q[k], accept(p[k], q[k])), p[k], left)
            left -= spent
            places.append([share * accept(p[k], q[k])[x] + (1.0 - share) * lossless(p[k], q[k])[x]])
            final += cumulated(np.maximum(p[k] - q[k], 0.0))
        return places, final

    return edges


def check_law(rule: Rule, accept: Accept) -> None:
    """One block, then tokens by the stated law, have the stated joint law."""
    for seed, (vocab_size, num_drafted, width, one_hot, zeros, same, budget) in enumerate(CASES):
        toy = Toy(vocab_size, num_drafted, seed, zeros, same)
        rest = stated(toy, num_drafted, one_hot, accept, budget)
        edges = edges_of(accept, budget)
        got = output_law(rule.verify, toy, num_drafted, width, one_hot, edges, rest, budget)
        assert np.abs(got - joint_law(rest, vocab_size, num_drafted + 1)).max() < EXACT


def random_block(
    num_rows: int, num_drafted: int, vocab_size: int, one_hot: bool, dtype: torch.dtype, budget: float | None = None
) -> Block:
    """Drafts drawn from q, ragged, with zeros in p and q and some uniforms 0."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0.0, 2.0, (2, num_rows, num_drafted + 1, vocab_size))
    logits[1] = logits[0] + logits[1] / 2
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[..., 0] = np.where(np.isinf(logits).all(axis=-1), 0.0, logits[..., 0])
    p, q = torch.tensor(logits).softmax(dim=-1).to(dtype)
    q = q[:, :num_drafted]
    drafts = torch.tensor(rng.random((num_rows, num_drafted, 1))).lt(q.double().cumsum(dim=-1)).long().argmax(dim=-1)
    uniforms = torch.tensor(rng.random((num_rows, num_drafted + 1)) * (rng.random((num_rows, num_drafted + 1)) > 0.05))
    return Block(
        p,
        None if one_hot else q,
        drafts,
        torch.tensor(rng.integers(0, num_drafted + 1, num_rows)),
        uniforms[:, :num_drafted],
        uniforms[:, num_drafted],
        None if budget is None else torch.full((num_rows,), budget, dtype=torch.float64),
    )


def check_told(rule: Rule, accept: Accept) -> None:
    """A verdict tells nu of each emitted token, each place's distance, and which tokens lossless would reject."""
    for one_hot, budget in [(False, None), (True, None), (False, 0.2), (True, 0.2)]:
        block = random_block(200, 3, 4, one_hot, torch.float64, budget)
        verdict = rule.verify(block)
        p_rows, q_rows = block.target_probs_BTV.numpy(), block.dense_draft_probs().numpy()
        for row, num_accepted in enumerate(verdict.num_accepted_B.tolist()):
            left = np.inf if budget is None else budget
            for k in range(min(num_accepted, 2) + 1):
                p, q, x = p_rows[row, k], q_rows[row, k], int(block.draft_tokens_BK[row, k])
                nu = law(p, q, accept(p, q))
                share, spent = spend(nu, p, left)
                left -= spent
                assert abs(float(verdict.distances_BK[row, k]) - spent) < EXACT
                refused = float(block.uniforms_BK[row, k]) >= lossless(p, q)[x]
                assert bool(verdict.relaxed_BK[row, k]) == (k < num_accepted and refused)
                y = x if k < num_accepted else int(verdict.next_token_B[row])
                is_bonus = k == num_accepted == int(block.num_drafted_B[row])
                expected = p if is_bonus else share * nu + (1.0 - share) * p
                assert abs(float(verdict.verify_probs_BT[row, k]) - expected[y]) < EXACT
        assert budget is not None or verdict.relaxed_BK.any()


def check_zero(rule: Rule) -> None:
    """u = 0 and p(x) = 0: rejected, and no token of probability zero comes instead; nor does one of rounding."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0]] * 2])
    q = torch.tensor([[[0.5, 0.1, 0.4, 0.0]]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    for draft_probs in (q, None):
        for budget in (None, torch.ones(1, dtype=torch.float64)):
            verdict = rule.verify(Block(p, draft_probs, torch.tensor([[0]]), torch.tensor([1]), zero, zero[0], budget))
            assert (verdict.num_accepted_B.item(), verdict.next_token_B.item()) == (0, 1)
            assert not verdict.is_bonus_B.item()


def check_support(rule: Rule) -> None:
    """Nothing outside p's support is ever emitted, in float32 and over many rows."""
    for one_hot in (False, True):
        block = random_block(2000, 4, 50, one_hot, torch.float32)
        verdict = rule.verify(block)
        emitted = torch.arange(4) < verdict.num_accepted_B[:, None]
        p_x = block.target_probs_BTV[:, :4].gather(2, block.draft_tokens_BK[..., None])[..., 0]
        assert (p_x[emitted] > 0).all()
        p_next = block.target_probs_BTV[torch.arange(2000), verdict.num_accepted_B]
        assert (p_next.gather(1, verdict.next_token_B[:, None]) > 0).all()


def check_same_as_lossless(rule: Rule, budget: float | None = None, ignores_q: bool = False) -> None:
    """Bit for bit the lossless verdict, in float32, ragged rows, sampled and one-hot q."""
    for one_hot in (False, True):
        block = random_block(2000, 4, 50, one_hot, torch.float32, budget)
        given = random_block(2000, 4, 50, one_hot or ignores_q, torch.float32)
        strict, relaxed = token.verify_tokens(given), rule.verify(block)
        assert torch.equal(strict.num_accepted_B, relaxed.num_accepted_B)
        assert torch.equal(strict.next_token_B, relaxed.next_token_B)
        assert torch.equal(strict.is_bonus_B, relaxed.is_bonus_B)
        assert set(strict.num_accepted_B.tolist()) >= ({0, 1} if given.draft_probs_BKV is None else {0, 1, 2, 3, 4})
        assert relaxed.relaxed_BK is None or not relaxed.relaxed_BK.any()
