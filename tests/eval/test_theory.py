"""Theory: every formula against the rules' real verdicts, linear programs, or a real run of the decoder.

The same checks are then shown to fail for faults planted in the formulas.
"""

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from eval.theory import __main__ as command
from eval.theory import enumerable, exact, frontier
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.tiny import make_tiny_target
from models.verification.base import Block, Rule
from models.verification.blockwise import BlockVerification
from models.verification.ensemble import StaticEnsemble
from models.verification.lenience import Lenience
from models.verification.thresholds import ThresholdSampling
from tests.models.verification import sequences
from tests.models.verification.enumeration import EXACT, Text, fails

SOLVED = 1e-9  # linprog's own tolerances are 1e-7 on the constraints of much larger problems
MODULES = ("enumerable", "exact", "frontier")
REAL = SimpleNamespace(**(vars(enumerable) | vars(exact) | vars(frontier)))
# rule, what it should do, whether it is stated by its law
RULES = [
    (StaticEnsemble(1.0), sequences.static_ensemble(1.0), True),
    (StaticEnsemble(0.3), sequences.static_ensemble(0.3), True),
    (Lenience(0.4), sequences.lenience(0.4), False),
]
# for drafters that do not tell q
HIDDEN_RULES = [
    (StaticEnsemble(0.3), sequences.static_ensemble(0.3), True),
    (ThresholdSampling(0.6, 0.7), sequences.two_thresholds(0.6, 0.7), False),
]


def make_model(
    code: SimpleNamespace, num_models: int, vocab_size: int, depth: int, seed: int = 0, zero_share: float = 0.0
) -> enumerable.EnumerableModel:
    return code.random_model(num_models, vocab_size, depth, torch.Generator().manual_seed(seed), zero_share)


def as_dicts(model: enumerable.EnumerableModel, number: int) -> sequences.Tables:
    """p and q of one model after each text, spelled out."""
    tables: tuple[dict[Text, np.ndarray], dict[Text, np.ndarray]] = ({}, {})
    for table, laws in zip(tables, (model.p, model.q), strict=True):
        for length, law_MNV in enumerate(laws):
            for row, text in enumerate(itertools.product(range(model.vocab_size), repeat=length)):
                table[text] = law_MNV[number, row].numpy()
    return tables


# ---- what a rule does ----


def check_sequences(code: SimpleNamespace) -> None:
    """Law, accepted tokens, blocks and certificates of whole decodes equal those of the rules' own verdicts."""
    told = make_model(code, 2, vocab_size=3, depth=3, seed=1, zero_share=0.2)
    hidden = replace(told, tells_q=False)
    for model, (rule, state, is_law) in [*((told, case) for case in RULES), *((hidden, case) for case in HIDDEN_RULES)]:
        for num_draft_tokens, budget in [(1, None), (2, None), (1, 0.15), (2, 0.15)]:
            outcome = code.decode_exactly(model, rule, 3, num_draft_tokens, budget)
            number = num_draft_tokens - 1
            tally = sequences.decode_by_verdicts(
                rule, state, is_law, as_dicts(model, number), 3, num_draft_tokens, budget, model.tells_q
            )
            law = [tally.law[text] for text in itertools.product(range(3), repeat=3)]
            assert np.abs(outcome.law_MN[number].numpy() - law).max() < EXACT
            for ours, theirs in [
                (outcome.accepted_M, tally.accepted),
                (outcome.blocks_M, tally.blocks),
                (outcome.certificate_M, tally.certificate),
                (outcome.largest_certificate_M, tally.largest),
            ]:
                assert abs(float(ours[number]) - theirs) < EXACT


