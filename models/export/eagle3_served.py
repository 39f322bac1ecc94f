"""EAGLE-3 heads as servers read them: a strict reader of both layouts, and the forward pass by the book.

Written from the sources of vLLM 0.32 (`llama_eagle3.py`, `transformers_utils/configs/speculators`), SGLang 0.5.23
(`llama_eagle3.py`) and speculators 0.9 (`models/eagle3`); shares nothing with our own head, so that each is the other's
oracle. Must not write anything.

Shape suffixes: T positions of the text, S entries seen, K drafts, N queries or key-value heads, D head width or draft
vocabulary, V vocabulary, H hidden, X = 3H streams side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..checkpoint import CONFIG_NAME, WEIGHTS_NAME, read_object, read_tensors
from ..target.model import Target

NUM_READS = 3
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# What must be said, and said like this: a server takes something else where it is missing, or means another network.
LAYER_FACTS = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
SPECULATORS_FACTS = {
    "speculators_model_type": "eagle3",
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}


@dataclass(frozen=True)
class ServedEagle3:
    """A folder of either layout, read: the layer's config, the layers read as we count them, tensors by the names of
    the speculators format."""

    config: LlamaConfig
    reads: tuple[int, ...]
    tensors: dict[str, Tensor]

    def on(self, target: Target) -> ServedEagle3:
        """The same on the target's device, with its embedding where there is no other."""
        tensors = {name: tensor.to(target.device) for name, tensor in self.tensors.items()}
        tensors.setdefault("embed_tokens.weight", target.model.get_input_embeddings().weight.detach())
        return replace(self, tensors=tensors)

    @torch.no_grad()
    def logits(self, streams_TX: Tensor, next_ids_T: Tensor, drafted_K: Tensor) -> Tensor:
        """Raw logits [1 + K, V], float32, after a text and after each drafted token; -inf outside the draft vocabulary.

        streams_TX: of the text's positions, as wide as `fc` reads; next_ids_T: the token behind each of them.
        """
        fused_TH = F.linear(streams_TX.to(self._dtype), self.tensors["fc.weight"])
        seen: list[tuple[Tensor, Tensor]] = []
        carried_TH = self._layer(fused_TH, next_ids_T, 0, seen)
        states = [carried_TH[-1:]]
        for step, token in enumerate(drafted_K.split(1)):
            states.append(self._layer(states[-1], token, len(streams_TX) + step, seen))
        normed_KH = self._norm(torch.cat(states), "norm")
        logits_KD = F.linear(normed_KH, self.tensors["lm_head.weight"]).float()
        if "d2t" not in self.tensors:
            return logits_KD
        tokens_D = self.tensors["d2t"] + torch.arange(logits_KD.shape[1], device=logits_KD.device)
        wide_KV = logits_KD.new_full((len(logits_KD), self.config.vocab_size), -torch.inf)
        wide_KV[:, tokens_D] = logits_KD
        return wide_KV

    @property
    def _dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _layer(self, carried_TH: Tensor, ids_T: Tensor, start: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer at positions start, start + 1, ..; `seen`: keys and values of all positions so far, added to."""
        embedding_TH = F.embedding(ids_T, self.tensors["embed_tokens.weight"]).to(self._dtype)
        both_TX = torch.cat(
            [self._norm(embedding_TH, "layers.0.input_layernorm"), self._norm(carried_TH, "layers.0.hidden_norm")],
            dim=1,
        )
        attended_TH = self._attention(both_TX, start, seen)
        residual_TH = carried_TH + attended_TH
        x_TH = self._norm(residual_TH, "layers.0.post_attention_layernorm")
        gate, up = (F.linear(x_TH, self.tensors[f"layers.0.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual_TH + F.linear(F.silu(gate) * up, self.tensors["layers.0.mlp.down_proj.weight"])

    def _attention(self, x_TX: Tensor, start: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        width, num_new = self.config.head_dim, len(x_TX)
        q, k, v = (
            F.linear(x_TX, self.tensors[f"layers.0.self_attn.{name}_proj.weight"]).view(num_new, -1, width)
            for name in ("q", "k", "v")
        )
        seen.append((self._rotated(k, start), v))
        keys_SND, values_SND = (torch.cat(parts) for parts in zip(*seen, strict=True))
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        keys_SND, values_SND = (part.repeat_interleave(groups, dim=1) for part in (keys_SND, values_SND))
        scores_NTS = torch.einsum("tnd,snd->nts", self._rotated(q, start), keys_SND).float() * width**-0.5
        at_T = torch.arange(start, start + num_new, device=x_TX.device)
        future_TS = torch.arange(len(keys_SND), device=x_TX.device) > at_T[:, None]
        weights_NTS = scores_NTS.masked_fill(future_TS, -torch.inf).softmax(dim=-1).to(x_TX.dtype)
        mixed_TX = torch.einsum("nts,snd->tnd", weights_NTS, values_SND).flatten(1)
        return F.linear(mixed_TX, self.tensors["layers.0.self_attn.o_proj.weight"])

    def _rotated(self, x_TND: Tensor, start: int) -> Tensor:
        """Halves of each head turned against each other (the NeoX way), by position."""
        rotary = LlamaRotaryEmbedding(self.config).to(x_TND.device)
        positions_1T = torch.arange(start, start + len(x_TND), device=x_TND.device)[None]
        cos_TD, sin_TD = (table[0].to(x_TND.dtype) for table in rotary(x_TND, positions_1T))
        one, other = x_TND.chunk(2, dim=-1)
        return x_TND * cos_TD[:, None] + torch.cat([-other, one], dim=-1) * sin_TD[:, None]


def read_speculators(folder: Path) -> ServedEagle3:
    """A folder of the speculators format. ValueError for a config or tensors that are not those of such a head."""
    config = read_object(folder / CONFIG_NAME)
    layer = config.get("transformer_layer_config")
    _require(folder, config, SPECULATORS_FACTS)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if type(methods[0].get("speculative_tokens")) is not int or not isinstance(layer, dict):
        raise ValueError(f"{folder / CONFIG_NAME} lacks proposal_methods or transformer_layer_config; export it again")
    reads = config.get("eagle_aux_hidden_state_layer_ids")
    return _read(folder, layer, config.get("draft_vocab_size"), reads, "layers.0.", has_embedding=True)


def read_sglang(folder: Path) -> ServedEagle3:
    """A folder of SGLang's layout; as `read_speculators`."""
    config = read_object(folder / CONFIG_NAME)
    eagle = config.get("eagle_config") or {}
    _require(folder, config, {"architectures": ["LlamaForCausalLMEagle3"], "num_aux_hidden_states": NUM_READS})
    _require(folder, eagle, {"use_aux_hidden_state": True})
    reads = eagle.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(reads, list):
        reads = [number + 1 if type(number) is int else None for number in reads]
    if config.get("target_hidden_size") != config.get("hidden_size"):
        raise ValueError(f"{folder / CONFIG_NAME}: target_hidden_size must be hidden_size; export it again")
    return _read(folder, config, config.get("draft_vocab_size"), reads, "midlayer.", has_embedding=False)


def _require(folder: Path, found: dict[str, Any], facts: dict[str, Any]) -> None:
    wrong = [
        f"{key} is {found.get(key)!r}, expected {value!r}" for key, value in facts.items() if found.get(key) != value
    ]
    if wrong:
        raise ValueError(f"{folder / CONFIG_NAME} is no config of an EAGLE-3 head of ours: {'; '.join(wrong)}")


def _read(
    folder: Path, layer: dict[str, Any], draft_vocab_size: Any, reads: Any, prefix: str, has_embedding: bool
) -> ServedEagle3:
    """prefix: of the layer's tensors. has_embedding: whether an embedding stands in the file."""
    _require(folder, layer, LAYER_FACTS)
    sizes = {name: layer.get(name) for name in SIZES} | {"draft_vocab_size": draft_vocab_size}
    if wrong := [name for name, value in sizes.items() if type(value) is not int or value < 1]:
        raise ValueError(f"{folder / CONFIG_NAME} lacks {', '.join(wrong)}, or has no such size; export it again")
    is_rising = isinstance(reads, list) and all(type(number) is int for number in reads) and reads == sorted(set(reads))
    if not is_rising or len(reads) != NUM_READS or reads[0] < 0:
        raise ValueError(f"{folder / CONFIG_NAME}: the layers read must be {NUM_READS} rising numbers; export it again")
    shapes = served_shapes(layer, draft_vocab_size)
    if has_embedding:
        shapes["embed_tokens.weight"] = (layer["vocab_size"], layer["hidden_size"])
    by_file = {name.replace("layers.0.", prefix): shape for name, shape in shapes.items()}
    path = folder / WEIGHTS_NAME
    tensors = read_tensors(path, by_file, "a served EAGLE-3 head")
    tensors = {name.replace(prefix, "layers.0."): tensor for name, tensor in tensors.items()}
    if "d2t" in tensors and not _is_draft_map(tensors["d2t"], tensors["t2d"]):
        raise ValueError(f"{path}: d2t and t2d must name the same tokens, in rising order; it is damaged")
    return ServedEagle3(LlamaConfig(**layer), tuple(reads), tensors)


def served_shapes(layer: dict[str, Any], draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Names, as the speculators format has them, and shapes of the tensors that the servers make room for."""
    size, inner, width = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, entries = layer["num_attention_heads"] * width, layer["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, NUM_READS * size),
        "layers.0.input_layernorm.weight": (size,),
        "layers.0.hidden_norm.weight": (size,),
        "layers.0.self_attn.q_proj.weight": (queries, 2 * size),
        "layers.0.self_attn.k_proj.weight": (entries, 2 * size),
        "layers.0.self_attn.v_proj.weight": (entries, 2 * size),
        "layers.0.self_attn.o_proj.weight": (size, queries),
        "layers.0.post_attention_layernorm.weight": (size,),
        "layers.0.mlp.gate_proj.weight": (inner, size),
        "layers.0.mlp.up_proj.weight": (inner, size),
        "layers.0.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab_size, size),
    }
    if draft_vocab_size != layer["vocab_size"]:
        shapes |= {"d2t": (draft_vocab_size,), "t2d": (layer["vocab_size"],)}
    return shapes


def _is_draft_map(d2t_D: Tensor, t2d_V: Tensor) -> bool:
    if d2t_D.dtype != torch.long or t2d_V.dtype != torch.bool:
        return False
    return torch.equal(d2t_D + torch.arange(len(d2t_D)), t2d_V.nonzero()[:, 0])
