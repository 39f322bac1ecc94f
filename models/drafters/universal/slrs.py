"""SLRS, string-level rejection sampling: draft text, judge its first target token by the mass psi of all texts that
begin with it (Timor et al. 2025, arXiv 2502.05202, algorithm 3).

psi(t) is the draft model's probability that the text it goes on with is re-tokenised to t and something more: a sum
over all sequences of its ids that come to t. The sequences form a tree (see `text_tree`). One that could still become
a longer token is expanded where it weighs at least `min_mass`, the heaviest first, as long as a place's tree has at
most `max_sequences` leaves. Every leaf counts for the first token of its own text, so psi is exactly the law that the
token is drawn from, wherever the tree ends; with both bounds out of the way it is the paper's. After a token is drawn,
the leaves that begin with it are kept, and their weights go on as the law of what follows: each place is conditioned on
all sequences, where the paper draws one and emits one token.

A place lists the draft vocabulary once for each expanded sequence, so a draft vocabulary of bytes or characters is
what this is for; one that is larger than `max_sequences` is refused.

Shape suffixes: B rows, K drafted tokens, N nodes of a level, C slots, H the draft model's hidden size, D its
vocabulary, V the target's.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.ragged import AttentionMasks, RaggedCache
from ...heads.base import last_kept
from ...processors.block import BlockProcessor
from ...sampling import SamplingParams, sample_from, transform_logits
from ...target.model import Target
from ..base import Draft
from .base import UniversalDrafter, UniversalState
from .text_tree import FirstTokens, Leaf, TextTree

MAX_SEQUENCES = 8192
MIN_MASS = 0.01


@dataclass
class _Forest:
    """The rows' trees in one block, and the nodes that the cache holds behind the text."""

    trees: list[TextTree]
    starts: list[int]  # slots of the text: node n of a row is in slot start + n
    depths: list[list[int]]  # of each node: 1 for the text's children


