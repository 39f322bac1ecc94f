"""Running estimates of what drafting gives and costs: how often drafted tokens are kept, and what a pass takes.

Whoever chooses how much to draft, or from where, rests on these. They look at blocks that are over, and nothing else.
"""

from collections.abc import Sequence

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
        self.tried = [0.0] * num_places
        self.kept = [0.0] * num_places

    def observe(self, asked: int, num_accepted: Sequence[int]) -> None:
        """Drafts of `asked` tokens, of which so many were kept."""
        for place in range(min(asked, len(self.tried))):
            tried = sum(count >= place for count in num_accepted)
            self._scale(place, (1.0 - 1.0 / self.memory) ** tried)
            self.tried[place] += tried
            self.kept[place] += sum(count > place for count in num_accepted)

    def reached(self) -> list[float]:
        """r_0 = 1, r_1, .., r_K: how often the first k tokens are all kept."""
        reached, share = [1.0], START_KEPT
        for tried, kept in zip(self.tried, self.kept, strict=True):
            share = (kept + START_WEIGHT * share) / (tried + START_WEIGHT)
            reached.append(reached[-1] * share)
        return reached

    def expected_tokens(self) -> list[float]:
        """1 + r_1 + .. + r_k for k = 0 .. K: emitted tokens of a block that drafts k."""
        totals: list[float] = []
        for reached in self.reached():
            totals.append(reached + (totals[-1] if totals else 0.0))
        return totals

    def trust_at_most(self, weight: float) -> None:
        """Let what was observed so far count like no more than so many observations of a place."""
        for place, tried in enumerate(self.tried):
            if tried > weight:
                self._scale(place, weight / tried)

    def fade(self, share: float) -> None:
        """Let all observations count a little less, so that what is no longer tried is tried again one day."""
        for place in range(len(self.tried)):
            self._scale(place, 1.0 - share)

    def _scale(self, place: int, left: float) -> None:
        self.tried[place] *= left
        self.kept[place] *= left


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
        weight, sum_n, sum_nn, sum_t, sum_nt = self._sums
        if not weight:
            return 0.0
        mean_n, mean_t = sum_n / weight, sum_t / weight
        spread = sum_nn / weight - mean_n**2
        if spread > 1e-6:
            slope = max(0.0, (sum_nt / weight - mean_n * mean_t) / spread)
        else:  # one number of tokens alone
            slope = START_COST * mean_t / (1.0 + START_COST * mean_n)
        return max(0.0, mean_t + slope * (num_tokens - mean_n))
