"""Lenience: its law, certificate and flags, exact; its bound p / l; its strict end.

The checks are then shown to fail for faults planted in the real source.
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from models.verification import base, lenience, token
from tests.models.verification import acceptance
from tests.models.verification.enumeration import EXACT, Toy, fails, planted

LENIENCES = (0.5, 0.8)


def accept_with(value: float) -> acceptance.Accept:
    def accept(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.array([min(1.0, p[x] / (value * q[x])) if q[x] > 0 else 0.0 for x in range(len(p))])

    return accept


def check_zero(code: SimpleNamespace) -> None:
    acceptance.check_zero(code.Lenience(0.3))
    acceptance.check_support(code.Lenience(0.3))


def check_strict(code: SimpleNamespace) -> None:
    acceptance.check_same_as_lossless(code.Lenience(1.0))
    acceptance.check_same_as_lossless(code.Lenience(0.3), budget=0.0)


def check_told(code: SimpleNamespace) -> None:
    for value in LENIENCES:
        acceptance.check_told(code.Lenience(value), accept_with(value))


def check_law(code: SimpleNamespace) -> None:
    for value in LENIENCES:
        acceptance.check_law(code.Lenience(value), accept_with(value))


CHECKS = [check_zero, check_strict, check_told, check_law]  # cheap ones first
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(lenience)))


@pytest.mark.parametrize("check", CHECKS)
def test_rule_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "l on the wrong side": ("acceptance_probs(p, self.lenience * q)", "acceptance_probs(self.lenience * p, q)"),
    "l forgotten": ("acceptance_probs(p, self.lenience * q)", "acceptance_probs(p, q)"),
    "l added": ("self.lenience * q", "self.lenience + q"),
    "l squared": ("self.lenience * q", "self.lenience**2 * q"),
    "refused of another l": ("alpha=1.0 / self.lenience", "alpha=self.lenience"),
    "refused not cut at zero": (".clamp_(min=0.0)", ".abs_()"),
    "refused of the wrong sign": ("torch.sub(q, p, alpha", "torch.sub(p, q, alpha"),
    "residual after the ratio": ("return (p - q).clamp(min=0.0)", "return (p - q).clamp(min=0.0).sqrt()"),
    "law without the residual": (" + self.residual(p, q, *stats) * scale", ""),
    "residual not scaled": ("self.residual(p, q, *stats) * scale", "self.residual(p, q, *stats)"),
    "distance of the lossless rule's refusals": ("(distance - rejected)[..., 0]", "rejected[..., 0]"),
    "distance of p and q": ("(distance - rejected)[..., 0]", "distance[..., 0]"),
    "statistics in the wrong order": ("return (*stats, rejected, (p_BKV", "return (*stats, 1.0 - rejected, (p_BKV"),
    "budget never spent": ("left_B = left_B - spent_B", "left_B = left_B"),
    "budget ignored": ("spent_B = torch.minimum(distance_B, left_B)", "spent_B = distance_B"),
    "share upside down": ("return share.to(strict.dtype) * relaxed", "return (1.0 - share).to(strict.dtype) * relaxed"),
    "bonus told as nu": ("torch.where(is_bonus_B[:, None], p_y, ", "torch.where(is_bonus_B[:, None], q_y, "),
    "flag on every accepted token": ("(block.uniforms_BK >= acceptance_probs(p_x, q_x)[..., 0]) & ", ""),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token", "lenience"], right, wrong)
    assert any(fails(check, mutant) for check in CHECKS)


def test_no_token_is_likelier_than_p_over_l() -> None:
    """The bound of the paper, and that it is reached."""
    tightest = 0.0
    for seed in range(20):
        toy = Toy(4, 2, seed, zeros=seed % 2 == 1)
        for value in (0.3, *LENIENCES, 1.0):
            nus = acceptance.stated(toy, 3, False, accept_with(value), None)
            for text, nu in nus.items():
                p = toy.p[text]
                assert (nu <= p / value + EXACT).all()
                tightest = max(tightest, float((nu[p > 0] / p[p > 0]).max() * value))
    assert tightest > 1.0 - EXACT


def test_less_lenience_means_less_distance() -> None:
    toy = Toy(4, 1, seed=3)
    distances = [
        acceptance.distance(acceptance.law(toy.p[()], toy.q[()], accept_with(value)(toy.p[()], toy.q[()])), toy.p[()])
        for value in (0.1, 0.4, 0.7, 1.0)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < EXACT < distances[0]


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, float("nan")])
def test_refuses_what_is_no_lenience(value: float) -> None:
    with pytest.raises(ValueError, match="lenience="):
        lenience.Lenience(value)
