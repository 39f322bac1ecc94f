"""The recursive mtp head in the layout of a stock MTP layer, for vLLM (its method `mtp`) and SGLang (`NEXTN`).

vLLM has a class for the layer that MiMo ships (`MiMoMTP`, read in 0.32), and it is our head's own arithmetic: norms of
the previous state and of the next token's embedding, [state; embedding] projected, one Llama-like layer, a norm whose
output goes into the target's output head and into the next step. It is loaded beside any target whose hidden states
come normalised, Llama and Qwen2 among them, from a folder of its own:

- config.json: a Qwen2 config of the target's sizes, with architectures [MiMoForCausalLM], which is what vLLM goes by;
- model.safetensors: `model.mtp_layers.0.{token_layernorm, hidden_layernorm, final_layernorm}.weight` [H],
  `.input_proj.weight` [H, 2H], the layer under its usual names with biases of q, k and v (zeros where the target has
  none), and `model.embed_tokens.weight` and `lm_head.weight`, which vLLM demands of the file and then replaces by the
  target's own.

vLLM's class takes all sizes from the target's config, and asks it for the number of such layers: `VLLM_OVERRIDES` says
so on its command line. Our `scale` is multiplied into `input_proj`. vLLM runs one set of weights for every step, as we
do, and warns that it does. Both servers do without the embedding in the first pair of a text. Heads that were trained
with `blank_first` do, too; for others that pair's entry in the layer's cache is another one there, which changes drafts
by a little (two points of acceptance at most, on texts of a hundred tokens) and the output never.

SGLang 0.5.23 has the same class, reads the same names and takes the target's tables likewise; that was read in its
source and not run there.

What was written is read back by names that come from config.json alone into transformers' own Qwen2 layer, and must
give our head's logits.

Shape suffixes: T time, K steps, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from ..checkpoint import CONFIG_NAME, WEIGHTS_NAME, read_object, read_tensors, write_files
from ..heads.mtp import MTPHead
from ..target.model import Target

ARCHITECTURE = "MiMoForCausalLM"
# Families whose layers are Qwen2's in all but biases, and whose served hidden states come behind the final norm.
FAMILIES = ("llama", "mistral", "qwen2")
VLLM_OVERRIDES = {"num_nextn_predict_layers": 1}
PREFIX = "model.mtp_layers.0."
NORMS = {"token_layernorm": "norm_embedding", "hidden_layernorm": "norm_state", "final_layernorm": "norm_out"}
PROBE_TOKENS = 8
# Of the largest logit: float32 sums in another order, through a layer and a few steps.
TOLERANCE = 1e-4
INSTEAD = "use --to hf, or this project's own decoder"


def export_mtp(head: MTPHead, folder: Path, dtype: torch.dtype) -> None:
    """Write the head for its target in `dtype`, and check it. ValueError for what vLLM has no place for.

    head: in float32, so that `scale` is multiplied in before anything is rounded.
    """
    require_place(head)
    config = _config(head.target.get, dtype)
    tensors = _tensors(head)
    check_mtp(ServedMTP(config, tensors), head)
    write_files(folder, {name: tensor.to(dtype) for name, tensor in tensors.items()}, config)
    _require_written(folder, tensors, dtype)


def require_place(head: MTPHead) -> None:
    """ValueError for a head or a target of another shape than MiMo's layer."""
    target, options = head.target.get, head.options
    if options.num_layers != 1:
        raise ValueError(f"heads.num_layers={options.num_layers}: a server's MTP layer is one; train one, or {INSTEAD}")
    if options.own_output_head or head.draft_vocab is not None:
        name = "own_output_head=true" if options.own_output_head else f"draft_vocab_size={options.draft_vocab_size}"
        raise ValueError(
            f"heads.{name}: servers give MTP layers the target's whole output head; train with "
            f"heads.own_output_head=false heads.draft_vocab_size=0, or {INSTEAD}"
        )
    config = target.config
    if target.output_head.bias is not None:
        raise ValueError(
            f"target {target.name!r} has a bias in its output head, and a server's MTP layer none; {INSTEAD}"
        )
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"target {target.name!r} is of family {config.model_type!r}: a server's MTP layer is that of "
            f"{', '.join(FAMILIES)}; {INSTEAD}"
        )
    if config.hidden_act != "silu":
        raise ValueError(
            f"target {target.name!r} has hidden_act {config.hidden_act!r}, and a server's MTP layer 'silu'; {INSTEAD}"
        )
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    if layer_types[-1] != "full_attention" or window is not None:
        raise ValueError(f"target {target.name!r} attends in a window, and a server's MTP layer to all; {INSTEAD}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"target {target.name!r} has attention heads of {head_dim}, and a server's MTP layer divides hidden_size "
            f"{config.hidden_size} by {config.num_attention_heads} heads; {INSTEAD}"
        )


