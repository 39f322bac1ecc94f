"""The recursive MTP head: one transformer layer that is applied once a drafted token.

DeepSeek-V3 (arXiv 2412.19437, eq. 21-23): normalise the previous state and the next token's embedding, concatenate,
project, run one layer, normalise, use the target's output head. One set of weights serves every step, as in FastMTP
(arXiv 2509.18362). The layer is a copy of the target's last one, whatever its family.

Step 1 at position t reads (h_t, x_{t+1}); step k reads (state of step k - 1, x_{t+k}). Attention, and this is a
deviation from DeepSeek-V3 taken from EAGLE-3's training (arXiv 2503.01840, section 3.2): step k sees the step-1
entries of positions <= t and its own draft's entries of steps 2..k, which is exactly what a single cache holds while
decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache

from models.decoding.cache import RaggedCache
from models.decoding.tree_entries import tree_masks, tree_positions
from models.heads.base import DraftHead, HeadOptions, HeadState, all_bases, at_bases, below, last_kept, tokens_after
from models.placement import plain_copy
from models.target import Target

# Size of the embedding's part in the first layer's input, relative to the state's.
EMBEDDING_SHARE = 0.3
# Gains of the final norm below this share of their median are taken as switched off.
MIN_GAIN = 0.02
PROBE_TOKENS = 64
# Ridge of the least-squares start, relative to the mean square of its features.
RIDGE = 1e-3


@dataclass
class MTPState(HeadState):
    """A cache with one entry a verified position and one a drafted token; states [B, H] after the root and now.

    level: the last level of a draft tree, where a tree is drafted.
    """

    cache: RaggedCache
    root_state_BH: Tensor
    state_BH: Tensor
    num_drafted_entries: int = 0
    level: TreeLevel | None = None


@dataclass
class TreeLevel:
    """Of each node, its state, which of the tree's entries it sees, and of all entries the depths below the first."""

    states_BMH: Tensor
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


