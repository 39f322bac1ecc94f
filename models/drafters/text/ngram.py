"""Drafting by prompt lookup: what followed the longest n-gram that the text ends with, where it stood before.

After Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding, which scans the
whole text in every block. Here a table of n-grams makes it O(max_match) a token, however long the text.
"""

from collections.abc import Sequence
from typing import Any

from ...target.model import Target
from ..options import DrafterContext, DrafterOptions, settings_record
from .rows import TextDrafter


class NgramReader:
    """A text, and for each n-gram of it the place behind its last occurrence."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes = range(max_match, min_match - 1, -1)
        self._text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._source: int | None = None  # where what may follow is copied from
        self.match_length = 0

    def read(self, tokens: Sequence[int]) -> None:
        """See `Reader.read`."""
        for token in tokens:
            self._text.append(token)
            end = len(self._text)
            self._source, self.match_length = None, 0
            for size in self._sizes:
                if size > end:
                    continue
                ngram = tuple(self._text[-size:])
                if self._source is None and ngram in self._behind:
                    self._source, self.match_length = self._behind[ngram], size
                self._behind[ngram] = end

    def propose(self, count: int) -> list[int]:
        """See `Reader.propose`. A copy that reaches the text's end goes on with its own beginning: a loop stays one."""
        if self._source is None:
            return []
        period = len(self._text) - self._source
        return [self._text[self._source + place % period] for place in range(count)]


class NgramDrafter(TextDrafter):
    """Copies on from the last occurrence of the longest n-gram, n from max_match down to min_match, that ends the text.

    A row whose last min_match tokens never stood before drafts nothing.
    """

    def __init__(self, target: Target, min_match: int, max_match: int) -> None:
        """ValueError unless 1 <= min_match <= max_match."""
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"drafter.min_match={min_match} and drafter.max_match={max_match}: the first must be at least 1, the "
                "second no less than the first"
            )
        super().__init__(target)
        self.min_match, self.max_match = min_match, max_match

    def make_reader(self) -> NgramReader:
        """See `TextDrafter.make_reader`."""
        return NgramReader(self.min_match, self.max_match)


def build(options: DrafterOptions, context: DrafterContext) -> tuple[NgramDrafter, dict[str, Any]]:
    """See `options.Build`."""
    assert options.min_match is not None
    assert options.max_match is not None
    drafter = NgramDrafter(context.target, options.min_match, options.max_match)
    return drafter, settings_record(options)
