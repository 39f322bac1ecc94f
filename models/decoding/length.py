"""How many tokens a block drafts: always K, or as many as earn the most emitted tokens a second.

A block of k drafted tokens emits 1 + r_1 + .. + r_k tokens a row, r_i being how often the i-th one is kept, and takes a
time c_k. `AdaptiveLength` estimates both while it decodes and asks for the k with the largest ratio; k = 0 is plain
decoding, which is what remains where drafting loses (few drafts kept, or so many rows that a wider pass costs its
width). What it chooses rests on earlier blocks alone, never on a token that is still to be judged, so that every rule's
output law stays what it is (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, has the ratio for constant r and c).

Must not do: draft, or look at probabilities (`drafters.stop` ends a draft by what the drafter sees).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from models.decoding.estimates import START_COST, KeepRates

# Drafted tokens that an estimate of how often they are kept remembers, and how many of them it still does when new
# prompts come; observations that a relative cost remembers.
MEMORY_TOKENS, MEMORY_OF_OTHERS, MEMORY_COSTS = 128.0, 16.0, 16
# A single measurement counts as at most so many times what was expected, and no less than its inverse.
CLIP = 2.0
# What trying other lengths may cost: a share of all time, and so many blocks' time more when new prompts come.
SEARCH_SHARE, SEARCH_START = 0.01, 1.0


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
    """Seconds of a block of each length as relative[k] * scale, for one number of rows.

    The scale follows what all blocks share (a longer context, another program on the machine); a relative cost changes
    only where its length is tried beside others, so that the two cannot be mistaken for one another.
    """

    relative: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    scale: float = 0.0

    def observe(self, length: int, seconds: float, is_usual: bool) -> None:
        """is_usual: this length is the one that most blocks have, and so tells of the scale."""
        if not self.scale:
            self.scale, self.relative[length], self.counts[length] = seconds, 1.0, 0
            return
        found = seconds / self.scale
        expected = self.relative.get(length)
        if expected is None or not self.knows(length):
            self.relative[length], self.counts[length] = found, self.counts.get(length, -1) + 1
            return
        found = min(max(found, expected / CLIP), expected * CLIP)
        self.counts[length] = min(self.counts[length] + 1, MEMORY_COSTS)
        if is_usual:
            self.scale *= 1.0 + (found / expected - 1.0) / MEMORY_COSTS
        else:
            self.relative[length] += (found - expected) / self.counts[length]

    def knows(self, length: int) -> bool:
        """Whether it was measured twice: once is not enough, for a length's first block may have set up things."""
        return self.counts.get(length, -1) >= 1

    def all_costs(self, longest: int) -> list[float]:
        """Of the lengths 0 .. longest, never falling: on lines through those that were tried.

        A longer block is never cheaper; where noise says so the two are taken together, so that no length wins by luck.
        """
        known = sorted(self.relative)
        if not known:
            return [1.0 + START_COST * length for length in range(longest + 1)]
        costs = monotone([self.relative[k] for k in known], [max(1, self.counts[k]) for k in known])
        slope = START_COST * costs[-1] if len(known) == 1 else (costs[-1] - costs[0]) / (known[-1] - known[0])
        ends = [(-1, costs[0] - slope * (known[0] + 1)), (longest + 1, costs[-1] + slope * (longest + 1 - known[-1]))]
        places, values = zip(*sorted([*zip(known, costs, strict=True), *ends]), strict=True)
        return [max(float(cost), 1e-9) for cost in np.interp(range(longest + 1), places, values)]


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-falling values nearest to these by weighted squares (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, v, n), (b, w, m) = pools.pop(-2), pools.pop()
            pools.append(((a * v + b * w) / (v + w), v + w, n + m))
    return [mean for mean, _, count in pools for _ in range(count)]


class AdaptiveLength:
    """The length with the most emitted tokens a second, by running estimates; 0 where plain decoding has.

    The first blocks try the ends and the middle of the range; after them a block now and then tries a neighbour of the
    best length or none at all, as often as a hundredth of the time pays for. Estimates outlive a `generate`. Because
    times enter, two runs may draft differently: greedy output never depends on it, and sampled output has the same law
    but not the same tokens.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        """num_draft_tokens: the longest block. ValueError unless it is at least 1."""
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens={num_draft_tokens}: an adaptive length needs at least 1 to choose from")
        self.num_draft_tokens = num_draft_tokens
        self._rates = KeepRates(num_draft_tokens, MEMORY_TOKENS)
        self._costs: dict[int, _Costs] = {}
        self._num_rows = 0
        self._best = num_draft_tokens
        self._budget = 0.0  # for the search, in blocks of the best length
        self._turn = 0

    def begin(self) -> None:
        """See `Length.begin`."""
        self._budget = SEARCH_START
        self._rates.trust_at_most(MEMORY_OF_OTHERS)

    def choose(self, num_rows: int, longest: int) -> int:
        """See `Length.choose`."""
        self._num_rows = num_rows
        costs = self._costs.setdefault(num_rows, _Costs())
        unmeasured = [k for k in (self.num_draft_tokens, 0, (self.num_draft_tokens + 1) // 2) if not costs.knows(k)]
        if unmeasured:
            return min(unmeasured[0], longest)
        expected, cost = self._rates.expected_tokens(), costs.all_costs(self.num_draft_tokens)
        self._best = max(range(len(expected)), key=lambda length: expected[length] / cost[length])
        others = [self._best + 1, self._best - 1, 0]
        other = others[self._turn % len(others)]
        if not 0 <= other <= self.num_draft_tokens or other == self._best:
            self._turn += 1
            return min(self._best, longest)
        # Over what the best length would have taken for the tokens that the other one is expected to give.
        loss = cost[other] / cost[self._best] - expected[other] / expected[self._best]
        if loss > self._budget:
            return min(self._best, longest)
        self._budget -= loss
        self._turn += 1
        return min(other, longest)

    def observe(self, asked: int, num_accepted: Sequence[int], seconds: float) -> None:
        """See `Length.observe`."""
        costs = self._costs[self._num_rows]
        costs.observe(asked, seconds, asked == self._best)
        self._budget += SEARCH_SHARE
        self._rates.observe(asked, num_accepted)
