"""Threshold rules: their laws, certificates and flags, exact, and their strict ends.

The checks are then shown to fail for faults planted in the real source.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.verification import base, thresholds, token
from models.verification.base import Block
from tests.models.verification import acceptance
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

TYPICAL = [(0.09, 0.3), (0.4, 0.8)]  # the second's epsilon decides where p is flat, its delta where it is peaked
GAPS = [(2, 0.25), (3, 0.1), (1, 0.0)]
SGLANG = [(0.5, 0.6), (1.0, 0.7), (0.35, 1.0)]


def or_lossless(meets: Callable[[np.ndarray], np.ndarray]) -> acceptance.Accept:
    return lambda p, q: np.where(meets(p), 1.0, acceptance.lossless(p, q))


def typical(epsilon: float, delta: float) -> acceptance.Accept:
    def meets(p: np.ndarray) -> np.ndarray:
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        return p > min(epsilon, delta * math.exp(-entropy))

    return or_lossless(meets)


def gap_rule(top_k: int, gap: float) -> acceptance.Accept:
    def meets(p: np.ndarray) -> np.ndarray:
        rank = np.array([(p > x).sum() for x in p])
        return (rank < top_k) & (p.max() - p <= gap) & (p > 0)

    return or_lossless(meets)


def keep_at(p: np.ndarray, x: int, single: float, acc: float) -> float:
    """SGLang's acceptance of a token that was drafted."""
    return 1.0 if p[x] >= single and p[x] > 0 else min(1.0, p[x] / acc)


def law_given(p: np.ndarray, x: int, keep: float) -> np.ndarray:
    """Law of the token at a place where x was drafted: x, or p without it."""
    others = np.where(np.arange(len(p)) == x, 0.0, p)
    nu = (1.0 - keep) * others / others.sum() if keep < 1 else np.zeros(len(p))
    nu[x] = keep
    return nu


def check_zero(code: SimpleNamespace) -> None:
    for rule in (
        code.TypicalAcceptance(0.0, 0.3),
        code.ProbabilityGap(50, 1.0),
        code.ThresholdSampling(0.0, 1.0),
        code.ThresholdSampling(1.0, 1e-9),
    ):
        acceptance.check_zero(rule)
        acceptance.check_support(rule)


def check_edges(code: SimpleNamespace) -> None:
    """p just at the threshold, and all of p on one token."""

    def verify(rule: object, p: list[float], drafted: int) -> tuple[int, int]:
        p_BTV = torch.tensor([[p, [0.0, 0.0, 0.0, 1.0]]], dtype=torch.float64)
        u = torch.tensor([[0.9]], dtype=torch.float64)
        verdict = rule.verify(Block(p_BTV, None, torch.tensor([[drafted]]), torch.tensor([1]), u, u[0]))
        return int(verdict.num_accepted_B), int(verdict.next_token_B)

    flat, sure = [0.25] * 4, [0.0, 1.0, 0.0, 0.0]
    assert verify(code.TypicalAcceptance(0.25, math.inf), flat, 0) == (0, 3)
    assert verify(code.TypicalAcceptance(0.2499, math.inf), flat, 0) == (1, 3)
    assert verify(code.ProbabilityGap(1, 0.0), flat, 2) == (1, 3)
    assert verify(code.ThresholdSampling(0.25, 1.0), flat, 0) == (1, 3)
    assert verify(code.ThresholdSampling(0.2501, 1.0), flat, 0) == (0, 3)
    for rule in (code.TypicalAcceptance(), code.ProbabilityGap(2, 1.0), code.ThresholdSampling(0.5, 0.5)):
        assert verify(rule, sure, 1) == (1, 3)
        assert verify(rule, sure, 0) == (0, 1)


def check_strict(code: SimpleNamespace) -> None:
    acceptance.check_same_as_lossless(code.TypicalAcceptance(1.0, math.inf))
    acceptance.check_same_as_lossless(code.ProbabilityGap(0, 1.0))
    acceptance.check_same_as_lossless(code.ThresholdSampling(1.0, 1.0), ignores_q=True)
    acceptance.check_same_as_lossless(code.TypicalAcceptance(), budget=0.0)
    acceptance.check_same_as_lossless(code.ProbabilityGap(3, 0.5), budget=0.0)
    acceptance.check_same_as_lossless(code.ThresholdSampling(0.3, 0.5), budget=0.0, ignores_q=True)


