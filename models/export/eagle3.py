"""EAGLE-3 heads in the two layouts that servers load: the speculators format (vLLM) and SGLang's own.

speculators (speculators 0.9, read by vLLM 0.32): config.json has `speculators_model_type` eagle3, the Llama layer's
config, how many tokens to draft, the verifier, and the layers read, counted as ours are. Tensors: `fc.weight` [H, 3H],
`layers.0.*` with q, k and v [.., 2H], `norm.weight`, `lm_head.weight` [D, H] and `embed_tokens.weight` [V, H]; for a
reduced vocabulary `d2t` [D], the distance from a row's number to its token, and `t2d` [V], whether a token has a row.
The embedding is a copy of the target's, which vLLM drops where its own is the same; left out, the package fills it with
what the memory holds (seen with transformers 5.24).

SGLang (0.5.23): architectures [LlamaForCausalLMEagle3], the layer's config at the top, `midlayer.*` in the place of
`layers.0.*`, and under `eagle_config` the layers read, less one: it reads in front of the layer behind each number.

Both servers pass over tensors whose names they do not know, or take a default for a key that is missing (vLLM takes
`norm_before_residual` for true), so what was written is read back (`eagle3_served`) and must give our own head's
logits. The output head's scale and soft cap are not written: a draft is the likeliest token, which neither changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import write_files
from ..heads.eagle3 import Eagle3Head
from ..target.model import PROBE_TOLERANCE
from .eagle3_served import ServedEagle3, read_sglang, read_speculators

SPECULATORS_VERSION = "0.9.0"
PROBE_TOKENS = 12
# Of the layer's config, what both layouts carry.
LAYER_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
)


def export_speculators(head: Eagle3Head, folder: Path) -> None:
    """Write the head, in the dtype that it is in, and check what was written. ValueError where there is no place."""
    _require_no_bias(head, "vLLM's EAGLE-3 heads have none")
    # With what a family does to its embeddings, such as Gemma's scale.
    embedding_VH = head.target.get.embed(_all_ids(head)).to(head.trainable_dtype())
    write_files(folder, {**_tensors(head), "embed_tokens.weight": embedding_VH}, _speculators_config(head))
    check_eagle3(read_speculators(folder), head, folder)


def export_sglang(head: Eagle3Head, folder: Path) -> None:
    """As `export_speculators`, for SGLang."""
    _require_no_bias(head, "SGLang's EAGLE-3 heads have none")
    name, num_layers = head.target.get.name, len(head.target.get.layers())
    if _scales_embeddings(head):
        raise ValueError(
            f"target {name!r} scales its embeddings, and SGLang's EAGLE-3 heads share them as they are stored; "
            "use --to vllm, which gets a copy, or --to hf"
        )
    if num_layers in head.reads:
        raise ValueError(
            f"heads.reads={list(head.reads)}: SGLang reads in front of a layer, so not behind all {num_layers}; "
            "train with other heads.reads, or use --to vllm or --to hf"
        )
    tensors = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in _tensors(head).items()}
    write_files(folder, tensors, _sglang_config(head))
    check_eagle3(read_sglang(folder), head, folder)


def _require_no_bias(head: Eagle3Head, have_none: str) -> None:
    if head.frozen_bias(head.trainable_dtype()) is not None:
        raise ValueError(f"target {head.target.get.name!r} has a bias in its output head, and {have_none}; use --to hf")


def _all_ids(head: Eagle3Head) -> Tensor:
    return torch.arange(head.vocab_size, device=head.target.get.device)


def _scales_embeddings(head: Eagle3Head) -> bool:
    """Whether the family does more with a token than look its row up."""
    target = head.target.get
    ids = _probe_ids(head, PROBE_TOKENS)
    return not torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])


def _probe_ids(head: Eagle3Head, count: int) -> Tensor:
    """So many ids, far apart."""
    return torch.linspace(0, head.vocab_size - 1, count, device=head.target.get.device).long()


def _tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """By the names of the speculators format."""
    tensors = {name: tensor for name, tensor in head.state_dict().items() if not name.startswith("output_heads.")}
    tensors["lm_head.weight"] = head.output_weight(1).to(head.trainable_dtype())
    if head.draft_vocab is not None and len(head.draft_vocab) < head.vocab_size:
        tensors["d2t"] = head.draft_vocab - torch.arange(len(head.draft_vocab), device=head.draft_vocab.device)
        tensors["t2d"] = torch.isin(_all_ids(head), head.draft_vocab)
    return tensors


def _layer_config(head: Eagle3Head) -> dict[str, Any]:
    found = head.config.to_dict()
    return {**{key: found[key] for key in LAYER_KEYS}, "dtype": str(head.trainable_dtype()).removeprefix("torch.")}


def _draft_vocab_size(head: Eagle3Head) -> int:
    return head.vocab_size if head.draft_vocab is None else len(head.draft_vocab)


def _speculators_config(head: Eagle3Head) -> dict[str, Any]:
    target = head.target.get
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": head.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": _layer_config(head),
        "draft_vocab_size": _draft_vocab_size(head),
        "eagle_aux_hidden_state_layer_ids": list(head.reads),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(head.trainable_dtype()).removeprefix("torch."),
    }


def _sglang_config(head: Eagle3Head) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(head),
        "draft_vocab_size": _draft_vocab_size(head),
        "target_hidden_size": head.hidden_size,
        "num_aux_hidden_states": len(head.reads),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [number - 1 for number in head.reads],
        },
    }


def check_eagle3(served: ServedEagle3, head: Eagle3Head, folder: Path) -> None:
    """ValueError unless the folder, read as the server reads it, gives this head's logits, up to rounding.

    Over a text of some tokens and a block that drafts twice what the head was trained for.
    """
    target = head.target.get
    num_drafted = 2 * head.num_draft_tokens
    ids_T = _probe_ids(head, PROBE_TOKENS + num_drafted)
    text_1T, next_1T = ids_T[None, :PROBE_TOKENS], ids_T[None, 1 : PROBE_TOKENS + 1]
    state = head.start(1)
    head.absorb(state, target.hidden(text_1T, reads=head.reads), next_1T, [PROBE_TOKENS])
    drafted_K = ids_T[PROBE_TOKENS + 1 :]
    ours = [head.draft_logits(state, None), *(head.draft_logits(state, token) for token in drafted_K.split(1))]
    streams_TX = target.hidden(text_1T, reads=served.reads)[0, :, target.hidden_size :]
    theirs_KV = served.on(target).logits(streams_TX, next_1T[0], drafted_K)
    # What the server leaves out of the logits, it may leave out: the likeliest token stays.
    theirs_KV = torch.where(theirs_KV.isfinite(), target.finish_logits(theirs_KV.nan_to_num(neginf=0.0)), theirs_KV)
    ours_KV = torch.cat(ours)
    is_drafted = ours_KV.isfinite()
    gap = (theirs_KV - ours_KV)[is_drafted].abs().max() / ours_KV[is_drafted].abs().max().clamp(min=1.0)
    if not torch.equal(is_drafted, theirs_KV.isfinite()) or not gap <= PROBE_TOLERANCE[head.trainable_dtype()]:
        raise ValueError(
            f"{folder}: the head gives other logits when it is read as the server reads it (relative gap {gap:.2g}); "
            "please report it"
        )
