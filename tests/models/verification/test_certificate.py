"""The certificate: never below the true distance between output laws, and never above its budget.

    TV(law of the output, law of the target's own) <= E[sum of TV(nu, p) over the places that were verified]

by the chain rule; here over 1000 random models, every rule that tells distances, blocks of 1 to 3, with budgets, by
sums over all texts (`eval.theory.exact`, which `tests/eval/test_theory.py` holds against real verdicts). That the
rules' verdicts tell these distances, and keep to the budget, is checked on whole sequences, also for faults planted in
the real source.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.theory.enumerable import EnumerableModel, random_model
from eval.theory.exact import decode_exactly, output_distance
from models.verification import base, ensemble, lenience, token
from models.verification.base import Block, total_variation
from models.verification.cascades import SpeculativeCascade
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble
from models.verification.lenience import Lenience
from models.verification.mentored import MentoredDecoding
from models.verification.thresholds import ProbabilityGap, ThresholdSampling, TypicalAcceptance
from models.verification.token import TokenRule
from tests.models.verification import sequences
from tests.models.verification.enumeration import EXACT, Toy, fails, planted

NUM_MODELS = 1000
VOCAB_SIZE, LENGTH = 3, 4
BUDGETS = (None, 0.0, 0.2)


def weigh_by_entropy(block: Block) -> torch.Tensor:
    """A w [B, K] that varies with the text and with the place in the block."""
    p_BKV = block.target_probs_BTV[:, :-1]
    entropy_BK = -torch.special.xlogy(p_BKV, p_BKV).sum(dim=2)
    return torch.sigmoid(4.0 * entropy_BK - 2.0) * torch.linspace(0.2, 1.0, p_BKV.shape[1], dtype=p_BKV.dtype)


RULES: dict[str, TokenRule] = {
    "lossless": StaticEnsemble(1.0),
    "static 0.9": StaticEnsemble(0.9),
    "static 0.5": StaticEnsemble(0.5),
    "static 0": StaticEnsemble(0.0),
    "dynamic": DynamicEnsemble(weigh_by_entropy),
    "lenience 0.6": Lenience(0.6),
    "lenience 0.1": Lenience(0.1),
    "typical": TypicalAcceptance(0.3, 0.6),
    "gap": ProbabilityGap(2, 0.4),
    "mentored": MentoredDecoding(0.1),
    "cascade opt": SpeculativeCascade("opt", 0.3),
    "cascade v3": SpeculativeCascade("v3", 0.5),
}
# Rules for a one-hot q: their law, and so their certificate, is that given the drafted token.
RULES_FOR_CERTAIN_TOKENS: dict[str, TokenRule] = {
    "static 0.5": StaticEnsemble(0.5),
    "lenience 0.3": Lenience(0.3),
    "thresholds": ThresholdSampling(0.6, 0.7),
}
CASES = [
    *((name, rule, True) for name, rule in RULES.items()),
    *((name, rule, False) for name, rule in RULES_FOR_CERTAIN_TOKENS.items()),
]


def show(rule: str, budget: float | None, distance: torch.Tensor, certificate: torch.Tensor) -> None:
    used = (distance / certificate)[certificate > 1e-9]
    if len(used):
        print(
            f"{rule:20} budget {budget}: true distance / certificate: median {used.median():.3f}, largest "
            f"{used.max():.6f}; certificate on average {certificate.mean():.3f}"
        )


@pytest.mark.parametrize(("name", "rule", "tells_q"), CASES, ids=[f"{name}, {tells}" for name, _, tells in CASES])
def test_certificate_bounds_the_distance(name: str, rule: TokenRule, tells_q: bool) -> None:
    """1000 random models with zeros in p and q: no violation, no sequence above its budget; how tight, printed."""
    model = random_model(NUM_MODELS, VOCAB_SIZE, LENGTH, torch.Generator().manual_seed(0), zero_share=0.2)
    model = replace(model, tells_q=tells_q)
    length = 3 if name == "mentored" else LENGTH  # its law takes a search at every place
    widths = (1, 2) if name == "mentored" or not tells_q else (1, 2, 3)
    for budget in BUDGETS:
        outcomes = [decode_exactly(model, rule, length, width, budget) for width in widths]
        distance = torch.stack([output_distance(model, outcome, length) for outcome in outcomes])
        certificate = torch.stack([outcome.certificate_M for outcome in outcomes])
        assert all((outcome.law_MN.sum(dim=1) - 1.0).abs().max() < EXACT for outcome in outcomes)
        assert (distance <= certificate + EXACT).all()
        if budget is not None:
            assert all(outcome.largest_certificate_M.max() <= budget + EXACT for outcome in outcomes)
        show(name, budget, distance, certificate)
        if name == "lossless" or budget == 0.0:
            assert distance.max() < EXACT
            assert certificate.max() < EXACT
        else:
            used = (distance / certificate)[certificate > 1e-9]
            assert used.max() > (0.99 if tells_q else 0.8), "a bound that is never near would hide what it leaves out"


def test_budget_buys_acceptance() -> None:
    """More budget, more accepted tokens on average; none is lossless, and enough is the rule itself."""
    model = random_model(200, VOCAB_SIZE, LENGTH, torch.Generator().manual_seed(1), zero_share=0.2)
    for rule in (StaticEnsemble(0.2), Lenience(0.2)):
        lossless, free = (decode_exactly(model, each, LENGTH, 2) for each in (StaticEnsemble(1.0), rule))
        budgets = [0.0, 0.1, 0.2, 0.5, 1.0, 4.0]
        outcomes = [decode_exactly(model, rule, LENGTH, 2, budget) for budget in budgets]
        means = [float(outcome.accepted_M.mean()) for outcome in outcomes]
        assert all(later > earlier for earlier, later in itertools.pairwise(means[:-1]))
        assert (outcomes[0].accepted_M - lossless.accepted_M).abs().max() < EXACT
        assert (outcomes[-1].law_MN - free.law_MN).abs().max() < EXACT
        assert (outcomes[-1].certificate_M - free.certificate_M).abs().max() < EXACT


def test_distance_is_subadditive_over_places() -> None:
    """The theorem without any of our rules: two arbitrary laws, place after place."""
    model = random_model(NUM_MODELS, VOCAB_SIZE, LENGTH, torch.Generator().manual_seed(2), zero_share=0.2)
    target_MN, other_MN = model.target_law(LENGTH), EnumerableModel(model.q, model.p).target_law(LENGTH)
    certificate_M = torch.zeros(NUM_MODELS, dtype=torch.float64)
    reach_MN = torch.ones(NUM_MODELS, 1, dtype=torch.float64)
    for p, q in zip(model.p, model.q, strict=True):
        certificate_M += (reach_MN * total_variation(p, q)).sum(dim=1)
        reach_MN = (reach_MN[..., None] * q).flatten(1)
    assert (total_variation(other_MN, target_MN) <= certificate_M + EXACT).all()


# ---- what verdicts tell ----


def as_model(toy: Toy) -> EnumerableModel:
    """The same world as tables."""
    texts = [list(itertools.product(range(toy.vocab_size), repeat=length)) for length in range(3)]
    p, q = (tuple(torch.tensor(np.array([law[t] for t in group]))[None] for group in texts) for law in (toy.p, toy.q))
    return EnumerableModel(p, q)


def check_sequences(code: SimpleNamespace) -> None:
    """Sequences through real verdicts: told certificates bound the distance, keep the budget, and buy what they can."""
    toy = Toy(3, 3, seed=3, zeros=True)
    model = as_model(toy)
    for rule, plain, state, is_law in [
        (code.StaticEnsemble(0.2), StaticEnsemble(0.2), sequences.static_ensemble(0.2), True),
        (code.Lenience(0.2), Lenience(0.2), sequences.lenience(0.2), False),
    ]:
        for budget in (None, 0.0, 0.2):
            tally = sequences.decode_by_verdicts(rule, state, is_law, (toy.p, toy.q), 3, 2, budget)
            law = np.array([tally.law[text] for text in itertools.product(range(3), repeat=3)])
            distance = np.abs(law - toy.target_law(3).flatten()).sum() / 2
            assert abs(law.sum() - 1.0) < EXACT
            assert distance <= tally.certificate + EXACT
            if budget is not None:
                assert tally.largest <= budget + EXACT
            outcome = decode_exactly(model, plain, 3, 2, budget)
            assert abs(tally.accepted - float(outcome.accepted_M)) < EXACT
            assert abs(tally.certificate - float(outcome.certificate_M)) < EXACT
            assert np.abs(law - outcome.law_MN[0].numpy()).max() < EXACT


REAL = SimpleNamespace(**(vars(base) | vars(token) | vars(ensemble) | vars(lenience)))


def test_verdicts_tell_what_they_spend() -> None:
    check_sequences(REAL)


PLANTED = {
    "share given to the lossless rule": (
        "share.to(strict.dtype) * relaxed + (1.0 - share).to(strict.dtype) * strict",
        "(1.0 - share).to(strict.dtype) * relaxed + share.to(strict.dtype) * strict",
    ),
    "each place has the whole budget": ("left_B = left_B - spent_B", "left_B = left_B"),
    "place spends more than is left": ("spent_B = torch.minimum(distance_B, left_B)", "spent_B = distance_B"),
    "place may not spend its last part": (
        "spent_B = torch.minimum(distance_B, left_B)",
        "spent_B = torch.where(distance_B <= left_B, distance_B, 0.0)",
    ),
    "all or nothing, told as a part": ("spent_B / distance_B, 1.0)", "(spent_B / distance_B).ceil(), 1.0)"),
    "told as if no budget were set": ("shares_BK, distances_BK = spend_budget", "shares_BK, _ = spend_budget"),
    "budget not heeded": ("place, stats = _WithinBudget(rule), (*stats, shares_BK[..., None])", "pass"),
    "acceptance not mixed": (
        "return _mix(self.rule.accept(p, q, *stats[:-1]), acceptance_probs(p, q), stats[-1])",
        "return self.rule.accept(p, q, *stats[:-1])",
    ),
    "acceptance of the unmixed law": (
        "return acceptance_probs(self.law(p, q, *stats), q)\n        return _mix",
        "return self.rule.accept(p, q, *stats[:-1])\n        return _mix",
    ),
    "residual of the unmixed law": (
        "return (self.law(p, q, *stats) - q).clamp(min=0.0)\n        return _mix",
        "return self.rule.residual(p, q, *stats[:-1])\n        return _mix",
    ),
    "distance of w, not of 1 - w": (
        "return (1.0 - target_weight[..., 0].double()) * tv",
        "return target_weight[..., 0].double() * tv",
    ),
    "distance of the unrestricted q": (
        "tv = torch.addcmul(p, q, scale, value=-1.0)",
        "tv = torch.addcmul(p, q, scale / scale, value=-1.0)",
    ),
    "rejected mass counted twice": ("(distance - rejected)[..., 0]", "(distance - 2 * rejected)[..., 0]"),
    "place of the next token taken for the first": (
        "stats_B = tuple(stat[rows_B, rejected_B] for stat in stats)",
        "stats_B = tuple(stat[:, 0] for stat in stats)",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes the check above fail."""
    assert fails(check_sequences, planted(["base", "token", "ensemble", "lenience"], *PLANTED[fault]))
