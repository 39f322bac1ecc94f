"""A suffix automaton of growing texts, with how often each ending was followed by each token.

The automaton (Blumer et al. 1985, TCS 40, "The smallest automaton recognizing the subwords of a text") has a state for
every class of substrings that end at the same places; it grows by amortised O(1) states and steps a token. Several
texts may grow in one automaton side by side, each from a state of its own (Mohri, Moreno and Weinstein 2009, TCS 410).

Pure data structure: knows nothing of rows, drafts or tensors.
"""

ROOT = 0
# A token is counted for so many of the endings that it follows, the longest first. In text that repeats itself without
# end, where each token follows as many as the text is long, shorter ones go without; this keeps a token O(1).
MAX_COUNTED = 32


class SuffixAutomaton:
    """State s stands for the substrings that share its end places: the longest has lengths[s] tokens.

    links[s]: state of the longest of its endings that has other end places, too (-1 for the root). edges[s]: token ->
    state. follows[s]: token -> how often it came after s. totals[s]: their sum. favourites[s]: the token that came most
    often, of equals the latest.
    """

    def __init__(self) -> None:
        self.lengths = [0]
        self.links = [-1]
        self.edges: list[dict[int, int]] = [{}]
        self.follows: list[dict[int, int]] = [{}]
        self.totals = [0]
        self.favourites = [-1]
        self.num_tokens = 0

    def extend(self, state: int, token: int) -> int:
        """Append a token to the text that ends in `state` (ROOT: an empty one); returns the state where it ends now."""
        target = self._grow(state, token)
        self._count(state, token)
        self.num_tokens += 1
        return target

    def match(self, state: int) -> int:
        """The longest ending of a text in `state` that something has followed, in any text; ROOT if there is none."""
        while state != ROOT and not self.edges[state]:
            state = self.links[state]
        return state

    def walk(self, state: int, count: int, min_match: int, min_probability: float) -> list[int]:
        """At most `count` tokens that may follow the text in `state`, each the most frequent after those before it.

        Stops where only endings shorter than min_match have a continuation, and before the tokens whose share of
        continuations, multiplied up from the first token on, is below min_probability.
        """
        tokens: list[int] = []
        probability = 1.0
        while len(tokens) < count:
            state = self.match(state)
            if self.lengths[state] < min_match:
                break
            token = self.favourites[state]
            probability *= self.follows[state][token] / self.totals[state]
            if probability < min_probability:
                break
            tokens.append(token)
            state = self.edges[state][token]
        return tokens

    def _grow(self, state: int, token: int) -> int:
        known = self.edges[state].get(token)
        if known is not None:  # another text went on like this
            return self._exact(state, known, token)
        target = self._add(self.lengths[state] + 1)
        at = state
        while at != -1 and token not in self.edges[at]:
            self.edges[at][token] = target
            at = self.links[at]
        self.links[target] = ROOT if at == -1 else self._exact(at, self.edges[at][token], token)
        return target

    def _exact(self, state: int, known: int, token: int) -> int:
        """The state whose longest string is that of `state` with the token: `known`, or what is split off from it."""
        if self.lengths[known] == self.lengths[state] + 1:
            return known
        twin = self._add(self.lengths[state] + 1)
        self.edges[twin] = dict(self.edges[known])
        self.follows[twin] = dict(self.follows[known])
        self.totals[twin] = self.totals[known]
        self.favourites[twin] = self.favourites[known]
        self.links[twin] = self.links[known]
        self.links[known] = twin
        while state != -1 and self.edges[state].get(token) == known:
            self.edges[state][token] = twin
            state = self.links[state]
        return twin

    def _add(self, length: int) -> int:
        self.lengths.append(length)
        self.links.append(-1)
        self.edges.append({})
        self.follows.append({})
        self.totals.append(0)
        self.favourites.append(-1)
        return len(self.lengths) - 1

    def _count(self, state: int, token: int) -> None:
        for _ in range(MAX_COUNTED):
            if state == -1:
                break
            follows = self.follows[state]
            follows[token] = follows.get(token, 0) + 1
            self.totals[state] += 1
            if follows[token] >= follows.get(self.favourites[state], 0):
                self.favourites[state] = token
            state = self.links[state]
