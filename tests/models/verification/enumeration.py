"""What the tests of verification rules share: small worlds, the exact law of a rule's output, and planted faults.

A verdict depends on each uniform only through the cell it falls in. So the law is a finite sum: the rule is evaluated
at the midpoint of every cell of a partition that contains all true edges (computed here or in the test, independently
of the code), weighted by the cells' sizes. Further random edges change nothing for correct code and show a wrong
threshold.
"""

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from models.verification.base import Block, Verdict
from tests.planting import blank_module

EXACT = 1e-12  # float64, sums of some thousand terms
NUM_EXTRA_EDGES = 3
PACKAGE = "models.verification"

Text = tuple[int, ...]
# p at each place 0 .. K, q at each place 0 .. K - 1, the draft -> edges of each place's uniform, and of the final one
Edges = Callable[[Sequence[np.ndarray], Sequence[np.ndarray], Text], tuple[list[list[float]], list[float]]]


class Toy:
    """Random p(. | prefix) and q(. | prefix) over a small vocabulary, for every prefix, with some zeros in both."""

    def __init__(self, vocab_size: int, depth: int, seed: int, zeros: bool = False, same: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.p: dict[Text, np.ndarray] = {}
        self.q: dict[Text, np.ndarray] = {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocab_size), repeat=length):
                for law in (self.p, self.q):
                    weights = rng.dirichlet(np.ones(vocab_size))
                    if zeros:
                        weights[rng.integers(vocab_size)] = 0.0
                    law[prefix] = weights / weights.sum()
                if same:
                    self.q[prefix] = self.p[prefix]

    def target_law(self, length: int) -> np.ndarray:
        return joint_law(self.p, self.vocab_size, length)


def joint_law(step: Mapping[Text, np.ndarray], vocab_size: int, length: int) -> np.ndarray:
    """Law [V, V, ...] of `length` tokens, each drawn from step[the tokens before it]."""
    law = np.zeros((vocab_size,) * length)
    for text in itertools.product(range(vocab_size), repeat=length):
        law[text] = np.prod([step[text[:i]][text[i]] for i in range(length)])
    return law


def cells(edges: Sequence[float], rng: np.random.Generator) -> list[tuple[float, float]]:
    """(midpoint, size) of the cells that these edges and some random ones cut the unit interval into."""
    cut = np.unique(np.clip([0.0, *edges, *rng.random(NUM_EXTRA_EDGES), 1.0], 0.0, 1.0))
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(cut) if b > a]


def cumulated(weights: np.ndarray) -> list[float]:
    """Edges of drawing from these weights; none where they are all 0."""
    return list(np.cumsum(weights) / weights.sum()) if weights.sum() > 0 else []


def token_edges(p: Sequence[np.ndarray], q: Sequence[np.ndarray], draft: Text) -> tuple[list[list[float]], list[float]]:
    """Edges of lossless token verification."""
    accept = [[min(1.0, p[k][token] / q[k][token])] for k, token in enumerate(draft)]
    final = list(np.cumsum(p[-1]))
    for k in range(len(draft)):
        final += cumulated(np.maximum(p[k] - q[k], 0.0))
    return accept, final


def output_law(
    verify: Callable[[Block], Verdict],
    toy: Toy,
    num_drafted: int,
    width: int,
    one_hot: bool = False,
    edges: Edges = token_edges,
    rest: Mapping[Text, np.ndarray] | None = None,
    budget: float | None = None,
) -> np.ndarray:
    """Joint law of num_drafted + 1 tokens: one block of num_drafted (padded to `width`), then tokens from `rest`.

    rest: law after each text, by default the target's own.
    """
    rng = np.random.default_rng(7)
    vocab_size = toy.vocab_size
    rest = toy.p if rest is None else rest
    p_rows, q_rows, drafts, uniforms, finals, weights = [], [], [], [], [], []
    for draft in itertools.product(range(vocab_size), repeat=num_drafted):
        p = [toy.p[draft[:k]] for k in range(num_drafted + 1)]
        if one_hot:
            # A drafter that always proposes the same token after the same text.
            if any(draft[k] != int(np.argmax(toy.q[draft[:k]])) for k in range(num_drafted)):
                continue
            q = [np.eye(vocab_size)[d] for d in draft]
        else:
            q = [toy.q[draft[:k]] for k in range(num_drafted)]
        draft_weight = np.prod([q[k][draft[k]] for k in range(num_drafted)])
        if draft_weight == 0:
            continue
        accept_edges, final_edges = edges(p, q, draft)
        axes = [cells(place, rng) for place in accept_edges]
        padding = width - num_drafted
        for combination in itertools.product(*axes, cells(final_edges, rng)):
            p_rows.append(p + [toy.p[()]] * padding)
            q_rows.append(q + [toy.q[()]] * padding)
            drafts.append(draft + (0,) * padding)
            uniforms.append([middle for middle, _ in combination[:-1]] + [0.0] * padding)
            finals.append(combination[-1][0])
            weights.append(draft_weight * np.prod([size for _, size in combination]))
    verdict = verify(
        Block(
            torch.tensor(np.array(p_rows)),
            None if one_hot else torch.tensor(np.array(q_rows)).reshape(len(drafts), width, vocab_size),
            torch.tensor(drafts, dtype=torch.long).reshape(len(drafts), width),
            torch.full((len(drafts),), num_drafted),
            torch.tensor(uniforms, dtype=torch.float64).reshape(len(drafts), width),
            torch.tensor(finals, dtype=torch.float64),
            None if budget is None else torch.full((len(drafts),), budget, dtype=torch.float64),
        )
    )
    law = np.zeros((vocab_size,) * (num_drafted + 1))
    outcomes = zip(drafts, weights, verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
    for draft, weight, num_accepted, next_token in outcomes:
        emitted = (*draft[:num_accepted], next_token)
        assert num_accepted <= num_drafted
        for tail in itertools.product(range(vocab_size), repeat=num_drafted - num_accepted):
            text = emitted + tail
            law[text] += weight * np.prod([rest[text[:i]][text[i]] for i in range(len(emitted), len(text))])
    return law


def planted(modules: Sequence[str], right: str, wrong: str) -> SimpleNamespace:
    """All names of these modules of the package, made anew with `wrong` in place of the first `right` in their source.

    modules: short names, each after those it imports; what they import from each other is the faulty copy.
    """
    sources = {name: inspect.getsource(importlib.import_module(f"{PACKAGE}.{name}")) for name in modules}
    place = next((name for name in modules if right in sources[name]), None)
    assert place is not None, f"the planted fault no longer matches the code: {right}"
    sources[place] = sources[place].replace(right, wrong, 1)
    before = {name: sys.modules[f"{PACKAGE}.{name}"] for name in modules}
    names: dict[str, object] = {}
    try:
        for name in modules:
            module = sys.modules[f"{PACKAGE}.{name}"] = blank_module(f"{PACKAGE}.{name}", PACKAGE)
            exec(compile(sources[name], f"faulty {name}", "exec"), module.__dict__)
            names |= vars(module)
    finally:
        sys.modules.update({f"{PACKAGE}.{name}": module for name, module in before.items()})
    return SimpleNamespace(**names)


def fails(check: Callable[[SimpleNamespace], None], code: SimpleNamespace) -> bool:
    """Whether a check refuses this code."""
    try:
        check(code)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return True
    return False
