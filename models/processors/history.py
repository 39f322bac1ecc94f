"""What the built-in processors need to know of one row's settled text, kept from block to block.

A new block pays for the tokens that the last one emitted, not for the whole text.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Counts:
    """How often each token came, in the order of first occurrence."""

    def __init__(self) -> None:
        self.place_of: dict[int, int] = {}  # token: its place in both arrays
        self._ids, self._counts = np.zeros(64, np.int64), np.zeros(64, np.int64)

    def add(self, tokens: Sequence[int]) -> None:
        """Count these too."""
        for token in tokens:
            place = self.place_of.setdefault(token, len(self.place_of))
            if place == len(self._ids):
                self._ids, self._counts = (np.pad(array, (0, place)) for array in (self._ids, self._counts))
            self._ids[place] = token
            self._counts[place] += 1

    def with_paths(self, paths: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
        """(ids [U], counts [N, U]) of the text followed by each of the paths; an id may have the count 0."""
        num_settled = len(self.place_of)
        new: dict[int, int] = {}
        for token in (token for path in paths for token in path):
            if token not in self.place_of:
                new.setdefault(token, num_settled + len(new))
        ids = np.concatenate([self._ids[:num_settled], np.fromiter(new, np.int64, len(new))])
        counts = np.zeros((len(paths), len(ids)), np.int64)
        counts[:, :num_settled] = self._counts[:num_settled]
        for row, path in enumerate(paths):
            for token in path:
                counts[row, self.place_of[token] if token in self.place_of else new[token]] += 1
        return ids, counts


class History:
    """One row's prompt and output. prompt, shown: see `block_processor.BlockProcessor`."""

    def __init__(self, prompt: Sequence[int], shown: Sequence[int] | None = None) -> None:
        self.prompt = tuple(prompt)
        self.shown = self.prompt if shown is None else tuple(shown)
        self._begin()

    def _begin(self) -> None:
        self.generated: list[int] = []
        self._of_text: Counts | None = None
        self._of_output: Counts | None = None
        self._ngrams: dict[int, dict[tuple[int, ...], dict[int, None]]] = {}  # size: first tokens: last ones

    def catch_up(self, generated: Sequence[int]) -> "History":
        """Take in what was emitted since the last call; output that was taken back makes it begin anew."""
        if list(generated[: len(self.generated)]) != self.generated:
            self._begin()
        new = list(generated[len(self.generated) :])
        for counts in (self._of_text, self._of_output):
            if counts is not None:
                counts.add(new)
        for size, ngrams in self._ngrams.items():
            _add_ngrams(ngrams, size, self.tail(size - 1) + new)
        self.generated += new
        return self

    def tail(self, count: int) -> list[int]:
        """The last `count` tokens of shown prompt and output, or all if these are fewer."""
        if count <= 0:
            return []
        missing = count - len(self.generated)
        return [*self.shown[-missing:], *self.generated] if missing > 0 else self.generated[-count:]

    @property
    def of_text(self) -> Counts:
        """Counts of prompt and output."""
        if self._of_text is None:
            self._of_text = Counts()
            self._of_text.add([*self.prompt, *self.generated])
        return self._of_text

    @property
    def of_output(self) -> Counts:
        """Counts of the output alone."""
        if self._of_output is None:
            self._of_output = Counts()
            self._of_output.add(self.generated)
        return self._of_output

    def repeats(self, size: int, path: Sequence[int]) -> list[int]:
        """Tokens that would end an n-gram of this size for the second time, after the text and the path."""
        if size not in self._ngrams:
            self._ngrams[size] = {}
            _add_ngrams(self._ngrams[size], size, [*self.shown, *self.generated])
        text = [*self.tail(size - 1), *path]
        if len(text) < size - 1:
            return []
        start = text[len(text) - size + 1 :]
        here = [text[j + size - 1] for j in range(len(text) - size + 1) if text[j : j + size - 1] == start]
        return [*self._ngrams[size].get(tuple(start), ()), *here]


def _add_ngrams(ngrams: dict[tuple[int, ...], dict[int, None]], size: int, text: list[int]) -> None:
    for end in range(size - 1, len(text)):
        ngrams.setdefault(tuple(text[end - size + 1 : end]), {})[text[end]] = None
