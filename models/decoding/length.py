"""How many tokens a block drafts: always K, or as many as earn the most emitted tokens a second.

A block of k drafted tokens emits 1 + r_1 + .. + r_k tokens a row, r_i being how often the i-th one is kept, and takes a
time c_k. `AdaptiveLength` estimates both while it decodes and asks for the k with the largest ratio; k = 0 is plain
decoding, which is what remains where drafting loses (few drafts kept, or so many rows that a wider pass costs its
width). What it chooses rests on earlier blocks alone, never on a token that is still to be judged, so that every rule's
output law stays what it is (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, has the ratio for constant r and c).

Must not do: draft, or look at probabilities (`drafters.stop` ends a draft by what the drafter sees).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np

from ..drafters.estimates import START_COST, KeepRates

# Drafted tokens that an estimate of how often they are kept remembers, and how many of them it still does when new
# prompts come; blocks that the mean of what a length emits remembers, and blocks that the estimate from single places
# counts like beside it.
MEMORY_TOKENS, MEMORY_OF_OTHERS, MEMORY_BLOCKS, PLACES_WEIGHT = 128.0, 48.0, 300.0, 24.0
# What trying other lengths may cost: a share of all time, and so many blocks' time more when new prompts come.
SEARCH_SHARE, SEARCH_START = 0.01, 1.0
# Blocks of each length when the costs are first measured, of which the first counts for nothing, and in a later trial.
CALIBRATION, TRIAL = 6, 4
# What the first trial in a class of row counts may cost, once, in blocks.
CLASS_START = 2.0
# How much a later trial's cost counts beside what was known.
TRIAL_WEIGHT = 0.5


class Length(Protocol):
    """Chooses how many tokens a block drafts."""

    def begin(self) -> None:
        """New prompts have come, and what they are like is not known."""
        ...

    def choose(self, num_rows: int, longest: int) -> int:
        """Most tokens, 0 to `longest`, that a row of the next block drafts."""
        ...

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        """A block for which `asked` was chosen has kept so many tokens of each row, and has taken this long."""
        ...


class FixedLength:
    """Always K, or all that may be drafted."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def begin(self) -> None:
        """See `Length.begin`."""

    def choose(self, num_rows: int, longest: int) -> int:
        """See `Length.choose`."""
        return min(self.num_draft_tokens, longest)

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        """See `Length.observe`."""


@dataclass
class _Costs:
    """What blocks of each length take, each relative to the others, for one class of row counts; and its trial.

    Lengths are compared by blocks in turns, a turn being one block of each: the medians over turns of a block's time
    over that of the same turn's first length count. A machine that grows slower, a context that grows, or rows that
    come and go change a turn alike, and a block that was held up changes nothing.
    """

    relative: dict[int, float] = field(default_factory=dict)
    credit: float = 0.0  # that only a trial of this class may use, in blocks
    to_come: deque[int] = field(default_factory=deque)  # lengths of the trial that is under way, and what they took
    compared: dict[int, list[float]] = field(default_factory=dict)
    known: int | None = None  # the length whose cost stays; None: these are the first
    is_trial: bool = False

    def begin(self, lengths: Sequence[int], turns: int, known: int | None) -> None:
        """Plan a trial of these lengths in turns."""
        self.to_come.extend([*lengths] * turns)
        self.compared, self.known, self.is_trial = {length: [] for length in lengths}, known, True

    def settle(self) -> None:
        """Take in the trial that is over."""
        self.is_trial = False
        first = next(iter(self.compared.values())) if self.known is None else self.compared[self.known]
        skipped = 1 if self.known is None else 0  # the first turn of all warms up
        for length, times in self.compared.items():
            ratios = [time / other for time, other in zip(times, first, strict=True)][skipped:]
            found = median(ratios) * (1.0 if self.known is None else self.relative.setdefault(self.known, 1.0))
            if length != self.known:
                before = self.relative.get(length, found)
                self.relative[length] = before + TRIAL_WEIGHT * (found - before)

    def all_costs(self, longest: int, others: Sequence[float] | None = None) -> list[float]:
        """Of the lengths 0 .. longest, never falling: on lines through those that were tried.

        others: what other row counts say, followed where nothing is tried here. A longer block is never cheaper; where
        noise says so the two are taken together, so that no length wins by luck.
        """
        shape = list(others) if others is not None else [1.0 + START_COST * length for length in range(longest + 1)]
        known = sorted(self.relative)
        if not known:
            return shape
        costs = monotone([self.relative[k] for k in known])
        if others is not None:  # the others' shape, bent to go through what was measured here
            bends = [cost / shape[k] for k, cost in zip(known, costs, strict=True)]
            bent = np.interp(range(longest + 1), known, bends) * np.asarray(shape)
            return [max(cost, 1e-9) for cost in monotone(bent.tolist())]
        slope = START_COST * costs[-1] if len(known) == 1 else (costs[-1] - costs[0]) / (known[-1] - known[0])
        ends = [(-1, costs[0] - slope * (known[0] + 1)), (longest + 1, costs[-1] + slope * (longest + 1 - known[-1]))]
        places, values = zip(*sorted([*zip(known, costs, strict=True), *ends]), strict=True)
        return [max(float(cost), 1e-9) for cost in np.interp(range(longest + 1), places, values)]


