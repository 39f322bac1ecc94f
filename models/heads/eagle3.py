"""The EAGLE-3 head (arXiv 2503.01840): one Llama layer over three of the target's residual streams.

Step 1 at position t reads g_t = W [low_t; middle_t; high_t], the residual stream behind three of the target's layers,
and x_{t+1}; step k reads what step k - 1 handed on, before the final norm, and x_{t+k}. The layer's attention reads
[norm(embedding); norm(g)], 2H wide, and its residual is g, not normalised. The output head is its own where
`own_output_head` asks for it, over the draft vocabulary, and starts as the target's.

The layer is a Llama layer whatever the target's family, because that is what servers build for such heads
(vLLM 0.32 `llama_eagle3.py`, SGLang 0.5.23 `llama_eagle3.py`, speculators 0.9 `models/eagle3`): the target's width,
heads and rotary base, no biases, no norms of queries and keys, SiLU. Layers are counted as vLLM does: i is the residual
stream behind the first i layers, and [2, n / 2, n - 3] of n layers is its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from ..cache.ragged import RaggedCache
from ..target.model import Target
from .base import HeadOptions
from .eagle3_start import guess_linearly, write_attention
from .recursive import RecursiveHead, RMSNorm

NUM_READS = 3
# Fewest layers of which vLLM's default picks three rising ones.
MIN_DEFAULT_LAYERS = 7
# Kinds of rotary scaling that the servers' Llama layer has; with another, positions are rotated by the base alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_EPS = 1e-6


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention also reads the next token's embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)  # of the embedding
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = self.self_attn.get_submodule(name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, width, bias=False))
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, carried_BTH: Tensor, embedding_BTH: Tensor, **attention: Any) -> Tensor:
        """[B, T, H] twice -> [B, T, H]; attention: mask, cache and rotary tables."""
        both_BTX = torch.cat([self.input_layernorm(embedding_BTH), self.hidden_norm(carried_BTH)], dim=-1)
        x_BTH = carried_BTH + self.self_attn(both_BTX, **attention)[0]
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Eagle3Head(RecursiveHead):
    """Fuse, run the layer, hand on; the final norm is before the output head alone."""

    kind = "eagle3"
    concatenation = "[embedding; state]"
    reads_layers = True

    def __init__(self, target: Target, options: HeadOptions, draft_vocab: Tensor | None = None) -> None:
        """ValueError for options out of range, and for a target whose layers are too few."""
        super().__init__(target, options, draft_vocab)
        if options.num_layers != 1:
            raise ValueError(f"heads.num_layers={options.num_layers}: an eagle3 head has one layer; leave it out")
        self.reads = tuple(options.reads) or default_reads(len(target.layers()))
        check_reads(self.reads, len(target.layers()))
        self.options = replace(options, reads=list(self.reads))
        self.config = layer_config(target)
        size, eps = self.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(NUM_READS * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(self.config)])
        self.norm = RMSNorm(size, eps)
        # In a list, out of nn.Module's sight: in bfloat16 its frequencies would lose most of their digits.
        self._rotary = [LlamaRotaryEmbedding(self.config)]
        self._start_blind()
        self.float().to(target.device)
        self._rotary[0].to(target.device)

    @torch.no_grad()
    def _start_blind(self) -> None:
        """First weights: linear layers drawn as torch does by default, the final norm's gain the target's own."""
        generator = torch.Generator().manual_seed(0)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                module.weight.uniform_(-bound, bound, generator=generator)
        norm = self.target.get.decoder.get_submodule("norm")
        ones = torch.ones(self.hidden_size, device=self.target.get.device, dtype=self.target.get.dtype)
        self.norm.weight.copy_(norm(ones))

    @torch.no_grad()
    def fit_start(self, texts: Sequence[Tensor]) -> None:
        """Set `fc` and the attention to a least-squares guess of what the target's last layer gives next.

        See `eagle3_start`. With too little text all stays as it was.
        """
        layer: nn.Module = self.layers[0]
        guess = guess_linearly(self.target.get, self.reads, layer.get_submodule("input_layernorm"), texts)
        if guess is not None:
            self.fc.weight.copy_(guess.fuse)
            write_attention(layer.get_submodule("self_attn"), self.config, guess)

    def _enter(self, hidden_BTH: Tensor) -> Tensor:
        """The target's pass [B, T, 4H] -> the three streams in one, [B, T, H]; the final hidden state is not read."""
        return self.fc(hidden_BTH[..., self.hidden_size :].to(self.trainable_dtype()))

    def _run(
        self,
        carried_BTH: Tensor,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None,
        cache: DynamicCache | RaggedCache,
    ) -> Tensor:
        embedding_BTH = self.target.get.embed(ids_BT).to(carried_BTH.dtype)
        rotary = self._rotary[0](carried_BTH, positions_BT)
        out_BTH: Tensor = self.layers[0](
            carried_BTH, embedding_BTH, attention_mask=mask, cache=cache, position_embeddings=rotary
        )
        return out_BTH

    def _finish(self, carried: Tensor) -> Tensor:
        return self.norm(carried)

    def _layer_config(self) -> PreTrainedConfig:
        return self.config


def default_reads(num_layers: int) -> tuple[int, ...]:
    """vLLM's choice, and for targets of too few layers for it the embeddings, the middle and the last layer's input."""
    if num_layers >= MIN_DEFAULT_LAYERS:
        return (2, num_layers // 2, num_layers - 3)
    return (0, num_layers // 2, num_layers - 1) if num_layers >= NUM_READS else (0, 1, 2)


def check_reads(reads: tuple[int, ...], num_layers: int) -> None:
    """ValueError unless these are three rising numbers of layers."""
    is_rising = all(one < other for one, other in pairwise(reads))
    if len(reads) != NUM_READS or not is_rising or reads[0] < 0 or reads[-1] > num_layers:
        raise ValueError(
            f"heads.reads={list(reads)}: an eagle3 head reads {NUM_READS} layers of the target, rising from 0 (the "
            f"embeddings) to at most {num_layers} (all of its layers)"
        )


def layer_config(target: Target) -> LlamaConfig:
    """The config of the head's layer: as wide as the target's, with its heads and its rotary positions."""
    config, size = target.config, target.hidden_size
    num_heads = config.num_attention_heads
    inner = getattr(config, "intermediate_size", None)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=size,
        intermediate_size=inner if isinstance(inner, int) else 4 * size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or size // num_heads,
        hidden_act="silu",
        max_position_embeddings=target.max_context(),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or DEFAULT_EPS,
        rope_parameters=_rope_parameters(config),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager" if config._attn_implementation == "eager" else "sdpa",
    )


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The target's own where a Llama layer can have them; of a family with several, those of its full attention."""
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in found:
        found = found["full_attention"]
    if found.get("rope_type", "default") in ROPE_TYPES and found.get("partial_rotary_factor", 1.0) == 1.0:
        return {key: value for key, value in found.items() if key != "partial_rotary_factor"}
    return {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}
