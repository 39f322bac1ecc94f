"""The recursive MTP head: one transformer layer that is applied once a drafted token.

DeepSeek-V3 (arXiv 2412.19437, eq. 21-23): normalise the previous state and the next token's embedding, concatenate,
project, run one layer, normalise, use the target's output head. One set of weights serves every step, as in FastMTP
(arXiv 2509.18362). The layer is a copy of the target's last one, whatever its family.

Step 1 at position t reads (h_t, x_{t+1}); step k reads (state of step k - 1, x_{t+k}). What a step's attention sees is
a deviation from DeepSeek-V3, taken from EAGLE-3's training (see `recursive`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache

from ..cache.ragged import RaggedCache
from ..target.model import Target
from ..target.placement import plain_copy
from .base import HeadOptions
from .recursive import RecursiveHead, RMSNorm

# Size of the embedding's part in the first layer's input, relative to the state's.
EMBEDDING_SHARE = 0.3
# Gains of the final norm below this share of their median are taken as switched off.
MIN_GAIN = 0.02
PROBE_TOKENS = 64
# Ridge of the least-squares start, relative to the mean square of its features.
RIDGE = 1e-3


class MTPHead(RecursiveHead):
    """norm both, concatenate [state; embedding], project, layer(s), norm."""

    kind = "mtp"

    def __init__(self, target: Target, options: HeadOptions, draft_vocab: Tensor | None = None) -> None:
        super().__init__(target, options, draft_vocab)
        eps = getattr(target.config, "rms_norm_eps", 1e-6)
        size = self.hidden_size
        available = len(target.layers())
        if options.num_layers > available:
            raise ValueError(
                f"heads.num_layers={options.num_layers}: the target has only {available} layers to start from"
            )
        self.norm_state = RMSNorm(size, eps)
        self.norm_embedding = RMSNorm(size, eps)
        self.project = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(plain_copy(layer) for layer in target.layers()[available - options.num_layers :])
        for index, layer in enumerate(self.layers):
            layer.get_submodule("self_attn").layer_idx = index  # type: ignore[assignment]
        self.norm_out: nn.Module = plain_copy(target.decoder.get_submodule("norm"))
        self.scale = nn.Parameter(torch.ones(()))
        self.float().requires_grad_(True).to(target.device)
        self._start_blind()

    @torch.no_grad()
    def _start_blind(self) -> None:
        """First weights without text: the copied layer meets the residual stream of its own depth and size.

        A state is the stream, normalised, times the final norm's gain; dividing by the gain gives its direction back,
        and `scale` its size. The embedding enters small and through a random map: through the identity, the head would
        first of all predict the token that it was given.
        """
        size = self.hidden_size
        gain = self.norm_out(torch.ones(size, device=self.scale.device))
        inverse = torch.where(gain.abs() > MIN_GAIN * gain.abs().median(), 1 / gain, 0.0)
        embedding_half = (
            torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * EMBEDDING_SHARE / size**0.5
        )
        state_half = torch.diag(inverse * gain.pow(2).mean().sqrt())
        self.project.weight.copy_(torch.cat([state_half, embedding_half.to(state_half.device)], dim=1))
        target = self.target.get
        probe = torch.linspace(0, target.vocab_size - 1, PROBE_TOKENS, device=target.device).long()[None]
        self.scale.copy_(_rms(self._layer_input(probe)[1]).median())

    @torch.no_grad()
    def fit_start(self, texts: Sequence[Tensor]) -> None:
        """Set `project` to the least-squares estimate of what the copied layer receives in the target itself.

        At position t + 1 the target's own layer reads some r_{t+1}, and what follows it turns r_{t+1} into the right
        prediction. The linear map from (h_t, x_{t+1}) closest to r_{t+1} is therefore a start from which the copied
        layer already predicts. Positions count by 1 / rms(r)^2: the layer normalises, so relative errors matter.
        Our own method.
        """
        size = self.hidden_size
        gram = torch.zeros(2 * size, 2 * size, dtype=torch.float64, device=self.scale.device)
        cross = torch.zeros(2 * size, size, dtype=torch.float64, device=self.scale.device)
        sizes = []
        for ids_T in tqdm(texts, desc="first weights", unit="text", leave=False):
            ids_1T = ids_T[None].to(self.target.get.device)
            hidden_1TH, residual_1TH = self._layer_input(ids_1T)
            features = self._features(hidden_1TH[:, :-1].float(), ids_1T[:, 1:])[0].double()
            rms = _rms(residual_1TH[0, 1:].double())[:, None]
            gram += (features / rms).T @ (features / rms)
            cross += (features / rms).T @ (residual_1TH[0, 1:].double() / rms)
            sizes.append(rms[:, 0])
        if sum(map(len, sizes)) <= 4 * size:
            return  # too little text to say anything about 2H x H weights
        self.scale.copy_(torch.cat(sizes).median())
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(2 * size, dtype=gram.dtype, device=gram.device)
        self.project.weight.copy_(torch.linalg.solve(gram + ridge, cross).T / self.scale)

    def _layer_input(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The target's hidden states, and what its layer at our first layer's depth receives: both [B, T, H]."""
        target = self.target.get
        hidden_BTH, residual_BTH = target.hidden(ids_BT, reads=[len(target.layers()) - len(self.layers)]).chunk(2, -1)
        return hidden_BTH, residual_BTH

    def _run(
        self,
        carried_BTH: Tensor,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None,
        cache: DynamicCache | RaggedCache,
    ) -> Tensor:
        blank_BT = positions_BT == 0 if self.options.blank_first else None
        x = self.project(self._features(carried_BTH, ids_BT, blank_BT)) * self.scale
        rotary = self.target.get.rotary(x, positions_BT)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=positions_BT, cache=cache, position_embeddings=rotary)
        return self.norm_out(x)

    def _features(self, state_BTH: Tensor, ids_BT: Tensor, blank_BT: Tensor | None = None) -> Tensor:
        """[state; embedding], each normalised: [B, T, 2H]. blank_BT: where the embedding is zero instead."""
        embedding_BTH = self.target.get.embed(ids_BT).to(state_BTH.dtype)
        if blank_BT is not None:
            embedding_BTH = embedding_BTH.masked_fill(blank_BT[..., None], 0)
        return torch.cat([self.norm_state(state_BTH), self.norm_embedding(embedding_BTH)], dim=-1)


def _rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension."""
    return x.float().pow(2).mean(dim=-1).sqrt()
