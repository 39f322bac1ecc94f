"""Drafting with trained heads on the target's hidden states, whatever their kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import heads_record, load_heads
from ..heads.base import DraftHead, HeadState
from ..processors.block import BlockProcessor
from ..sampling import SamplingParams
from .base import Draft
from .drawing import Drawing, Prefix
from .options import DrafterContext, DrafterOptions
from .pairs import Pairs, join_pairs
from .stop import DraftStop


@dataclass
class HeadsState:
    """The head's own state, and what the target has settled since the head last drafted.

    Where the length controller lets several blocks go undrafted, their pairs are taken in at once: plain decoding then
    pays for no head.
    """

    head: HeadState
    unread: list[Pairs]
    num_rows: int


class HeadRows:
    """All of a `Drafter` over a `DraftHead` but `propose`, which begins with `read`."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.network: nn.Module | None = head
        self.vocab_size = head.vocab_size
        self.reads = head.reads
        self.max_draft_tokens: int | None = None if head.recursive else head.num_draft_tokens

    def start(self, prompts: Sequence[Sequence[int]]) -> HeadsState:
        """See `Drafter.start`."""
        return HeadsState(self.head.start(len(prompts)), [], len(prompts))

    def absorb(self, state: HeadsState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """See `Drafter.absorb`."""
        state.unread.append(Pairs(hidden_BTH, next_tokens_BT, counts))

    def select_rows(self, state: HeadsState, rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        self.read(state)
        self.head.select_rows(state.head, rows)
        state.num_rows = len(rows)

    def extend(self, state: HeadsState, other: HeadsState) -> None:
        """See `Drafter.extend`."""
        self.read(state)
        self.read(other)
        self.head.extend(state.head, other.head)
        state.num_rows += other.num_rows

    @torch.no_grad()
    def read(self, state: HeadsState) -> None:
        """Let the head take in what was settled since it last did."""
        if state.unread:
            pairs = join_pairs(state.unread)
            self.head.absorb(state.head, pairs.hidden_BTH, pairs.next_tokens_BT, pairs.counts)
            state.unread = []


class HeadsDrafter(HeadRows):
    """A `DraftHead` as a drafter: its logits go through the target's sampling transforms, place by place."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.stop: DraftStop | None = None

    @torch.no_grad()
    def propose(
        self,
        state: HeadsState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
        prefix: Prefix | None = None,
    ) -> Draft:
        """See `Drafter.propose`. prefix: tokens to draft behind, which the head reads as if it had drafted them."""
        self.read(state)
        drawing = Drawing(self.head.target.get.device, params, uniforms_BK, processor, self.stop, prefix)
        for place in range(num_draft_tokens):
            previous_B = drawing.tokens[place - 1] if place else None
            if place < drawing.num_given:
                self.head.draft_hidden(state.head, previous_B)
                continue
            hidden_BH, logits_BV = self.head.draft_step(state.head, previous_B)
            if not drawing.draw(self.head.target.get.hide_padding(logits_BV), hidden_BH):
                break
        return drawing.finish([num_draft_tokens] * state.num_rows)


def build(options: DrafterOptions, context: DrafterContext) -> tuple[HeadsDrafter, dict[str, Any]]:
    """See `options.Build`. ValueError where no checkpoint is given, or it was trained for another target."""
    if context.checkpoint is None:
        raise ValueError("drafter=heads needs checkpoint=FOLDER, which train.mtp writes")
    return HeadsDrafter(load_heads(context.checkpoint, context.target)), heads_record(context.checkpoint)