def check_accepted(code: SimpleNamespace) -> None:
    """One block, text by text: exact and averaged."""
    model = make_model(code, 3, vocab_size=3, depth=4, seed=2, zero_share=0.2)
    for rule, _, _ in RULES:
        for num_draft_tokens in (1, 2, 3):
            expected_M = code.expected_accepted(model, rule, num_draft_tokens)
            for number in range(model.num_models):
                p, q = as_dicts(model, number)
                alive = {(): 1.0}  # text -> P(these tokens are drafted and kept)
                total = 0.0
                rates, drafts = [], {(): 1.0}
                state = next(state for other, state, _ in RULES if other is rule)
                for _ in range(num_draft_tokens):
                    keep = {text: q[text] * state(p[text], q[text])[0] for text in drafts}
                    alive = {(*t, x): w * keep[t][x] for t, w in alive.items() for x in range(3)}
                    total += sum(alive.values())
                    rates.append(sum(w * keep[t].sum() for t, w in drafts.items()))
                    drafts = {(*t, x): w * q[t][x] for t, w in drafts.items() for x in range(3)}
                assert abs(float(expected_M[number]) - total) < EXACT
                averaged = float(code.averaged_accepted(model, rule, num_draft_tokens)[number])
                assert abs(averaged - sum(np.prod(rates[: t + 1]) for t in range(num_draft_tokens))) < EXACT
    # After one token of the target's own, it is the mean over that token.
    later_M = code.expected_accepted(model, RULES[1][0], 2, start=1)
    tails = code.EnumerableModel(
        tuple(law[1].view(3, -1, 3) for law in model.p[1:]), tuple(law[1].view(3, -1, 3) for law in model.q[1:])
    )
    mean = (model.p[0][1, 0] * code.expected_accepted(tails, RULES[1][0], 2)).sum()
    assert abs(later_M[1] - mean) < EXACT


def check_blockwise(code: SimpleNamespace) -> None:
    """Block verification: sum over prefixes of q w (the paper's lemma), and never less than token verification."""
    model = make_model(code, 20, vocab_size=3, depth=4, seed=3, zero_share=0.2)
    token_M = code.expected_accepted(model, StaticEnsemble(1.0), 3)
    block_M = code.expected_accepted_blockwise(model, 3)
    assert (block_M >= token_M - EXACT).all()
    assert (block_M > token_M + 0.01).any()
    draft_MN = weight_MN = torch.ones(20, 1, dtype=torch.float64)
    expected_M = torch.zeros(20, dtype=torch.float64)
    for p, q in zip(model.p[:3], model.q[:3], strict=True):
        ratio = torch.where(q > 0, p / q, 0.0)
        draft_MN, weight_MN = (
            (draft_MN[..., None] * q).flatten(1),
            (weight_MN[..., None] * ratio).clamp(max=1).flatten(1),
        )
        expected_M += (draft_MN * weight_MN).sum(dim=1)
    assert (block_M - expected_M).abs().max() < EXACT
    same = code.EnumerableModel(model.p, model.p)
    assert (code.expected_accepted_blockwise(same, 3) - 3.0).abs().max() < EXACT


# ---- the frontier ----


def best_by_linear_program(p: np.ndarray, q: np.ndarray, distance: float) -> float:
    """Highest acceptance of any (a, R): variables kept = q a, R and e >= |kept + R - p|; none where p = 0."""
    size = len(p)
    eye = np.eye(size)
    above = np.hstack([np.vstack([eye, -eye]), np.vstack([eye, -eye]), np.vstack([-eye, -eye])])
    far = np.hstack([np.zeros(2 * size), np.ones(size)])
    bounds = [(0.0, q[x] if p[x] > 0 else 0.0) for x in range(size)]
    bounds += [(0.0, None if p[x] > 0 else 0.0) for x in range(size)] + [(0.0, None)] * size
    solved = linprog(
        np.hstack([-np.ones(size), np.zeros(2 * size)]),
        A_ub=np.vstack([above, far]),
        b_ub=np.hstack([p, -p, 2 * distance]),
        A_eq=np.hstack([np.ones(2 * size), np.zeros(size)])[None],
        b_eq=[1.0],
        bounds=bounds,
    )
    assert solved.status == 0
    return -solved.fun


