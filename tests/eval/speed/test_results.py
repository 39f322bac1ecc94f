"""Figures of a row against sums done by hand."""

import pytest

from eval.speed.acceptance import Agreement, Difference
from eval.speed.methods import BARE, GENERATE, PLAIN
from eval.speed.results import Counted, Row, Run, summarise
from models.decoding.counters import Counters, Timings

HEADS = "heads"
# Seconds for 60 tokens in "a" and 20 in "b", round by round; the second round ran on a machine half as fast.
SECONDS = {
    PLAIN: {"a": [6.0, 12.0, 6.0], "b": [2.0, 4.0, 2.0]},
    GENERATE: {"a": [12.0, 24.0, 9.0], "b": [4.0, 8.0, 3.0]},
    HEADS: {"a": [2.0, 4.0, 3.0], "b": [2.0, 4.0, 1.0]},
}
TOKENS = {"a": 60, "b": 20}


def make_runs() -> list[Run]:
    runs = []
    for method, groups in SECONDS.items():
        for group, seconds in groups.items():
            for number, value in enumerate(seconds):
                timings = None
                if method != GENERATE:
                    timings = Timings(target_s=value / 2, draft_s=value / 8, target_passes=10)
                runs.append(Run(group, method, number, value, TOKENS[group], 1000 + number, timings))
    for group in TOKENS:
        runs += [Run(group, BARE, n, 9.9, 0, 5, Timings(target_s=0.4, target_passes=8)) for n in range(3)]
    return runs


def make_counters(blocks: int, accepted: int) -> Counters:
    counters = Counters(sequences=1, emitted=1)
    for block in range(blocks):
        kept = 2 if block < accepted // 2 else 0
        counters.record_block(2, kept, kept + 1)
    return counters


@pytest.fixture(name="rows")
def make_rows() -> dict[str, Row]:
    counted = [
        Counted("a", PLAIN, make_counters(59, 0), None),
        Counted("b", PLAIN, make_counters(19, 0), None),
        Counted("a", GENERATE, None, Agreement(4)),
        Counted("b", GENERATE, None, Agreement(4, (Difference(1, 5, 7, 8, 0.25),))),
        Counted("a", HEADS, make_counters(20, 20), Agreement(4)),
        Counted("b", HEADS, make_counters(10, 4), Agreement(4)),
    ]
    return {row.method: row for row in summarise(make_runs(), counted, [PLAIN, GENERATE, HEADS])}


def test_rate_is_all_tokens_over_all_seconds(rows: dict[str, Row]) -> None:
    plain, heads = rows[PLAIN].tokens_per_s, rows[HEADS].tokens_per_s
    assert (plain.median, plain.low, plain.high, plain.count) == (10, 5, 10, 3)
    assert (heads.median, heads.low, heads.high) == (20, 10, 20)
    assert rows[HEADS].num_tokens == 80


def test_speedup_is_taken_within_a_round(rows: dict[str, Row]) -> None:
    """A round at half speed leaves it as it is: 2, 2, 2, not 10 / 10 or 20 / 5."""
    over_plain, over_generate = rows[HEADS].speedup_over_plain, rows[HEADS].speedup_over_generate
    assert (over_plain.median, over_plain.low, over_plain.high) == (2, 2, 2)
    assert (over_generate.low, over_generate.median, over_generate.high) == (3, 4, 4)
    assert rows[PLAIN].speedup_over_plain.median == 1
    assert rows[GENERATE].speedup_over_generate.median == 1


def test_passes_and_parts(rows: dict[str, Row]) -> None:
    # Round 0: (2 + 2) / 2 s in 20 passes = 100 ms, over 50 ms of the bare forward.
    assert rows[HEADS].pass_ms.median == pytest.approx(100)
    assert rows[HEADS].pass_over_bare.median == pytest.approx(2)
    assert rows[HEADS].draft_over_target.median == pytest.approx(0.25)
    assert rows[PLAIN].draft_over_target is not None  # these fake counters drafted
    assert rows[GENERATE].pass_ms is None
    assert rows[GENERATE].pass_over_bare is None


def test_counts_are_added_up(rows: dict[str, Row]) -> None:
    counters = rows[HEADS].counters
    assert (counters.blocks, counters.accepted, counters.drafted, counters.sequences) == (30, 24, 60, 2)
    assert counters.mean_block_length == pytest.approx(1 + 24 / 30)
    assert rows[GENERATE].counters is None
    assert rows[GENERATE].agreement == Agreement(8, (Difference(5, 5, 7, 8, 0.25),))
    assert rows[HEADS].peak_bytes == 1002


def test_plain_decoding_has_no_draft_cost() -> None:
    counters = Counters(sequences=1, emitted=1)
    counters.record_block(0, 0, 1)
    (row,) = summarise(make_runs(), [Counted("a", PLAIN, counters, None)], [PLAIN])
    assert row.draft_over_target is None


def test_parts_are_told_by_the_waiting_twin() -> None:
    twin = [Run("a", "twin", n, 50.0, 4, 9, Timings(target_s=1.0, draft_s=0.1, target_passes=5)) for n in range(3)]
    counted = [Counted("a", HEADS, make_counters(20, 20), None)]
    (row,) = summarise([*make_runs(), *twin], counted, [HEADS], {HEADS: "twin"})
    assert row.pass_ms.median == pytest.approx(200)
    assert row.draft_over_target.median == pytest.approx(0.1)
    assert row.tokens_per_s.median == 20  # its own
