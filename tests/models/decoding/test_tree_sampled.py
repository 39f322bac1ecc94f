"""Sampled decoding with trees: the judge's law exactly, the decoder's by chi-square, and rows that see no others."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.decoding.tree_judge import judge_tree
from models.drafters.base import Branches
from models.sampling import SamplingParams
from models.target.tiny import make_tiny_target
from models.verification.base import Rule
from models.verification.blockwise import BlockVerification
from models.verification.token import TokenVerification
from models.verification.tree import DraftTree, TreeVerdict
from tests.models.decoding.scripted import random_prompts
from tests.models.decoding.trees import LAW_VOCAB, BigramTrees, check_law
from tests.models.verification.enumeration import EXACT, Toy
from tests.models.verification.tree_enumeration import (
    BINARY,
    FORK,
    UNEVEN,
    Trees,
    from_leaves,
    from_root,
    law_and_length,
)

RULES: dict[str, tuple[Rule, Callable]] = {
    "token": (TokenVerification(), from_root),
    "block": (BlockVerification(), from_leaves),
}
NO_LOGPROBS = SimpleNamespace(wants_logprobs=False)


def through_the_judge(rule: Rule, num_shapes: int) -> Callable[[DraftTree], TreeVerdict]:
    """The judge in the place of a rule. Padding gives every other row another shape, which must change nothing."""

    def verify(tree: DraftTree) -> TreeVerdict:
        num_rows, num_nodes = tree.tokens_BN.shape
        shapes = [(*tree.parents, row % num_shapes - 1) for row in range(num_rows)]
        tokens_BN, drafted_BN = (
            torch.cat([t, torch.zeros_like(t[:, :1])], dim=1) for t in (tree.tokens_BN, tree.drafted_BN)
        )
        logits_BTV = torch.cat([tree.target_probs_BTV, tree.target_probs_BTV[:, :1]], dim=1).log()
        branches = Branches(shapes, tokens_BN, drafted_BN, tree.draft_probs_BIV, tree.distinct)
        uniforms_BU = torch.cat(
            [tree.uniforms_BN, torch.full((num_rows, 2), 0.5), tree.final_uniform_B[:, None]], dim=1
        )
        rows = [NO_LOGPROBS] * num_rows
        judged, path_BT = judge_tree(rule, rows, logits_BTV, logits_BTV, branches, uniforms_BU, SamplingParams(1.0))
        verdict, path_BD = judged.verdict, path_BT[:, 1:] - 1
        for b, emission in enumerate(judged.emissions):
            kept = path_BD[b, : emission.num_accepted]
            assert emission.tokens == [*tokens_BN[b, kept].tolist(), int(verdict.next_token_B[b])]
            assert emission.num_accepted <= emission.num_drafted <= num_nodes
        return TreeVerdict(path_BD, verdict.num_accepted_B, verdict.next_token_B, verdict.is_bonus_B)

    return verify


@pytest.mark.parametrize("name", RULES)
def test_the_judges_law_is_the_targets(name: str) -> None:
    """Every tree that may be drawn and every outcome, in float64: the tree's tokens and the target's own after them."""
    rule, outcomes = RULES[name]
    code = SimpleNamespace(DraftTree=DraftTree)
    for parents, how in itertools.product([BINARY[:5], FORK, UNEVEN], ["likeliest", "distinct", "independent"]):
        num_shapes = 2 if how == "likeliest" else 1  # the same shape in all rows where something is drawn
        trees = Trees(Toy(3, 3, seed=4, zeros=True), parents, how)
        law, _ = law_and_length(code, through_the_judge(rule, num_shapes), trees, outcomes)
        assert np.abs(law - trees.toy.target_law(law.ndim)).max() < EXACT


def test_what_is_below_a_broken_place_does_not_count() -> None:
    """p or q that are no numbers at a place: nothing below it is kept, whatever the uniforms, and the rest goes on."""
    parents, vocab_size = (-1, -1, 0, 0), 4
    logits_BTV = torch.zeros(1, 5, vocab_size)
    q_BIV = torch.full((1, 2, vocab_size), 0.25)
    tokens_BN = torch.tensor([[1, 2, 3, 0]])
    drafted_BN = torch.ones(1, 4, dtype=torch.bool)
    uniforms_BU = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.5]], dtype=torch.float64)

    def judge(rule: Rule) -> tuple[int, int, bool]:
        branches = Branches([parents], tokens_BN, drafted_BN, q_BIV, distinct=True)
        judged, _ = judge_tree(rule, [NO_LOGPROBS], logits_BTV, logits_BTV, branches, uniforms_BU, SamplingParams(1.0))
        emission = judged.emissions[0]
        return emission.num_accepted, emission.num_drafted, emission.is_invalid

    for rule, _ in RULES.values():
        assert judge(rule) == (2, 2, False)
        logits_BTV[0, 1] = torch.nan
        assert judge(rule) == (1, 1, True)
        logits_BTV[0, 1] = 0.0
        q_BIV[0, 1] = torch.nan
        assert judge(rule) == (1, 1, False)
        q_BIV[0, 1] = 0.25


def test_a_tree_counts_as_deep_as_it_goes_on_without_a_gap() -> None:
    """A node below one that does not count does not count either."""
    logits_BTV = torch.zeros(3, 5, 4)
    parents = (-1, 0, -1, 2)
    drafted_BN = torch.tensor([[False, True, True, False], [True, True, True, True], [False] * 4])
    branches = Branches([parents] * 3, torch.ones(3, 4, dtype=torch.long), drafted_BN)
    judged, _ = judge_tree(
        TokenVerification(), [NO_LOGPROBS] * 3, logits_BTV, logits_BTV, branches, None, SamplingParams()
    )
    assert [emission.num_drafted for emission in judged.emissions] == [1, 2, 0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("how", ["distinct", "independent", "likeliest"])
def test_law_is_the_targets(how: str, name: str) -> None:
    """See `check_law` for N, threshold and false-alarm probability."""
    target = make_tiny_target(seed=3, vocab_size=LAW_VOCAB)
    check_law(Decoder(target, BigramTrees(LAW_VOCAB, how), 3, RULES[name][0]), [[3, 4, 1], [2], [4, 4, 3, 1, 0, 2]])


@pytest.mark.parametrize("how", ["distinct", "independent", "likeliest"])
def test_rows_do_not_depend_on_their_neighbours(how: str) -> None:
    """Tokens and counters, whatever stands beside a row: the length limit of one keeps no other's tree flat."""
    target = make_tiny_target()
    prompts = random_prompts(5, longest=20)
    decoder = Decoder(target, BigramTrees(target.vocab_size, how), 3)
    for new_tokens in (2, 5, 12):
        params = GenerationParams(new_tokens, SamplingParams(1.0, top_k=8), seed=2)
        alone = decoder.generate(prompts, params, 1)
        for max_batch_size in (2, 3, 5):
            assert decoder.generate(prompts, params, max_batch_size) == alone
