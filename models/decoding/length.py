"""How many tokens a block drafts: always K, or as many as earn the most emitted tokens a second.

A block of k drafted tokens emits 1 + r_1 + .. + r_k tokens a row, r_i being how often the i-th one is kept, and takes a
time c_k. `AdaptiveLength` estimates both while it decodes and asks for the k with the largest ratio; k = 0 is plain
decoding, which is what remains where drafting loses (few drafts kept, or so many rows that a wider pass costs its
width). What it chooses rests on earlier blocks alone, never on a token that is still to be judged, so that every rule's
output law stays what it is (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, has the ratio for constant r and c).

Must not do: draft, or look at probabilities (`drafters.stop` ends a draft by what the drafter sees).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np

from models.decoding.estimates import START_COST, KeepRates

# Drafted tokens that an estimate of how often they are kept remembers, and how many of them it still does when new
# prompts come; blocks that the mean of what a length emits remembers, and blocks that the estimate from single places
# counts like beside it.
MEMORY_TOKENS, MEMORY_OF_OTHERS, MEMORY_BLOCKS, PLACES_WEIGHT = 128.0, 48.0, 300.0, 24.0
# What trying other lengths may cost: a share of all time, and so many blocks' time more when new prompts come.
SEARCH_SHARE, SEARCH_START = 0.01, 1.0
# Blocks of each length when the costs are first measured, of which the first counts for nothing, and in a later trial.
CALIBRATION, TRIAL = 6, 4
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
    """What blocks of each length take, each relative to the others, for one number of rows.

    Lengths are compared by blocks in turns, whose medians are: a machine that grows slower, or a context that grows,
    changes them alike, and a block that was held up changes nothing.
    """

    relative: dict[int, float] = field(default_factory=dict)

    def settle(self, seconds: dict[int, list[float]], known: int | None) -> None:
        """Take in blocks that took turns. known: the length whose cost stays; None: these are the first."""
        if known is None:
            self.relative = {length: median(times[1:]) for length, times in seconds.items() if len(times) > 1}
            return
        if not seconds.get(known):
            return
        unit = self.relative[known] / median(seconds[known])
        for length, times in seconds.items():
            if length != known:
                found = median(times) * unit
                before = self.relative.get(length, found)
                self.relative[length] = before + TRIAL_WEIGHT * (found - before)

    def all_costs(self, longest: int) -> list[float]:
        """Of the lengths 0 .. longest, never falling: on lines through those that were tried.

        A longer block is never cheaper; where noise says so the two are taken together, so that no length wins by luck.
        """
        known = sorted(self.relative)
        if not known:
            return [1.0 + START_COST * length for length in range(longest + 1)]  # nothing is measured
        costs = monotone([self.relative[k] for k in known])
        slope = START_COST * costs[-1] if len(known) == 1 else (costs[-1] - costs[0]) / (known[-1] - known[0])
        ends = [(-1, costs[0] - slope * (known[0] + 1)), (longest + 1, costs[-1] + slope * (longest + 1 - known[-1]))]
        places, values = zip(*sorted([*zip(known, costs, strict=True), *ends]), strict=True)
        return [max(float(cost), 1e-9) for cost in np.interp(range(longest + 1), places, values)]


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
        self._costs: dict[int, _Costs] = {}
        self._num_rows = 0
        self._best = num_draft_tokens
        self._budget = 0.0  # for the search, in blocks of the best length
        self._turn = 0
        self._to_come: deque[int] = deque()  # lengths of blocks that are compared, and what the last of them took
        self._compared: dict[int, list[float]] = {}
        self._known: int | None = None

    def begin(self) -> None:
        """See `Length.begin`."""
        self._budget = SEARCH_START
        self._rates.trust_at_most(MEMORY_OF_OTHERS)
        for mean in self._emitted:
            mean.trust_at_most(MEMORY_OF_OTHERS)

    def choose(self, num_rows: int, longest: int) -> int:
        """See `Length.choose`."""
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._to_come.clear()
        if not self._to_come:
            self._plan(self._costs.setdefault(num_rows, _Costs()))
        return min(self._to_come[0], longest)

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        """See `Length.observe`."""
        self._budget += SEARCH_SHARE
        self._rates.observe(asked, num_accepted)
        self._emitted[asked].observe(1.0 + sum(num_accepted) / len(num_accepted), len(num_accepted))
        self._compared.setdefault(asked, []).append(seconds)
        self._to_come.popleft()
        if not self._to_come and len(self._compared) > 1:
            self._costs[self._num_rows].settle(self._compared, self._known)

    def _plan(self, costs: _Costs) -> None:
        """The lengths of the blocks to come: one of the best, or several that are compared."""
        self._compared = {}
        if not costs.relative:
            self._known = None
            self._to_come.extend([self.num_draft_tokens, 0, (self.num_draft_tokens + 1) // 2] * CALIBRATION)
            return
        expected, cost = self.expected_tokens(), costs.all_costs(self.num_draft_tokens)
        rates = [tokens / seconds for tokens, seconds in zip(expected, cost, strict=True)]
        self._best = best = rates.index(max(rates))
        if best not in costs.relative:  # what lies between two lengths that were measured is no measurement
            self._known = min(costs.relative, key=lambda length: abs(length - best))
            self._to_come.extend([best, self._known] * TRIAL)
            return
        self._known = best
        far = [length for length in range(len(rates)) if abs(length - best) > 1]
        others = [best + 1, best - 1, 0, max(far, key=lambda length: rates[length], default=0)]
        other = others[self._turn % len(others)]
        if not 0 <= other <= self.num_draft_tokens or other == best:
            self._turn += 1
            other = best
        # Over what the best length would have taken for the tokens that the other one is expected to give.
        loss = TRIAL * (cost[other] / cost[best] - expected[other] / expected[best])
        if other == best or loss > self._budget:
            self._to_come.append(best)
            return
        self._budget -= loss
        self._turn += 1
        self._to_come.extend([other, best] * TRIAL)

    def expected_tokens(self) -> list[float]:
        """Emitted tokens of a row's block, for each length 0 .. K."""
        from_places = self._rates.expected_tokens()
        return [mean.with_prior(places, PLACES_WEIGHT) for mean, places in zip(self._emitted, from_places, strict=True)]
