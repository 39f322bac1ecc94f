"""Speculative cascades, exact: the law of each deferral rule against the paper's formula, enumerated.

The same checks are then shown to fail for faults planted in the real source.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.verification import base, cascades, token
from models.verification.base import Block
from tests.models.verification.laws import (
    DEEP,
    Check,
    Law,
    check_enumerated,
    check_rows_apart,
    check_strict,
    check_verdicts,
    is_caught,
    random_block,
    restricted,
    tv,
)

# An alpha at which each rule defers at some places, or some tokens, and not at others; and the ends.
MIDDLE = {"chow": 0.4, "diff": 0.1, "opt": 0.35, "v1": 0.3, "v2": 0.15, "v3": 0.5}
RULES = [*MIDDLE.items(), ("diff", -0.1), ("v2", 0.0), ("v3", 0.0), *((deferral, 1.0) for deferral in MIDDLE)]


def cascade(deferral: str, alpha: float) -> Law:
    """The law, from the equations of the paper: r is 1 where the target is asked, for the place or for each token."""

    def law(p: np.ndarray, q: np.ndarray, text: tuple[int, ...]) -> np.ndarray:
        if q[p > 0].sum() == 0:
            return p  # the proposal has no answer that the target allows
        q = restricted(p, q)
        r = {
            "chow": q.max() < 1.0 - alpha,
            "diff": q.max() < p.max() - alpha,
            "opt": alpha < 1.0 and q.max() < p.max() - alpha * tv(p, q),
            "v1": q < p.max() - alpha,
            "v2": p < p.max() - alpha,
            "v3": p < (1.0 - alpha) * p.max(),
        }[deferral]
        if deferral in ("chow", "diff", "opt"):
            return p if r else q
        return q * (1.0 - r) + p * (r * q).sum()

    return law


LAWS = {rule: cascade(*rule) for rule in RULES}


def check_verdict(code: SimpleNamespace) -> None:
    for rule, law in LAWS.items():
        check_verdicts(code.SpeculativeCascade(*rule), law)


def check_law(code: SimpleNamespace) -> None:
    for rule in MIDDLE.items():
        check_enumerated(code.SpeculativeCascade(*rule), LAWS[rule], budgets=(0.1,))


def check_deep_law(code: SimpleNamespace) -> None:
    check_enumerated(code.SpeculativeCascade("v3", 0.5), LAWS["v3", 0.5], DEEP)


def check_strict_end(code: SimpleNamespace) -> None:
    """alpha = -inf, what the docstring says defers all already, and a budget of 0: lossless, bit for bit."""
    always = {"chow": -1e-6, "diff": -1.0, "opt": -1.0 - 1e-5, "v1": -1.0, "v2": -1e-6, "v3": -1e-6}
    for deferral, alpha in always.items():
        check_strict(code.SpeculativeCascade(deferral, -math.inf))
        check_strict(code.SpeculativeCascade(deferral, alpha))
    check_strict(code.SpeculativeCascade("v2", 0.5), budget=0.0)
    check_strict(code.SpeculativeCascade("opt", 1.0), budget=0.0)


def check_rows(code: SimpleNamespace) -> None:
    for rule in MIDDLE.items():
        check_rows_apart(code.SpeculativeCascade(*rule))


CHECKS: list[Check] = [check_verdict, check_rows, check_strict_end, check_law, check_deep_law]
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(cascades)))


@pytest.mark.parametrize("check", CHECKS)
def test_cascade_is_exact(check: Check) -> None:
    check(REAL)


PLANTED = {
    "keeps what should be deferred": ("return scale * kept, 1.0 - kept", "return scale * (1.0 - kept), kept"),
    "kept without any mass on the support": (" & (scale > 0)", ""),
    "defers tokens that should be kept": (".ge_(least)", ".lt_(least)"),
    "defers a tie": (".ge_(least)", ".gt_(least)"),
    "chow by alpha": ("return best_q >= 1.0 - self.alpha", "return best_q >= self.alpha"),
    "chow on p": ("return best_q >= 1.0 - self.alpha", "return best_p >= 1.0 - self.alpha"),
    "diff with the sign turned": ("return best_q >= best_p - self.alpha\n", "return best_q >= best_p + self.alpha\n"),
    "opt without TV": ("- self.alpha * tv", "- self.alpha"),
    "opt with the sum of |p - q'|": ("self.alpha * tv", "2.0 * self.alpha * tv"),
    "v1 looks at p": ('return q if self.deferral == "v1" else p', "return p"),
    "v2 looks at q": ('return q if self.deferral == "v1" else p', 'return p if self.deferral == "v3" else q'),
    "v3 subtracts": ("return best_p * (1.0 - self.alpha)", "return best_p - self.alpha"),
    "v1 compares q, not q'": ("(best_p - self.alpha) / scale", "(best_p - self.alpha)"),
    "best of the target from q'": (
        "best_p, best_q = p.amax(dim=-1, keepdim=True), ",
        "best_p, best_q = (q * scale).amax(dim=-1, keepdim=True), ",
    ),
    "confidence of q, not q'": (".amax(dim=-1, keepdim=True) * scale", ".amax(dim=-1, keepdim=True)"),
    "confidence outside the support": ("p.sign().mul_(q).amax", "q.amax"),
    "deferred mass lost": ("(1.0 - kept_mass).clamp(min=0.0)", "(kept_mass == 0).to(scale)"),
    "deferred tokens drawn by kept mass": ("(1.0 - kept_mass).clamp(min=0.0)", "kept_mass"),
    "q not renormalised": ("scale = support_scale(p_BKV, q_BKV)", "scale = support_scale(p_BKV, q_BKV).sign()"),
    "q not restricted": ("else restricted(p, q, scale)", "else q * scale"),
    "decides by the first place": (
        "return scale * kept, 1.0 - kept",
        "return scale * kept[:, :1], 1.0 - kept[:, :1] + 0.0 * kept",
    ),
    "distance of a deferred place": ("1.0 - kept, tv * kept", "1.0 - kept, tv"),
    "distance to q, not q'": ("torch.addcmul(p, q, scale, value=-1.0)", "(p - q)"),
    "distance doubled": (".sub_(p).clamp_(min=0.0)", ".sub_(p).abs_()"),
    "residual (p - q)+": ("return (self.law(p, q, *stats) - q).clamp(min=0.0)", "return (p - q).clamp(min=0.0)"),
    "accepts what q is sure of": (
        "return acceptance_probs(self.law(p, q, *stats), q)",
        "return torch.where((q > 0.5) & (p > 0), 1.0, acceptance_probs(self.law(p, q, *stats), q))",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    assert is_caught(CHECKS, ["cascades"], *PLANTED[fault])


def kept_share(deferral: str, alpha: float, block: Block) -> float:
    """Share of places whose law is q' (or of q' mass on kept tokens)."""
    p_BKV, q_BKV = block.target_probs_BTV[:, :-1], block.dense_draft_probs()
    rule = cascades.SpeculativeCascade(deferral, alpha)
    return 1.0 - float(rule.prepare(block, p_BKV, q_BKV)[1].mean())


@pytest.mark.parametrize("deferral", MIDDLE)
def test_alpha_sets_how_much_is_deferred(deferral: str) -> None:
    """More alpha, less deferred: nothing at 1, all at -inf, and something between at the alphas of these tests."""
    block = random_block(300, 6, 2, seed=4, dtype=torch.float64, zeros=False)
    shares = [kept_share(deferral, alpha, block) for alpha in (-math.inf, -0.5, 0.0, MIDDLE[deferral], 0.7, 1.0)]
    assert (np.diff(shares) >= -1e-12).all()
    assert shares[0] == 0.0
    assert 0.1 < shares[3] < 0.9
    assert abs(shares[-1] - 1.0) < 1e-12


@pytest.mark.parametrize("deferral", ["token", "V1", ""])
def test_unknown_deferral(deferral: str) -> None:
    with pytest.raises(ValueError, match="must be one of chow, diff, opt, v1, v2, v3"):
        cascades.SpeculativeCascade(deferral, 0.1)


@pytest.mark.parametrize("alpha", [1.1, math.inf, math.nan])
def test_bad_alpha(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha=.*at most 1"):
        cascades.SpeculativeCascade("opt", alpha)
