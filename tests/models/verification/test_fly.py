"""FLy: its verdict on every outcome, and its certificate, which the true distance of the output never exceeds.

The reference is a plain enumeration: each place's uniform falls into one of three intervals (lossless verification
accepts; only FLy may keep; nobody keeps). The checks are then shown to fail for faults planted in the real source.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.verification import base, fly, thresholds, token
from models.verification.base import Block
from tests.models.verification import acceptance
from tests.models.verification.enumeration import EXACT, Edges, Text, Toy, cumulated, fails, output_law, planted

# Vocabulary, tokens drafted, width, one-hot q, zeros, window, budget.
CASES = [
    (3, 2, 2, False, False, 1, None),
    (4, 2, 3, False, True, 1, None),
    (3, 3, 3, False, True, 1, None),
    (3, 3, 4, False, False, 2, None),
    (3, 3, 3, True, False, 1, None),
    (3, 3, 3, False, False, 1, 0.2),
    (3, 3, 3, False, True, 1, 0.05),
    (3, 3, 3, False, False, 2, 10.0),
    (3, 2, 4, False, False, 2, None),
    (3, 0, 2, False, False, 1, None),
]
ENTROPY = 0.45  # some places have less
NUM_SEEDS = 5
PASSES, MAY_BE_KEPT, FAILS = range(3)


class Draft:
    """What the reference says of one draft: intervals of each place's uniform, and charges."""

    def __init__(
        self, p: Sequence[np.ndarray], q: Sequence[np.ndarray], draft: Text, window: int, budget: float | None
    ):
        self.p, self.q, self.draft, self.window = p, q, draft, window
        self.accepts = [min(1.0, p[k][x] / q[k][x]) for k, x in enumerate(draft)]
        self.charges, self.limits = [], []
        left = math.inf if budget is None else budget
        for k, accept in enumerate(self.accepts):
            entropy = -sum(x * math.log(x) for x in p[k] if x > 0) / math.log(len(p[k]))
            charge = 0.0
            if entropy > ENTROPY and accept > 0 and k + window < len(draft):
                charge = (1.0 - accept) * math.prod(self.accepts[k + 1 : k + 1 + window])
            spent = min(charge, left)
            left -= spent
            self.charges.append(spent)
            # Where nothing would be charged nothing can be kept.
            self.limits.append(accept + (1.0 - accept) * (spent / charge) if charge > 0 else accept)

    def outcomes(self) -> Iterator[tuple[list[int], list[float], float]]:
        """(interval of each place, a uniform in each, chance)."""
        places = [
            [(0.0, accept), (accept, limit), (limit, 1.0)]
            for accept, limit in zip(self.accepts, self.limits, strict=True)
        ]
        for intervals in itertools.product(range(3), repeat=len(self.draft)):
            bounds = [place[i] for place, i in zip(places, intervals, strict=True)]
            chance = math.prod(high - low for low, high in bounds)
            if chance > 0:
                yield list(intervals), [(low + high) / 2 for low, high in bounds], chance

    def keeps(self, intervals: list[int], k: int) -> bool:
        window = intervals[k + 1 : k + 1 + self.window]
        return intervals[k] == MAY_BE_KEPT and len(window) == self.window and set(window) == {PASSES}

    def num_accepted(self, intervals: list[int]) -> int:
        goes_on = [intervals[k] == PASSES or self.keeps(intervals, k) for k in range(len(intervals))]
        return [*goes_on, False].index(False)

    def certificate(self, num_accepted: int) -> float:
        return sum(self.charges[: num_accepted + 1])

    def next_law(self, k: int) -> np.ndarray:
        if k == len(self.draft):
            return self.p[k]
        excess = np.maximum(self.p[k] - self.q[k], 0.0)
        return excess / excess.sum()


def drafts_of(
    toy: Toy, num_drafted: int, one_hot: bool, window: int, budget: float | None
) -> Iterator[tuple[float, Draft]]:
    """(chance, draft)."""
    for draft in itertools.product(range(toy.vocab_size), repeat=num_drafted):
        q = [acceptance.proposal(toy, draft[:k], one_hot) for k in range(num_drafted)]
        chance = math.prod(q[k][x] for k, x in enumerate(draft))
        if chance > 0:
            yield chance, Draft([toy.p[draft[:k]] for k in range(num_drafted + 1)], q, draft, window, budget)


