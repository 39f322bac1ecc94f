"""The verification rule, exact: every draft and every outcome enumerated in float64, against the target's joint law.

A verdict depends on each uniform only through the cell it falls in. So the law is a finite sum: the rule is evaluated
at the midpoint of every cell of a partition that contains all true edges (computed here, independently of the code),
weighted by the cells' sizes. Further random edges change nothing for correct code and show a wrong threshold. The same
checks are then shown to fail for faults planted in the real source.
"""

import inspect
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.decoding import verification
from models.decoding.sampling import SamplingParams, transform_logits

EXACT = 1e-12  # float64, sums of some thousand terms
NUM_EXTRA_EDGES = 3


class Toy:
    """Random p(. | prefix) and q(. | prefix) over a small vocabulary, for every prefix, with some zeros in both."""

    def __init__(self, vocab_size: int, depth: int, seed: int, zeros: bool = False, same: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.p: dict[tuple[int, ...], np.ndarray] = {}
        self.q: dict[tuple[int, ...], np.ndarray] = {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocab_size), repeat=length):
                for law in (self.p, self.q):
                    weights = rng.dirichlet(np.ones(vocab_size))
                    if zeros:
                        weights[rng.integers(vocab_size)] = 0.0
                    law[prefix] = weights / weights.sum()
                if same:
                    self.q[prefix] = self.p[prefix]

    def target_law(self, length: int) -> np.ndarray:
        law = np.zeros((self.vocab_size,) * length)
        for text in itertools.product(range(self.vocab_size), repeat=length):
            law[text] = np.prod([self.p[text[:i]][text[i]] for i in range(length)])
        return law


def cells(edges: list[float], rng: np.random.Generator) -> list[tuple[float, float]]:
    """(midpoint, size) of the cells that these edges and some random ones cut the unit interval into."""
    cut = np.unique(np.clip([0.0, *edges, *rng.random(NUM_EXTRA_EDGES), 1.0], 0.0, 1.0))
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(cut) if b > a]


