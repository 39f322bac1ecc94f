"""Lossless token verification, exact: every draft and every outcome enumerated in float64, against the target's law.

The same checks are then shown to fail for faults planted in the real source.
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.sampling import SamplingParams, transform_logits
from models.verification import base, token
from models.verification.base import Block
from tests.models.verification.enumeration import EXACT, Toy, fails, output_law, planted


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
    no, yes = torch.tensor([False]), torch.tensor([True])
    assert torch.equal(code.next_weights(p, torch.zeros_like(p), no), p)
    assert torch.equal(code.next_weights(p, p.flip(1), yes), p)
    assert torch.equal(code.next_weights(p, p.flip(1), no), p.flip(1))
    below = torch.full((1, 1), 1.0 - 2.0**-53, dtype=torch.float64)
    verdict = code.verify_tokens(
        Block(p[:, None].repeat(1, 2, 1), p[:, None], torch.tensor([[1]]), torch.tensor([1]), below, below[0])
    )
    assert verdict.num_accepted_B.tolist() == [1]
    assert verdict.is_bonus_B.tolist() == [True]


def check_zero(code: SimpleNamespace) -> None:
    """u = 0 and p(x) = 0: rejected, and no token of probability zero comes instead."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0]] * 2])
    q = torch.tensor([[[0.5, 0.1, 0.4, 0.0]]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    for draft_probs in (q, None):
        verdict = code.verify_tokens(Block(p, draft_probs, torch.tensor([[0]]), torch.tensor([1]), zero, zero[0]))
        assert (verdict.num_accepted_B.item(), verdict.next_token_B.item()) == (0, 1)
        assert not verdict.is_bonus_B.item()


def check_pieces(code: SimpleNamespace) -> None:
    """Acceptance is a probability, and 0 for what q cannot have given."""
    toy = Toy(4, 1, seed=5, zeros=True)
    p, q = (torch.tensor(np.array(list(law.values()))) for law in (toy.p, toy.q))
    accept = code.acceptance_probs(p, q)
    assert ((accept >= 0) & (accept <= 1)).all()
    assert (accept[q == 0] == 0).all()


CHECKS = [check_pieces, check_zero, check_same, check_law]  # cheap ones first
REAL = SimpleNamespace(**(vars(base) | vars(token)))


@pytest.mark.parametrize("check", CHECKS)
def test_rule_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "comparison not strict": ("uniforms_BK < accept", "uniforms_BK <= accept"),
    "ratio inverted": ("p_x / q_x", "q_x / p_x"),
    "ratio not clamped": (".clamp(max=1.0)", ""),
    "token with q = 0 accepted": ("torch.where(q_x > 0, p_x / q_x, 0.0)", "(p_x / q_x)"),
    "residual of the wrong sign": ("(p_BV - q_BV).clamp(min=0.0)", "(q_BV - p_BV).clamp(min=0.0)"),
    "residual not cut at zero": ("(p_BV - q_BV).clamp(min=0.0)", "(p_BV - q_BV).abs()"),
    "residual 0 where p == q": ("(is_bonus_B | (residual_BV.sum(dim=-1) <= 0))", "(is_bonus_B)"),
    "p in place of the residual": ("next_weights(p_BV, (p_BV - q_BV).clamp(min=0.0), is_bonus_B)", "p_BV"),
    "accepts past the first rejection": (".cumprod(dim=1).sum(dim=1)", ".sum(dim=1)"),
    "padding is judged": (" & (steps_K < num_drafted_B[:, None])", ""),
    "bonus from q": ("next_weights(p_BV, (p_BV", "next_weights(q_BV, (p_BV"),
    "no bonus in short rows": (
        "is_bonus_B = num_accepted_B == block.num_drafted_B",
        "is_bonus_B = num_accepted_B == num_draft_tokens",
    ),
    "p one place late": ("target_probs_BTV[:, :num_draft_tokens]", "target_probs_BTV[:, 1:]"),
    "next token one place early": (
        "target_probs_BTV[rows_B, num_accepted_B]",
        "target_probs_BTV[rows_B, (num_accepted_B - 1).clamp(min=0)]",
    ),
    "q of the first place": ("q_BV = block.draft_probs_BKV[rows_B, rejected_B]", "q_BV = block.draft_probs_BKV[:, 0]"),
    "uniform used twice": (
        "sample_from(weights_BV, block.final_uniform_B)",
        "sample_from(weights_BV, block.uniforms_BK[rows_B, rejected_B])",
    ),
    "one-hot q of the wrong token": (
        "scatter_(1, tokens_BK1[rows_B, rejected_B], 1.0)",
        "scatter_(1, tokens_BK1[:, 0], 1.0)",
    ),
    "one-hot draft taken as always right": ("q_x_BK = torch.ones_like(p_x_BK)", "q_x_BK = p_x_BK"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token"], right, wrong)
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
    fast = token.verify_greedy(logits_BKV.argmax(dim=-1), drafts_BK, num_drafted_B)
    for draft_probs in (None, one_hot_BKV):
        slow = token.verify_tokens(
            Block(probs_BKV, draft_probs, drafts_BK, num_drafted_B, uniforms_BK[:, :3], uniforms_BK[:, 3])
        )
        assert torch.equal(fast.num_accepted_B, slow.num_accepted_B)
        assert torch.equal(fast.next_token_B, slow.next_token_B)
        assert torch.equal(fast.is_bonus_B, slow.is_bonus_B)
    assert set(fast.num_accepted_B.tolist()) == {0, 1, 2, 3}
