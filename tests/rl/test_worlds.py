"""The worlds' law is that of the verifier that decodes, and their gradient the slope of their objective."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor

from models.verification.base import Block
from models.verification.ensemble import DynamicEnsemble
from rl.policy import PolicyOptions
from tests.models.verification.enumeration import cells, cumulated
from tests.rl.worlds import EOS, EXACT, THETA, UNCLIPPED, WORLDS, Event, World, gap


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_worlds_law_is_one(world: dict) -> None:
    assert abs(float(World(**world).law(THETA).sum()) - 1.0) < EXACT


@pytest.mark.parametrize("by_place", [False, True])
def test_enumerated_gradient_is_the_slope_of_the_objective(by_place: bool) -> None:
    world, step = World(by_place=by_place), 1e-5
    for options in (UNCLIPPED, PolicyOptions(lam=0.0)):
        slopes = [
            (
                world.objective(THETA + step * axis, options.lam, options.entropy)
                - world.objective(THETA - step * axis, options.lam, options.entropy)
            )
            / (2 * step)
            for axis in torch.eye(len(THETA), dtype=torch.float64)
        ]
        assert gap(torch.stack(slopes), world.gradient(THETA, options)) < 1e-8  # step^2 and rounding / step


def run_law(world: World, rule: DynamicEnsemble) -> dict[tuple[Event, ...], float]:
    """Law of the runs by the rule's own verdicts: it judges every draft at the midpoint of every cell of uniforms."""
    rng, states, law = np.random.default_rng(0), {(): 1.0}, defaultdict(float)
    while states:
        reached: dict[tuple[Event, ...], float] = defaultdict(float)
        for events, weight in states.items():
            for outcome, chance in block_law(world, rule, tuple(e.token for e in events), rng).items():
                run = (*events, *outcome)
                is_over = len(run) == world.length or run[-1].token == EOS
                (law if is_over else reached)[run] += weight * chance
        states = reached
    return law


def block_law(
    world: World, rule: DynamicEnsemble, text: tuple[int, ...], rng: np.random.Generator
) -> dict[tuple[Event, ...], float]:
    num_drafted = world.num_drafted(text)
    drafts, uniforms, sizes, p_rows, q_rows = [], [], [], [], []
    for draft in itertools.product(range(world.vocab_size), repeat=num_drafted):
        texts = [text + draft[:k] for k in range(num_drafted + 1)]
        p = [world.p[after] for after in texts]
        q = [world.q[after, k] for k, after in enumerate(texts[:-1])]
        w = [1.0 / (1.0 + np.exp(-world.features[after, k] @ THETA.numpy())) for k, after in enumerate(texts[:-1])]
        nu = [w[k] * p[k] + (1.0 - w[k]) * q[k] for k in range(num_drafted)]
        axes = [cells([nu[k][draft[k]] / q[k][draft[k]]], rng) for k in range(num_drafted)]
        final = cumulated(p[-1]) + [edge for k in range(num_drafted) for edge in cumulated(np.maximum(nu[k] - q[k], 0))]
        for combination in itertools.product(*axes, cells(final, rng)):
            middles, widths = zip(*combination, strict=True)
            drafts.append(draft)
            uniforms.append(middles)
            sizes.append(np.prod(widths) * np.prod([q[k][draft[k]] for k in range(num_drafted)]))
            p_rows.append(p)
            q_rows.append(q)
    shape = (len(drafts), num_drafted)
    uniforms_BT = torch.tensor(uniforms, dtype=torch.float64)
    verdict = rule.verify(
        Block(
            torch.tensor(np.array(p_rows)),
            torch.tensor(np.array(q_rows)).reshape(*shape, world.vocab_size),
            torch.tensor(drafts, dtype=torch.long).reshape(shape),
            torch.full((len(drafts),), num_drafted),
            uniforms_BT[:, :-1],
            uniforms_BT[:, -1],
            target_hidden_BTH=torch.tensor(
                [[text_number(text + draft[:k]) for k in range(num_drafted)] for draft in drafts]
            ),
        )
    )
    law: dict[tuple[Event, ...], float] = defaultdict(float)
    for draft, size, kept, token in zip(
        drafts, sizes, verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True
    ):
        events = [Event(text + draft[:k], k, draft[k], "accepted") for k in range(kept)]
        events.append(Event(text + draft[:kept], kept, token, "bonus" if kept == num_drafted else "recovered"))
        end = next((i + 1 for i, event in enumerate(events) if event.token == EOS), len(events))
        law[tuple(events[:end])] += size
    return law


def text_number(text: tuple[int, ...]) -> int:
    """A number for each text: digits in base 5, each plus one."""
    return sum((token + 1) * 5**i for i, token in enumerate(text))


def test_runs_have_the_law_that_the_verifier_gives_them() -> None:
    """Tokens and verdicts together, by the rule that decodes, against min(q, nu), (nu - q)+ and p of the bonus."""
    world = World(length=4, by_place=True)
    numbered = {text_number(text): text for text in world.p}

    def weigh(block: Block) -> Tensor:
        texts = [[numbered[number] for number in row] for row in block.target_hidden_BTH.tolist()]
        features = np.array([[world.features[text, k] for k, text in enumerate(row)] for row in texts])
        return torch.sigmoid(torch.tensor(features) @ THETA)

    law = run_law(world, DynamicEnsemble(weigh))
    expected = dict(zip(world.runs, world.law(THETA).tolist(), strict=True))
    assert set(law) <= set(expected)
    assert max(abs(chance - law.get(run, 0.0)) for run, chance in expected.items()) < EXACT