def output_law(verify: Callable, toy: Toy, num_drafted: int, width: int, one_hot: bool) -> np.ndarray:
    """Joint law of num_drafted + 1 tokens: one block of num_drafted (padded to `width`), then the target's own."""
    rng = np.random.default_rng(7)
    vocab_size = toy.vocab_size
    p_rows, q_rows, drafts, uniforms, finals, weights = [], [], [], [], [], []
    for draft in itertools.product(range(vocab_size), repeat=num_drafted):
        p = [toy.p[draft[:k]] for k in range(num_drafted + 1)]
        if one_hot:
            # A drafter that always proposes the same token after the same text.
            if any(draft[k] != int(np.argmax(toy.q[draft[:k]])) for k in range(num_drafted)):
                continue
            q = [np.eye(vocab_size)[d] for d in draft]
        else:
            q = [toy.q[draft[:k]] for k in range(num_drafted)]
        draft_weight = np.prod([q[k][draft[k]] for k in range(num_drafted)])
        if draft_weight == 0:
            continue
        accept = [min(1.0, p[k][draft[k]] / q[k][draft[k]]) for k in range(num_drafted)]
        finals_edges = list(np.cumsum(p[-1]))
        for k in range(num_drafted):
            excess = np.maximum(p[k] - q[k], 0.0)
            finals_edges += list(np.cumsum(excess) / excess.sum()) if excess.sum() > 0 else []
        axes = [cells([a], rng) for a in accept]
        padding = width - num_drafted
        for combination in itertools.product(*axes, cells(finals_edges, rng)):
            p_rows.append(p + [toy.p[()]] * padding)
            q_rows.append(q + [toy.q[()]] * padding)
            drafts.append(draft + (0,) * padding)
            uniforms.append([middle for middle, _ in combination[:-1]] + [0.0] * padding)
            finals.append(combination[-1][0])
            weights.append(draft_weight * np.prod([size for _, size in combination]))
    verdict = verify(
        torch.tensor(np.array(p_rows)),
        None if one_hot else torch.tensor(np.array(q_rows)).reshape(len(drafts), width, vocab_size),
        torch.tensor(drafts, dtype=torch.long).reshape(len(drafts), width),
        torch.full((len(drafts),), num_drafted),
        torch.tensor(uniforms, dtype=torch.float64).reshape(len(drafts), width),
        torch.tensor(finals, dtype=torch.float64),
    )
    law = np.zeros((vocab_size,) * (num_drafted + 1))
    outcomes = zip(drafts, weights, verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
    for draft, weight, num_accepted, next_token in outcomes:
        emitted = (*draft[:num_accepted], next_token)
        assert num_accepted <= num_drafted
        for rest in itertools.product(range(vocab_size), repeat=num_drafted - num_accepted):
            text = emitted + rest
            law[text] += weight * np.prod([toy.p[text[:i]][text[i]] for i in range(len(emitted), len(text))])
    return law


def check_law(code: SimpleNamespace) -> None:
    """One block, then the target's own tokens, have the target's joint law."""
    for vocab_size, num_drafted, width, one_hot in [
        (4, 2, 2, False),
        (3, 3, 3, False),
        (3, 1, 3, False),
        (3, 0, 2, False),
        (3, 0, 0, False),
        (4, 2, 2, True),
        (3, 1, 2, True),
    ]:
        for seed, zeros in [(0, False), (1, True)]:
            toy = Toy(vocab_size, num_drafted, seed, zeros)
            law = output_law(code.verify_tokens, toy, num_drafted, width, one_hot)
            assert np.abs(law - toy.target_law(num_drafted + 1)).max() < EXACT


def check_same(code: SimpleNamespace) -> None:
    """p == q: everything is accepted, and the residual is p, not NaN."""
    toy = Toy(3, 2, seed=3, same=True)
    assert np.abs(output_law(code.verify_tokens, toy, 2, 2, False) - toy.target_law(3)).max() < EXACT
    p = torch.tensor([[0.2, 0.5, 0.3]])
    assert torch.equal(code.residual_probs(p, p), p)
    below = torch.full((1, 1), 1.0 - 2.0**-53, dtype=torch.float64)
    verdict = code.verify_tokens(
        p[:, None].repeat(1, 2, 1), p[:, None], torch.tensor([[1]]), torch.tensor([1]), below, below[0]
    )
    assert verdict.num_accepted_B.tolist() == [1]
    assert verdict.is_bonus_B.tolist() == [True]


def check_zero(code: SimpleNamespace) -> None:
    """u = 0 and p(x) = 0: rejected, and no token of probability zero comes instead."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0]] * 2])
    q = torch.tensor([[[0.5, 0.1, 0.4, 0.0]]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    for draft_probs in (q, None):
        verdict = code.verify_tokens(p, draft_probs, torch.tensor([[0]]), torch.tensor([1]), zero, zero[0])
        assert (verdict.num_accepted_B.item(), verdict.next_token_B.item()) == (0, 1)
        assert not verdict.is_bonus_B.item()


def check_pieces(code: SimpleNamespace) -> None:
    """Acceptance is a probability, the residual sums to one."""
    toy = Toy(4, 1, seed=5, zeros=True)
    p, q = (torch.tensor(np.array(list(law.values()))) for law in (toy.p, toy.q))
    accept = code.acceptance_probs(p, q)
    assert ((accept >= 0) & (accept <= 1)).all()
    assert (accept[q == 0] == 0).all()
    residual = code.residual_probs(p, q)
    assert (residual.sum(dim=-1) - 1).abs().max() < EXACT
    assert (residual[p <= q] == 0).all()


CHECKS = [check_pieces, check_zero, check_same, check_law]  # cheap ones first
REAL = SimpleNamespace(**vars(verification))


@pytest.mark.parametrize("check", CHECKS)
def test_rule_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "comparison not strict": ("uniforms_BK < accept", "uniforms_BK <= accept"),
    "ratio inverted": ("p_x / q_x", "q_x / p_x"),
    "ratio not clamped": (".clamp(max=1.0)", ""),
    "token with q = 0 accepted": ("torch.where(q_x > 0, p_x / q_x, 0.0)", "(p_x / q_x)"),
    "residual of the wrong sign": ("(p - q).clamp(min=0.0)", "(q - p).clamp(min=0.0)"),
    "residual not cut at zero": ("(p - q).clamp(min=0.0)", "(p - q).abs()"),
    "residual not normalised": ("excess / mass", "excess"),
    "residual NaN where p == q": ("torch.where(mass > 0, excess / mass, p)", "excess / mass"),
    "p in place of the residual": ("residual_probs(p_BV, q_BV))", "p_BV)"),
    "accepts past the first rejection": (".cumprod(dim=1).sum(dim=1)", ".sum(dim=1)"),
    "padding is judged": (" & (steps_K < num_drafted_B[:, None])", ""),
    "bonus from q": ("torch.where(is_bonus_B[:, None], p_BV,", "torch.where(is_bonus_B[:, None], q_BV,"),
    "no bonus in short rows": (
        "is_bonus_B = num_accepted_B == num_drafted_B",
        "is_bonus_B = num_accepted_B == num_draft_tokens",
    ),
    "p one place late": ("target_probs_BKV[:, :num_draft_tokens]", "target_probs_BKV[:, 1:]"),
    "next token one place early": (
        "target_probs_BKV[rows_B, num_accepted_B]",
        "target_probs_BKV[rows_B, (num_accepted_B - 1).clamp(min=0)]",
    ),
    "q of the first place": ("draft_probs_BKV[rows_B, rejected_B]", "draft_probs_BKV[:, 0]"),
    "uniform used twice": (
        "sample_from(next_probs_BV, final_uniform_B)",
        "sample_from(next_probs_BV, uniforms_BK[rows_B, rejected_B])",
    ),
    "one-hot q of the wrong token": (
        "draft_tokens_BK[rows_B, rejected_B][:, None], 1.0",
        "draft_tokens_BK[:, :1], 1.0",
    ),
    "one-hot draft taken as always right": ("q_x_BK = torch.ones_like(p_x_BK)", "q_x_BK = p_x_BK"),
}


def fails(check: Callable[[SimpleNamespace], None], code: SimpleNamespace) -> bool:
    try:
        check(code)
    except (AssertionError, IndexError):
        return True
    return False


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    source = inspect.getsource(verification)
    assert right in source, "the planted fault no longer matches the code"
    # Only the first occurrence: the greedy rule further down shares some lines.
    module = {"__name__": "mutant"}
    exec(compile(source.replace(right, wrong, 1), "mutant", "exec"), module)
    mutant = SimpleNamespace(**module)
    assert any(fails(check, mutant) for check in CHECKS)


def test_greedy_rule_equals_the_general_one() -> None:
    """Temperature 0: ids alone give what one-hot p and q give, whatever the uniforms."""
    generator = torch.Generator().manual_seed(0)
    logits_BKV = torch.randn(4000, 4, 3, generator=generator)
    drafts_BK = torch.randint(0, 3, (4000, 3), generator=generator)
    num_drafted_B = torch.randint(0, 4, (4000,), generator=generator)
    uniforms_BK = torch.rand(4000, 4, generator=generator, dtype=torch.float64)
    probs_BKV = transform_logits(logits_BKV, SamplingParams())
    one_hot_BKV = torch.nn.functional.one_hot(drafts_BK, 3).float()
    fast = verification.verify_greedy(logits_BKV.argmax(dim=-1), drafts_BK, num_drafted_B)
    for draft_probs in (None, one_hot_BKV):
        slow = verification.verify_tokens(
            probs_BKV, draft_probs, drafts_BK, num_drafted_B, uniforms_BK[:, :3], uniforms_BK[:, 3]
        )
        assert torch.equal(fast.num_accepted_B, slow.num_accepted_B)
        assert torch.equal(fast.next_token_B, slow.next_token_B)
        assert torch.equal(fast.is_bonus_B, slow.is_bonus_B)
    assert set(fast.num_accepted_B.tolist()) == {0, 1, 2, 3}
