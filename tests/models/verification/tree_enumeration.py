"""What the tests of tree rules share: every tree a drafter may draw, every outcome of a rule, and the law they give.

For one tree a rule reads its uniforms one after the other, and each only through the side of one edge on which it lies.
The edges are computed here, in numpy, from the papers' normalised formulas. The code is then run with each uniform
right beside its edge, and anything in those that must not be read, and its verdicts are weighted with the sizes of the
sides. If the code's edges lay elsewhere, or if the formulas here were wrong, the law would not be the target's.
"""

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from models.verification.base import Block
from tests.models.verification.enumeration import Text, Toy, cumulated

BESIDE = 1e-12  # how near to a true edge of a uniform the code's own edge must lie
ALMOST_ONE = 1.0 - 2.0**-53
Parents = tuple[int, ...]

CHAIN: Parents = (-1, 0, 1)
BINARY: Parents = (-1, -1, 0, 0, 1, 1)  # two children of the root with two children each
UNEVEN: Parents = (-1, 0, 0, -1, -1, 3)  # three children of the root: with two, with one and without children
FORK: Parents = (-1, 0, 1, 1, 0)  # a chain that forks twice
TWO: Parents = (-1, -1, 0, 1, 1)  # two children of the root with one and two
WIDE: Parents = (-1, -1, -1, -1)


class Drafted(NamedTuple):
    """One tree: its tokens and whether they count."""

    chance: float
    tokens: Text
    counts: tuple[bool, ...]


NOTHING = Drafted(1.0, (), ())


class Outcome(NamedTuple):
    """The path to `place` is kept. sides: node -> (edge of its uniform, below it?); weights: of the next token."""

    place: int
    chance: float
    sides: dict[int, tuple[float, bool]]
    weights: np.ndarray


@dataclass(frozen=True)
class Trees:
    """All trees of one shape over a toy's models.

    how: siblings are independent, distinct (drawn without replacement), the likeliest, or repeated: those, twice each.
    mask: nodes that count; all by default.
    """

    toy: Toy
    parents: Parents
    how: str = "independent"
    mask: tuple[bool, ...] | None = None

    def children(self, place: int) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent == place - 1]

    def prefix(self, tokens: Text, place: int) -> Text:
        return () if place == 0 else (*self.prefix(tokens, self.parents[place - 1] + 1), tokens[place - 1])

    def proposal(self, tokens: Text, node: int) -> np.ndarray:
        """q of a node given those before it; 0 where none is left."""
        place = self.parents[node] + 1
        siblings = self.children(place)
        q = self.toy.q[self.prefix(tokens, place)].copy()
        if self.how in ("likeliest", "repeated"):
            rank = siblings.index(node) // (2 if self.how == "repeated" else 1)
            return np.eye(len(q))[np.argsort(-q)[rank]]
        if self.how == "distinct":
            q[[tokens[sibling] for sibling in siblings if sibling < node]] = 0.0
        return q / q.sum() if q.sum() > 0 else q

    def drafts(self, begun: Drafted = NOTHING) -> Iterator[Drafted]:
        node = len(begun.tokens)
        if node == len(self.parents):
            yield begun
            return
        q = self.proposal(begun.tokens, node)
        parent = self.parents[node]
        counts = (self.mask is None or self.mask[node]) and (parent < 0 or begun.counts[parent]) and q.sum() > 0
        for token in np.flatnonzero(q) if counts else [0]:
            chance = begun.chance * (q[token] if counts else 1.0)
            yield from self.drafts(Drafted(chance, (*begun.tokens, int(token)), (*begun.counts, bool(counts))))


def varied_trees() -> Iterator[Trees]:
    """Shapes and ways to draw siblings; `distinct` ones with too few tokens included."""
    for parents, how, seed in itertools.product(
        [WIDE, CHAIN, FORK, UNEVEN], ["likeliest", "repeated", "distinct", "independent"], [1, 3]
    ):
        if not (parents == WIDE and how == "likeliest"):
            yield Trees(Toy(3, 3, seed, zeros=True), parents, how)
    for parents, how in itertools.product([WIDE, TWO], ["likeliest", "distinct"]):
        yield Trees(Toy(4, 2, seed=0), parents, how)