def _config(target: Target, dtype: torch.dtype) -> dict[str, Any]:
    of = target.config
    config = Qwen2Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=of.intermediate_size,
        num_hidden_layers=len(target.layers()),
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        hidden_act=of.hidden_act,
        max_position_embeddings=of.max_position_embeddings,
        rms_norm_eps=of.rms_norm_eps,
        rope_parameters=of.rope_parameters,
        tie_word_embeddings=False,
        architectures=[ARCHITECTURE],
        dtype=dtype,
    )
    return {**config.to_dict(), "num_nextn_predict_layers": 1}


@torch.no_grad()
def _tensors(head: MTPHead) -> dict[str, Tensor]:
    """All tensors, float32. ValueError for a layer with parts that vLLM's has not."""
    target = head.target.get
    tensors: dict[str, Tensor] = {
        f"{PREFIX}{name}.weight": head.get_parameter(f"{own}.weight") for name, own in NORMS.items()
    }
    tensors[f"{PREFIX}input_proj.weight"] = head.project.weight * head.scale
    tensors.update({PREFIX + name: tensor for name, tensor in head.layers[0].state_dict().items()})
    for part, count in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        rows = target.hidden_size // target.config.num_attention_heads * getattr(target.config, count)
        tensors.setdefault(f"{PREFIX}self_attn.{part}_proj.bias", torch.zeros(rows))
    ids_V = torch.arange(target.vocab_size, device=target.device)
    tensors["model.embed_tokens.weight"] = target.embed(ids_V)
    tensors["lm_head.weight"] = target.output_head.weight
    if unknown := sorted(tensors.keys() - _shapes(_config(target, torch.float32)).keys()):
        raise ValueError(
            f"target {target.name!r}: a server's MTP layer has no {unknown[0].removeprefix(PREFIX)}; {INSTEAD}"
        )
    return {name: tensor.detach().float() for name, tensor in tensors.items()}


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that vLLM makes room for, from the config alone."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    few = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_proj.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in NORMS},
    }
    for part, rows in (("q", hidden), ("k", few), ("v", few)):
        layer |= {f"self_attn.{part}_proj.weight": (rows, hidden), f"self_attn.{part}_proj.bias": (rows,)}
    tables = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    return {**{PREFIX + name: shape for name, shape in layer.items()}, **tables}