def check_one_context(code: SimpleNamespace) -> None:
    """No (a, R) whatever accepts more at its distance; static ensembles get there where q's support is in p's."""
    for seed, zero_share in [(0, 0.0), (1, 0.4)]:
        model = make_model(code, 6, vocab_size=4, depth=1, seed=seed, zero_share=zero_share)
        for p, q in zip(model.p[0][:, 0], model.q[0][:, 0], strict=True):
            tv = float((p - q).abs().sum() / 2)
            for distance in (0.0, 0.5 * tv, tv + 0.1):
                best = float(code.best_acceptance(p, q, distance))
                assert abs(best - best_by_linear_program(p.numpy(), q.numpy(), distance)) < SOLVED
        one = code.EnumerableModel((model.p[0], model.p[0].repeat(1, 4, 1)), (model.q[0],) * 2)
        for weight in (1.0, 0.7, 0.2, 0.0):
            accepted_M = code.expected_accepted(one, StaticEnsemble(weight), 1)
            outcome = code.decode_exactly(one, StaticEnsemble(weight), 2, 1)
            best_M = code.best_acceptance(model.p[0], model.q[0], outcome.certificate_M[:, None])[:, 0]
            is_nested_M = ((model.p[0] > 0) | (model.q[0] == 0)).all(dim=2)[:, 0]
            assert is_nested_M.any()
            assert (accepted_M <= best_M + EXACT).all()
            assert (accepted_M - best_M)[is_nested_M].abs().max() < EXACT


def check_static(code: SimpleNamespace) -> None:
    """The frontier's own recursion, forwards by the rule itself."""
    model = make_model(code, 5, vocab_size=3, depth=4, seed=4)
    for num_draft_tokens in (1, 2, 3):
        for weight in (1.0, 0.6, 0.0):
            point = code.static_point(model, 4, num_draft_tokens, weight)
            outcome = code.decode_exactly(model, StaticEnsemble(weight), 4, num_draft_tokens)
            assert abs(point.accepted - float(outcome.accepted_M.mean())) < EXACT
            assert abs(point.distance - float(outcome.certificate_M.mean())) < EXACT
            assert abs(float(outcome.blocks_M.mean()) - (4 - point.accepted)) < EXACT


class Occupancy:
    """The linear program over occupancies of one model: a state is (text, drafted tokens kept in the running block)."""

    def __init__(self, tables: sequences.Tables, length: int, num_draft_tokens: int) -> None:
        p, q = tables
        self.length, self.width, self.vocab_size = length, num_draft_tokens, len(p[()])
        texts = [t for n in range(length - 1) for t in itertools.product(range(self.vocab_size), repeat=n)]
        self.states = [(text, k) for text in texts for k in range(num_draft_tokens + 1)]
        self.index = {state: number for number, state in enumerate(self.states)}
        size = len(self.states)
        # Variables: occupancy with w = 1, then with w = 0. A bonus place (k = K) uses the first alone.
        self.flow, self.accepted, self.cost = np.zeros((size, 2 * size)), np.zeros(2 * size), np.zeros(2 * size)
        self.start = np.zeros(size)
        self.start[self.index[(), 0]] = 1.0
        for number, (text, k) in enumerate(self.states):
            self.flow[number, number] += 1.0
            self.flow[number, size + number] += 1.0
            if k == num_draft_tokens:
                self._send(number, text, p[text], 0)
                continue
            self._send(number, text, np.minimum(p[text], q[text]), k + 1)
            self._send(number, text, np.maximum(p[text] - q[text], 0.0), 0)
            self._send(size + number, text, q[text], k + 1)
            self.accepted[number] = np.minimum(p[text], q[text]).sum()
            self.accepted[size + number] = 1.0
            self.cost[size + number] = np.abs(p[text] - q[text]).sum() / 2
        self.bounds = [(0, None)] * size + [(0, 0 if k == num_draft_tokens else None) for _, k in self.states]

    def _send(self, variable: int, text: Text, weights: np.ndarray, k: int) -> None:
        for token, weight in enumerate(weights):
            if ((*text, token), k) in self.index:
                self.flow[self.index[(*text, token), k], variable] -= weight

    def best(self, distance: float) -> float:
        solved = linprog(
            -self.accepted, self.cost[None], [distance], self.flow, self.start, self.bounds, method="highs"
        )
        assert solved.status == 0
        return -solved.fun