def masked_trees() -> Iterator[Trees]:
    """One shape, with every choice of nodes that do not count."""
    for mask in itertools.product([True, False], repeat=5):
        for how in ("likeliest", "independent"):
            yield Trees(Toy(3, 3, seed=5, zeros=True), FORK, how, mask)


def leave(a: float, p: np.ndarray, q: np.ndarray) -> tuple[float, np.ndarray]:
    """What is owed, and its law, after a child ~ q was rejected; a = 1: norm((p - q)+)."""
    left = np.maximum(a * p - q, 0.0)
    total = left.sum() + 1.0 - a
    return (left.sum() / total if total > 0 else 1.0), (left / left.sum() if left.sum() > 0 else p)


def from_root(trees: Trees, drafted: Drafted, place: int = 0, chance: float = 1.0) -> Iterator[Outcome]:
    """Outcomes of the rules that walk from the root."""
    p = trees.toy.p[trees.prefix(drafted.tokens, place)]
    sides: dict[int, tuple[float, bool]] = {}
    for node in trees.children(place):
        if drafted.counts[node]:
            x, q = drafted.tokens[node], trees.proposal(drafted.tokens, node)
            edge = min(1.0, p[x] / q[x])
            for outcome in from_root(trees, drafted, node + 1, chance * edge):
                yield outcome._replace(sides={**sides, node: (edge, True), **outcome.sides})
            chance, p = chance * (1.0 - edge), leave(1.0, p, q)[1]
            sides[node] = (edge, False)
    yield Outcome(place, chance, sides, p)


def from_leaves(
    trees: Trees,
    drafted: Drafted,
    place: int = 0,
    owed: float = 1.0,
    chance: float = 1.0,
    sides: dict[int, tuple[float, bool]] | None = None,
) -> Generator[Outcome, None, tuple[float, dict[int, tuple[float, bool]]]]:
    """Outcomes of traversal verification; returns what is left of the chance, and the sides so far, if none is kept."""
    sides = sides or {}
    p = trees.toy.p[trees.prefix(drafted.tokens, place)]
    for node in trees.children(place):
        if drafted.counts[node]:
            x, q = drafted.tokens[node], trees.proposal(drafted.tokens, node)
            share = min(1.0, owed * p[x] / q[x])
            chance, sides = yield from from_leaves(trees, drafted, node + 1, share, chance, sides)
            owed, p = leave(owed, p, q)
    here = {} if place == 0 else {place - 1: (owed, True)}
    yield Outcome(place, chance * owed, {**sides, **here}, p)
    return chance * (1.0 - owed), {**sides, place - 1: (owed, False)}


Outcomes = Callable[[Trees, Drafted], Iterator[Outcome]]


