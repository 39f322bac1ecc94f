"""The law of what a block emits, by enumeration in float64: real trees, the real rule, every draft and outcome."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from models.drafters.universal.text_tree import FirstTokens, TextTree
from models.drafters.universal.tli import shared_tokens
from models.drafters.universal.translation import Translator
from models.verification.base import Block
from models.verification.token import TokenVerification
from tests.models.drafters.universal.toy import DRAFT_END, NUM_DRAFT_IDS, psi
from tests.models.drafters.universal.vocabularies import TOY_DRAFT, TOY_TARGET, make_toy_draft, make_toy_target
from tests.models.verification.enumeration import EXACT, cells, token_edges

SIZE = len(TOY_TARGET)
K = 2
Text = tuple[int, ...]


def random_law(prefix: Text, size: int, seed: int) -> np.ndarray:
    """A law that depends on the whole prefix; one entry is 0."""
    weights = np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.full(size, 0.7))
    weights[sum(prefix) % size] = 0.0
    return weights / weights.sum()


def draft_law(ids: Text) -> Tensor:
    return torch.tensor(random_law(ids, NUM_DRAFT_IDS, seed=1))


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator(make_toy_draft(), make_toy_target())


def grow(tree: TextTree, ids_of: dict[tuple[int, ...], Text]) -> None:
    """What the drafter does with the draft model, by the table of laws. A node is called by its number."""
    while leaves := tree.wanted():
        for leaf in leaves:
            if leaf.last_id is None:
                tree.expand(leaf, (), draft_law(()))
                continue
            path = (*leaf.path, len(ids_of))
            ids_of[path] = (*ids_of[leaf.path], leaf.last_id)
            tree.expand(leaf, path, draft_law(ids_of[path]))


def tree_law(translator: Translator, max_expanded: int, min_mass: float) -> Callable[[Text], np.ndarray]:
    """psi after the tokens drawn so far in the block, of the real tree."""
    firsts = FirstTokens(translator, SIZE)

    def law(drawn: Text) -> np.ndarray:
        tree, ids_of = TextTree(firsts, max_expanded, min_mass, max_depth=50), {(): ()}
        grow(tree, ids_of)
        for token in drawn:
            tree.condition(token)
            grow(tree, ids_of)
        return tree.psi().numpy()

    return law


def intersection_law(translator: Translator) -> Callable[[Text], np.ndarray]:
    """The draft model's law over shared tokens, renormalised; what was drawn is read in the draft model's ids."""
    pairs = shared_tokens(translator)
    assert pairs == [(TOY_TARGET.index(token), TOY_DRAFT.index(token)) for token in ("<|end|>", "a", "b", "c", "Ġ")]
    partner = dict(pairs)

    def law(drawn: Text) -> np.ndarray:
        whole, result = draft_law(tuple(partner[token] for token in drawn)).numpy(), np.zeros(SIZE)
        for target_id, draft_id in pairs:
            result[target_id] = whole[draft_id]
        return result / result.sum()

    return law


def certain_law(translator: Translator) -> Callable[[Text], np.ndarray]:
    """SLEM: the tokens of the draft model's likeliest text, each of them certain; no token behind the last."""
    ids: Text = ()
    while len(ids) < 2 * K and (not ids or ids[-1] != DRAFT_END):
        ids = (*ids, int(draft_law(ids).argmax()))
    data = translator.spelling.spell([index for index in ids if index != DRAFT_END])
    tokens = translator.to_target(translator.start(), data or b"")
    assert len(tokens) >= K

    def law(drawn: Text) -> np.ndarray:
        assert drawn == tuple(tokens[: len(drawn)])
        return np.eye(SIZE)[tokens[len(drawn)]]

    return law