@dataclass(frozen=True)
class ServedMTP:
    """A folder of this layout, read: config, and tensors in float32."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @torch.no_grad()
    def draft_logits(
        self, hidden_TH: Tensor, ids_T: Tensor, drafted: Sequence[int], blank_first: bool = True
    ) -> Tensor:
        """Raw logits [1 + len(drafted), V] of a block's steps behind T pairs of hidden state and next token.

        drafted: the tokens of all steps but the last. blank_first: as vLLM treats the first pair.
        """
        layer, rotary = self._layer()
        states_TH, steps, outputs = hidden_TH, list(drafted), []
        for _ in range(len(steps) + 1):
            inputs_TH = self._inputs(states_TH, ids_T, blank_first)
            positions_1T = torch.arange(len(ids_T), device=ids_T.device)[None]
            causal_TT = torch.ones(len(ids_T), len(ids_T), dtype=torch.bool, device=ids_T.device).tril()
            mask_11TT = torch.zeros(1, 1, *causal_TT.shape, device=ids_T.device).masked_fill(~causal_TT, -torch.inf)
            out_1TH = layer(
                inputs_TH[None], attention_mask=mask_11TT, position_embeddings=rotary(inputs_TH[None], positions_1T)
            )
            state_1H = self._norm("final_layernorm", out_1TH[0, -1:])
            outputs.append(F.linear(state_1H, self.tensors["lm_head.weight"])[0])
            if steps:
                ids_T = torch.cat([ids_T, ids_T.new_tensor([steps.pop(0)])])
                states_TH = torch.cat([states_TH, state_1H])
        return torch.stack(outputs)

    def _layer(self) -> tuple[Qwen2DecoderLayer, Qwen2RotaryEmbedding]:
        config = Qwen2Config.from_dict(self.config)
        config._attn_implementation = "eager"
        layer = Qwen2DecoderLayer(config, layer_idx=0).to(self.tensors["lm_head.weight"].device).eval()
        own = {name: self.tensors[PREFIX + name] for name in layer.state_dict()}
        layer.load_state_dict(own)
        return layer, Qwen2RotaryEmbedding(config).to(self.tensors["lm_head.weight"].device)

    def _inputs(self, states_TH: Tensor, ids_T: Tensor, blank_first: bool) -> Tensor:
        embedding_TH = F.embedding(ids_T, self.tensors["model.embed_tokens.weight"])
        if blank_first:
            embedding_TH[0] = 0
        both = [self._norm("hidden_layernorm", states_TH), self._norm("token_layernorm", embedding_TH)]
        return F.linear(torch.cat(both, dim=-1), self.tensors[f"{PREFIX}input_proj.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{PREFIX}{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])


def read_mtp(folder: Path) -> ServedMTP:
    """A folder of this layout. ValueError for a missing, unknown or mis-shaped tensor, or a config that is not one."""
    path = folder / CONFIG_NAME
    config = read_object(path)
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{path} is no config of an MTP layer: its architectures must be ['{ARCHITECTURE}']")
    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "num_nextn_predict_layers",
    )  # fmt: skip
    wrong = [name for name in sizes if type(config.get(name)) is not int or config[name] < 1]
    if wrong or config["num_nextn_predict_layers"] != 1:
        name = wrong[0] if wrong else "num_nextn_predict_layers=1"
        raise ValueError(f"{path} lacks {name}, or has no such size; export the checkpoint again")
    tensors = read_tensors(folder / WEIGHTS_NAME, _shapes(config), "vLLM's MTP layer")
    return ServedMTP(config, {name: tensor.float() for name, tensor in tensors.items()})


@torch.no_grad()
def check_mtp(served: ServedMTP, head: MTPHead) -> None:
    """ValueError unless it gives this head's logits, step for step, on random states and tokens."""
    target = head.target.get
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(PROBE_TOKENS, head.hidden_size, generator=generator).to(target.device)
    ids_T = torch.randint(target.num_tokens, (PROBE_TOKENS,), generator=generator).to(target.device)
    drafted = torch.randint(target.num_tokens, (head.num_draft_tokens - 1,), generator=generator).tolist()
    on_device = ServedMTP(served.config, {name: tensor.to(target.device) for name, tensor in served.tensors.items()})
    theirs_KV = on_device.draft_logits(hidden_TH, ids_T, drafted, head.options.blank_first)
    state = head.start(1)
    head.absorb(state, hidden_TH[None], ids_T[None], [PROBE_TOKENS])
    tokens: list[Tensor | None] = [None, *(torch.tensor([token], device=target.device) for token in drafted)]
    for step, token in enumerate(tokens, start=1):
        ours_V = F.linear(head.draft_hidden(state, token)[0], target.output_head.weight.float())
        if not (theirs_KV[step - 1] - ours_V).abs().max() <= TOLERANCE * ours_V.abs().max():
            raise ValueError(
                f"target {target.name!r}: step {step} gives other logits when the head is read as servers read it, so "
                f"this family differs from those in a way that is not known here; {INSTEAD}"
            )


def _require_written(folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    found = read_mtp(folder).tensors
    if wrong := [
        name for name, tensor in tensors.items() if not torch.equal(found[name], tensor.to(dtype).float().cpu())
    ]:
        raise ValueError(f"{folder / WEIGHTS_NAME}: {wrong[0]} is not what was written; please report it")
