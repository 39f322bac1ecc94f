"""Drafting with trained heads on the target's hidden states, whatever their kind."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.checkpoint import heads_record, load_heads
from models.decoding.drafters.base import Draft
from models.decoding.drafters.options import DrafterContext, DrafterOptions
from models.decoding.processors import BlockProcessor
from models.decoding.sampling import SamplingParams, sample_from, transform_logits
from models.heads.base import DraftHead, HeadState


class HeadsDrafter:
    """A `DraftHead` as a drafter: its logits go through the target's sampling transforms, place by place."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.network: nn.Module | None = head
        self.vocab_size = head.vocab_size
        self.max_draft_tokens: int | None = None if head.recursive else head.num_draft_tokens

    def start(self, prompts: Sequence[Sequence[int]]) -> HeadState:
        """See `Drafter.start`."""
        state: HeadState = self.head.start(len(prompts))
        return state

    @torch.no_grad()
    def absorb(self, state: HeadState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """See `Drafter.absorb`."""
        self.head.absorb(state, hidden_BTH, next_tokens_BT, counts)

    @torch.no_grad()
    def propose(
        self,
        state: HeadState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`."""
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        hidden: list[Tensor] = []
        for place in range(num_draft_tokens):
            hidden_BH, logits_BV = self.head.draft_step(state, tokens[-1] if tokens else None)
            hidden.append(hidden_BH)
            logits_BV = self.head.target.get.hide_padding(logits_BV)
            if processor is not None:
                logits_BV = processor.draft(logits_BV, tokens)
            if uniforms_BK is None:
                tokens.append(logits_BV.argmax(dim=-1))
            else:
                probs.append(transform_logits(logits_BV, params))
                tokens.append(sample_from(probs[-1], uniforms_BK[:, place]))
        probs_BKV = torch.stack(probs, dim=1) if probs else None
        return Draft(torch.stack(tokens, dim=1), probs_BKV, hidden_BKH=torch.stack(hidden, dim=1))

    def select_rows(self, state: HeadState, rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        self.head.select_rows(state, rows)

    def extend(self, state: HeadState, other: HeadState) -> None:
        """See `Drafter.extend`."""
        self.head.extend(state, other)


def build(options: DrafterOptions, context: DrafterContext) -> tuple[HeadsDrafter, dict[str, Any]]:
    """See `options.Build`. ValueError where no checkpoint is given, or it was trained for another target."""
    if context.checkpoint is None:
        raise ValueError("drafter=heads needs checkpoint=FOLDER, which train.mtp writes")
    return HeadsDrafter(load_heads(context.checkpoint, context.target)), heads_record(context.checkpoint)
