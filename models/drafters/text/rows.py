"""What drafters have in common that read the text alone and run no network: rows, their order, and ragged drafts.

Only settled tokens are ever read, so nothing has to be rolled back. What is drafted has no distribution: q is one-hot,
and how much a row drafts depends on nothing but its settled text.

Shape suffixes: B rows, T positions, K drafted tokens, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...processors.block import BlockProcessor
from ...sampling import SamplingParams
from ...target.model import Target
from ..base import Draft


class Text(Protocol):
    """What is kept of one row's text."""

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the settled tokens that follow those it has."""
        ...


class Reader(Text, Protocol):
    """A text that knows what may follow. match_length: tokens of the ending that `propose` goes on from, 0 for none."""

    @property
    def match_length(self) -> int: ...

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may follow; changes nothing."""
        ...


AnyText = TypeVar("AnyText", bound=Text)


class TextRows(ABC, Generic[AnyText]):
    """All of a `Drafter` over one text a row but `propose`."""

    def __init__(self, target: Target) -> None:
        self.vocab_size = target.vocab_size
        self.max_draft_tokens: int | None = None
        self.network: nn.Module | None = None
        self._device = target.device
        self._num_tokens = target.num_tokens

    def known(self, tokens: Sequence[int]) -> list[int]:
        """A draft up to the first id that no token has: a prompt may contain one, the target never emits one."""
        return list(takewhile(lambda token: token < self._num_tokens, tokens))

    @abstractmethod
    def make_reader(self) -> AnyText:
        """Of an empty text."""

    def start(self, prompts: Sequence[Sequence[int]]) -> list[AnyText]:
        """See `Drafter.start`."""
        readers = [self.make_reader() for _ in prompts]
        for reader, prompt in zip(readers, prompts, strict=True):
            reader.read(prompt[:1])  # the first `absorb` has what follows it
        return readers

    def absorb(self, state: list[AnyText], hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """See `Drafter.absorb`. The target's hidden states are not used."""
        for reader, tokens, count in zip(state, next_tokens_BT.tolist(), counts, strict=True):
            reader.read(tokens[:count])

    def select_rows(self, state: list[AnyText], rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        state[:] = [state[row] for row in rows]

    def extend(self, state: list[AnyText], other: list[AnyText]) -> None:
        """See `Drafter.extend`."""
        state += other


class TextDrafter(TextRows[Reader]):
    """A `Drafter` over one reader a row."""

    def propose(
        self,
        state: list[Reader],
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`. As wide as the longest row's draft; 0 wide where no row has one."""
        rows = [self.known(reader.propose(num_draft_tokens)) for reader in state]
        counts = [len(row) for row in rows]
        width = max(counts)
        padded = [row + [0] * (width - len(row)) for row in rows]
        tokens_BK = torch.tensor(padded, dtype=torch.long, device=self._device).reshape(len(rows), width)
        return Draft(tokens_BK, counts=counts)

    def match_lengths(self, state: list[Reader]) -> list[int]:
        """How long the ending is that each row's draft goes on from: the longer, the more of the draft is kept."""
        return [reader.match_length for reader in state]
