"""Medusa heads: K stacks of residual blocks over the hidden state (Cai et al. 2024, arXiv 2401.10774, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..target.model import Target
from .base import DraftHead, HeadOptions, HeadState, all_bases, at_bases, last_kept


@dataclass
class MedusaState(HeadState):
    """The hidden state [B, H] that all heads of the next block read."""

    hidden_BH: Tensor


class ResidualBlock(nn.Module):
    """h + SiLU(W h + b), W and b starting at zero, so that an untrained head repeats the target's own prediction."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(DraftHead):
    """Head k guesses token t + 1 + k from h_t alone; drafted tokens are not looked at."""

    kind = "medusa"
    recursive = False

    def __init__(self, target: Target, options: HeadOptions, draft_vocab: Tensor | None = None) -> None:
        super().__init__(target, options, draft_vocab)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(self.hidden_size) for _ in range(options.num_layers)))
            for _ in range(options.num_draft_tokens)
        ).to(target.device)

    def forward(self, hidden_BTH: Tensor, input_ids_BT: Tensor, bases_BS: Tensor | None = None) -> Tensor:
        bases_BS = all_bases(input_ids_BT) if bases_BS is None else bases_BS
        hidden_BSH = at_bases(hidden_BTH, bases_BS).to(self.trainable_dtype())
        return torch.stack([head(hidden_BSH) for head in self.heads])

    def start(self, batch_size: int) -> MedusaState:
        return MedusaState(0, torch.zeros(batch_size, self.hidden_size, device=self.target.get.device))

    def absorb(self, state: MedusaState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        state.hidden_BH = last_kept(hidden_BTH, counts).to(self.trainable_dtype())

    def draft_state(self, state: MedusaState, tokens_B: Tensor | None) -> Tensor:
        return self.heads[state.step - 1](state.hidden_BH)

    def level_states(self, state: MedusaState, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        state_B1H = self.heads[state.step - 1](state.hidden_BH)[:, None]
        return state_B1H if tokens_BM is None else state_B1H.expand(-1, tokens_BM.shape[1], -1)

    def select_rows(self, state: MedusaState, rows: Sequence[int]) -> None:
        state.hidden_BH = state.hidden_BH[list(rows)]

    def extend(self, state: MedusaState, other: MedusaState) -> None:
        state.hidden_BH = torch.cat([state.hidden_BH, other.hidden_BH])