def check_told(code: SimpleNamespace) -> None:
    for epsilon, delta in TYPICAL:
        acceptance.check_told(code.TypicalAcceptance(epsilon, delta), typical(epsilon, delta))
    for top_k, gap in GAPS[:2]:
        acceptance.check_told(code.ProbabilityGap(top_k, gap), gap_rule(top_k, gap))


def check_sglang_told(code: SimpleNamespace) -> None:
    """A verdict tells the law given the drafted tokens, whatever q; its mean distance bounds the law's own."""
    for (single, acc), budget in [(SGLANG[0], None), (SGLANG[0], 0.2), (SGLANG[2], None)]:
        for one_hot in (False, True):
            block = acceptance.random_block(200, 3, 4, one_hot, torch.float64, budget)
            verdict = code.ThresholdSampling(single, acc).verify(block)
            for row, num_accepted in enumerate(verdict.num_accepted_B.tolist()):
                left = np.inf if budget is None else budget
                for k in range(min(num_accepted, 2) + 1):
                    p, x = block.target_probs_BTV[row, k].numpy(), int(block.draft_tokens_BK[row, k])
                    nu = law_given(p, x, keep_at(p, x, single, acc))
                    share, spent = acceptance.spend(nu, p, left)
                    left -= spent
                    assert abs(float(verdict.distances_BK[row, k]) - spent) < EXACT
                    relaxed = k < num_accepted and float(block.uniforms_BK[row, k]) >= p[x]
                    assert bool(verdict.relaxed_BK[row, k]) == relaxed
                    y = x if k < num_accepted else int(verdict.next_token_B[row])
                    is_bonus = k == num_accepted == int(block.num_drafted_B[row])
                    expected = p if is_bonus else share * nu + (1.0 - share) * p
                    assert abs(float(verdict.verify_probs_BT[row, k]) - expected[y]) < EXACT
            assert budget is not None or verdict.relaxed_BK.any()


def sglang_stated(
    toy: Toy, num_drafted: int, one_hot: bool, single: float, acc: float, budget: float | None
) -> dict[Text, np.ndarray]:
    """The law after each text, over all that may be drafted there; without a budget, the docstring's formula."""
    rest: dict[Text, np.ndarray] = {}
    left = {(): np.inf if budget is None else budget}
    for text, p in toy.p.items():
        rest[text] = p
        if len(text) == num_drafted:
            continue
        q = acceptance.proposal(toy, text, one_hot)
        keep = np.array([keep_at(p, x, single, acc) for x in range(len(p))])
        rest[text] = np.zeros(len(p))
        for x in range(len(p)):
            nu = law_given(p, x, keep[x])
            share, spent = acceptance.spend(nu, p, left[text])
            left[(*text, x)] = left[text] - spent
            rest[text] += q[x] * (share * nu + (1.0 - share) * p)
        if budget is None:
            c = np.where(p < 1, q * (1.0 - keep) / np.where(p < 1, 1.0 - p, 1.0), 0.0)
            assert np.abs(rest[text] - (q * keep + p * (c.sum() - c))).max() < EXACT
    return rest


def sglang_edges(single: float, acc: float, budget: float | None) -> Edges:
    def edges(p: Sequence[np.ndarray], q: Sequence[np.ndarray], draft: Text) -> tuple[list[list[float]], list[float]]:
        left = np.inf if budget is None else budget
        places, final = [], list(np.cumsum(p[-1]))
        for k, x in enumerate(draft):
            keep = keep_at(p[k], x, single, acc)
            share, spent = acceptance.spend(law_given(p[k], x, keep), p[k], left)
            left -= spent
            places.append([share * keep + (1.0 - share) * p[k][x]])
            final += cumulated(np.where(np.arange(len(p[k])) == x, 0.0, p[k]))
        return places, final

    return edges


