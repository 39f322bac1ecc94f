"""Rules that walk a drafted tree from its root, exact: all trees and outcomes in float64, against the target's law.

The same checks are then shown to fail for faults planted in the real source.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.sampling import SamplingParams, transform_logits
from models.verification import base, token, tree
from tests.models.verification.enumeration import EXACT, Toy, fails, planted
from tests.models.verification.tree_enumeration import (
    ALMOST_ONE,
    BESIDE,
    BINARY,
    CHAIN,
    FORK,
    UNEVEN,
    WIDE,
    Parents,
    Trees,
    chain_of,
    from_root,
    law_and_length,
    length_of,
    masked_trees,
    random_block,
    varied_trees,
)

NUM_PAIRS = 40
VERDICTS = ("num_accepted_B", "next_token_B", "is_bonus_B")
REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(tree)))


def rules(code: SimpleNamespace, how: str) -> list[object]:
    """The rules for siblings drawn in this way."""
    one, other = code.MultiRound(), code.WithoutReplacement()
    return {"independent": [one], "distinct": [other]}.get(how, [one, other])


def check_trees(code: SimpleNamespace, trees: Trees) -> None:
    for rule in rules(code, trees.how):
        law, length = law_and_length(code, rule.verify, trees, from_root)
        assert np.abs(law - trees.toy.target_law(law.ndim)).max() < EXACT
        assert abs(length - length_of(trees, from_root)) < EXACT


def check_law(code: SimpleNamespace) -> None:
    """One tree, then the target's own tokens, have the target's joint law; `distinct` with too few tokens included."""
    for trees in varied_trees():
        check_trees(code, trees)


def check_masks(code: SimpleNamespace) -> None:
    """Nodes that do not count are as good as not there."""
    for trees in masked_trees():
        check_trees(code, trees)


def check_same(code: SimpleNamespace) -> None:
    """p == q: the first child is always accepted, and what it leaves, nothing, is nowhere NaN."""
    toy = Toy(3, 3, seed=3, zeros=True, same=True)
    for how in ("independent", "distinct"):
        trees = Trees(toy, UNEVEN, how)
        check_trees(code, trees)
        assert abs(length_of(trees, from_root) - 2.0) < EXACT


def check_zero(code: SimpleNamespace) -> None:
    """u = 0 and p(x) = 0: rejected, and no token of probability zero comes instead; nor one that q no longer has."""
    p = torch.tensor([[[0.0, 0.6, 0.4, 0.0]] * 3])
    zero = torch.zeros(1, 2, dtype=torch.float64)
    both = torch.ones(1, 2, dtype=torch.bool)
    for q, tokens in [
        ([0.5, 0.1, 0.4, 0.0], [0, 0]),
        ([0.5, 0.0, 0.0, 0.5], [3, 0]),
        ([1.0, 0.0, 0.0, 0.0], [0, 2]),
        (None, [0, 3]),
    ]:
        draft_probs = None if q is None else torch.tensor([[q]])
        for rule, distinct in ((code.MultiRound(), False), (code.WithoutReplacement(), True)):
            drafted = code.DraftTree((-1, -1), p, draft_probs, torch.tensor([tokens]), both, zero, zero[:, 0], distinct)
            verdict = rule.verify(drafted)
            assert (verdict.path_BD.tolist(), verdict.next_token_B.tolist()) == ([[-1]], [1])
            assert verdict.is_bonus_B.tolist() == [False]


def check_chain(code: SimpleNamespace) -> None:
    """A tree without branches, or without nodes: token verification, bit for bit, under the same uniforms."""
    for width, dtype, one_hot in itertools.product((0, 1, 3), (torch.float32, torch.float64), (False, True)):
        block = random_block(4000, width, dtype, one_hot)
        ours, theirs = code.MultiRound().verify(chain_of(code, block)), code.verify_tokens(block)
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in VERDICTS)
        steps_K = torch.arange(width)
        assert torch.equal(ours.path_BD, steps_K.where(steps_K < theirs.num_accepted_B[:, None], -1))


def check_greedy(code: SimpleNamespace) -> None:
    """Temperature 0: ids alone give what one-hot p gives in every rule, whatever the uniforms."""
    generator = torch.Generator().manual_seed(0)
    num_rows = 3000
    for parents in (CHAIN, BINARY, UNEVEN, ()):
        num_nodes = len(parents)
        logits_BTV = torch.randn(num_rows, num_nodes + 1, 3, generator=generator)
        tokens_BN = torch.randint(0, 3, (num_rows, num_nodes), generator=generator)
        drafted_BN = torch.rand(num_rows, num_nodes, generator=generator) < 0.8
        uniforms_BT = torch.rand(num_rows, num_nodes + 1, generator=generator, dtype=torch.float64)
        fast = code.verify_tree_greedy(logits_BTV.argmax(dim=-1), parents, tokens_BN, drafted_BN)
        p_BTV = transform_logits(logits_BTV, SamplingParams())
        drafted = code.DraftTree(
            parents, p_BTV, None, tokens_BN, drafted_BN, uniforms_BT[:, :num_nodes], uniforms_BT[:, num_nodes]
        )
        slow = code.MultiRound().verify(drafted)
        assert all(torch.equal(getattr(fast, name), getattr(slow, name)) for name in (*VERDICTS, "path_BD"))
        if parents == CHAIN:
            counts_B = drafted_BN.long().cumprod(dim=1).sum(dim=1)
            chain = code.verify_greedy(logits_BTV.argmax(dim=-1), tokens_BN, counts_B)
            assert all(torch.equal(getattr(fast, name), getattr(chain, name)) for name in VERDICTS)


def check_draws(code: SimpleNamespace) -> None:
    """`draw_without_replacement` maps the unit cube to sequences with the right edges, and knows when q is empty."""
    q = Toy(4, 0, seed=1, zeros=True).q[()]
    for order in itertools.permutations(np.flatnonzero(q)):
        left, ends = q.copy(), []
        for x in order:
            start = left[:x].sum() / left.sum()
            ends.append((start + BESIDE, min(start + left[x] / left.sum() - BESIDE, ALMOST_ONE)))
            left[x] = 0.0
        uniforms = torch.tensor([*itertools.product(*ends)])
        uniforms = torch.cat([uniforms, torch.full_like(uniforms[:, :1], 0.5)], dim=1)
        tokens_BC, drafted_BC = code.draw_without_replacement(torch.tensor(q).repeat(len(uniforms), 1), uniforms)
        assert (tokens_BC[:, :3] == torch.tensor(np.array(order))).all()
        assert drafted_BC.tolist() == [[True, True, True, False]] * len(uniforms)


CHECKS = [check_zero, check_draws, check_chain, check_same, check_greedy, check_masks, check_law]  # cheap ones first


@pytest.mark.parametrize("check", CHECKS)
def test_rules_are_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


@pytest.mark.parametrize("how", ["independent", "distinct"])
def test_two_children_of_two_children_are_exact(how: str) -> None:
    """The largest trees: all tokens possible, 6 nodes."""
    check_trees(REAL, Trees(Toy(3, 2, seed=0), BINARY, how))


PLANTED = {
    "comparison not strict": ("[rows_B, node_B] < remainder", "[rows_B, node_B] <= remainder"),
    "residual not cut at zero": ("scale_B1 * self.q_BV).clamp_(min=0.0)", "scale_B1 * self.q_BV).abs_()"),
    "residual not normalised": ("self.total_B = torch.where(where_B, left_B + self.lost_B, self.total_B)", ""),
    "residual in place of p at the next place": ("self.weights_BV = torch.where(where_B[:, None], p_BV,", "_ = (p_BV,"),
    "q not that of the next place": ("self.q_BV = torch.where(where_B[:, None], q_BV, self.q_BV)", ""),
    "normaliser carried to the next place": ("self.total_B = self.total_B.masked_fill(where_B, 1.0)", ""),
    "q's normaliser carried to the next place": ("self.q_mass_B = self.q_mass_B.masked_fill(where_B, 1.0)", ""),
    "token stays in q": ("self.q_BV = self.q_BV.scatter(1, tokens_B1, left_B1)", ""),
    "token leaves q, which is not normalised": (
        "self.q_mass_B = torch.where(where_B, self.q_BV.sum(dim=1).double(), self.q_mass_B)",
        "",
    ),
    "token leaves q of independent siblings": ("if self.distinct:", "if True:"),
    "deterministic child stays in p": ("self.weights_BV = self.weights_BV.scatter(1, tokens_B1, left_B1)", ""),
    "siblings of an accepted child are tried": (" & (accepted_B < 0)", ""),
    "stopped rows go on": ("is_tried_B = moved_B & (node_B >= 0)", "is_tried_B = (node_B >= 0)"),
    "missing children are tried": ("moved_B & (node_B >= 0)", "moved_B"),
    "padding is tried": (" & tree.drafted_BN[rows_B, node_B]", ""),
    "padding counts as a child": ("((nodes_BC >= 0) & drafted_BN.gather(1, nodes_BC.clamp(min=0)))", "(nodes_BC >= 0)"),
    "p of the parent": ("self.target_probs_BTV[rows_B, place_B], self", "self.target_probs_BTV[:, 0], self"),
    "q by place, not by inner place": ("self.draft_probs_BIV[rows_B, inner_B]", "self.draft_probs_BIV[rows_B, 0]"),
    "bonus from the residual": ("next_weights(tree.place(place_B)[0], weights_BV, is_bonus_B)", "weights_BV"),
    "next token always from p": (
        "next_weights(tree.place(place_B)[0], weights_BV, is_bonus_B)",
        "tree.place(place_B)[0]",
    ),
    "uniform used twice": (
        "sample_from(weights_BV, tree.final_uniform_B)",
        "sample_from(weights_BV, tree.uniforms_BN[:, 0])",
    ),
    "q that is empty divides": (
        "torch.where(self.q_mass_B > 0, self.total_B / self.q_mass_B, 0.0)",
        "1.0 / self.q_mass_B",
    ),
    "greedy takes any child": ("(tokens_BC == target_tokens_BT.gather(1, place_B[:, None])) & ", ""),
    "greedy takes padding": (" & drafted_BC & ", " & "),
    "drawn with replacement": ("probs_BV = probs_BV.scatter(1, tokens[-1][:, None], 0.0)", ""),
    "draws from nothing count": ("(probs_BV > 0).any(dim=1)", "(probs_BV >= 0).any(dim=1)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    right, wrong = PLANTED[fault]
    mutant = planted(["base", "token", "tree"], right, wrong)
    assert any(fails(check, mutant) for check in CHECKS)


@pytest.mark.parametrize("parents", [BINARY, UNEVEN, FORK])
def test_never_shorter_than_a_chain(parents: Parents) -> None:
    """As many accepted tokens are expected as of the tree's first path alone, or more; distinct siblings give most."""
    lengths = []
    for seed in range(NUM_PAIRS):
        toy = Toy(2 if parents == BINARY else 3, 3, seed, zeros=parents != BINARY)
        depth = len(tree.widths_of(parents))
        trees = [Trees(toy, CHAIN[:depth]), Trees(toy, parents), Trees(toy, parents, "distinct")]
        lengths.append([length_of(each, from_root) for each in trees])
    chain, independent, distinct = np.array(lengths).T
    assert (independent >= chain - EXACT).all()
    assert (distinct >= chain - EXACT).all()
    means = [float(length.mean()) for length in (chain, independent, distinct)]
    print(f"{parents}: chain, independent, distinct: {means[0]:.3f}, {means[1]:.3f}, {means[2]:.3f}")
    assert means == sorted(means)


def test_misuse_is_refused() -> None:
    """The way in which siblings were drawn must be the rule's, and a tree must be one."""
    trees = Trees(Toy(3, 3, seed=0), WIDE)
    with pytest.raises(ValueError, match="distinct=False"):
        law_and_length(REAL, tree.WithoutReplacement().verify, trees, from_root)
    with pytest.raises(ValueError, match="distinct=True"):
        law_and_length(REAL, tree.MultiRound().verify, Trees(trees.toy, WIDE, "distinct"), from_root)
    for parents in ((0,), (-1, 1), (-2,)):
        with pytest.raises(ValueError, match="after its parent"):
            tree.children_of(parents)
