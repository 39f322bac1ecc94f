"""Every shipped drafter and rule by its name, with other values for its options, and names and values that are none."""

import pytest

from models.drafters.options import KINDS, DrafterOptions, check_drafter
from models.verification.options import RULES, VerifierOptions
from train.runtime.presets import preset_names, read_preset


def test_every_kind_has_its_file() -> None:
    """With all parameters that the kind needs, and none that it lacks."""
    assert preset_names("drafter") == sorted(KINDS)
    assert preset_names("verifier") == sorted(RULES)
    for kind in KINDS:
        options = read_preset(DrafterOptions, "drafter", kind, {}, "drafter")
        assert options.kind == kind
        check_drafter(options)


def test_values_replace_those_of_the_file() -> None:
    options = read_preset(DrafterOptions, "drafter", "suffix", {"min_match": "3"}, "--drafter")
    assert (options.min_match, options.min_probability, options.max_match) == (3, 0.1, None)
    assert read_preset(VerifierOptions, "verifier", "static", {"target_weight": 0.25}, "x").target_weight == 0.25


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("oracle", {}, "others names 'oracle', which is unknown; choose one of heads, "),
        ("../model/tiny", {}, "is unknown"),
        ("ngram", {"nope": 1}, "others ngram: Key 'nope' not in 'DrafterOptions'"),
        ("ngram", {"min_match": "few"}, "others ngram: Value 'few'"),
    ],
)
def test_refusals(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_preset(DrafterOptions, "drafter", name, values, "others")
    assert "\n" not in str(caught.value)
