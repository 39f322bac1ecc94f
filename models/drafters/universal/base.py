"""What the three algorithms share: the draft model's cache, kept in step with a text that its tokenizer may rewrite.

A row knows what the draft model has read and what it should have read. Where the two part, the cache is rolled back,
and the rest is read with the next block's first pass. That covers rejected drafts and re-tokenised text alike.

Shape suffixes: B rows, T positions, K drafted tokens, H the draft model's hidden size, D its vocabulary, V the
target's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...cache.ragged import AttentionMasks, RaggedCache
from ...processors.block import BlockProcessor
from ...sampling import SamplingParams
from ...target.model import Target
from ..base import Draft
from .spelling import num_incomplete_bytes
from .translation import Transcript, Translator, num_common


@dataclass
class UniversalState:
    """The draft model's cache, what it holds, and each row's text in the draft model's ids."""

    cache: RaggedCache
    read: list[list[int]]  # the ids whose entries the cache holds, drafted ones included
    texts: list[Transcript]


class UniversalDrafter(ABC):
    """A causal language model of another vocabulary as a drafter.

    A row whose text outgrows the draft model's context (`context_length`; None: no limit) goes on with the second half
    of it. A row whose text ends inside a character that the draft model cannot read has no drafts in that block.
    """

    method: str

    def __init__(self, draft: Target, target: Target) -> None:
        """ValueError where a tokenizer hides its tokens' bytes, devices differ, or the draft cannot roll back."""
        if draft.device != target.device:
            raise ValueError(
                f"draft model {draft.name!r} is on {draft.device} and target {target.name!r} on {target.device}: "
                "load both onto one device."
            )
        self.draft = draft
        self.network: nn.Module | None = draft.model
        self.vocab_size = target.vocab_size
        self.max_draft_tokens: int | None = None
        self.context_length: int | None = getattr(draft.config, "max_position_embeddings", None)
        self.translator = Translator(draft, target)
        self._largest_id: int = draft.model.get_input_embeddings().weight.shape[0] - 1
        try:
            self.start([])
        except ValueError as error:
            raise ValueError(f"draft model {draft.name!r} cannot draft: {error}") from error

    def start(self, prompts: Sequence[Sequence[int]]) -> UniversalState:
        """See `Drafter.start`."""
        cache = RaggedCache(self.draft.config, len(prompts), self.draft.device, self.draft.dtype, finite=True)
        texts = [self.translator.start() for _ in prompts]
        for text, prompt in zip(texts, prompts, strict=True):
            self.translator.append(text, prompt[:1])
        return UniversalState(cache, [[] for _ in prompts], texts)

    @torch.no_grad()
    def absorb(self, state: UniversalState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """See `Drafter.absorb`. The target's hidden states are not used. The prompt is read here, in one pass."""
        is_new = state.cache.longest == 0
        rollback = []
        for row, (text, tokens, count) in enumerate(zip(state.texts, next_tokens_BT.tolist(), counts, strict=True)):
            self.translator.append(text, tokens[:count])
            kept = min(num_common(state.read[row], text.ids), max(0, len(text.ids) - self._num_read_again(text)))
            rollback.append(len(state.read[row]) - kept)
            del state.read[row][kept:]
        state.cache.rollback(rollback)
        # Prompts join a batch that is under way: reading them apart from it spares its rows the padding.
        if is_new and any(has_room := self._make_room(state, [1] * len(counts))):
            ends = [len(text.ids) - self._num_read_again(text) for text in state.texts]
            self._read(state, [end if room else 0 for end, room in zip(ends, has_room, strict=True)])

    def _num_read_again(self, text: Transcript) -> int:
        """Ids at a text's end that every block reads, read before or not: it needs the hidden states after them."""
        return 1

    @abstractmethod
    def propose(
        self,
        state: UniversalState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`."""

    def select_rows(self, state: UniversalState, rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        state.cache.select_rows(rows)
        state.read = [state.read[row] for row in rows]
        state.texts = [state.texts[row] for row in rows]

    def extend(self, state: UniversalState, other: UniversalState) -> None:
        """See `Drafter.extend`."""
        state.cache.extend(other.cache)
        state.read += other.read
        state.texts += other.texts

    def _make_room(self, state: UniversalState, num_steps: Sequence[int]) -> list[bool]:
        """Drop the beginning of texts that num_steps[b] ids would lead out of the context; tell which rows may draft.

        A row may not without anything to read, or with the text's end unread.
        """
        rollback = [0] * len(state.texts)
        can_draft = []
        for row, (text, steps) in enumerate(zip(state.texts, num_steps, strict=True)):
            if self.context_length is not None and len(text.ids) + steps > self.context_length:
                prefix = self.translator.prefix
                num_kept = max(1, self.context_length // 2 - len(prefix))
                num_dropped = len(text.ids) - num_kept - len(prefix)
                if num_dropped > 0:
                    text.num_dropped += num_dropped
                    text.ids = [*prefix, *text.ids[-num_kept:]]
                    text.sources = [b""] * len(prefix) + text.sources[-num_kept:]
                    text.num_fixed = max(len(prefix), text.num_fixed - num_dropped)
                    rollback[row] = len(state.read[row])
                    state.read[row] = []
            has_room = self.context_length is None or len(text.ids) + steps <= self.context_length
            can_draft.append(has_room and bool(text.ids) and not num_incomplete_bytes(text.pending))
        state.cache.rollback(rollback)
        return can_draft

    def _read(self, state: UniversalState, ends: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Read what the draft model lacks of each row's first ends[b] ids.

        Hidden states [B, T, H], and how many of each row count; the others mean nothing.
        """
        rows = [text.ids[len(read) : end] for text, read, end in zip(state.texts, state.read, ends, strict=True)]
        for read, ids in zip(state.read, rows, strict=True):
            read += ids
        counts = [len(ids) for ids in rows]
        width = max(1, *counts)
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows], device=self.draft.device)
        return self._pass(state, ids_BT, counts), counts

    def _read_all(self, state: UniversalState, reads: Sequence[bool]) -> tuple[Tensor, list[int]]:
        """`_read` these rows to their ends, the others not at all."""
        return self._read(state, [len(text.ids) if on else 0 for text, on in zip(state.texts, reads, strict=True)])

    def _step(self, state: UniversalState, ids_B: Tensor, reads: Sequence[bool]) -> Tensor:
        """Read one drafted id in each of these rows: hidden states [B, H]."""
        for row, index in enumerate(ids_B.tolist()):
            if reads[row]:
                state.read[row].append(index)
        return self._pass(state, ids_B[:, None], [int(is_on) for is_on in reads])[:, 0]

    def _pass(self, state: UniversalState, ids_BT: Tensor, counts: Sequence[int]) -> Tensor:
        num_new = ids_BT.shape[1]
        positions_BT = state.cache.positions(num_new)
        masks = state.cache.attention_masks(num_new)
        hidden_BTH = self._forward(state, ids_BT, masks, positions_BT)
        state.cache.advance(counts)
        return hidden_BTH

    def _forward(self, state: UniversalState, ids_BT: Tensor, masks: AttentionMasks, positions_BT: Tensor) -> Tensor:
        """Hidden states [B, T, H]. Ids that the draft model lacks are read as its last one; padding stands anywhere."""
        if self.context_length is not None:
            positions_BT = positions_BT.clamp(max=self.context_length - 1)  # only padding stands there
        return self.draft.hidden(ids_BT.clamp(max=self._largest_id), masks, positions_BT, state.cache)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The draft model's logits [..., D] float32 of the ids that its tokenizer has."""
        return self.draft.logits(hidden)[..., : self.draft.num_tokens]
