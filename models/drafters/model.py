"""Drafting with a smaller model that has the target's vocabulary (Leviathan et al. 2023, arXiv 2211.17192).

The draft model reads the text and nothing of the target. Its cache is kept in step with what the target settles: of the
tokens d_1 .. d_K that a block drafts it has read all but the last, so a verdict that keeps n of them leaves the entries
of the first min(n, K - 1) in place and rolls back the others. What it has not read yet, which is the recovered token or
the bonus (with d_K before it), goes into the first pass of the next block: K passes a block, however it ends.

Shape suffixes: B rows, T positions, K drafted tokens, V vocabulary, H the draft model's hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache.ragged import RaggedCache
from ..checkpoint import model_record
from ..heads.base import last_kept
from ..processors.block import BlockProcessor
from ..sampling import SamplingParams
from ..target.model import Target, TargetOptions, load_target
from ..target.quantization import NONE
from ..target.wheel import WheelOptions
from .base import Draft
from .drawing import Drawing, Prefix
from .options import DrafterContext, DrafterOptions
from .stop import DraftStop

NAMED_TOKENS = 3  # so many differing tokens are named when two vocabularies are refused


@dataclass
class ModelState:
    """The draft model's cache, and each row's settled tokens that it lacks; while drafting it has drafted ones, too."""

    cache: RaggedCache
    unread: list[list[int]]
    num_drafted_entries: int = 0


class ModelDrafter:
    """A causal language model as a drafter.

    Its output head may be padded to another size than the target's: drafted ids, logits and q are over the target's
    vocabulary, and ids that no token of both models has are never drafted. A row that has filled the draft model's
    context (`context_length`; None: no limit) goes on without drafts.
    """

    def __init__(self, draft: Target, target: Target) -> None:
        """ValueError where the two have different vocabularies or devices, or the draft model cannot roll back."""
        _check_vocabulary(draft, target)
        if draft.device != target.device:
            raise ValueError(
                f"draft model {draft.name!r} is on {draft.device} and target {target.name!r} on {target.device}: "
                "load both onto one device."
            )
        self.draft = draft
        self.network: nn.Module | None = draft.model
        self.vocab_size = target.vocab_size
        self.max_draft_tokens: int | None = None
        self.stop: DraftStop | None = None
        self.context_length: int | None = getattr(draft.config, "max_position_embeddings", None)
        self._num_tokens = min(draft.num_tokens, target.num_tokens)
        self._largest_id: int = draft.model.get_input_embeddings().weight.shape[0] - 1
        try:
            self.start([])
        except ValueError as error:
            raise ValueError(f"draft model {draft.name!r} cannot draft: {error}") from error

    def start(self, prompts: Sequence[Sequence[int]]) -> ModelState:
        """See `Drafter.start`."""
        cache = RaggedCache(self.draft.config, len(prompts), self.draft.device, self.draft.dtype, finite=True)
        return ModelState(cache, [[prompt[0]] for prompt in prompts])

    @torch.no_grad()
    def absorb(self, state: ModelState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """See `Drafter.absorb`. The target's hidden states are not used. The prompt is read here, in one pass."""
        # All of these tokens but the last were drafted, if anything was.
        kept = [min(count - 1, state.num_drafted_entries) for count in counts]
        state.cache.rollback([state.num_drafted_entries - num_kept for num_kept in kept])
        state.num_drafted_entries = 0
        rows = zip(state.unread, next_tokens_BT.tolist(), kept, counts, strict=True)
        for unread, tokens, num_kept, count in rows:
            unread += tokens[num_kept:count]
        # Prompts join a batch that is under way: reading them apart from it spares its rows the padding.
        if state.cache.longest == 0 and any(self._room(state)):
            self._read(state, num_left=1)

    @torch.no_grad()
    def propose(
        self,
        state: ModelState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
        prefix: Prefix | None = None,
    ) -> Draft:
        """See `Drafter.propose`. prefix: tokens to draft behind.

        May be narrower than asked for, where the context leaves no row more room.
        """
        limits = [min(num_draft_tokens, room) for room in self._room(state)]
        num_places = max(limits)
        drawing = Drawing(self.draft.device, params, uniforms_BK, processor, self.stop, prefix)
        for place in range(drawing.num_given, num_places):
            if place == drawing.num_given:
                hidden_BH = self._read(state, drawing.tokens)
            else:
                hidden_BH = self._pass(state, drawing.tokens[-1][:, None], [1] * len(limits))
                state.num_drafted_entries += 1
            if not drawing.draw(self._logits(hidden_BH), hidden_BH):
                break
        return drawing.finish(limits)

    def select_rows(self, state: ModelState, rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        state.cache.select_rows(rows)
        state.unread = [state.unread[row] for row in rows]

    def extend(self, state: ModelState, other: ModelState) -> None:
        """See `Drafter.extend`. Between blocks: both have absorbed what they drafted."""
        assert state.num_drafted_entries == other.num_drafted_entries == 0
        state.cache.extend(other.cache)
        state.unread += other.unread

    def _room(self, state: ModelState) -> list[int]:
        """Tokens that each row may draft, between blocks: the text fits, with all of them but the last."""
        if self.context_length is None:
            return [torch.iinfo(torch.long).max] * len(state.unread)
        lengths = [length + len(unread) for length, unread in zip(state.cache.lengths, state.unread, strict=True)]
        return [max(0, self.context_length - length + 1) for length in lengths]

    def _read(self, state: ModelState, drafted: Sequence[Tensor] = (), num_left: int = 0) -> Tensor:
        """Read the settled tokens but for the last num_left of each row, and then drafted ones: hidden states [B, H].

        A row without room reads nothing that is settled, and its hidden state means nothing.
        """
        given = torch.stack(list(drafted), dim=1).tolist() if drafted else [[]] * len(state.unread)
        settled = [
            len(unread) - num_left if room else 0 for unread, room in zip(state.unread, self._room(state), strict=True)
        ]
        rows = [[*unread[:n], *more] for unread, n, more in zip(state.unread, settled, given, strict=True)]
        width = max(1, *map(len, rows))
        ids_BT = torch.tensor([row + (row[-1:] or [0]) * (width - len(row)) for row in rows], device=self.draft.device)
        state.unread = [unread[n:] for unread, n in zip(state.unread, settled, strict=True)]
        state.num_drafted_entries += len(drafted)
        return self._pass(state, ids_BT, [len(row) for row in rows])

    def _pass(self, state: ModelState, ids_BT: Tensor, counts: Sequence[int]) -> Tensor:
        """Run the draft model over new tokens, keep counts[b] entries of each row: hidden states [B, H] at the last."""
        num_new, cache = ids_BT.shape[1], state.cache
        positions_BT = cache.positions(num_new)
        if self.context_length is not None and cache.longest + num_new > self.context_length:
            positions_BT = positions_BT.clamp(max=self.context_length - 1)  # only padding stands there
        # An id that the draft model lacks is read as its last one: any reading will do, if it is always the same.
        ids_BT = ids_BT.clamp(max=self._largest_id)
        hidden_BTH = self.draft.hidden(ids_BT, cache.attention_masks(num_new), positions_BT, cache)
        cache.advance(counts)
        return last_kept(hidden_BTH, counts)

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """Logits [B, V] over the target's vocabulary, float32, -inf at ids that no token of both models has."""
        logits = self.draft.logits(hidden_BH)[:, : self._num_tokens]
        return F.pad(logits, (0, self.vocab_size - self._num_tokens), value=-torch.inf)


def load_model_drafter(options: TargetOptions, target: Target) -> ModelDrafter:
    """A drafter from `load_draft`'s model. ValueError where there is none, or the two do not fit."""
    return ModelDrafter(load_draft(options, target), target)


def load_draft(options: TargetOptions, target: Target, dtype: str = "", instead: str = "") -> Target:
    """The model `options.draft` (hub name or local folder), in dtype (default: the target's) and on its device.

    `options` are those that the target was loaded with, and its quantisation is its own; random weights get a sibling
    of the next seed. ValueError where none is named; it ends with `instead`, what else a user can do then.
    """
    dtype = dtype or str(target.dtype).removeprefix("torch.")
    sibling = replace(options, dtype=dtype, device=str(target.device), draft="", quantization=NONE, chat_template="")
    if options.source == "random":
        return load_target(replace(sibling, seed=options.seed + 1))
    if not options.draft:
        raise ValueError(
            f"model.draft is empty, and {target.name!r} has no smaller sibling by default: name a model of the same "
            "tokenizer (for drafter=universal, of any), e.g. model.draft=Qwen/Qwen3-0.6B for a larger Qwen3, or "
            "model.draft=path/to/folder" + instead
        )
    try:
        return load_target(replace(sibling, name=options.draft, source="auto", revision="main", wheel=WheelOptions()))
    except ValueError as error:
        raise ValueError(str(error).replace("model.name", "model.draft")) from error


def build(options: DrafterOptions, context: DrafterContext) -> tuple[ModelDrafter, dict[str, Any]]:
    """See `options.Build`."""
    drafter = load_model_drafter(context.model, context.target)
    return drafter, dict(model_record(drafter.draft))


def _check_vocabulary(draft: Target, target: Target) -> None:
    """The same ids for the same tokens. Merges and chat template do not matter: only ids go from one to the other."""
    ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = [token for token in sorted(ours.keys() | theirs.keys()) if ours.get(token) != theirs.get(token)]
    named = "; ".join(
        f"{token!r} is {_id(token, ours)} in the draft model and {_id(token, theirs)} in the target"
        for token in differing[:NAMED_TOKENS]
    )
    raise ValueError(
        f"draft model {draft.name!r} has another vocabulary than target {target.name!r}: of {len(ours)} and "
        f"{len(theirs)} tokens {len(differing)} differ ({named}). A token id must mean the same to both: give as "
        "model.draft a smaller model of the target's own family, with the same tokenizer."
    )


def _id(token: str, vocabulary: dict[str, int]) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"
