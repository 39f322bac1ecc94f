"""Running estimates of what drafting gives and costs: how often drafted tokens are kept, and what a pass takes.

Whoever chooses how much to draft, or from where, rests on these. They look at blocks that are over, and nothing else.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]

# A drafted token is first thought to be kept this often; one behind another as often as that, which counts like so many
# observations of its own.
START_KEPT, START_WEIGHT = 0.7, 4.0
# One more token is first thought to cost this much of the pass.
START_COST = 0.1


class KeepRates:
    """How often the token at each place of a draft is kept, given that those before it were.

    memory: so many observations count. tried[i], kept[i]: of place i, decayed.
    """

    def __init__(self, num_places: int, memory: float) -> None:
        self.memory = memory
        self.tried = np.zeros(num_places)
        self.kept = np.zeros(num_places)

    def observe(self, asked: int | Sequence[int], num_accepted: Sequence[int]) -> None:
        """Drafts of `asked` tokens (one number for all, or each its own), of which so many were kept."""
        accepted_1B = np.asarray(num_accepted, dtype=int)[None]
        places_P1 = np.arange(len(self.tried))[:, None]
        is_asked_PB = places_P1 < np.asarray(asked, dtype=int)
        tried = (is_asked_PB & (accepted_1B >= places_P1)).sum(axis=1)
        left = (1.0 - 1.0 / self.memory) ** tried
        self.tried = self.tried * left + tried
        self.kept = self.kept * left + (is_asked_PB & (accepted_1B > places_P1)).sum(axis=1)

    def reached(self, longest: int | None = None) -> list[float]:
        """r_0 = 1, r_1, .., r_K: how often the first k tokens are all kept; for k up to `longest`, default all."""
        reached, share = [1.0], START_KEPT
        for tried, kept in zip(self.tried[:longest].tolist(), self.kept[:longest].tolist(), strict=True):
            share = (kept + START_WEIGHT * share) / (tried + START_WEIGHT)
            reached.append(reached[-1] * share)
        return reached

    def expected_tokens(self, longest: int | None = None) -> list[float]:
        """1 + r_1 + .. + r_k for k = 0 .. K: emitted tokens of a block that drafts k; see `reached`."""
        return list(accumulate(self.reached(longest)))

    def trust_at_most(self, weight: float) -> None:
        """Let what was observed so far count like no more than so many observations of a place."""
        left = np.minimum(1.0, weight / np.maximum(self.tried, weight))
        self.tried, self.kept = self.tried * left, self.kept * left

    def fade(self, share: float) -> None:
        """Let all observations count a little less, so that what is no longer tried is tried again one day."""
        self.tried, self.kept = self.tried * (1.0 - share), self.kept * (1.0 - share)


class Line:
    """Seconds that n tokens take, a + b n, by least squares over the last `memory` observations, b no less than 0."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self._sums = [0.0] * 5  # of 1, n, n n, t, n t

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One measurement."""
        terms = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._sums = [total * (1.0 - 1.0 / self.memory) + term for total, term in zip(self._sums, terms, strict=True)]

    def seconds(self, num_tokens: int) -> float:
        """What so many tokens are expected to take; 0 before any observation."""
        return float(self.all_seconds(np.asarray(num_tokens)))

    def all_seconds(self, num_tokens: FloatArray) -> FloatArray:
        """The same of each entry of an array."""
        weight, sum_n, sum_nn, sum_t, sum_nt = self._sums
        if not weight:
            return np.zeros(num_tokens.shape)
        mean_n, mean_t = sum_n / weight, sum_t / weight
        spread = sum_nn / weight - mean_n**2
        if spread > 1e-6:
            slope = max(0.0, (sum_nt / weight - mean_n * mean_t) / spread)
        else:  # one number of tokens alone
            slope = START_COST * mean_t / (1.0 + START_COST * mean_n)
        return np.asarray(np.maximum(0.0, mean_t + slope * (num_tokens - mean_n)))
