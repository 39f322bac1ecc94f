"""Hydra heads: Medusa heads that also read the drafted tokens (Ankner et al. 2024, arXiv 2402.05109, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..target.model import Target
from .base import DraftHead, HeadOptions, HeadState, all_bases, at_bases, below, last_kept, tokens_after


@dataclass
class HydraState(HeadState):
    """Hidden state [B, H] of the block, and the tokens it continues: the root, then what was drafted [B, 1..K].

    paths_BMK: the same for each node of a draft tree's last level.
    """

    hidden_BH: Tensor
    tokens_BK: Tensor
    paths_BMK: Tensor | None = None


class HydraMLP(nn.Module):
    """[h_t; e(x_{t+1}); ...; e(x_{t+k})] -> state, as a residual on h_t that starts at zero."""

    def __init__(self, hidden_size: int, num_tokens: int, num_layers: int) -> None:
        super().__init__()
        widths = [(num_tokens + 1) * hidden_size] + [hidden_size] * num_layers
        self.hidden_layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        # Embeddings are far smaller than hidden states; both are brought to unit scale so that both can be heard.
        x = torch.cat([F.rms_norm(part, part.shape[-1:]) for part in (hidden, *embeddings)], dim=-1)
        for layer in self.hidden_layers:
            x = F.silu(layer(x))
        return hidden + self.out(x)


class HydraHeads(DraftHead):
    """Head k guesses token t + 1 + k from h_t and the k tokens after it."""

    kind = "hydra"
    recursive = False

    def __init__(self, target: Target, options: HeadOptions, draft_vocab: Tensor | None = None) -> None:
        super().__init__(target, options, draft_vocab)
        self.heads = nn.ModuleList(
            HydraMLP(self.hidden_size, step, options.num_layers) for step in range(1, options.num_draft_tokens + 1)
        ).to(target.device)

    def forward(self, hidden_BTH: Tensor, input_ids_BT: Tensor, bases_BS: Tensor | None = None) -> Tensor:
        bases_BS = all_bases(input_ids_BT) if bases_BS is None else bases_BS
        hidden_BSH = at_bases(hidden_BTH, bases_BS).to(self.trainable_dtype())
        steps = range(1, self.num_draft_tokens + 1)
        embeddings = [self._embed(tokens_after(input_ids_BT, bases_BS, step)) for step in steps]
        return torch.stack([head(hidden_BSH, embeddings[: k + 1]) for k, head in enumerate(self.heads)])

    def start(self, batch_size: int) -> HydraState:
        device = self.target.get.device
        return HydraState(
            0,
            torch.zeros(batch_size, self.hidden_size, device=device),
            torch.zeros(batch_size, 1, dtype=torch.long, device=device),
        )

    def absorb(self, state: HydraState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        state.hidden_BH = last_kept(hidden_BTH, counts).to(self.trainable_dtype())
        state.tokens_BK = last_kept(next_tokens_BT, counts)[:, None]

    def draft_state(self, state: HydraState, tokens_B: Tensor | None) -> Tensor:
        kept_BK = state.tokens_BK[:, :1] if tokens_B is None else state.tokens_BK
        state.tokens_BK = kept_BK if tokens_B is None else torch.cat([kept_BK, tokens_B[:, None]], dim=1)
        embeddings = [self._embed(column_B) for column_B in state.tokens_BK.unbind(dim=1)]
        return self.heads[state.step - 1](state.hidden_BH, embeddings)

    def level_states(self, state: HydraState, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        if tokens_BM is None or parents_BM is None:
            state.paths_BMK = state.tokens_BK[:, None, :1]
        else:
            assert state.paths_BMK is not None
            state.paths_BMK = torch.cat([below(state.paths_BMK, parents_BM), tokens_BM[..., None]], dim=2)
        hidden_BMH = state.hidden_BH[:, None].expand(-1, state.paths_BMK.shape[1], -1)
        return self.heads[state.step - 1](hidden_BMH, [self._embed(ids_BM) for ids_BM in state.paths_BMK.unbind(dim=2)])

    def select_rows(self, state: HydraState, rows: Sequence[int]) -> None:
        state.hidden_BH = state.hidden_BH[list(rows)]
        state.tokens_BK = state.tokens_BK[list(rows), :1]

    def extend(self, state: HydraState, other: HydraState) -> None:
        state.hidden_BH = torch.cat([state.hidden_BH, other.hidden_BH])
        state.tokens_BK = torch.cat([state.tokens_BK[:, :1], other.tokens_BK[:, :1]])

    def _embed(self, ids: Tensor) -> Tensor:
        return self.target.get.embed(ids).to(self.trainable_dtype())