def check_dynamic(code: SimpleNamespace) -> None:
    """The optimum over all w(text, place) equals the linear program's, and is never below the static one."""
    for num_draft_tokens, length, seed in [(1, 4, 5), (1, 4, 6), (2, 4, 7), (3, 4, 8)]:
        model = make_model(code, 1, vocab_size=2, depth=length, seed=seed)
        program = Occupancy(as_dicts(model, 0), length, num_draft_tokens)
        for weight in (1.0, 0.8, 0.5, 0.2, 0.0):
            static = code.static_point(model, length, num_draft_tokens, weight)
            dynamic = code.dynamic_point(model, length, num_draft_tokens, static.distance)
            assert dynamic.accepted >= static.accepted - EXACT
            assert abs(dynamic.accepted - program.best(static.distance)) < SOLVED


def check_dynamic_by_force(code: SimpleNamespace) -> None:
    """K = 1, two tokens: the hull of all 2 ** 7 choices of w in {0, 1} for texts of 0, 1 and 2 tokens."""
    model = make_model(code, 1, vocab_size=2, depth=4, seed=9)
    p, q = as_dicts(model, 0)
    contexts = [text for n in range(3) for text in itertools.product(range(2), repeat=n)]

    def follow(weights: dict[Text, int], text: Text, is_bonus: bool) -> np.ndarray:
        if len(text) >= 3:
            return np.zeros(2)
        if is_bonus:
            return sum(p[text][x] * follow(weights, (*text, x), False) for x in range(2))
        w = weights[text]
        kept = q[text] - w * np.maximum(q[text] - p[text], 0.0)
        recovered = w * np.maximum(p[text] - q[text], 0.0)
        here = np.array([(1 - w) * np.abs(p[text] - q[text]).sum() / 2, kept.sum()])
        later = [kept[x] * follow(weights, (*text, x), True) for x in range(2)]
        return here + sum(later) + sum(recovered[x] * follow(weights, (*text, x), False) for x in range(2))

    points = [
        follow(dict(zip(contexts, choice, strict=True)), (), False) for choice in itertools.product((0, 1), repeat=7)
    ]
    for distance in np.linspace(0.0, max(point[0] for point in points), 7):
        # Highest point at `distance` on a line between any two.
        best = max(point[1] for point in points if point[0] <= distance + EXACT)
        for left, right in itertools.product(points, points):
            if left[0] <= distance < right[0]:
                best = max(best, left[1] + (right[1] - left[1]) * (distance - left[0]) / (right[0] - left[0]))
        assert abs(code.dynamic_point(model, 4, 1, distance).accepted - best) < 1e-10


CHECKS = [
    check_static,
    check_blockwise,
    check_accepted,
    check_one_context,
    check_dynamic_by_force,
    check_dynamic,
    check_sequences,
]