class MTPHead(DraftHead):
    """norm both, concatenate [state; embedding], project, layer(s), norm."""

    kind = "mtp"
    recursive = True

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
        seen: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        depth = len(target.layers()) - len(self.layers)
        handle = target.layers()[depth].register_forward_pre_hook(note, with_kwargs=True)
        try:
            hidden_BTH = target.hidden(ids_BT)
            return hidden_BTH, seen[0].to(hidden_BTH.device)
        finally:
            handle.remove()

    def forward(self, hidden_BTH: Tensor, input_ids_BT: Tensor, bases_BS: Tensor | None = None) -> Tensor:
        everywhere_BT = all_bases(input_ids_BT)
        bases_BS = everywhere_BT if bases_BS is None else bases_BS
        cache = DynamicCache()
        # Step 1 runs over all positions, since their entries are the context of all steps; later ones over the bases
        # alone.
        mask = _step_mask(everywhere_BT[:1], everywhere_BT, 1, self.trainable_dtype())
        first_ids_BT = tokens_after(input_ids_BT, everywhere_BT, 1)
        state = self._run(hidden_BTH.to(self.trainable_dtype()), first_ids_BT, everywhere_BT[:1], mask, cache)
        state = at_bases(state, bases_BS)
        states = [state]
        for step in range(2, self.num_draft_tokens + 1):
            mask = _step_mask(bases_BS, everywhere_BT, step, state.dtype)
            state = self._run(state, tokens_after(input_ids_BT, bases_BS, step), bases_BS + step - 1, mask, cache)
            states.append(state)
        return torch.stack(states)

    def _run(
        self,
        state_BTH: Tensor,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None,
        cache: DynamicCache | RaggedCache,
    ) -> Tensor:
        """One step of the recursion at T positions: [B, T, H] -> [B, T, H]; appends T entries to the cache."""
        x = self.project(self._features(state_BTH, ids_BT)) * self.scale
        rotary = self.target.get.rotary(x, positions_BT)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=positions_BT, cache=cache, position_embeddings=rotary)
        return self.norm_out(x)

    def _features(self, state_BTH: Tensor, ids_BT: Tensor) -> Tensor:
        """[state; embedding], each normalised: [B, T, 2H]."""
        embedding_BTH = self.target.get.embed(ids_BT).to(state_BTH.dtype)
        return torch.cat([self.norm_state(state_BTH), self.norm_embedding(embedding_BTH)], dim=-1)

    def start(self, batch_size: int) -> MTPState:
        target = self.target.get
        types = ["full_attention"] * len(self.layers)
        cache = RaggedCache(target.config, batch_size, target.device, self.trainable_dtype(), layer_types=types)
        zeros_BH = torch.zeros(batch_size, self.hidden_size, device=target.device)
        return MTPState(0, cache, zeros_BH, zeros_BH)

    @torch.no_grad()
    def absorb(self, state: MTPState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        self._forget_draft(state)
        hidden_BTH = hidden_BTH.to(self.trainable_dtype())
        out_BTH = self._append(state, hidden_BTH, next_tokens_BT)
        state.cache.advance(counts)
        state.root_state_BH = last_kept(out_BTH, counts)

    @torch.no_grad()
    def draft_state(self, state: MTPState, tokens_B: Tensor | None) -> Tensor:
        if tokens_B is None:
            self._forget_draft(state)
            state.state_BH = state.root_state_BH
        else:
            state.state_BH = self._append(state, state.state_BH[:, None], tokens_B[:, None])[:, 0]
            state.cache.advance([1] * state.cache.batch_size)
            state.num_drafted_entries += 1
        return state.state_BH

    @torch.no_grad()
    def level_states(self, state: MTPState, tokens_BM: Tensor | None, parents_BM: Tensor | None) -> Tensor:
        if tokens_BM is None or parents_BM is None:
            self._forget_draft(state)
            nothing_B0 = torch.zeros(len(state.root_state_BH), 0, dtype=torch.long, device=self.scale.device)
            state.level = TreeLevel(state.root_state_BH[:, None], nothing_B0[:, None].bool(), nothing_B0)
            return state.level.states_BMH
        assert state.level is not None
        last, (num_rows, num_nodes) = state.level, tokens_BM.shape
        # Each node has an entry of its own, and sees it and those on the way to it.
        own_BMM = torch.eye(num_nodes, dtype=torch.bool, device=tokens_BM.device).expand(num_rows, -1, -1)
        sees_BMT = torch.cat([below(last.sees_BMT, parents_BM), own_BMM], dim=2)
        depth_BM = torch.full_like(tokens_BM, state.step - 2)
        depths_BT = torch.cat([last.depths_BT, depth_BM], dim=1)
        positions_BM = tree_positions(state.cache, depth_BM, state.num_drafted_entries)
        mask = tree_masks(state.cache, sees_BMT, depths_BT)
        states_BMH = below(last.states_BMH, parents_BM)
        states_BMH = self._run(states_BMH, tokens_BM, positions_BM, mask, state.cache)  # type: ignore[arg-type]
        state.cache.advance([num_nodes] * num_rows)
        state.num_drafted_entries += num_nodes
        state.level = TreeLevel(states_BMH, sees_BMT, depths_BT)
        return states_BMH

    def select_rows(self, state: MTPState, rows: Sequence[int]) -> None:
        self._forget_draft(state)
        state.cache.select_rows(rows)
        state.root_state_BH = state.root_state_BH[list(rows)]

    def extend(self, state: MTPState, other: MTPState) -> None:
        self._forget_draft(state)
        self._forget_draft(other)
        state.cache.extend(other.cache)
        state.root_state_BH = torch.cat([state.root_state_BH, other.root_state_BH])

    def _append(self, state: MTPState, states_BTH: Tensor, ids_BT: Tensor) -> Tensor:
        num_new = ids_BT.shape[1]
        mask = state.cache.attention_masks(num_new)
        return self._run(states_BTH, ids_BT, state.cache.positions(num_new), mask, state.cache)  # type: ignore[arg-type]

    def _forget_draft(self, state: MTPState) -> None:
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


def _rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension."""
    return x.float().pow(2).mean(dim=-1).sqrt()
