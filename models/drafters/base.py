"""What the decoder asks of a source of drafted tokens.

A drafter is stateless between batches: what it remembers of the rows lives in a state of its own, which the decoder
keeps beside its batch and hands back. Rows join (`extend`) and leave (`select_rows`) while others go on.

Shape suffixes: B rows, T positions, K drafted tokens, N nodes of a tree, I inner places, S side nodes, W watched ones,
V vocabulary, H hidden: the width of what the target's pass gives a position, with the layers that are read behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ..processors.block import BlockProcessor
from ..sampling import SamplingParams


@dataclass(frozen=True)
class SideNodes:
    """Nodes that take part in the target's pass and are never kept; they stand behind those of the tree.

    parents: of each, among the side nodes, in all rows alike; -1 is the root. watch: is given the target's likeliest
    token [B, W] after each of the last num_watched.
    """

    parents: tuple[int, ...]
    tokens_BS: Tensor
    num_watched: int
    watch: Callable[[Tensor], None]


@dataclass(frozen=True)
class Branches:
    """A drafted tree a row; see `verification.tree.DraftTree`, where nodes, places and their order are explained.

    parents: of every row, N nodes each; with probs_BIV the same in all rows. A row's shape may depend on its settled
    text and on the drafter's distributions, not on drawn tokens. drafted_BN: nodes that count, the others are padding.
    """

    parents: Sequence[tuple[int, ...]]
    tokens_BN: Tensor
    drafted_BN: Tensor
    probs_BIV: Tensor | None = None
    distinct: bool = False
    side: SideNodes | None = None


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and what they were drawn from."""

    tokens_BK: Tensor  # int64
    # q, after the sampling transforms: exactly what the tokens were drawn from. None: one-hot (greedy, or a drafter
    # without a distribution).
    probs_BKV: Tensor | None = None
    # How many of a row's tokens count, for a drafter that may have less to say; None: all.
    counts: Sequence[int] | None = None
    # The drafter's hidden state that each token was drawn from, for a drafter that has one: a learned rule reads it.
    hidden_BKH: Tensor | None = None
    # A tree in the place of the chain above, which then is empty.
    branches: Branches | None = None

    def narrowed(self, width: int) -> "Draft":
        """The first `width` tokens of each chain; a tree stays as it is."""
        if self.branches is not None or self.tokens_BK.shape[1] <= width:
            return self
        probs_BKV = self.probs_BKV[:, :width] if self.probs_BKV is not None and width else None
        hidden_BKH = self.hidden_BKH[:, :width] if self.hidden_BKH is not None and width else None
        counts = None if self.counts is None else [min(count, width) for count in self.counts]
        return Draft(self.tokens_BK[:, :width], probs_BKV, counts, hidden_BKH)

    def check_ids(self, vocab_size: int) -> None:
        """Assert that all ids, those of padding included, are of this vocabulary: the target embeds every one."""
        for ids in (self.tokens_BK, self.branches.tokens_BN if self.branches is not None else self.tokens_BK):
            is_known = (ids >= 0) & (ids < vocab_size)
            assert is_known.all(), f"drafted ids {ids[~is_known].tolist()}: ids of this target are below {vocab_size}"


class Drafter(Protocol):
    """A source of drafted tokens."""

    vocab_size: int  # must be the target's
    max_draft_tokens: int | None  # longest block it can propose; None: any
    network: nn.Module | None  # what runs while drafting; None for a drafter without a network

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        """State of a new batch with these prompts. The first `absorb` covers them."""
        ...

    def absorb(self, state: Any, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """Take in what the target's last pass settled.

        The first counts[b] entries of row b are pairs (target's last hidden state at a position, token that follows
        it); behind them is padding. The last of these tokens is the root: emitted, and not yet seen by the target.
        """
        ...

    def propose(
        self,
        state: Any,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """Draft num_draft_tokens >= 1 tokens that follow the root.

        Tokens are drawn with `sampling.sample_from` and uniforms_BK, float64 in [0, 1), from
        `sampling.transform_logits` of the drafter's logits; uniforms_BK is None when params are greedy. `processor`:
        what the target's logits go through, at each place with its own prefix. The output is right without it, and more
        of the draft is kept with it.
        """
        ...

    def select_rows(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        ...

    def extend(self, state: Any, other: Any) -> None:
        """Append the rows of another state."""
        ...


@runtime_checkable
class LayerReader(Drafter, Protocol):
    """A drafter that is given the target's hidden states with these of its layers behind them; see `Target.hidden`."""

    reads: tuple[int, ...]


@runtime_checkable
class BranchDrafter(Drafter, Protocol):
    """A drafter of trees: its `propose` gives `Draft.branches`.

    num_draft_tokens is then the depth of the tree, always the decoder's K: the shape of a row's tree must not depend on
    how much other rows may still emit, and nodes that are too deep for a row are left out afterwards. Node n is drawn
    by uniform n of num_nodes.
    """

    num_nodes: int  # most nodes of a tree