@pytest.mark.parametrize("check", CHECKS)
def test_theory_is_exact(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


PLANTED = {
    "text numbered in the wrong order": (
        "places = torch.arange(count - 1, -1, -1",
        "places = torch.arange(0, count, 1",
    ),
    "residual not scaled": ("rejected.clamp(min=0.0) * torch.where", "torch.where"),
    "acceptance without q": ("kept, residual = q * rule.accept", "kept, residual = rule.accept"),
    "places independent": (
        "reach_MN = (reach_MN[..., None] * place.kept_MNV).flatten(1)",
        "reach_MN = place.kept_MNV.flatten(1)",
    ),
    "average over accepted drafts": ("(draft_MN[..., None] * q_MNV)", "(draft_MN[..., None] * place.kept_MNV)"),
    "averaged over the first place only": ("product_M = product_M * (", "product_M = ("),
    "start not drawn from p": (
        "reach_MN = model.target_law(start)",
        "reach_MN = torch.ones_like(model.target_law(start))",
    ),
    "last test of a block as the others": ("fails.append(1.0 - weight_B)", "fails.append(0.0 * weight_B)"),
    "kept only where every longer test fails": ("1.0 - torch.stack(fails[k:])", "1.0 - torch.stack(fails[: k + 1])"),
    "weight of a prefix not cut at 1": (
        "weight_B * p_x_B / q_x_B, 0.0).clamp(max=1.0)",
        "weight_B * p_x_B / q_x_B, 0.0)",
    ),
    "one drafted token too few": (
        "min(num_draft_tokens, length - place - 1)",
        "min(num_draft_tokens, max(length - place - 2, 0))",
    ),
    "bonus from q": ("* model.p[start + num_drafted]).flatten(1)", "* model.q[start + num_drafted]).flatten(1)"),
    "rejected place free of charge": (
        "yield num_kept, weight, total_MN.repeat",
        "yield num_kept, weight, spent_MN.repeat",
    ),
    "certificate of another token": (
        "zip(place.recovered_MNXV.unbind(dim=2)",
        "zip(place.recovered_MNXV.flip(2).unbind(dim=2)",
    ),
    "token drafted for certain": (
        "q_MNX * accept_MNX, q_MNX[..., None] * recovered_MNXV",
        "accept_MNX, recovered_MNXV",
    ),
    "budget anew in every block": ("budget - spent_MN", "budget - 0.0 * spent_MN"),
    "budget not spent within a block": (
        "spend_budget(distances_BK, left_B)",
        "spend_budget(distances_BK, left_B * 0.0 + 1.0)",
    ),
    "share of the other law": (
        "share * (kept + recovered) + (1.0 - share) * p",
        "(1.0 - share) * (kept + recovered) + share * p",
    ),
    "bonus counted as accepted": ("accepted_M += num_kept *", "accepted_M += (num_kept + 1) *"),
    "mean in place of the largest": ("torch.maximum(largest_M,", "torch.minimum(largest_M,"),
    "best acceptance without p's support": ("within = torch.where(p > 0, q, 0.0)", "within = torch.where(p > 0, q, q)"),
    "distance counted twice": ("- total_variation(p, q) + distance", "- total_variation(p, q) + 2 * distance"),
    "price ignored": ("torch.tensor([1.0, -price]", "torch.tensor([1.0, -0.0]"),
    "place after a rejection in the same block": (
        "recovered = _expect((p - q).clamp(min=0.0), fresh)",
        "recovered = _expect((p - q).clamp(min=0.0), if_kept[0])",
    ),
    "no bonus after a full block": ("values.append(_expect(p, fresh))", "values.append(values[0])"),
    "distance of w = 0 free": ("loose = _verified(q, distance_MN", "loose = _verified(q, 0 * distance_MN"),
    "the wrong neighbour": ("(best, right) if best.distance <= distance", "(best, right) if best.distance > distance"),
}


def planted(right: str, wrong: str) -> SimpleNamespace:
    """All names of the package's modules, made anew with `wrong` in place of the first `right` in their source."""
    sources = {name: inspect.getsource(importlib.import_module(f"eval.theory.{name}")) for name in MODULES}
    place = next((name for name in MODULES if right in sources[name]), None)
    assert place is not None, f"the planted fault no longer matches the code: {right}"
    sources[place] = sources[place].replace(right, wrong, 1)
    before = {name: sys.modules[f"eval.theory.{name}"] for name in MODULES}
    names: dict[str, object] = {}
    try:
        for name in MODULES:
            module = sys.modules[f"eval.theory.{name}"] = ModuleType(f"eval.theory.{name}")
            exec(compile(sources[name], f"faulty {name}", "exec"), module.__dict__)
            names |= vars(module)
    finally:
        sys.modules.update({f"eval.theory.{name}": module for name, module in before.items()})
    return SimpleNamespace(**names)


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    code = planted(*PLANTED[fault])
    assert any(fails(check, code) for check in CHECKS)


# ---- beside real runs ----


@pytest.mark.parametrize("rule", [*(rule for rule, _, _ in RULES), BlockVerification()], ids=lambda r: type(r).__name__)
def test_simulated_blocks_agree(rule: Rule) -> None:
    """N = 100 000 blocks of K = 3; refused beyond 6 standard errors, false-alarm probability 2e-9."""
    num_rows, num_draft_tokens, vocab_size = 100_000, 3, 3
    model = make_model(REAL, 1, vocab_size, depth=4, seed=11, zero_share=0.1)
    generator = torch.Generator().manual_seed(0)
    uniforms_BU = torch.rand(num_rows, 2 * num_draft_tokens + 1, generator=generator, dtype=torch.float64)
    texts_B = torch.zeros(num_rows, dtype=torch.long)
    p, q, drafts = [model.p[0][0, texts_B]], [], []
    for k in range(num_draft_tokens):
        q.append(model.q[k][0, texts_B])
        drafts.append(sample_from(q[-1], uniforms_BU[:, k]))
        texts_B = texts_B * vocab_size + drafts[-1]
        p.append(model.p[k + 1][0, texts_B])
    verdict = rule.verify(
        Block(
            torch.stack(p, dim=1),
            torch.stack(q, dim=1),
            torch.stack(drafts, dim=1),
            torch.full((num_rows,), num_draft_tokens),
            uniforms_BU[:, num_draft_tokens:-1],
            uniforms_BU[:, -1],
        )
    )
    if isinstance(rule, BlockVerification):
        expected = float(exact.expected_accepted_blockwise(model, num_draft_tokens))
    else:
        expected = float(exact.expected_accepted(model, rule, num_draft_tokens))
    counts_B = verdict.num_accepted_B.double()
    assert abs(float(counts_B.mean()) - expected) < 6 * float(counts_B.std()) / num_rows**0.5


def test_averaging_is_wrong_where_contexts_differ() -> None:
    """One token is kept for certain and leads to a sure place, the other half the time to a hopeless one."""
    p = torch.tensor([[[0.75, 0.25]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    sure, hopeless = [1.0, 0.0], [0.0, 1.0]
    then_p = torch.tensor([[sure, hopeless]], dtype=torch.float64)
    then_q = torch.tensor([[sure, sure]], dtype=torch.float64)
    model = enumerable.EnumerableModel((p, then_p, p.repeat(1, 4, 1)), (q, then_q, q.repeat(1, 4, 1)))
    lossless = StaticEnsemble(1.0)
    assert float(exact.expected_accepted(model, lossless, 2)) == pytest.approx(0.75 + 0.5)
    assert float(exact.averaged_accepted(model, lossless, 2)) == pytest.approx(0.75 + 0.75 * 0.5)


SAMPLING = SamplingParams(temperature=1.3, top_k=4)
PROMPTS = [[1, 4, 2], [3]]


def tiny_tables(depth: int) -> tuple:
    target = make_tiny_target(seed=3, vocab_size=5)
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    drafter = enumerable.TableDrafter(table)
    return target, drafter, enumerable.from_target(target, drafter, PROMPTS, depth, SAMPLING)


def test_tables_are_the_targets_own() -> None:
    """A few texts by a forward of their own, float32 logits; q as the drafter itself gives it."""
    target, drafter, model = tiny_tables(depth=4)
    for number, prompt in enumerate(PROMPTS):
        for text in [(), (4,), (0, 3), (2, 1, 4)]:
            row = sum(token * 5**place for place, token in enumerate(reversed(text)))
            logits_V = target.logits(target.hidden(torch.tensor([[*prompt, *text]]))[0, -1])
            expected_V = transform_logits(logits_V.double(), SAMPLING)
            assert (model.p[len(text)][number, row] - expected_V).abs().max() < 1e-5
            state = drafter.start([[*prompt, *text]])
            draft = drafter.propose(state, 1, SAMPLING, torch.tensor([[0.5]], dtype=torch.float64))
            assert (model.q[len(text)][number, row] - draft.probs_BKV[0, 0]).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("rule", "num_draft_tokens", "budget"),
    [(StaticEnsemble(0.4), 2, None), (StaticEnsemble(0.2), 1, 0.4), (Lenience(0.3), 2, 0.4)],
)
def test_decoder_agrees(rule: Rule, num_draft_tokens: int, budget: float | None) -> None:
    """Accepted, blocks and certificate of N = 1500 sequences of 4 tokens a prompt; 6 standard errors, 2e-9 each."""
    num_samples = 1500
    target, drafter, model = tiny_tables(depth=4)
    outcome = exact.decode_exactly(model, rule, 4, num_draft_tokens, budget, start=1)
    decoder = Decoder(target, drafter, num_draft_tokens, rule, float("inf") if budget is None else budget)
    params = GenerationParams(4, SAMPLING, seed=5, eos_token_ids=())
    results = decoder.generate([prompt for prompt in PROMPTS for _ in range(num_samples)], params, 500)
    for expected_M, values in [
        (outcome.accepted_M, [result.counters.accepted for result in results]),
        (outcome.blocks_M, [result.counters.blocks for result in results]),
        (outcome.certificate_M, [result.certificate for result in results]),
    ]:
        counted_MN = torch.tensor(values, dtype=torch.float64).view(len(PROMPTS), num_samples)
        error_M = counted_MN.std(dim=1) / num_samples**0.5
        assert ((counted_MN.mean(dim=1) - expected_M).abs() < 6 * error_M + 1e-6).all()
    if budget is not None:
        assert float(outcome.certificate_M.max()) > 0.5 * budget, "the budget must matter for the test to mean anything"


def test_command_prints_three_tables(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--samples", "40", "--models", "20", "--seed", "1"])
    out = capsys.readouterr().out
    tables = [[line.split() for line in part.splitlines()] for part in out.strip().split("\n\n")]
    assert len(tables) == 4
    assert all(row[-2] == "0" for row in tables[1][2:]), "a violation of the certificate"
    for table in tables[2:]:
        gains = [float(row[-1]) for row in table[2:]]
        assert gains[0] == gains[-1] == 0.0
        assert min(gains) >= 0.0
        assert max(gains) > 0.0


# ---- wrong input ----


def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(REAL, 2, vocab_size=3, depth=2, zero_share=0.5)
    with pytest.raises(ValueError, match="depth=3 or more"):
        exact.expected_accepted(model, StaticEnsemble(0.5), 2)
    with pytest.raises(ValueError, match="depth=5 or more"):
        exact.decode_exactly(model, StaticEnsemble(0.5), 5, 2)
    with pytest.raises(ValueError, match="tells_q=False"):
        exact.expected_accepted(make_model(REAL, 2, 3, 3), ThresholdSampling(0.6, 0.7), 2)
    with pytest.raises(ValueError, match="tells_q=False"):
        frontier.static_point(replace(model, tells_q=False), 2, 1, 0.5)
    with pytest.raises(ValueError, match="without top_k"):
        frontier.static_point(model, 2, 1, 0.5)
    with pytest.raises(ValueError, match=r"distance=-0\.1"):
        frontier.dynamic_point(make_model(REAL, 2, 3, 2), 2, 1, -0.1)
    for vocab_size, depth in [(1, 2), (3, 0), (50, 8)]:
        with pytest.raises(ValueError, match=f"vocab_size={vocab_size}, depth={depth}"):
            make_model(REAL, 1, vocab_size, depth)
    with pytest.raises(SystemExit):
        command.main(["--samples", "1"])
    assert "--samples=1: must be at least 2" in capsys.readouterr().err
