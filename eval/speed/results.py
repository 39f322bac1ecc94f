"""From single measurements to the figures of a row. Pure arithmetic, no model.

A rate is tokens over seconds of a whole round, prompts' own passes included. A speed-up is the ratio of two methods'
rates in the same round, so that what slowed a round down cancels; medians are taken over rounds, last of all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eval.speed.acceptance import Agreement, join
from eval.speed.methods import BARE, GENERATE, PLAIN
from eval.speed.timing import Spread, spread
from models.decoding.counters import Counters, Timings, add_up


@dataclass(frozen=True)
class Run:
    """One method's go at one group."""

    group: str
    method: str
    round: int
    seconds: float
    num_tokens: int
    peak_bytes: int
    timings: Timings | None


@dataclass(frozen=True)
class Counted:
    """What one method gave for one group, the same in every round."""

    group: str
    method: str
    counters: Counters | None  # None: not counted by this method
    agreement: Agreement | None  # with plain decoding; None where that means nothing (sampling)
    certificate: float | None = None  # sum over sequences; None for a lossless rule, which has none


@dataclass(frozen=True)
class Row:
    """The figures of one method over some groups. None: it has no such figure."""

    method: str
    num_tokens: int
    tokens_per_s: Spread
    speedup_over_plain: Spread | None
    speedup_over_generate: Spread | None
    counters: Counters | None
    pass_ms: Spread | None  # one target pass, output head included
    pass_over_bare: Spread | None
    draft_over_target: Spread | None  # time to draft over time of the target's pass, both a block
    peak_bytes: int
    agreement: Agreement | None
    # Bound on the total variation between the output's law and the target's, for one token on average.
    certificate_per_token: float | None = None


def summarise(
    runs: Sequence[Run], counted: Iterable[Counted], methods: Sequence[str], parts_of: Mapping[str, str] | None = None
) -> list[Row]:
    """One row a method, in this order, over all groups that are in `runs`.

    parts_of: for some methods the name of the one whose timings tell the parts (see `WaitingDecoder`).
    """
    counted = list(counted)
    rates = {method: rates_by_round(runs, method) for method in {run.method for run in runs} - {BARE}}
    bare_ms = pass_ms_by_round(runs, BARE)
    rows = []
    for method in methods:
        ours = [entry for entry in counted if entry.method == method]
        counters = [entry.counters for entry in ours if entry.counters is not None]
        agreements = [entry.agreement for entry in ours if entry.agreement is not None]
        certificates = [entry.certificate for entry in ours if entry.certificate is not None]
        num_tokens = sum(run.num_tokens for run in runs if run.method == method and run.round == 0)
        told_by = (parts_of or {}).get(method, method)
        pass_ms = pass_ms_by_round(runs, told_by)
        rows.append(
            Row(
                method=method,
                num_tokens=num_tokens,
                tokens_per_s=spread(rates[method]),
                speedup_over_plain=ratio(rates[method], rates.get(PLAIN)),
                speedup_over_generate=ratio(rates[method], rates.get(GENERATE)),
                counters=add_up(counters) if counters else None,
                pass_ms=spread(pass_ms) if pass_ms else None,
                pass_over_bare=ratio(pass_ms, bare_ms),
                draft_over_target=ratio(*_draft_and_target(runs, told_by))
                if any(c.drafted for c in counters)
                else None,
                peak_bytes=max(run.peak_bytes for run in runs if run.method == method),
                agreement=join(agreements) if agreements else None,
                certificate_per_token=sum(certificates) / num_tokens if certificates and num_tokens else None,
            )
        )
    return rows


def rates_by_round(runs: Sequence[Run], method: str) -> list[float]:
    """Tokens per second in each round, all groups together."""
    rounds = _by_round(runs, method)
    return [sum(run.num_tokens for run in group) / sum(run.seconds for run in group) for group in rounds]


def pass_ms_by_round(runs: Sequence[Run], method: str) -> list[float]:
    """Milliseconds per target pass in each round; empty for a method that does not tell, or made no pass."""
    found = []
    for group in _by_round(runs, method):
        timings = [run.timings for run in group if run.timings is not None]
        if passes := sum(one.target_passes for one in timings):
            found.append(1e3 * sum(one.target_s for one in timings) / passes)
    return found


def ratio(values: Sequence[float], others: Sequence[float] | None) -> Spread | None:
    """Spread of value over other, round by round; None where one of them is missing or zero."""
    if not values or not others or not all(others):
        return None
    return spread([value / other for value, other in zip(values, others, strict=True)])


def _draft_and_target(runs: Sequence[Run], method: str) -> tuple[list[float], list[float]]:
    """Seconds of drafting and of target passes in each round."""
    timings = [[run.timings for run in group if run.timings is not None] for group in _by_round(runs, method)]
    draft = [sum(one.draft_s for one in group) for group in timings]
    target = [sum(one.target_s for one in group) for group in timings]
    return draft, target


def _by_round(runs: Sequence[Run], method: str) -> list[list[Run]]:
    rounds: dict[int, list[Run]] = {}
    for run in runs:
        if run.method == method:
            rounds.setdefault(run.round, []).append(run)
    return [rounds[number] for number in sorted(rounds)]