def check_sglang_law(code: SimpleNamespace) -> None:
    """Drafted tokens drawn from q, which the rule never sees: the stated joint law."""
    for seed, (vocab_size, num_drafted, width, one_hot, zeros, same, budget) in enumerate(acceptance.CASES):
        single, acc = SGLANG[seed % len(SGLANG)]
        toy = Toy(vocab_size, num_drafted, seed, zeros, same)
        rest = sglang_stated(toy, num_drafted, one_hot, single, acc, budget)
        edges = sglang_edges(single, acc, budget)
        rule = code.ThresholdSampling(single, acc)
        got = output_law(rule.verify, toy, num_drafted, width, one_hot, edges, rest, budget)
        assert np.abs(got - joint_law(rest, vocab_size, num_drafted + 1)).max() < EXACT


def check_law(code: SimpleNamespace) -> None:
    acceptance.check_law(code.TypicalAcceptance(*TYPICAL[1]), typical(*TYPICAL[1]))
    acceptance.check_law(code.ProbabilityGap(*GAPS[0]), gap_rule(*GAPS[0]))


CHECKS = [
    check_edges,
    check_sglang_told,
    check_zero,
    check_told,
    check_strict,
    check_sglang_law,
    check_law,
]  # cheap first
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(thresholds)))


@pytest.mark.parametrize("check", CHECKS)
def test_rules_are_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "entropy of the wrong sign": ("torch.exp(-entropy_nats(p_BKV))", "torch.exp(entropy_nats(p_BKV))"),
    "entropy in bits": (".log_().mul_(p)", ".log2_().mul_(p)"),
    "entropy unweighted": (".log_().mul_(p).sum", ".log_().sum"),
    "NaN entropy at p = 0": ("p.clamp(min=torch.finfo(p.dtype).tiny).log_()", "p.log()"),
    "the larger of epsilon and delta": (".clamp(max=self.epsilon)", ".clamp(min=self.epsilon)"),
    "epsilon ignored": (".clamp(max=self.epsilon)", ""),
    "delta ignored": ("(self.delta * torch.exp", "(torch.exp"),
    "typical: at least": (".gt_(threshold)", ".ge_(threshold)"),
    "typical: below": (".gt_(threshold)", ".lt_(threshold)"),
    "threshold or nothing": (
        "torch.maximum(self.meets(p, stats[0]), acceptance_probs(p, q))",
        "self.meets(p, stats[0])",
    ),
    "refused though the threshold is met": ("rejected.mul_(q - p)", "(q - p)"),
    "refused of the wrong sign": ("rejected.mul_(q - p)", "rejected.mul_(p - q)"),
    "gap or top-k": ("torch.maximum(top[..., -1:]", "torch.minimum(top[..., -1:]"),
    "gap below the k-th": ("top[..., :1] - self.gap", "top[..., -1:] - self.gap"),
    "gap as a factor": ("top[..., :1] - self.gap", "top[..., :1] * (1.0 - self.gap)"),
    "one candidate too many": ("largest(p_BKV, self.top_k)", "largest(p_BKV, self.top_k + 1)"),
    "gap: token with p = 0": (".clamp(min=torch.finfo(p_BKV.dtype).tiny)", ""),
    "gap: the k-th left out": (".ge_(threshold)", ".gt_(threshold)"),
    "top_k = 0 keeps all": ("math.inf)\n", "0.0)\n"),
    "SGLang: q seen": ("verify_with(self, replace(block, draft_probs_BKV=None))", "verify_with(self, block)"),
    "SGLang: thresholds exchanged": ("(p >= self.threshold_single)", "(p >= self.threshold_acc)"),
    "SGLang: single on p / acc": ("(p >= self.threshold_single)", "(p / self.threshold_acc >= self.threshold_single)"),
    "SGLang: strictly above": ("(p >= self.threshold_single)", "(p > self.threshold_single)"),
    "SGLang: token with p = 0": ("(p >= self.threshold_single) & (p > 0)", "(p >= self.threshold_single)"),
    "SGLang: acc multiplies": (
        "acceptance_probs(p, self.threshold_acc * q)",
        "acceptance_probs(p * self.threshold_acc, q)",
    ),
    "SGLang: refused is kept": ("return 1.0 - self.accept(p_x", "return self.accept(p_x"),
    "SGLang: distance is p(x)": ("(1.0 - p_x).clamp(min=0.0)", "p_x"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token", "thresholds"], right, wrong)
    assert any(fails(check, mutant) for check in CHECKS)


@pytest.mark.parametrize("vocab_size", [5, 256, 700, 49152])
def test_largest_is_what_sorting_gives(vocab_size: int) -> None:
    """Any vocabulary, with ties and zeros, several of the largest in one chunk, and more asked for than there are."""
    weights = torch.rand(2, 3, vocab_size, generator=torch.Generator().manual_seed(0))
    weights[0] = (20 * weights[0]).floor() - 10
    weights[1] += (torch.arange(vocab_size) // 256 == 1).float()
    p = weights.clamp(min=0.0)
    for count in (1, 3, 10, 300):
        assert torch.equal(thresholds.largest(p, count), p.sort(descending=True).values[..., :count])


def test_sglang_certificate_bounds_the_law_of_sampled_drafts() -> None:
    """Mean over drafts of the distance told >= TV(nu, p); equal for a drafter that always proposes the same token."""
    for seed in range(30):
        toy = Toy(4, 0, seed, zeros=seed % 3 == 0)
        p, q = toy.p[()], toy.q[()]
        half = torch.full((4, 1), 0.5, dtype=torch.float64)
        block = Block(
            torch.tensor(p).expand(4, 2, 4),
            torch.tensor(q).expand(4, 1, 4),
            torch.arange(4)[:, None],
            torch.ones(4, dtype=torch.long),
            half,
            half[:, 0],
        )
        for single, acc in SGLANG:
            told = thresholds.ThresholdSampling(single, acc).verify(block).distances_BK[:, 0].numpy()
            nus = [law_given(p, x, keep_at(p, x, single, acc)) for x in range(4)]
            assert (q * told).sum() >= acceptance.distance(sum(q[x] * nus[x] for x in range(4)), p) - EXACT
            assert np.abs(told - [acceptance.distance(nu, p) for nu in nus]).max() < EXACT


@pytest.mark.parametrize("accept", [typical(0.09, 0.3), typical(0.4, 0.8), gap_rule(2, 0.25)])
def test_one_hot_draft_has_the_law_of_the_published_rules(accept: acceptance.Accept) -> None:
    """Those keep a token that meets the threshold and draw from p otherwise."""
    kept = 0
    for seed in range(40):
        p = Toy(4, 0, seed, zeros=seed % 2 == 0).p[()]
        for x in range(4):
            q = np.eye(4)[x]
            meets = accept(p, np.ones(4))[x] == 1.0  # p / 1 < 1: only the threshold gives 1
            kept += meets
            assert np.abs(acceptance.law(p, q, accept(p, q)) - (q if meets else p)).max() < EXACT
    assert 0 < kept < 160


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: thresholds.TypicalAcceptance(1.1, 0.3), "epsilon="),
        (lambda: thresholds.TypicalAcceptance(-0.1, 0.3), "epsilon="),
        (lambda: thresholds.TypicalAcceptance(0.1, -0.3), "delta="),
        (lambda: thresholds.TypicalAcceptance(0.1, math.nan), "delta="),
        (lambda: thresholds.ProbabilityGap(-1, 0.5), "top_k="),
        (lambda: thresholds.ProbabilityGap(1, 1.5), "gap="),
        (lambda: thresholds.ProbabilityGap(1, -0.5), "gap="),
        (lambda: thresholds.ThresholdSampling(1.5, 0.5), "threshold_single="),
        (lambda: thresholds.ThresholdSampling(-0.5, 0.5), "threshold_single="),
        (lambda: thresholds.ThresholdSampling(0.5, 0.0), "threshold_acc="),
        (lambda: thresholds.ThresholdSampling(0.5, 1.5), "threshold_acc="),
    ],
)
def test_refuses_what_is_no_threshold(make: Callable[[], object], option: str) -> None:
    with pytest.raises(ValueError, match=option):
        make()
