"""Block verification, exact: its law and its length by enumeration in float64, beside token verification's.

The same checks are then shown to fail for faults planted in the real source.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.verification import base, blockwise, token, tree
from models.verification.base import Block
from models.verification.tree import DraftTree, TreeVerdict
from tests.models.verification.enumeration import EXACT, Toy, fails, planted
from tests.models.verification.tree_enumeration import (
    CHAIN,
    Trees,
    from_leaves,
    from_root,
    law_and_length,
    length_of,
    random_block,
)

NUM_PAIRS = 300
VERDICTS = ("num_accepted_B", "next_token_B", "is_bonus_B")


def law_and_length_of_chains(
    code: SimpleNamespace, toy: Toy, mask: tuple[bool, ...], one_hot: bool = False
) -> tuple[np.ndarray, float]:
    """Law and length of block verification of chains as long as the mask, which says how many tokens count."""

    def verify(chain: DraftTree) -> TreeVerdict:
        verdict = code.BlockVerification().verify(
            Block(
                chain.target_probs_BTV,
                chain.draft_probs_BIV,
                chain.tokens_BN,
                chain.drafted_BN.sum(dim=1),
                chain.uniforms_BN,
                chain.final_uniform_B,
            )
        )
        steps_K = torch.arange(len(mask))
        path_BK = steps_K.where(steps_K < verdict.num_accepted_B[:, None], -1)
        return TreeVerdict(path_BK, verdict.num_accepted_B, verdict.next_token_B, verdict.is_bonus_B)

    trees = Trees(toy, CHAIN[: len(mask)], "likeliest" if one_hot else "independent", mask)
    return law_and_length(tree, verify, trees, from_leaves)


def lengths_by_formula(toy: Toy, num_drafted: int) -> tuple[float, float]:
    """Accepted tokens expected of block and of token verification: sums of E[w_i], and of E[prod min(1, p / q)]."""
    by_block = by_token = 0.0
    for draft in itertools.product(range(toy.vocab_size), repeat=num_drafted):
        steps = [(toy.p[draft[:k]][x], toy.q[draft[:k]][x]) for k, x in enumerate(draft)]
        chance = np.prod([q_x for _, q_x in steps])
        weight = share = 1.0
        for p_x, q_x in steps if chance > 0 else ():
            weight, share = min(1.0, weight * p_x / q_x), share * min(1.0, p_x / q_x)
            by_block, by_token = by_block + chance * weight, by_token + chance * share
    return by_block, by_token


def check_law(code: SimpleNamespace) -> None:
    """One block, then the target's own tokens, have the target's joint law."""
    for vocab_size, mask in [
        (3, (True,)),
        (3, (False,)),
        (3, (True, False, False)),
        (4, (True, True)),
        (3, (True, True, False)),
        (3, (True, True, True)),
    ]:
        for one_hot, seed in itertools.product((True, False), range(4)):
            toy = Toy(vocab_size, len(mask), seed, zeros=seed % 2 == 1)
            law, _ = law_and_length_of_chains(code, toy, mask, one_hot)
            assert np.abs(law - toy.target_law(law.ndim)).max() < EXACT


def check_same(code: SimpleNamespace) -> None:
    """p == q: everything is accepted, whatever the uniforms, and 0 / 0 is nowhere."""
    for last in (0, 1):  # 1: the same up to the last place, so that w = 1 and S = 0 before it
        toy = Toy(3, 3, seed=3, same=True)
        for prefix in itertools.product(range(3), repeat=2):
            toy.q[prefix] = np.roll(toy.p[prefix], last)
        law, _ = law_and_length_of_chains(code, toy, (True,) * 3)
        assert np.abs(law - toy.target_law(4)).max() < EXACT
    p = torch.tensor([[0.2, 0.5, 0.3]]).repeat(4, 1)[None]
    below = torch.full((1, 3), 1.0 - 2.0**-53, dtype=torch.float64)
    verdict = code.BlockVerification().verify(
        Block(p, p[:, :3], torch.tensor([[1, 0, 2]]), torch.tensor([3]), below, below[:, 0])
    )
    assert verdict.num_accepted_B.tolist() == [3]
    assert verdict.is_bonus_B.tolist() == [True]


def check_zero(code: SimpleNamespace) -> None:
    """u = 0 and p(x) = 0: neither that token nor one behind it is kept, and none of probability zero comes instead."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0]] * 4])
    q = torch.tensor([[[0.5, 0.1, 0.4, 0.0]] * 3])
    zero = torch.zeros(1, 3, dtype=torch.float64)
    for tokens, kept in [([0, 1, 1], 0), ([1, 0, 1], 1), ([1, 2, 0], 2)]:
        for draft_probs in (q, None):
            verdict = code.BlockVerification().verify(
                Block(p, draft_probs, torch.tensor([tokens]), torch.tensor([3]), zero, zero[:, 0])
            )
            assert verdict.num_accepted_B.tolist() == [kept]
            assert verdict.next_token_B.tolist() in ([1], [2])
            assert not verdict.is_bonus_B.item()


def check_one_token(code: SimpleNamespace) -> None:
    """One drafted token, or none: token verification, bit for bit, under the same uniforms."""
    for dtype, one_hot in [(torch.float32, False), (torch.float64, False), (torch.float32, True)]:
        for width in (0, 1):
            block = random_block(4000, width, dtype, one_hot)
            ours, theirs = code.BlockVerification().verify(block), code.verify_tokens(block)
            assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in VERDICTS)


