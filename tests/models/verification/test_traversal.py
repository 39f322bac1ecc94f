"""Traversal verification, exact: all trees and outcomes in float64, against the target's law; and its length.

The same checks are then shown to fail for faults planted in the real source.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.verification import base, blockwise, token, traversal, tree
from models.verification.base import Block
from tests.models.verification.enumeration import EXACT, Toy, fails, planted
from tests.models.verification.tree_enumeration import (
    BINARY,
    CHAIN,
    FORK,
    TWO,
    UNEVEN,
    Parents,
    Trees,
    chain_of,
    from_leaves,
    from_root,
    law_and_length,
    length_of,
    masked_trees,
    random_block,
    varied_trees,
)

NUM_PAIRS = 30
VERDICTS = ("num_accepted_B", "next_token_B", "is_bonus_B")
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(blockwise) | vars(tree) | vars(traversal)))


def check_trees(code: SimpleNamespace, trees: Trees) -> None:
    law, length = law_and_length(code, code.TraversalVerification().verify, trees, from_leaves)
    assert np.abs(law - trees.toy.target_law(law.ndim)).max() < EXACT
    assert abs(length - length_of(trees, from_leaves)) < EXACT


def check_law(code: SimpleNamespace) -> None:
    """One tree, then the target's own tokens, have the target's joint law; `distinct` with too few tokens included."""
    for trees in varied_trees():
        check_trees(code, trees)


def check_masks(code: SimpleNamespace) -> None:
    """Nodes that do not count are as good as not there."""
    for trees in masked_trees():
        check_trees(code, trees)


def check_same(code: SimpleNamespace) -> None:
    """p == q: the first path is always accepted, whatever the uniforms, and what it leaves, nothing, is nowhere NaN."""
    toy = Toy(3, 3, seed=3, zeros=True, same=True)
    for how in ("independent", "distinct"):
        trees = Trees(toy, UNEVEN, how)
        check_trees(code, trees)
        assert abs(length_of(trees, from_leaves) - 2.0) < EXACT


def check_zero(code: SimpleNamespace) -> None:
    """u = 0 and p(x) = 0: neither that node nor one below it is kept, and no token of probability zero is drawn."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0]] * 4])
    q = torch.tensor([[[0.5, 0.1, 0.4, 0.0]] * 2])
    zero = torch.zeros(1, 3, dtype=torch.float64)
    counts = torch.ones(1, 3, dtype=torch.bool)
    for (tokens, path), draft_probs in itertools.product(
        [([0, 1, 0], [-1, -1]), ([1, 0, 0], [0, -1]), ([0, 1, 1], [2, -1])], (q, None)
    ):
        drafted = code.DraftTree((-1, 0, -1), p, draft_probs, torch.tensor([tokens]), counts, zero, zero[:, 0])
        verdict = code.TraversalVerification().verify(drafted)
        assert verdict.path_BD.tolist() == [path]
        assert verdict.next_token_B.tolist() in ([1], [2])


def check_chain(code: SimpleNamespace) -> None:
    """A tree without branches, or without nodes: block verification, bit for bit in float64."""
    rule = REAL.BlockVerification()
    for width, one_hot in itertools.product((0, 1, 3), (False, True)):
        block = random_block(4000, width, torch.float64, one_hot)
        ours, theirs = code.TraversalVerification().verify(chain_of(code, block)), rule.verify(block)
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in VERDICTS)


CHECKS = [check_zero, check_chain, check_same, check_masks, check_law]  # cheap ones first


@pytest.mark.parametrize("check", CHECKS)
def test_rule_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


@pytest.mark.parametrize("how", ["independent", "distinct"])
def test_two_children_of_two_children_are_exact(how: str) -> None:
    """The largest trees: all tokens possible, 6 nodes."""
    check_trees(REAL, Trees(Toy(3, 2, seed=0), BINARY, how))


PLANTED = {
    "comparison not strict": ("place - 1] < weight_B", "place - 1] <= weight_B"),
    "another node's uniform": ("tree.uniforms_BN[:, place - 1]", "tree.uniforms_BN[:, 0]"),
    "root may be rejected": ("if place > 0:", "if True:"),
    "what is kept is overwritten": ("is_kept_B = kept.place_B < 0", "is_kept_B = kept.place_B < 999"),
    "weight not handed down": ("weight_B[:, None].to(p_BV.dtype) * p_BV", "p_BV"),
    "loss not handed down": ("1.0 - weight_B)", "torch.zeros_like(weight_B))"),
    "weight stays after a rejection": (
        "weight_B = torch.where(drafted_B, left_share_B, weight_B)",
        "",
    ),
    "weight without the loss": ("left_B / remainder.total_B", "left_B"),
    "children take nothing": (
        "left_B = remainder.reject(tokens_B, drafted_B)",
        "left_B = remainder.weights_BV.sum(dim=1)",
    ),
    "padding takes its share": (
        "remainder.reject(tokens_B, drafted_B)",
        "remainder.reject(tokens_B, drafted_B | True)",
    ),
    "padding is judged": (
        "torch.where(drafted_B, remainder.accept_probs(tokens_B), 0.0)",
        "remainder.accept_probs(tokens_B)",
    ),
    "children judged with the weight of the place": (
        "torch.where(drafted_B, remainder.accept_probs(tokens_B), 0.0)",
        "torch.where(drafted_B, weight_B, 0.0)",
    ),
    "next token always from p": ("is_kept_B[:, None], remainder.weights_BV", "is_kept_B[:, None], p_BV"),
    "loss lost after a rejection": ("left_B + self.lost_B", "left_B"),
    "siblings taken for independent": ("if self.distinct:", "if False:"),
    "siblings taken for distinct": ("if self.distinct:", "if True:"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token", "tree", "traversal"], right, wrong)
    assert any(fails(check, mutant) for check in CHECKS)


@pytest.mark.parametrize("parents", [CHAIN, FORK, TWO, UNEVEN])
def test_never_shorter_than_from_the_root(parents: Parents) -> None:
    """On every random pair of models at least as many accepted tokens are expected as of the rules from the root."""
    for how in ("independent", "distinct", "likeliest"):
        all_trees = [Trees(Toy(3, 3, seed, zeros=seed % 2 == 1), parents, how) for seed in range(NUM_PAIRS)]
        from_top = np.array([length_of(trees, from_root) for trees in all_trees])
        from_below = np.array([length_of(trees, from_leaves) for trees in all_trees])
        assert (from_below >= from_top - EXACT).all()
        num_longer = int((from_below > from_top + 1e-6).sum())
        print(f"{parents} {how}: more on {num_longer} of {NUM_PAIRS}; {from_top.mean():.3f} -> {from_below.mean():.3f}")
        # Children that are no random draw leave nothing to gain: a path's weight is its probability in either rule.
        assert (num_longer == 0) if how == "likeliest" else (num_longer > NUM_PAIRS / 2)


def test_float32_verdicts_are_those_of_float64() -> None:
    """The sums over the vocabulary are taken in the dtype of p: only uniforms next to an edge may fall otherwise."""
    wide = random_block(20000, 3, torch.float64)
    narrow = Block(
        wide.target_probs_BTV.float(),
        wide.draft_probs_BKV.float(),
        wide.draft_tokens_BK,
        wide.num_drafted_B,
        wide.uniforms_BK,
        wide.final_uniform_B,
    )
    rule = REAL.TraversalVerification()
    a, b = rule.verify(chain_of(REAL, wide)), rule.verify(chain_of(REAL, narrow))
    assert sum(int((getattr(a, name) != getattr(b, name)).sum()) for name in VERDICTS) <= 3