def judged(
    code: SimpleNamespace, verify: Callable, trees: Trees, outcomes: Outcomes
) -> Iterator[tuple[float, Text, int, int]]:
    """(chance, kept tokens, next token, number of accepted tokens) of each outcome there should be, by the code."""
    rng = np.random.default_rng(7)
    parents, places = trees.parents, range(len(trees.parents) + 1)
    inner = [place for place in places if trees.children(place)]
    known, p, q, rows = [], [], [], []
    for index, drafted in enumerate(trees.drafts()):
        p.append([trees.toy.p[trees.prefix(drafted.tokens, place)] for place in places])
        q.append([trees.toy.q[trees.prefix(drafted.tokens, place)] for place in inner])
        for outcome in outcomes(trees, drafted):
            uniforms = rng.random(len(parents))
            for node, (edge, below) in outcome.sides.items():
                uniforms[node] = max(edge - BESIDE, 0.0) if below else min(edge + BESIDE, ALMOST_ONE)
            for start, end in itertools.pairwise([0.0, *cumulated(outcome.weights)]):
                chance = drafted.chance * outcome.chance * (end - start) / 2
                for final in (start + BESIDE, min(end, 1.0) - BESIDE) if chance > 0 else ():
                    known.append((chance, drafted))
                    rows.append((index, drafted.tokens, drafted.counts, uniforms, final))
    index_rows, tokens, counts, uniforms_rows, finals = (np.array(column) for column in zip(*rows, strict=True))
    p_rows, q_rows = (torch.tensor(np.array(law)[index_rows]) for law in (p, q))
    fixed = trees.how in ("likeliest", "repeated")
    tree = code.DraftTree(
        parents,
        p_rows,
        None if fixed else q_rows,
        torch.tensor(tokens).long(),
        torch.tensor(counts),
        torch.tensor(uniforms_rows),
        torch.tensor(finals),
        trees.how == "distinct",
    )
    verdict = verify(tree)
    answers = zip(
        verdict.path_BD.tolist(),
        verdict.num_accepted_B.tolist(),
        verdict.next_token_B.tolist(),
        verdict.is_bonus_B.tolist(),
        strict=True,
    )
    for (chance, drafted), (path, num_accepted, next_token, is_bonus) in zip(known, answers, strict=True):
        kept = path[:num_accepted]
        assert set(path[num_accepted:]) <= {-1}
        assert [parents[node] for node in kept] == [-1, *kept[:-1]][: len(kept)]
        assert all(drafted.counts[node] for node in kept)
        below = trees.children(kept[-1] + 1 if kept else 0)
        assert is_bonus == (not any(drafted.counts[node] for node in below))
        yield chance, tuple(drafted.tokens[node] for node in kept), next_token, num_accepted


def law_and_length(
    code: SimpleNamespace, verify: Callable, trees: Trees, outcomes: Outcomes
) -> tuple[np.ndarray, float]:
    """Joint law of depth + 1 tokens, the target's own after those of one tree, and the accepted tokens expected."""
    toy, places = trees.toy, range(len(trees.parents) + 1)
    num_tokens = max(len(trees.prefix((0,) * len(trees.parents), place)) for place in places) + 1
    law, length = np.zeros((toy.vocab_size,) * num_tokens), 0.0
    for chance, kept, next_token, num_accepted in judged(code, verify, trees, outcomes):
        length += chance * num_accepted
        emitted = (*kept, next_token)
        rest = itertools.product(range(toy.vocab_size), repeat=num_tokens - len(emitted))
        for tail in rest:
            text = emitted + tail
            law[text] += chance * np.prod([toy.p[text[:i]][text[i]] for i in range(len(emitted), num_tokens)])
    return law, length


def length_of(trees: Trees, outcomes: Outcomes) -> float:
    """Accepted tokens expected, without the code."""
    return sum(
        drafted.chance * outcome.chance * len(trees.prefix(drafted.tokens, outcome.place))
        for drafted in trees.drafts()
        for outcome in outcomes(trees, drafted)
    )


def chain_of(code: SimpleNamespace, block: Block) -> object:
    """A block as a tree without branches."""
    num_draft_tokens = block.num_draft_tokens
    return code.DraftTree(
        tuple(range(-1, num_draft_tokens - 1)),
        block.target_probs_BTV,
        block.draft_probs_BKV,
        block.draft_tokens_BK,
        torch.arange(num_draft_tokens) < block.num_drafted_B[:, None],
        block.uniforms_BK,
        block.final_uniform_B,
    )


def random_block(num_rows: int, width: int, dtype: torch.dtype, one_hot: bool = False) -> Block:
    """Random rows, ragged, with zeros in p and q; drafted tokens come from q."""
    generator = torch.Generator().manual_seed(width)
    probs = torch.randn(2, num_rows, width + 1, 4, generator=generator, dtype=dtype).mul(2).softmax(dim=-1)
    probs = probs.where(probs > 0.1, 0.0)
    p, q = probs / probs.sum(dim=-1, keepdim=True)
    q = q[:, :-1]
    tokens = torch.multinomial(q.reshape(-1, 4), 1, generator=generator).reshape(num_rows, width)
    counts = torch.randint(0, width + 1, (num_rows,), generator=generator)
    uniforms = torch.rand(num_rows, width + 1, generator=generator, dtype=torch.float64)
    return Block(p, None if one_hot else q, tokens, counts, uniforms[:, :width], uniforms[:, width])