def reference(
    toy: Toy, num_drafted: int, one_hot: bool, window: int, budget: float | None
) -> tuple[np.ndarray, float, float]:
    """(law of num_drafted + 1 tokens, mean certificate, chance that FLy keeps a token)."""
    law, certificate, relaxed = np.zeros((toy.vocab_size,) * (num_drafted + 1)), 0.0, 0.0
    for weight, draft in drafts_of(toy, num_drafted, one_hot, window, budget):
        for intervals, _, chance in draft.outcomes():
            k = draft.num_accepted(intervals)
            certificate += weight * chance * draft.certificate(k)
            relaxed += weight * chance * (MAY_BE_KEPT in intervals[:k])
            for token_id, next_chance in enumerate(draft.next_law(k)):
                emitted = (*draft.draft[:k], token_id)
                for tail in itertools.product(range(toy.vocab_size), repeat=num_drafted - k):
                    text = emitted + tail
                    rest = math.prod(toy.p[text[:i]][text[i]] for i in range(k + 1, num_drafted + 1))
                    law[text] += weight * chance * next_chance * rest
    return law, certificate, relaxed


def edges_of(window: int, budget: float | None) -> Edges:
    def edges(p: Sequence[np.ndarray], q: Sequence[np.ndarray], draft: Text) -> tuple[list[list[float]], list[float]]:
        judged = Draft(p, q, draft, window, budget)
        final = list(np.cumsum(p[-1]))
        for k in range(len(draft)):
            final += cumulated(np.maximum(p[k] - q[k], 0.0))
        return [list(place) for place in zip(judged.accepts, judged.limits, strict=True)], final

    return edges


def all_outcomes(toy: Toy, case: tuple) -> tuple[Block, list[tuple[Draft, list[int], float]]]:
    """A row for each draft and each interval of each uniform, and what the reference knows of it."""
    vocab_size, num_drafted, width, one_hot, _, window, budget = case
    padding = width - num_drafted
    rows, known = [], []
    for weight, draft in drafts_of(toy, num_drafted, one_hot, window, budget):
        for intervals, uniforms, chance in draft.outcomes():
            p, q = draft.p + [toy.p[()]] * padding, draft.q + [toy.q[()]] * padding
            rows.append((p, q, draft.draft + (int(toy.p[()].argmax()),) * padding, uniforms + [0.0] * padding))
            known.append((draft, intervals, weight * chance))
    p, q, tokens, uniforms = (torch.tensor(np.array(column)) for column in zip(*rows, strict=True))
    block = Block(
        p,
        None if one_hot else q.reshape(len(rows), width, vocab_size),
        tokens.long().reshape(len(rows), width),
        torch.full((len(rows),), num_drafted),
        uniforms.double().reshape(len(rows), width),
        torch.full((len(rows),), 0.5, dtype=torch.float64),
        None if budget is None else torch.full((len(rows),), budget, dtype=torch.float64),
    )
    return block, known


def check_outcomes(code: SimpleNamespace) -> None:
    """Every draft and every interval of every uniform: length, flags and charges."""
    for case, seed in itertools.product(CASES, range(NUM_SEEDS)):
        vocab_size, num_drafted, width, one_hot, zeros, window, budget = case
        toy = Toy(vocab_size, num_drafted, seed, zeros)
        block, known = all_outcomes(toy, case)
        verdict = code.FLy(ENTROPY, window).verify(block)
        assert verdict.verify_probs_BT is None
        mean = 0.0
        for row, (draft, intervals, chance) in enumerate(known):
            k = draft.num_accepted(intervals)
            assert verdict.num_accepted_B[row] == k
            if num_drafted == 0:
                continue
            padding = width - num_drafted
            relaxed = [i < k and intervals[i] == MAY_BE_KEPT for i in range(num_drafted)] + [False] * padding
            assert verdict.relaxed_BK[row].tolist() == relaxed
            charges = np.array(draft.charges + [0.0] * padding)
            assert np.abs(verdict.distances_BK[row].numpy() - charges).max() < EXACT
            assert budget is None or charges.sum() <= budget + EXACT
            mean += chance * float(verdict.distances_BK[row, : k + 1].sum())
        assert abs(mean - reference(toy, num_drafted, one_hot, window, budget)[1]) < EXACT