class StringRejectionSampling(UniversalDrafter):
    """Drafts tokens of the target from the draft model's law of text."""

    method = "slrs"

    def __init__(
        self, draft: Target, target: Target, max_sequences: int = MAX_SEQUENCES, min_mass: float = MIN_MASS
    ) -> None:
        """ValueError for bounds out of range, or a draft vocabulary beyond them; see also `UniversalDrafter`."""
        if max_sequences < 1:
            raise ValueError(f"max_sequences={max_sequences}: must be at least 1.")
        if not 0.0 <= min_mass < 1.0:
            raise ValueError(f"min_mass={min_mass}: must be in [0, 1).")
        if draft.num_tokens > max_sequences:
            raise ValueError(
                f"draft model {draft.name!r} has {draft.num_tokens} tokens, and max_sequences={max_sequences}: psi is "
                "summed over all sequences of draft tokens that come to a target token, and their number grows as the "
                "vocabulary to the power of their length. Use a draft model of bytes or characters, a larger "
                "max_sequences, or method=slem or tli."
            )
        super().__init__(draft, target)
        self._max_expanded = max_sequences // draft.num_tokens
        self._min_mass = min_mass
        self._firsts = FirstTokens(self.translator, target.vocab_size)

    @torch.no_grad()
    def propose(
        self,
        state: UniversalState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`. May be narrower than asked for, where the drafted texts end."""
        num_rows, device = len(state.texts), self.draft.device
        is_on = self._make_room(state, [num_draft_tokens] * num_rows)
        counts = [0] * num_rows
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        forest = self._plant(state, is_on, params) if any(is_on) else _Forest([], [], [])
        while any(is_on) and len(tokens) < num_draft_tokens:
            self._grow(state, forest, is_on, params)
            rows = [tree.psi() for tree in forest.trees]
            is_on = [on and bool(psi_V.any()) for on, psi_V in zip(is_on, rows, strict=True)]
            if not any(is_on):
                break
            logits_BV = torch.stack(rows).to(device).log().float()
            logits_BV[[not on for on in is_on]] = 0.0  # a law, for rows whose tokens do not count
            if processor is not None:
                logits_BV = processor.draft(logits_BV, tokens)
            if uniforms_BK is None:
                tokens.append(logits_BV.argmax(dim=-1))
            else:
                probs.append(logits_BV.softmax(dim=-1))
                tokens.append(sample_from(probs[-1], uniforms_BK[:, len(tokens)]))
            for row, token in enumerate(tokens[-1].tolist()):
                if is_on[row]:
                    counts[row] += 1
                    forest.trees[row].condition(token)
        if forest.trees:
            state.cache.rollback([len(depths) for depths in forest.depths])
        if not tokens:
            return Draft(torch.zeros(num_rows, 0, dtype=torch.long, device=device), counts=counts)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None, counts)

    def _plant(self, state: UniversalState, is_on: list[bool], params: SamplingParams) -> _Forest:
        """Read the texts, and expand each tree's root."""
        probs_BD = self._probs(last_kept(*self._read_all(state, is_on)), params)
        starts = list(state.cache.lengths)
        trees = []
        for row, start in enumerate(starts):
            max_depth = sys.maxsize if self.context_length is None else self.context_length - start
            tree = TextTree(self._firsts, self._max_expanded, self._min_mass, max_depth)
            (root,) = tree.wanted()
            tree.expand(root, (), probs_BD[row])
            trees.append(tree)
        return _Forest(trees, starts, [[] for _ in starts])

    def _grow(self, state: UniversalState, forest: _Forest, is_on: list[bool], params: SamplingParams) -> None:
        """Expand the trees of these rows, a level at a time, until they want no more."""
        while True:
            wanted = [tree.wanted() if on else [] for tree, on in zip(forest.trees, is_on, strict=True)]
            if not any(wanted):
                return
            first_nodes = [len(depths) for depths in forest.depths]
            probs_BND = self._probs(self._read_nodes(state, forest, wanted), params)
            for row, leaves in enumerate(wanted):
                for place, leaf in enumerate(leaves):
                    path = (*leaf.path, first_nodes[row] + place)
                    forest.trees[row].expand(leaf, path, probs_BND[row, place])

    def _read_nodes(self, state: UniversalState, forest: _Forest, wanted: list[list[Leaf]]) -> Tensor:
        """Hidden states [B, N, H] after the last ids of these leaves, each of which sees its own path alone."""
        width = max(map(len, wanted))
        ids = [[leaf.last_id or 0 for leaf in leaves] + [0] * (width - len(leaves)) for leaves in wanted]
        depths = [[len(leaf.path) + 1 for leaf in leaves] + [1] * (width - len(leaves)) for leaves in wanted]
        starts_B1 = torch.tensor(forest.starts, device=self.draft.device)[:, None]
        positions_BN = starts_B1 - 1 + torch.tensor(depths, device=self.draft.device)
        masks = _masks(state.cache, forest, wanted, positions_BN)
        ids_BN = torch.tensor(ids, device=self.draft.device)
        hidden_BNH = self._forward(state, ids_BN, masks, positions_BN)
        state.cache.advance([len(leaves) for leaves in wanted])
        for row, leaves in enumerate(wanted):
            forest.depths[row] += [len(leaf.path) + 1 for leaf in leaves]
        return hidden_BNH

    def _probs(self, hidden: Tensor, params: SamplingParams) -> Tensor:
        """The draft model's law [..., D] of its next id, after the sampling transforms, on the CPU."""
        logits = self._logits(hidden).cpu()
        return transform_logits(logits.masked_fill(~self._firsts.is_drawn_D, -torch.inf), params)


def _masks(cache: RaggedCache, forest: _Forest, wanted: list[list[Leaf]], positions_BN: Tensor) -> AttentionMasks:
    """What each new node sees: the text, its path, itself. As `RaggedCache.attention_masks`; [B, 1, N, C]."""
    num_rows, num_new = positions_BN.shape
    num_slots = cache.longest + num_new
    visible_BNC = torch.zeros(num_rows, num_new, num_slots, dtype=torch.bool)
    slot_positions_BC = torch.arange(num_slots).repeat(num_rows, 1)
    for row, (leaves, start, depths) in enumerate(zip(wanted, forest.starts, forest.depths, strict=True)):
        visible_BNC[row, :, :start] = True
        slot_positions_BC[row, start : start + len(depths)] = start - 1 + torch.tensor(depths, dtype=torch.long)
        first = cache.lengths[row]
        for place in range(num_new):
            path = leaves[place].path if place < len(leaves) else ()
            visible_BNC[row, place, [*(start + node for node in path), first + place]] = True
            slot_positions_BC[row, first + place] = positions_BN[row, place]
    masks: dict[str, Tensor] = {}
    for layer_type in cache.mask_types:
        mask_BNC = visible_BNC
        if layer_type == "sliding_attention" and cache.sliding_window is not None:
            mask_BNC = visible_BNC & (
                slot_positions_BC[:, None] > positions_BN.cpu()[:, :, None] - cache.sliding_window
            )
        mask_B1NC = mask_BNC[:, None].to(positions_BN.device)
        if cache.eager:
            hidden = torch.finfo(cache.dtype).min
            mask_B1NC = torch.zeros_like(mask_B1NC, dtype=cache.dtype).masked_fill(~mask_B1NC, hidden)
        masks[layer_type] = mask_B1NC
    return masks if len(masks) > 1 else next(iter(masks.values()))