def block_law(q: Callable[[Text], np.ndarray]) -> np.ndarray:
    """Law [V] * (K + 1) of the next K + 1 tokens: one block of up to K drafts, and then the target's own law."""
    p = {text: random_law(text, SIZE, 2) for n in range(K + 1) for text in itertools.product(range(SIZE), repeat=n)}
    rng, rows = np.random.default_rng(0), []
    for draft, weight in all_drafts(q, (), 1.0):
        places = [draft[:k] for k in range(len(draft) + 1)]
        laws = [q(place) for place in places[:-1]]
        accept, final = token_edges([p[place] for place in places], laws, draft)
        for combination in itertools.product(*(cells(edges, rng) for edges in accept), cells(final, rng)):
            middles, sizes = zip(*combination, strict=True)
            rows.append((draft, laws, middles, weight * np.prod(sizes)))
    zeros = np.zeros(SIZE)
    verdict = TokenVerification().verify(
        Block(
            torch.tensor(np.array([[p[d[:k]] if k <= len(d) else zeros for k in range(K + 1)] for d, *_ in rows])),
            torch.tensor(np.array([[*laws, *[zeros] * (K - len(laws))] for _, laws, *_ in rows])),
            torch.tensor([[*d, *[0] * (K - len(d))] for d, *_ in rows]),
            torch.tensor([len(d) for d, *_ in rows]),
            torch.tensor([[*m[:-1], *[0.0] * (K + 1 - len(m))] for _, _, m, _ in rows], dtype=torch.float64),
            torch.tensor([m[-1] for _, _, m, _ in rows], dtype=torch.float64),
        )
    )
    law = np.zeros((SIZE,) * (K + 1))
    outcomes = zip(rows, verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
    for (draft, _, _, weight), num_accepted, token in outcomes:
        emitted = (*draft[:num_accepted], token)
        rest = {3: 1.0, 2: p.get(emitted)}.get(len(emitted))
        if rest is None:
            rest = p[emitted][:, None] * np.array([p[(*emitted, second)] for second in range(SIZE)])
        law[emitted] += weight * rest
    return law


def all_drafts(q: Callable[[Text], np.ndarray], drawn: Text, weight: float) -> list[tuple[Text, float]]:
    """(draft, probability) of every draft that q can give; shorter ones where the drafted text ends."""
    law = q(drawn) if len(drawn) < K else np.zeros(SIZE)
    if not law.any():
        return [(drawn, weight)]
    tokens = np.flatnonzero(law).tolist()
    return [found for token in tokens for found in all_drafts(q, (*drawn, token), weight * law[token])]


def target_law() -> np.ndarray:
    first = random_law((), SIZE, 2)
    second = np.array([random_law((a,), SIZE, 2) for a in range(SIZE)])
    third = np.array([[random_law((a, b), SIZE, 2) for b in range(SIZE)] for a in range(SIZE)])
    return first[:, None, None] * second[:, :, None] * third


@pytest.mark.parametrize("method", ["slem", "tli", "slrs", "slrs with a tree cut short"])
def test_a_blocks_law_is_the_targets(translator: Translator, method: str) -> None:
    """Also where psi sums over fewer sequences than there are."""
    bounds = (10**6, 0.0) if method == "slrs" else (2, 0.1)
    others = {"slem": certain_law, "tli": intersection_law}
    q = others[method](translator) if method in others else tree_law(translator, *bounds)
    assert abs(block_law(q) - target_law()).max() < EXACT


def test_psi_is_the_mass_of_all_sequences(translator: Translator) -> None:
    """With both bounds out of the way, after every draft of up to two tokens; in float64."""
    tokenizer, law = make_toy_target().tokenizer, tree_law(translator, 10**6, 0.0)
    first = psi(draft_law, (), tokenizer)
    assert abs(law(()) - first.numpy()).max() < EXACT
    assert (first > 0).sum() >= 8
    for token in first.nonzero()[:, 0].tolist():
        assert abs(law((token,)) - psi(draft_law, (token,), tokenizer).numpy()).max() < EXACT


def test_a_cut_tree_is_a_law_of_its_own(translator: Translator) -> None:
    """The first level alone: each id of the draft model counts for the first token of its own text."""
    expected = np.zeros(SIZE)
    for index, token in enumerate(TOY_DRAFT):
        first = {"ba": "b", "cb": "c", "d": None}.get(token, token)
        if first is not None:
            expected[TOY_TARGET.index(first)] += float(draft_law(())[index])
    assert abs(tree_law(translator, 1, 0.0)(()) - expected / expected.sum()).max() < EXACT
    assert TOY_DRAFT[DRAFT_END] == "<|end|>"