def check_law(code: SimpleNamespace) -> None:
    """The joint law of the real rule's tokens is the reference's, and within the certificate of the target's."""
    for seed, (vocab_size, num_drafted, width, one_hot, zeros, window, budget) in enumerate(CASES[:3] + CASES[-2:]):
        toy = Toy(vocab_size, num_drafted, seed, zeros)
        law, certificate, _ = reference(toy, num_drafted, one_hot, window, budget)
        rule = code.FLy(ENTROPY, window)
        got = output_law(rule.verify, toy, num_drafted, width, one_hot, edges_of(window, budget), None, budget)
        assert np.abs(got - law).max() < EXACT
        assert acceptance.distance(got, toy.target_law(num_drafted + 1)) <= certificate + EXACT


def check_zero(code: SimpleNamespace) -> None:
    """p(x) = 0 is never kept, whatever the gate and the window say."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0], [0.0, 1.0, 0.0, 0.0], [0.25] * 4]])
    for u in (0.0, 0.9):
        uniforms = torch.tensor([[u, 0.0]], dtype=torch.float64)
        for q in (p[:, :2].flip(2), None):
            verdict = code.FLy(0.0, 1).verify(
                Block(p, q, torch.tensor([[3, 1]]), torch.tensor([2]), uniforms, uniforms[:, 1])
            )
            assert (verdict.num_accepted_B.item(), verdict.next_token_B.item()) == (0, 1)
    acceptance.check_support(code.FLy(0.0, 1))


def check_strict(code: SimpleNamespace) -> None:
    """The gate shut, a window longer than the block, a budget of 0."""
    acceptance.check_same_as_lossless(code.FLy(1.0, 1))
    acceptance.check_same_as_lossless(code.FLy(0.0, 4))
    acceptance.check_same_as_lossless(code.FLy(0.0, 1), budget=0.0)
    assert code.FLy(0.0, 1).verify(acceptance.random_block(2000, 4, 50, False, torch.float32)).relaxed_BK.any()
    flat = torch.full((1, 3, 6), 1 / 6)  # its entropy rounds to above ln 6
    u = torch.tensor([[0.9, 0.0]], dtype=torch.float64)
    verdict = code.FLy(1.0, 1).verify(Block(flat, None, torch.zeros(1, 2).long(), torch.tensor([2]), u, u[:, 1]))
    assert verdict.num_accepted_B.item() == 0


CHECKS = [check_zero, check_strict, check_outcomes, check_law]  # cheap ones first
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(thresholds) | vars(fly)))


@pytest.mark.parametrize("check", CHECKS)
def test_rule_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


OWN_UNIFORMS = (
    "(1.0 - accept_BK) * self._ahead(accept_BK)",
    "(1.0 - accept_BK) * self._ahead((block.uniforms_BK < accept_BK).double())",
)
PLANTED = {
    "charge looks at the uniforms": OWN_UNIFORMS,
    "charge without the window": ("(1.0 - accept_BK) * self._ahead(accept_BK)", "(1.0 - accept_BK)"),
    "charge without the mismatch": ("(1.0 - accept_BK) * self._ahead(accept_BK)", "self._ahead(accept_BK)"),
    "gate turned round": ("> self.entropy, (0", "< self.entropy, (0"),
    "gate always open": ("self._gate(block) & (accept_BK > 0)", "(accept_BK > 0)"),
    "entropy not normalised": (" / math.log(p_BKV.shape[-1])", ""),
    "entropy in bits": (".log_().mul_(p)", ".log2_().mul_(p)"),
    "rounding opens a shut gate": (".clamp(max=1.0) > self.entropy", " > self.entropy"),
    "token with p = 0 kept": (" & (accept_BK > 0)", ""),
    "window holds the mismatch": ("(0, self.window))[:, 1:]", "(0, self.window))[:, :-1]"),
    "window skips a place": (
        "F.pad(values_BK, (0, self.window))[:, 1:]",
        "F.pad(values_BK, (0, self.window + 1))[:, 2:]",
    ),
    "any of the window": (".prod(dim=-1)", ".amax(dim=-1)"),
    "padding in the window": ("_accept_probs(block) * is_drafted_BK", "_accept_probs(block)"),
    "window not asked": ("may_keep_BK & window_passed_BK & ", "may_keep_BK & "),
    "gate not asked": ("may_keep_BK & window_passed_BK", "window_passed_BK"),
    "budget charged, then not heeded": (" & (block.uniforms_BK < limits_BK)", ""),
    "limit is the share": ("accept_BK + shares_BK * (1.0 - accept_BK)", "shares_BK"),
    "flag on what is not emitted": ("kept_BK & (steps_K < verdict.num_accepted_B[:, None])", "kept_BK"),
    "q ignored": ("acceptance_probs(p_x, q_x)[..., 0]\n", "acceptance_probs(p_x, torch.ones_like(p_x))[..., 0]\n"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token", "thresholds", "fly"], right, wrong)
    assert any(fails(check, mutant) for check in CHECKS)


def test_distance_never_exceeds_the_certificate() -> None:
    """Over 240 random worlds: the true TV between the laws of the output, against the mean certificate."""
    ratios, num_relaxed = [], 0
    for seed in range(60):
        for window, num_drafted, budget in [(1, 2, None), (1, 3, None), (2, 3, None), (1, 3, 0.1)]:
            toy = Toy(3, num_drafted, 1000 + seed, zeros=seed % 2 == 0)
            law, certificate, relaxed = reference(toy, num_drafted, seed % 5 == 0, window, budget)
            distance = acceptance.distance(law, toy.target_law(num_drafted + 1))
            assert distance <= certificate + EXACT
            assert budget is None or certificate <= budget + EXACT
            assert relaxed <= certificate + EXACT  # the chance that the runs part is what is bounded
            num_relaxed += relaxed > 0
            ratios += [distance / certificate] if certificate > 0 else []
    print(f"TV / certificate over {len(ratios)} worlds: median {np.median(ratios):.3f}, smallest {min(ratios):.3f}")
    assert num_relaxed > 80


def test_charge_must_not_look_at_uniforms() -> None:
    """Why a charge is the chance that the window passes, not whether it does: under a budget that would be no bound.

    Drafted tokens pass with 1/2, 1/2 and 1, and the budget is 1/2. If place 0 were charged 1/2 just when place 1
    passes, a mismatch at place 1 would find the budget untouched: the mean charge is 3/8, the distance 1/2.
    """
    toy = Toy(3, 3, seed=0)
    for text in toy.p:
        toy.p[text] = np.array([1.0, 0.0, 0.0] if len(text) == 2 else [0.5, 0.25, 0.25])
        toy.q[text] = np.array([1.0, 0.0, 0.0])
    eighths = itertools.product((0.125, 0.375, 0.625, 0.875), repeat=3)
    uniforms = torch.tensor(list(eighths), dtype=torch.float64)
    p = torch.tensor(np.array([toy.p[(0,) * k] for k in range(4)])).expand(64, 4, 3)
    drafts, three = torch.zeros(64, 3, dtype=torch.long), torch.full((64,), 3)
    half = torch.full((64,), 0.5, dtype=torch.float64)
    uniform_cells: Edges = lambda p, q, draft: ([[0.25, 0.5, 0.75]] * 3, [0.5, 0.75])  # noqa: E731
    figures = {}
    for name, code in [("ours", REAL), ("looks", planted(["base", "token", "thresholds", "fly"], *OWN_UNIFORMS))]:
        rule = code.FLy(ENTROPY, 1)
        verdict = rule.verify(Block(p, None, drafts, three, uniforms, half, half))
        reached = torch.arange(3) <= verdict.num_accepted_B[:, None]
        law = output_law(rule.verify, toy, 3, 3, True, uniform_cells, None, 0.5)
        certificate = float((verdict.distances_BK * reached).sum() / 64)
        figures[name] = (certificate, acceptance.distance(law, toy.target_law(4)))
    assert figures["ours"] == pytest.approx((7 / 16, 3 / 8))
    assert figures["looks"] == pytest.approx((3 / 8, 1 / 2))


@pytest.mark.parametrize(
    ("entropy", "window", "option"),
    [(-0.1, 6, "entropy="), (1.1, 6, "entropy="), (math.nan, 6, "entropy="), (0.3, 0, "window=")],
)
def test_refuses_what_is_no_gate_or_window(entropy: float, window: int, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        fly.FLy(entropy, window)
