"""From families of rules to points: grids, names, and what is refused."""

from typing import Any

import pytest

from eval.frontier.points import (
    DYNAMIC,
    LOSSLESS,
    PEER,
    PLAIN,
    Dynamic,
    Pair,
    describe,
    expand,
    expand_all,
    make_points,
)
from models.drafters.model import ModelDrafter
from models.ensemble import EnsembleHead, EnsembleOptions
from models.sampling import SamplingParams
from models.target.tiny import make_tiny_target
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble
from models.verification.options import VerifierOptions


def test_a_grid_has_every_combination() -> None:
    found = expand("gaps", {"kind": "gap", "top_k": [5, 10], "gap": [0.1, 0.2], "distance_budget": 3})
    assert [(one.kind, one.top_k, one.gap, one.distance_budget) for one in found] == [
        ("gap", 5, 0.1, 3),
        ("gap", 5, 0.2, 3),
        ("gap", 10, 0.1, 3),
        ("gap", 10, 0.2, 3),
    ]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"kind": "static", "target_weight": 0.8}, "static, w = 0.8"),
        ({"kind": "static", "target_weight": 0.0, "distance_budget": 2.5}, "static, w = 0, budget = 2.5"),
        ({"kind": "cascade", "deferral": "opt", "alpha": -0.5}, "static, opt, alpha = -0.5"),
        ({"kind": "lenience", "lenience": 0.25}, "static, l = 0.25"),
    ],
)
def test_names(spec: dict[str, Any], name: str) -> None:
    found, settings = describe("static", VerifierOptions(**spec))
    assert found == name
    assert settings == {key: value for key, value in spec.items() if key != "kind"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mine": {"kind": "nope"}}, "rules.mine: verifier.kind='nope' is unknown"),
        ({"mine": {"kind": "static"}}, "rules.mine: verifier.target_weight is missing"),
        ({"mine": {"kind": "static", "target_weight": [0.5, 2]}}, "rules.mine: target_weight=2"),
        ({"mine": {"kind": "static", "weight": 1}}, "rules.mine has weight, which no rule takes; choose among kind"),
        ({"mine": {"kind": "block"}}, "rules.mine: block is lossless, and is measured anyway"),
        ({"mine": {}}, "rules.mine: lossless is lossless"),
        ({"mine": {"kind": "lenience", "lenience": "much"}}, "rules.mine: "),
        ({"plain": {"kind": "static", "target_weight": 0.5}}, "rules.plain: that name has a meaning already"),
        ({"static": {"kind": "lenience", "lenience": 0.5}}, "its kind must be static"),
        ({"mine": 3}, "rules.mine=3"),
    ],
)
def test_mistakes(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        expand_all(rules)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_leaves_a_family_out() -> None:
    assert list(expand_all({"static": None, "mine": {"kind": "lenience", "lenience": [0.5]}})) == ["mine"]


def test_points_in_their_order() -> None:
    target, draft = make_tiny_target(), make_tiny_target(1)
    pair = Pair(target, ModelDrafter(draft, target), 3, draft)
    head = EnsembleHead(EnsembleOptions(draft_size=32, target_size=32))
    families = expand_all({"static": {"kind": "static", "target_weight": [0.5], "distance_budget": [4.0]}})
    points = make_points(pair, families, [Dynamic("mine", head, {"lam": 1})], [0.5], SamplingParams(1.0), 2)
    assert [(point.name, point.family) for point in points] == [
        ("plain", PLAIN),
        ("lossless, token", LOSSLESS),
        ("lossless, block", LOSSLESS),
        ("static, w = 0.5, budget = 4", "static"),
        ("mine", DYNAMIC),
        ("transformers static, w = 0.5", PEER),
    ]
    decoders = [point.decoder for point in points]
    assert decoders[0] is not None
    assert decoders[0].num_draft_tokens == 0
    assert all(decoder.num_draft_tokens == 3 for decoder in decoders[1:5])
    assert isinstance(decoders[3].judge.rule, StaticEnsemble)
    assert decoders[3].judge.distance_budget == 4.0
    assert isinstance(decoders[4].judge.rule, DynamicEnsemble)
    assert decoders[5] is None
    # No peer without a draft model, and no two points of one name.
    assert PEER not in {
        point.family for point in make_points(Pair(target, pair.drafter, 3), {}, [], [0.5], SamplingParams(1.0), 2)
    }
    with pytest.raises(ValueError, match="two points are called 'mine'"):
        make_points(pair, {}, [Dynamic("mine", head)] * 2, [], SamplingParams(1.0), 2)
