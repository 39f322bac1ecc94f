"""Lookahead decoding: drafting from the target's own Jacobi iteration, without any training.

Fu et al. 2024 (arXiv 2402.02057). A window of num_columns columns over ngram_size - 1 rows rides in every target pass
beside the guesses. Column j holds what the last passes thought of the text at some place ahead, one pass a row; the
token that the target finds likeliest after a column's last row completes an n-gram and becomes the next pass's last
row, while the first row leaves. n-grams go into a pool, by their first token, and those that begin with the root are
the guesses: a tree of one-hot q below it, judged losslessly. Deviations: the pool also reads the n-grams of the settled
text; the window begins as that text instead of random tokens, and its columns keep their places when several tokens are
accepted; guesses with a common beginning share its nodes.

The window's nodes are a tree, too: the first row is a chain below the root, and every other node stands below the one
above it in its column, so that a node sees its column and the first row's columns before it. They are never kept.

What is guessed depends on the settled text and on earlier passes alone, not on the token that is judged.

Shape suffixes: B rows, W columns, N nodes.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...processors.block import BlockProcessor
from ...sampling import SamplingParams
from ...target.model import Target
from ..base import Branches, Draft, SideNodes
from ..options import DrafterContext, DrafterOptions, settings_record
from .rows import TextRows


class LookaheadReader:
    """One row's n-gram pool and window."""

    def __init__(self, num_columns: int, ngram_size: int, num_guesses: int) -> None:
        self._num_guesses = num_guesses
        self._shape = (ngram_size - 1, num_columns)
        # First token: what may follow it, the least recently seen first.
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._recent: deque[int] = deque(maxlen=ngram_size + num_columns)
        self._size = ngram_size
        self._window: deque[list[int]] | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """See `Text.read`."""
        for token in tokens:
            self._recent.append(token)
            if len(self._recent) >= self._size:
                self._remember(list(self._recent)[-self._size :])

    @property
    def window(self) -> list[list[int]]:
        """Row by row; at first the end of the text, each row one token further."""
        if self._window is None:
            text, (num_rows, num_columns) = list(self._recent), self._shape
            rows = ([text[(row + column) % len(text)] for column in range(num_columns)] for row in range(num_rows))
            self._window = deque(rows, maxlen=num_rows)
        return list(self._window)

    def move(self, tokens: Sequence[int]) -> None:
        """Take in what the target found likeliest after each column."""
        for column, token in enumerate(tokens):
            self._remember([*(row[column] for row in self.window), token])
        assert self._window is not None
        self._window.append(list(tokens))

    def guesses(self) -> list[tuple[int, ...]]:
        """What may follow the text's last token, the most recently seen first."""
        return list(reversed(self._pool.get(self._recent[-1], {})))

    def _remember(self, ngram: Sequence[int]) -> None:
        known = self._pool.setdefault(ngram[0], OrderedDict())
        known[tuple(ngram[1:])] = None
        known.move_to_end(tuple(ngram[1:]))
        if len(known) > self._num_guesses:
            known.popitem(last=False)


class LookaheadDrafter(TextRows[LookaheadReader]):
    """Guesses from each row's pool, and its window beside them."""

    def __init__(self, target: Target, num_columns: int, ngram_size: int, num_guesses: int) -> None:
        """num_columns: W of the paper, ngram_size: N, num_guesses: G. ValueError for one out of range."""
        if num_columns < 1 or ngram_size < 2 or num_guesses < 1:
            raise ValueError(
                f"drafter.num_columns={num_columns}, drafter.ngram_size={ngram_size}, drafter.num_guesses="
                f"{num_guesses}: must be at least 1, 2 and 1"
            )
        super().__init__(target)
        self.max_draft_tokens = ngram_size - 1
        self.num_nodes = num_guesses * (ngram_size - 1)
        self._settings = (num_columns, ngram_size, num_guesses)
        first = range(-1, num_columns - 1)
        self._window_parents = (*first, *range((ngram_size - 2) * num_columns))

    def make_reader(self) -> LookaheadReader:
        """See `TextRows.make_reader`."""
        return LookaheadReader(*self._settings)

    def propose(
        self,
        state: list[LookaheadReader],
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `BranchDrafter`. Nothing is drawn."""
        trees = [merged([self.known(guess[:num_draft_tokens]) for guess in reader.guesses()]) for reader in state]
        width = max(len(tokens) for tokens, _ in trees)
        shape = (len(trees), width)
        tokens_BN = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in trees], dtype=torch.long)
        drafted_BN = torch.tensor([[node < len(tokens) for node in range(width)] for tokens, _ in trees])
        parents = [tuple(above + [-1] * (width - len(above))) for _, above in trees]
        window = [[token for row in reader.window for token in row] for reader in state]
        readers = list(state)

        def watch(tokens_BW: Tensor) -> None:
            for reader, tokens in zip(readers, tokens_BW.tolist(), strict=True):
                reader.move(tokens)

        tokens_BS = torch.tensor(window, device=self._device)
        branches = Branches(
            parents,
            tokens_BN.reshape(shape).to(self._device),
            drafted_BN.reshape(shape).to(self._device, torch.bool),
            side=SideNodes(self._window_parents, tokens_BS, self._settings[0], watch),
        )
        return Draft(tokens_BS[:, :0], branches=branches)


def merged(guesses: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a tree with all guesses as paths; a common beginning is there once."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}  # (parent, token): node
    for guess in guesses:
        place = -1
        for token in guess:
            if (place, token) not in nodes:
                nodes[place, token] = len(tokens)
                tokens.append(token)
                parents.append(place)
            place = nodes[place, token]
    return tokens, parents


def build(options: DrafterOptions, context: DrafterContext) -> tuple[LookaheadDrafter, dict[str, Any]]:
    """See `options.Build`."""
    assert options.num_columns is not None
    assert options.ngram_size is not None
    assert options.num_guesses is not None
    drafter = LookaheadDrafter(context.target, options.num_columns, options.ngram_size, options.num_guesses)
    return drafter, settings_record(options)