CHECKS = [check_zero, check_one_token, check_same, check_law]  # cheap ones first
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(blockwise)))


@pytest.mark.parametrize("check", CHECKS)
def test_rule_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "comparison not strict": ("uniforms_BK < keep", "uniforms_BK <= keep"),
    "stops at the first failed place": (
        "(passed_BK * lengths_K).amax(dim=1)",
        "passed_BK.long().cumprod(dim=1).sum(dim=1)",
    ),
    "weight not carried on": ("weights[-1] * p_x_B", "p_x_B"),
    "weight not capped at each place": (
        "acceptance_probs(weights[-1] * p_x_B, q_x_B)",
        "torch.where(q_x_B > 0, weights[-1] * p_x_B / q_x_B, 0.0)",
    ),
    "weight itself as the test": ("left_BK / total_BK", "weights_BK[:, :-1]"),
    "mass lost is forgotten": ("left_BK + (1.0 - weights_BK[:, :-1])", "left_BK + 1.0"),
    "short rows judged as long ones": (
        "torch.where(is_last_BK, weights_BK, torch.cat([inner_BK, weights_BK[:, -1:]], dim=1))",
        "torch.cat([inner_BK, weights_BK[:, -1:]], dim=1)",
    ),
    "left mass from the place before": ("p_BKV[:, 1:]).sub_(q_BKV[:, 1:])", "p_BKV[:, :-1]).sub_(q_BKV[:, :-1])"),
    "left mass without the weight": ("inner_BK[..., None].to(p_BKV.dtype) * p_BKV", "p_BKV"),
    "left mass not cut at zero": (".sub_(q_BKV[:, 1:]).clamp_(min=0.0)", ".sub_(q_BKV[:, 1:]).abs_()"),
    "one-hot left mass without the weight": ("inner_BK * (1.0 - p_x_BK[:, 1:])", "(1.0 - p_x_BK[:, 1:])"),
    "one-hot left mass one place early": ("(1.0 - p_x_BK[:, 1:])", "(1.0 - p_x_BK[:, :-1])"),
    "residual without the weight": ("(weight_B1 * p_BV - q_BV)", "(p_BV - q_BV)"),
    "weight of the place before": (
        "weights_BT[rows_B, num_accepted_B, None]",
        "weights_BT[rows_B, (num_accepted_B - 1).clamp(min=0), None]",
    ),
    "padding is judged": (" & (lengths_K <= block.num_drafted_B[:, None])", ""),
    "no bonus in short rows": ("num_accepted_B == block.num_drafted_B", "num_accepted_B == block.num_draft_tokens"),
    "one-hot q of the wrong token": ("draft_tokens_BK[rows_B, rejected_B, None]", "draft_tokens_BK[:, :1]"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token", "blockwise"], right, wrong)
    assert any(fails(check, mutant) for check in CHECKS)


@pytest.mark.parametrize("num_drafted", [2, 3])
def test_never_shorter_than_token_verification(num_drafted: int) -> None:
    """On every random pair of models at least as many accepted tokens are expected, on most of them more."""
    toys = [Toy(3, num_drafted, seed, zeros=seed % 2 == 1) for seed in range(NUM_PAIRS)]
    by_block, by_token = np.array([lengths_by_formula(toy, num_drafted) for toy in toys]).T
    assert (by_block >= by_token - EXACT).all()
    num_longer = int((by_block > by_token + 1e-6).sum())
    print(
        f"K = {num_drafted}: more on {num_longer} of {NUM_PAIRS}; mean {by_token.mean():.3f} -> {by_block.mean():.3f}"
    )
    assert num_longer > (0.85 if num_drafted == 3 else 0.7) * NUM_PAIRS
    for toy, length, shorter in zip(toys[:20], by_block, by_token, strict=False):
        assert abs(law_and_length_of_chains(REAL, toy, (True,) * num_drafted)[1] - length) < EXACT
        assert abs(length_of(Trees(toy, CHAIN[:num_drafted]), from_root) - shorter) < EXACT


def test_lengths_of_the_paper_s_example() -> None:
    """Sun et al. begin with p = (1/3, 2/3), q = (2/3, 1/3) and two drafted tokens: 10/9 and 11/9 are accepted."""
    toy = Toy(2, 2, seed=0)
    for prefix in toy.p:
        toy.p[prefix], toy.q[prefix] = np.array([1.0, 2.0]) / 3, np.array([2.0, 1.0]) / 3
    by_block, by_token = lengths_by_formula(toy, 2)
    assert abs(by_token - 10 / 9) < EXACT
    assert abs(by_block - 11 / 9) < EXACT
    assert abs(law_and_length_of_chains(REAL, toy, (True, True))[1] - 11 / 9) < EXACT


def test_float32_verdicts_are_those_of_float64() -> None:
    """The dense sums S are taken in the dtype of p: only uniforms within 1e-5 of an edge may fall to the other side."""
    wide = random_block(20000, 3, torch.float64)
    narrow = Block(
        wide.target_probs_BTV.float(),
        wide.draft_probs_BKV.float(),
        wide.draft_tokens_BK,
        wide.num_drafted_B,
        wide.uniforms_BK,
        wide.final_uniform_B,
    )
    a, b = REAL.BlockVerification().verify(wide), REAL.BlockVerification().verify(narrow)
    assert sum(int((getattr(a, name) != getattr(b, name)).sum()) for name in VERDICTS) <= 3
