"""Drafting from a suffix automaton: the most frequent continuation of the longest ending that stood anywhere before.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) and SAM Decoding (Hu et al. 2024, arXiv 2411.10666): matches
of any length, in amortised O(1) a token. A row drafts from its own prompt and output, and, where that is wanted, from
the other prompts and answers of the same run, if those match a longer ending.
"""

from collections.abc import Sequence
from typing import Any

from ...target.model import Target
from ..options import DrafterContext, DrafterOptions, settings_record
from .rows import TextDrafter
from .suffix_automaton import ROOT, SuffixAutomaton


class Memory:
    """What all rows of a run have read, up to a number of tokens: then everything is forgotten, and it begins anew."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.automaton = SuffixAutomaton()

    def extend(self, state: int, token: int) -> int:
        """See `SuffixAutomaton.extend`."""
        if self.automaton.num_tokens >= self.max_tokens:
            self.automaton, state = SuffixAutomaton(), ROOT
        return self.automaton.extend(state, token)


class SuffixReader:
    """The automaton of one row's text, and where the row stands in it and in the shared memory."""

    def __init__(self, min_match: int, min_probability: float, memory: Memory | None) -> None:
        self._limits = (min_match, min_probability)
        self._own = SuffixAutomaton()
        self._state = ROOT
        self._memory = memory
        self._known = memory.automaton if memory else None  # the automaton that _place lies in
        self._place = ROOT

    def read(self, tokens: Sequence[int]) -> None:
        """See `Reader.read`."""
        for token in tokens:
            self._state = self._own.extend(self._state, token)
            if self._memory is not None:
                self._place = self._memory.extend(self._current_place(), token)
                self._known = self._memory.automaton

    @property
    def match_length(self) -> int:
        """See `Reader`."""
        automaton, state = self._longest()
        return automaton.lengths[automaton.match(state)]

    def propose(self, count: int) -> list[int]:
        """See `Reader.propose`."""
        automaton, state = self._longest()
        return automaton.walk(state, count, *self._limits)

    def _longest(self) -> tuple[SuffixAutomaton, int]:
        """The automaton, of the row's own text or of the memory, that knows the longer ending, and the place in it."""
        if self._memory is not None:
            shared, place = self._memory.automaton, self._current_place()
            if shared.lengths[shared.match(place)] > self._own.lengths[self._own.match(self._state)]:
                return shared, place
        return self._own, self._state

    def _current_place(self) -> int:
        """ROOT where the memory was cleared since the row has read."""
        assert self._memory is not None
        return self._place if self._known is self._memory.automaton else ROOT


class SuffixDrafter(TextDrafter):
    """Walks on from the longest match, token by token to the most frequent one, of equals the latest.

    min_match: shorter matches draft nothing. min_probability: a draft ends before the tokens whose share of what
    followed the match, multiplied up over the draft, is below it. remembered_tokens: most tokens of a run, over all of
    its rows, that rows draft from beside their own; 0: none. With a memory a row's drafts, though never its law, depend
    on the other rows; it lasts until `forget`.
    """

    def __init__(self, target: Target, min_match: int, min_probability: float, remembered_tokens: int = 0) -> None:
        """ValueError for a limit out of range."""
        if min_match < 1:
            raise ValueError(f"drafter.min_match={min_match} must be at least 1")
        if not 0.0 <= min_probability <= 1.0:
            raise ValueError(f"drafter.min_probability={min_probability} must lie between 0 and 1")
        if remembered_tokens < 0:
            raise ValueError(f"drafter.remembered_tokens={remembered_tokens} must be at least 0; 0 remembers nothing")
        super().__init__(target)
        self.min_match, self.min_probability, self.remembered_tokens = min_match, min_probability, remembered_tokens
        self.forget()

    def forget(self) -> None:
        """Begin a new run: nothing of earlier prompts and answers is drafted from."""
        self._memory = Memory(self.remembered_tokens) if self.remembered_tokens else None

    def make_reader(self) -> SuffixReader:
        """See `TextDrafter.make_reader`."""
        return SuffixReader(self.min_match, self.min_probability, self._memory)


def build(options: DrafterOptions, context: DrafterContext) -> tuple[SuffixDrafter, dict[str, Any]]:
    """See `options.Build`."""
    assert options.min_match is not None
    assert options.min_probability is not None
    assert options.remembered_tokens is not None
    drafter = SuffixDrafter(context.target, options.min_match, options.min_probability, options.remembered_tokens)
    return drafter, settings_record(options)