class _CostTable:
    """The costs of every class of row counts: powers of two, to the nearest.

    A class that was never measured is read off those on both sides, or the nearest one, until its own trial.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.classes: dict[int, _Costs] = {}

    def of(self, num_rows: int) -> _Costs:
        """The class of this row count."""
        number = round(math.log2(num_rows))
        if number not in self.classes:
            self.classes[number] = _Costs(credit=CLASS_START)
        return self.classes[number]

    def is_empty(self) -> bool:
        """Whether nothing is measured at all."""
        return not any(costs.relative for costs in self.classes.values())

    def all_costs(self, num_rows: int) -> list[float]:
        """Of the lengths 0 .. longest, relative to each other, for this row count."""
        here = round(math.log2(num_rows))
        measured = {
            number: np.asarray(costs.all_costs(self.longest))
            for number, costs in sorted(self.classes.items())
            if number != here and len(costs.relative) > 2
        }
        if not measured:
            return self.of(num_rows).all_costs(self.longest)
        shapes = np.stack([costs / costs[0] for costs in measured.values()])
        others = [float(np.interp(here, list(measured), shapes[:, k])) for k in range(self.longest + 1)]
        return self.of(num_rows).all_costs(self.longest, others)


def monotone(values: Sequence[float]) -> list[float]:
    """The non-falling values nearest to these by squares (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools.pop(-2), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [mean for mean, count in pools for _ in range(count)]


class _Mean:
    """A running mean over the last `memory` observations."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.total = self.weight = 0.0

    def observe(self, value: float, count: int) -> None:
        """`count` observations of this mean value."""
        keep = (1.0 - 1.0 / self.memory) ** count
        self.total, self.weight = self.total * keep + value * count, self.weight * keep + count

    def with_prior(self, value: float, weight: float) -> float:
        """The mean, with so many more observations of another value."""
        return (self.total + value * weight) / (self.weight + weight)

    def trust_at_most(self, weight: float) -> None:
        """Let the past count like no more than so many observations."""
        if self.weight > weight:
            self.total, self.weight = self.total * weight / self.weight, weight


class AdaptiveLength:
    """The length with the most emitted tokens a second, by running estimates; 0 where plain decoding has.

    What a length emits is estimated from its own blocks, since where blocks begin depends on how long they are; for a
    length that was hardly tried the estimate rests on single places. The first blocks compare the ends and the middle
    of the range; after them a few blocks now and then compare the best length with a neighbour, with none at all, or
    with the next best, as often as a hundredth of the time pays for.

    Costs belong to row counts, by powers of two. Rows that come and go interrupt no trial: it waits for its class to
    come again. A new class begins with what its neighbours say, and one short trial.

    Estimates outlive a `generate`. Because times enter, two runs may draft differently: greedy output never depends on
    it, and sampled output has the same law but not the same tokens.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        """num_draft_tokens: the longest block. ValueError unless it is at least 1."""
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens={num_draft_tokens}: an adaptive length needs at least 1 to choose from")
        self.num_draft_tokens = num_draft_tokens
        self._rates = KeepRates(num_draft_tokens, MEMORY_TOKENS)
        self._emitted = [_Mean(MEMORY_BLOCKS) for _ in range(num_draft_tokens + 1)]  # by a row's block of this length
        self._table = _CostTable(num_draft_tokens)
        self._num_rows = 1
        self._planned = num_draft_tokens
        self._budget = 0.0  # for trials, in blocks of the best length
        self._turn = 0

    def begin(self) -> None:
        """See `Length.begin`."""
        self._budget = SEARCH_START
        self._rates.trust_at_most(MEMORY_OF_OTHERS)
        for mean in self._emitted:
            mean.trust_at_most(MEMORY_OF_OTHERS)

    def choose(self, num_rows: int, longest: int) -> int:
        """See `Length.choose`."""
        self._num_rows = num_rows
        costs = self._table.of(num_rows)
        if not costs.is_trial:
            self._planned = self._plan(costs)
        if costs.is_trial:
            self._planned = costs.to_come[0]
        return min(self._planned, longest)

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        """See `Length.observe`."""
        self._budget += SEARCH_SHARE
        self._rates.observe(asked, num_accepted)
        self._emitted[asked].observe(1.0 + sum(num_accepted) / len(num_accepted), len(num_accepted))
        costs = self._table.of(self._num_rows)
        if not costs.is_trial or asked != self._planned:
            return  # a block that was cut short is no measurement
        costs.to_come.popleft()
        costs.compared[asked].append(seconds)
        if not costs.to_come:
            costs.settle()

    def _plan(self, costs: _Costs) -> int:
        """The length of the next block, if no trial begins with it."""
        if self._table.is_empty():
            costs.begin([self.num_draft_tokens, 0, (self.num_draft_tokens + 1) // 2], CALIBRATION, None)
            return self.num_draft_tokens
        expected, cost = self.expected_tokens(), self._table.all_costs(self._num_rows)
        rates = [tokens / seconds for tokens, seconds in zip(expected, cost, strict=True)]
        best = rates.index(max(rates))

        def loss(length: int) -> float:
            """Of one block, over what the best length would have taken for the tokens that this one should give."""
            return cost[length] / cost[best] - expected[length] / expected[best]

        if not costs.relative:  # the class is new: what its neighbours say is best, against no draft or the longest
            other = 0 if best > 0 else max(range(1, len(rates)), key=lambda length: rates[length])
            if TRIAL * loss(other) <= self._budget + costs.credit:
                costs.relative[best] = 1.0
                self._budget -= max(0.0, TRIAL * loss(other) - costs.credit)
                costs.begin([other, best], TRIAL, best)
            else:
                costs.credit += SEARCH_SHARE
            return best
        if best not in costs.relative:  # what lies between two lengths that were measured is no measurement
            known = min(costs.relative, key=lambda length: abs(length - best))
            costs.begin([best, known], TRIAL, known)
            return best
        far = [length for length in range(len(rates)) if abs(length - best) > 1]
        others = [best + 1, best - 1, 0, max(far, key=lambda length: rates[length], default=0)]
        other = others[self._turn % len(others)]
        if not 0 <= other <= self.num_draft_tokens or other == best:
            self._turn += 1
        elif (price := TRIAL * loss(other)) <= self._budget:
            self._budget -= price
            self._turn += 1
            costs.begin([other, best], TRIAL, best)
        return best

    def expected_tokens(self) -> list[float]:
        """Emitted tokens of a row's block, for each length 0 .. K."""
        from_places = self._rates.expected_tokens()
        return [mean.with_prior(places, PLACES_WEIGHT) for mean, places in zip(self._emitted, from_places, strict=True)]
