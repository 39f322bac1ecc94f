"""Weights are sorted by the testbed's own rule, and tokens without one are left out."""

import pytest

from eval.frontier.decisive import WeightsFound, render_weights, sort_weights
from eval.frontier.tokens_html import TracedToken
from train.data.testbed_language import IDS


def traced(weight: float | None) -> TracedToken:
    return TracedToken("x", "accepted" if weight is not None else "bonus", 0.5, 0.5, 0.5, weight)


def test_weights_are_those_of_the_tokens_behind_a_name() -> None:
    words = ["we", "red", "7", "sing", "blue", "2", "<end>"]
    weights = [None, 0.1, 0.9, 0.2, 0.3, None, 0.4]
    ids = [IDS[word] for word in words]
    found = sort_weights("mine", [(ids, [traced(weight) for weight in weights]), (ids[:2], [traced(0.6), traced(0.7)])])
    assert found == WeightsFound("mine", [0.9], [0.1, 0.2, 0.3, 0.4, 0.6, 0.7])


def test_texts_and_what_is_known_of_them_must_be_as_long() -> None:
    with pytest.raises(ValueError, match="zip"):
        sort_weights("mine", [([IDS["we"]], [])])


def test_table() -> None:
    table = render_weights([WeightsFound("mine", [0.9, 1.0], [])])
    assert table.splitlines()[-1] == "| mine | 0.950 (2 tokens) | – |"
