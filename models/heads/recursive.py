"""Heads that are one small transformer, applied once a drafted token: all that does not hang on what its layers are.

One set of weights serves every step. Step 1 at position t reads what the target's pass gave at t, and x_{t+1}; step k
reads what step k - 1 handed on, and x_{t+k}. Attention is that of EAGLE-3's training (arXiv 2503.01840, section 3.2):
step k sees the step-1 entries of positions <= t and its own draft's entries of steps 2..k, which is exactly what a
single cache holds while decoding.

Shape suffixes: as in `base`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from ..cache.ragged import RaggedCache
from ..cache.tree_entries import tree_masks, tree_positions
from .base import DraftHead, HeadState, all_bases, at_bases, below, last_kept, tokens_after


@dataclass
class RecursiveState(HeadState):
    """A cache with one entry a verified position and one a drafted token.

    root_BH, current_BH: what was handed on by the step that read the root, and by the last one. level: the last level
    of a draft tree, where a tree is drafted.
    """

    cache: RaggedCache
    root_BH: Tensor
    current_BH: Tensor
    num_drafted_entries: int = 0
    level: TreeLevel | None = None


@dataclass
class TreeLevel:
    """What each node handed on, which of the tree's entries it sees, and of all entries the depths below the first."""

    carried_BMH: Tensor
    sees_BMT: Tensor
    depths_BT: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, started at one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class RecursiveHead(DraftHead):
    """A kind says what step 1 reads (`_enter`), what a step does (`_run`), and which state it hands out (`_finish`)."""

    recursive = True
    layers: nn.ModuleList

    @abstractmethod
    def _run(
        self,
        carried_BTH: Tensor,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None,
        cache: DynamicCache | RaggedCache,
    ) -> Tensor:
        """One step of the recursion at T positions: [B, T, H] -> [B, T, H]; appends T entries to the cache."""

    def _enter(self, hidden_BTH: Tensor) -> Tensor:
        """What the target's pass gave -> what step 1 reads [B, T, H]; by default the hidden state as it is."""
        return hidden_BTH.to(self.trainable_dtype())

    def _finish(self, carried: Tensor) -> Tensor:
        """What a step hands on [..., H] -> its state [..., H]; by default the same."""
        return carried

    def _layer_config(self) -> PreTrainedConfig:
        """The config of the layers' attention."""
        return self.target.get.config

    def forward(self, hidden_BTH: Tensor, input_ids_BT: Tensor, bases_BS: Tensor | None = None) -> Tensor:
        everywhere_BT = all_bases(input_ids_BT)
        bases_BS = everywhere_BT if bases_BS is None else bases_BS
        cache = DynamicCache()
        # Step 1 runs over all positions, since their entries are the context of all steps; later ones over the bases
        # alone.
        mask = _step_mask(everywhere_BT[:1], everywhere_BT, 1, self.trainable_dtype())
        first_ids_BT = tokens_after(input_ids_BT, everywhere_BT, 1)
        carried = self._run(self._enter(hidden_BTH), first_ids_BT, everywhere_BT[:1], mask, cache)
        carried = at_bases(carried, bases_BS)
        states = [self._finish(carried)]
        for step in range(2, self.num_draft_tokens + 1):
            mask = _step_mask(bases_BS, everywhere_BT, step, carried.dtype)
            carried = self._run(carried, tokens_after(input_ids_BT, bases_BS, step), bases_BS + step - 1, mask, cache)
            states.append(self._finish(carried))
        return torch.stack(states)

    def start(self, batch_size: int) -> RecursiveState:
        target = self.target.get
        types = ["full_attention"] * len(self.layers)
        dtype = self.trainable_dtype()
        cache = RaggedCache(self._layer_config(), batch_size, target.device, dtype, layer_types=types, finite=True)
        zeros_BH = torch.zeros(batch_size, self.hidden_size, device=target.device)
        return RecursiveState(0, cache, zeros_BH, zeros_BH)

    @torch.no_grad()
    def absorb(self, state: RecursiveState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        self._forget_draft(state)
        out_BTH = self._append(state, self._enter(hidden_BTH), next_tokens_BT)
        state.cache.advance(counts)
        state.root_BH = last_kept(out_BTH, counts)

    @torch.no_grad()
    def draft_state(self, state: RecursiveState, tokens_B: Tensor | None) -> Tensor:
        if tokens_B is None:
            self._forget_draft(state)
            state.current_BH = state.root_BH
        else:
            state.current_BH = self._append(state, state.current_BH[:, None], tokens_B[:, None])[:, 0]
            state.cache.advance([1] * state.cache.batch_size)
            state.num_drafted_entries += 1
        return self._finish(state.current_BH)

    @torch.no_grad()
    def level_states(self, state: RecursiveState, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        if tokens_BM is None or parents_BM is None:
            self._forget_draft(state)
            nothing_B0 = torch.zeros(len(state.root_BH), 0, dtype=torch.long, device=state.root_BH.device)
            state.level = TreeLevel(state.root_BH[:, None], nothing_B0[:, None].bool(), nothing_B0)
            return self._finish(state.level.carried_BMH)
        assert state.level is not None
        last, (num_rows, num_nodes) = state.level, tokens_BM.shape
        # Each node has an entry of its own, and sees it and those on the way to it.
        own_BMM = torch.eye(num_nodes, dtype=torch.bool, device=tokens_BM.device).expand(num_rows, -1, -1)
        sees_BMT = torch.cat([below(last.sees_BMT, parents_BM), own_BMM], dim=2)
        depth_BM = torch.full_like(tokens_BM, state.step - 2)
        depths_BT = torch.cat([last.depths_BT, depth_BM], dim=1)
        positions_BM = tree_positions(state.cache, depth_BM, state.num_drafted_entries)
        mask = tree_masks(state.cache, sees_BMT, depths_BT)
        carried_BMH = below(last.carried_BMH, parents_BM)
        carried_BMH = self._run(carried_BMH, tokens_BM, positions_BM, mask, state.cache)  # type: ignore[arg-type]
        state.cache.advance([num_nodes] * num_rows)
        state.num_drafted_entries += num_nodes
        state.level = TreeLevel(carried_BMH, sees_BMT, depths_BT)
        return self._finish(carried_BMH)

    def select_rows(self, state: RecursiveState, rows: Sequence[int]) -> None:
        self._forget_draft(state)
        state.cache.select_rows(rows)
        state.root_BH = state.root_BH[list(rows)]

    def extend(self, state: RecursiveState, other: RecursiveState) -> None:
        self._forget_draft(state)
        self._forget_draft(other)
        state.cache.extend(other.cache)
        state.root_BH = torch.cat([state.root_BH, other.root_BH])

    def _append(self, state: RecursiveState, carried_BTH: Tensor, ids_BT: Tensor) -> Tensor:
        num_new = ids_BT.shape[1]
        mask = state.cache.attention_masks(num_new)
        return self._run(carried_BTH, ids_BT, state.cache.positions(num_new), mask, state.cache)  # type: ignore[arg-type]

    def _forget_draft(self, state: RecursiveState) -> None:
        if state.num_drafted_entries:
            state.cache.rollback([state.num_drafted_entries] * state.cache.batch_size)
            state.num_drafted_entries = 0


def _step_mask(bases_BS: Tensor, positions_BT: Tensor, step: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, T + (step - 1) S]: step 1's entries up to the base, then each later step's own entry."""
    causal = positions_BT[:1, None, :] <= bases_BS[:, :, None]
    own = torch.eye(bases_BS.shape[1], dtype=torch.bool, device=bases_BS.device).expand(len(bases_BS), -1, -1)
    visible = torch.cat([causal, *[own] * (step - 1)], dim=2)
    mask = torch.zeros(visible.shape, dtype=dtype, device=bases_BS.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
