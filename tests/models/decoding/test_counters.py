"""Counts and the rates made from them, by hand."""

import pytest

from models.decoding.counters import Counters, add_up


def test_rates_by_hand() -> None:
    first = Counters(sequences=1, emitted=1)
    first.record_block(num_drafted=3, num_accepted=3, num_emitted=4)
    first.record_block(num_drafted=3, num_accepted=1, num_emitted=2)
    second = Counters(sequences=1, emitted=1)
    second.record_block(num_drafted=1, num_accepted=0, num_emitted=1)
    total = add_up([first, second])
    assert (total.blocks, total.drafted, total.accepted, total.emitted, total.sequences) == (3, 7, 4, 9, 2)
    assert (total.drafted_at, total.accepted_at) == ([3, 2, 2], [2, 1, 1])
    assert total.acceptance_by_place == [2 / 3, 1 / 2, 1 / 2]
    assert total.acceptance_rate == 4 / 7
    assert total.mean_block_length == 7 / 3 == pytest.approx(1 + total.accepted / total.blocks)
    assert (first.drafted_at, second.drafted_at) == ([2, 2, 2], [1])


def test_nothing_counted() -> None:
    assert Counters().acceptance_rate == 0.0
    assert Counters().mean_block_length == 0.0
    assert Counters().acceptance_by_place == []
