"""Every shipped configuration makes its rule; what does not fit is refused before anything runs."""

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from models.verification.blockwise import BlockVerification
from models.verification.options import RULES, VerifierOptions, make_rule
from models.verification.token import TokenVerification

CONF = Path(__file__).resolve().parents[3] / "conf" / "verifier"


def test_one_file_a_rule() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(RULES)


@pytest.mark.parametrize("kind", RULES)
def test_shipped_options_make_the_rule(kind: str) -> None:
    """The rule has the file's parameters, and says whether it is lossless."""
    loaded = OmegaConf.load(CONF / f"{kind}.yaml")
    options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(VerifierOptions), loaded))
    assert isinstance(options, VerifierOptions)
    rule = make_rule(options)
    assert isinstance(rule, RULES[kind][0])  # type: ignore[arg-type]
    for name in RULES[kind][1]:
        assert getattr(rule, name) == loaded[name]
    assert rule.is_lossless == isinstance(rule, TokenVerification | BlockVerification)
    assert options.kind == kind
    assert options.distance_budget == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (VerifierOptions("nope"), "verifier.kind='nope' is unknown; choose one of lossless, block"),
        (VerifierOptions("static"), "verifier.target_weight is missing: static needs target_weight"),
        (VerifierOptions("cascade", alpha=0.1), "verifier.deferral is missing: cascade needs deferral, alpha"),
        (
            VerifierOptions("lossless", lenience=0.5),
            "verifier.lenience=0.5 is no parameter of lossless, which has: none",
        ),
        (VerifierOptions("static", target_weight=1.5), "target_weight=1.5"),
        (VerifierOptions("block", distance_budget=1.0), "block is lossless and spends nothing"),
    ],
)
def test_what_does_not_fit(options: VerifierOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rule(options)
