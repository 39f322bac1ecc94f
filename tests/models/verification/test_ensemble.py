"""Static and dynamic ensembles, exact: their law, their distance and their acceptance against the formulas, enumerated.

The same checks are then shown to fail for faults planted in the real source.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.sampling import SamplingParams, transform_logits
from models.verification import base, ensemble, token
from models.verification.base import Block
from tests.models.verification.enumeration import EXACT, Text, Toy, output_law
from tests.models.verification.laws import (
    DEEP,
    SHAPES,
    Check,
    Law,
    check_enumerated,
    check_rows_apart,
    check_strict,
    check_verdicts,
    is_caught,
    law_edges,
    restricted,
    tv,
)

WEIGHTS = (0.0, 0.3, 0.75, 1.0)


def mixture(target_weight: float) -> Law:
    return lambda p, q, text: target_weight * p + (1.0 - target_weight) * restricted(p, q)


def weight_after(text: Text) -> float:
    """A weight for each place and each last token."""
    return 0.15 + 0.2 * len(text) * (text[-1] % 2) if text else 0.9


def dynamic(p: np.ndarray, q: np.ndarray, text: Text) -> np.ndarray:
    return mixture(weight_after(text))(p, q, text)


def weigh(block: Block) -> torch.Tensor:
    """`weight_after` for a block: entry k looks at drafted token k - 1, at none for k = 0."""
    place_K = torch.arange(1, block.num_draft_tokens).double()
    later_BK = 0.15 + 0.2 * place_K * (block.draft_tokens_BK[:, :-1] % 2)
    return torch.cat([torch.full((len(later_BK), 1), 0.9, dtype=torch.float64), later_BK], dim=1)


def check_static(code: SimpleNamespace) -> None:
    for target_weight in WEIGHTS:
        check_verdicts(code.StaticEnsemble(target_weight), mixture(target_weight))


def check_static_law(code: SimpleNamespace) -> None:
    for target_weight in WEIGHTS[:3]:
        check_enumerated(code.StaticEnsemble(target_weight), mixture(target_weight), budgets=(0.15,))


def check_dynamic(code: SimpleNamespace) -> None:
    check_verdicts(code.DynamicEnsemble(weigh), dynamic)


def check_dynamic_law(code: SimpleNamespace) -> None:
    check_enumerated(code.DynamicEnsemble(weigh), dynamic, (*SHAPES, *DEEP[1:]))


def check_rows(code: SimpleNamespace) -> None:
    check_rows_apart(code.StaticEnsemble(0.3))


def check_strict_end(code: SimpleNamespace) -> None:
    """w = 1, static or dynamic, and a budget of 0 are lossless token verification, bit for bit."""
    check_strict(code.StaticEnsemble(1.0))
    check_strict(code.DynamicEnsemble(lambda block: torch.ones_like(block.uniforms_BK)), budget=0.5)
    check_strict(code.StaticEnsemble(0.2), budget=0.0)


def measured(rule: object, p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """(acceptance, distance) of a rule in one context, by its own code."""
    p_BTV, q_BKV = torch.tensor(p).expand(1, 2, -1), torch.tensor(q)[None, None]
    zero = torch.zeros(1, 1, dtype=torch.float64)
    block = Block(p_BTV, q_BKV, torch.zeros(1, 1, dtype=torch.long), torch.ones(1), zero, zero[0])
    stats = rule.prepare(block, p_BTV[:, :-1], q_BKV)
    accepted = (q_BKV * rule.accept(p_BTV[:, :-1], q_BKV, *stats)).sum()
    return float(accepted), float(rule.distance(p_BTV[:, :-1], q_BKV, *stats))


def contexts() -> list[tuple[np.ndarray, np.ndarray]]:
    """(p, q), some with zeros, q's support within p's."""
    rng = np.random.default_rng(2)
    pairs = []
    for _ in range(30):
        p, q = rng.dirichlet(np.ones(5), 2)
        p[rng.integers(5)] *= rng.integers(2)
        q = np.where(p > 0, q, 0.0)
        q[rng.integers(5)] *= rng.integers(2)
        pairs.append((p / p.sum(), q / q.sum()))
    return pairs


def check_trade(code: SimpleNamespace) -> None:
    """Acceptance 1 - w TV, distance (1 - w) TV: together they lose exactly TV, less than which no rule loses."""
    for p, q in contexts():
        for target_weight in WEIGHTS:
            accepted, distance = measured(code.StaticEnsemble(target_weight), p, q)
            assert abs(accepted - (1.0 - target_weight * tv(p, q))) < EXACT
            assert abs(distance - (1.0 - target_weight) * tv(p, q)) < EXACT
            assert abs((1.0 - accepted) + distance - tv(p, q)) < EXACT


CHECKS: list[Check] = [
    check_static,
    check_dynamic,
    check_trade,
    check_rows,
    check_strict_end,
    check_static_law,
    check_dynamic_law,
]  # cheap ones first
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(ensemble)))


@pytest.mark.parametrize("check", CHECKS)
def test_ensemble_is_exact(check: Check) -> None:
    check(REAL)


PLANTED = {
    "w and 1 - w swapped": (
        "restricted(p, q, (1.0 - target_weight) * scale).addcmul_(p, target_weight)",
        "restricted(p, q, target_weight * scale).addcmul_(p, 1.0 - target_weight)",
    ),
    "logits mixed": (
        "return restricted(p, q, (1.0 - target_weight) * scale).addcmul_(p, target_weight)",
        "return (p.log() * target_weight + (1.0 - target_weight) * restricted(p, q, scale).log()).exp()",
    ),
    "q not restricted": ("return p.sign().mul_(q).mul_(scale)", "return q * scale"),
    "q not renormalised": ("torch.linalg.vecdot(q, p.sign())[..., None]", "q.sum(dim=-1, keepdim=True)"),
    "q has no mass on the support": ("torch.where(scale_BK1 > 0, ", "torch.where(scale_BK1 >= 0, "),
    "residual (p - q)+": (
        "return (self.law(p, q, *stats) - q).clamp(min=0.0)",
        "return (p - q).clamp(min=0.0)",
    ),
    "accepts with w p / q": (
        "return acceptance_probs(self.law(p, q, *stats), q)",
        "return acceptance_probs(stats[0] * p, q)",
    ),
    "accepts with nu / q'": (
        "return acceptance_probs(self.law(p, q, *stats), q)",
        "return acceptance_probs(self.law(p, q, *stats), q * stats[1])",
    ),
    "bonus from nu": (
        "p_BV, q_BV = block.target_probs_BTV[rows_B, num_accepted_B], q_BKV[rows_B, rejected_B]",
        "q_BV = q_BKV[rows_B, rejected_B]; "
        "p_BV = place.law(p_BKV[rows_B, rejected_B], q_BV, *(stat[rows_B, rejected_B] for stat in stats))",
    ),
    "distance w TV": (
        "return (1.0 - target_weight[..., 0].double()) * tv",
        "return target_weight[..., 0].double() * tv",
    ),
    "distance to q, not q'": ("torch.addcmul(p, q, scale, value=-1.0)", "(p - q)"),
    "distance between q and q'": ("torch.addcmul(p, q, scale, value=-1.0)", "restricted(p, q, scale).sub_(q)"),
    "one weight for the whole block": (
        "return weights_BK.nan_to_num(nan=1.0).clamp(0.0, 1.0)",
        "return weights_BK[:, :1].expand(expected)",
    ),
    "weights one place late": (
        "return weights_BK.nan_to_num(nan=1.0).clamp(0.0, 1.0)",
        "return weights_BK.roll(1, dims=1)",
    ),
    "mean of the rows' weights": (
        "return weights_BK.nan_to_num(nan=1.0).clamp(0.0, 1.0)",
        "return weights_BK.mean(dim=0, keepdim=True).expand(expected)",
    ),
    "budget not heeded": ("place, stats = _WithinBudget(rule), (*stats, shares_BK[..., None])", "pass"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    assert is_caught(CHECKS, ["ensemble"], right, wrong)


def test_no_rule_loses_less_than_tv() -> None:
    """Random acceptances and residuals: lost acceptance + distance >= TV(p, q)."""
    rng = np.random.default_rng(3)
    smallest = np.inf
    for p, q in contexts():
        for _ in range(200):
            accept = rng.random(5) ** rng.choice([0.2, 1.0, 5.0])
            residual = (1.0 - q @ accept) * rng.dirichlet(np.full(5, 0.3))
            excess = (1.0 - q @ accept) + tv(q * accept + residual, p) - tv(p, q)
            assert excess > -EXACT
            smallest = min(smallest, excess)
    assert smallest < 0.01  # the bound is tight


def test_weights_that_look_at_the_token_they_judge_break_the_law() -> None:
    """w_k may depend on earlier tokens alone: otherwise the law is not even the average of what each w stands for."""
    toy = Toy(3, 1, seed=0)
    p, q = toy.p[()], toy.q[()]

    def edges(p: list[np.ndarray], q: list[np.ndarray], draft: Text) -> tuple[list[list[float]], list[float]]:
        (accept_0, final_0), (accept_1, final_1) = (law_edges(mixture(w), None)(p, q, draft) for w in (0.0, 1.0))
        return [accept_0[0] + accept_1[0]], final_0 + final_1

    peeking = ensemble.DynamicEnsemble(lambda block: (block.draft_tokens_BK % 2).double())
    first_token = output_law(peeking.verify, toy, 1, 1, edges=edges).sum(axis=1)
    average = sum(q[x] * mixture(float(x % 2))(p, q, ()) for x in range(3))
    assert abs(first_token.sum() - 1.0) < EXACT
    assert np.abs(first_token - average).max() > 0.01


def test_top_k_run_stays_within_the_support() -> None:
    """p after top-k 3, q after none, 20,000 rows, u = 0 included: no token outside the support, whatever w."""
    generator = torch.Generator().manual_seed(0)
    num_rows = 20_000
    p_BTV = transform_logits(torch.randn(num_rows, 3, 8, generator=generator), SamplingParams(1.0, top_k=3))
    q_BKV = transform_logits(torch.randn(num_rows, 2, 8, generator=generator), SamplingParams(1.0))
    drafts_BK = torch.multinomial(q_BKV.flatten(0, 1), 1, generator=generator).view(num_rows, 2)
    uniforms_BT = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    uniforms_BT[::7] = 0.0
    block = Block(p_BTV, q_BKV, drafts_BK, torch.full((num_rows,), 2), uniforms_BT[:, :2], uniforms_BT[:, 2])
    for target_weight in (0.0, 0.5):
        verdict = ensemble.StaticEnsemble(target_weight).verify(block)
        emitted_BT = torch.cat([drafts_BK, drafts_BK[:, :1]], dim=1)
        emitted_BT.scatter_(1, verdict.num_accepted_B[:, None], verdict.next_token_B[:, None])
        is_emitted_BT = torch.arange(3) <= verdict.num_accepted_B[:, None]
        assert (p_BTV.gather(2, emitted_BT[..., None])[..., 0] > 0)[is_emitted_BT].all()
        assert verdict.relaxed_BK is not None
        assert verdict.relaxed_BK.any()


def test_nan_and_outside_weights() -> None:
    """NaN is lossless, what is outside [0, 1] the nearer end."""
    p_BTV, q_BKV = torch.tensor([[[0.2, 0.8]] * 2] * 4), torch.tensor([[[0.9, 0.1]]] * 4)
    zero = torch.zeros(4, 1, dtype=torch.float64)
    block = Block(p_BTV, q_BKV, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, dtype=torch.long), zero, zero[:, 0])
    weights = torch.tensor([[torch.nan], [torch.inf], [-3.0], [0.5]])
    verdict = ensemble.DynamicEnsemble(lambda _: weights).verify(block)
    assert verdict.distances_BK is not None
    assert np.allclose(verdict.distances_BK[:, 0], [0.0, 0.0, 0.7, 0.35], atol=1e-6)


@pytest.mark.parametrize("target_weight", [-0.1, 1.1, float("nan")])
def test_static_weight_out_of_range(target_weight: float) -> None:
    with pytest.raises(ValueError, match=r"target_weight=.*\[0, 1\]"):
        ensemble.StaticEnsemble(target_weight)


def test_bad_weigh() -> None:
    with pytest.raises(ValueError, match="must be a function"):
        ensemble.DynamicEnsemble(0.5)  # type: ignore[arg-type]
    p_BTV, zero = torch.tensor([[[0.2, 0.8]] * 2]), torch.zeros(1, 1, dtype=torch.float64)
    block = Block(p_BTV, p_BTV[:, 1:], torch.zeros(1, 1, dtype=torch.long), torch.ones(1), zero, zero[0])
    with pytest.raises(ValueError, match=r"shape \(1, 2\): must be \(1, 1\)"):
        ensemble.DynamicEnsemble(lambda _: torch.ones(1, 2)).verify(block)
