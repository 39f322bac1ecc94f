"""Medusa heads in the layout that vLLM serves (its speculative method `medusa`), and a strict reader of that layout.

config.json names the sizes; model.safetensors has `blocks.{i}.layers.{j}.weight` and `.bias` [H, H] and [H] of head i's
residual block j, and `lm_heads.{i}.weight` [V, H] of its output head. Where the heads share the target's frozen output
head, it is `lm_heads.0.weight` alone, and `original_lm_head` is true. A block there is x + SiLU(W x + b), as ours is,
and head i reads the hidden state after the final norm at the last accepted token, as ours does: its guess follows that
of the target's own token. vLLM drafts each head's likeliest token, which neither a scale nor a soft cap of logits
changes.

A reduced vocabulary: the layout has `token_map` [D], the token that each of D rows of the output head stands for, but
vLLM 0.32 stops at any folder with one ("not initialized from checkpoint: {'token_map'}", seen there: its loader counts
the map as a weight and its model does not report it as loaded). So all V rows are written, and every token outside of
the vocabulary gets the mean of those inside: its logit is the mean of theirs, and never the largest. `token_map=True`
writes the map, for a version that takes it.

vLLM passes over tensors of unknown names without a word, so what was written is read back here as it would read it, by
names that come from config.json alone, and must give our own head's logits.

Shape suffixes: K heads, N states, V vocabulary, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import CONFIG_NAME, WEIGHTS_NAME, read_object, read_tensors, write_files
from ..heads.medusa import MedusaHeads

PROBE_STATES = 8
NUM_ROUNDINGS = 4
# What a served folder must say, besides that it is one.
SIZES = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers", "truncated_vocab_size")
FLAGS = ("medusa_fc_bias", "original_lm_head")


def export_medusa(head: MedusaHeads, folder: Path, token_map: bool = False) -> None:
    """Write the heads, in the dtype that they are in, and check what was written. ValueError where vLLM has no place.

    With a token map the output head has to be the target's: vLLM makes room for all V rows of heads of their own,
    whatever the config says of a reduced vocabulary (seen in 0.32).
    """
    if head.frozen_bias(head.trainable_dtype()) is not None:
        raise ValueError(
            f"target {head.target.get.name!r} has a bias in its output head, and vLLM's Medusa heads have none; "
            "use --to hf"
        )
    token_map = token_map and head.draft_vocab is not None and len(head.draft_vocab) < head.vocab_size
    if token_map and head.options.own_output_head:
        raise ValueError(
            "--token-map with heads.own_output_head=true: vLLM reduces the target's output head alone; leave "
            "--token-map out"
        )
    write_files(folder, _tensors(head, token_map), _config(head, token_map))
    check_medusa(folder, head)


def _config(head: MedusaHeads, token_map: bool) -> dict[str, Any]:
    """vLLM takes any key with both `num` and `heads` in it for num_heads, and likewise for layers: no others here."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "num_heads": head.num_draft_tokens,
        "num_hidden_layers": head.options.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not head.options.own_output_head,
        "truncated_vocab_size": len(_drafted(head)) if token_map else head.vocab_size,
        "dtype": str(head.trainable_dtype()).removeprefix("torch."),
    }


def _drafted(head: MedusaHeads) -> Tensor:
    """The tokens that the heads may draft [D]."""
    return torch.arange(head.vocab_size) if head.draft_vocab is None else head.draft_vocab.cpu()


def _all_rows(weight_DH: Tensor, ids_D: Tensor, vocab_size: int) -> Tensor:
    """[V, H]: the rows of these tokens, and for every other one their mean."""
    rows_VH = weight_DH.float().mean(dim=0).to(weight_DH.dtype).repeat(vocab_size, 1)
    rows_VH[ids_D.to(weight_DH.device)] = weight_DH
    return rows_VH


def _tensors(head: MedusaHeads, token_map: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i in range(head.num_draft_tokens):
        for j in range(head.options.num_layers):
            for part in ("weight", "bias"):
                tensors[f"blocks.{i}.layers.{j}.{part}"] = head.get_parameter(f"heads.{i}.{j}.linear.{part}")
    for i in range(head.num_draft_tokens if head.options.own_output_head else 1):
        weight_DH = head.output_weight(i + 1).detach()
        rows = weight_DH if token_map else _all_rows(weight_DH, _drafted(head), head.vocab_size)
        tensors[f"lm_heads.{i}.weight"] = rows
    if token_map:
        tensors["token_map"] = _drafted(head)
    return tensors


@dataclass(frozen=True)
class ServedMedusa:
    """A folder of this layout, read."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @torch.no_grad()
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Hidden states [N, H] -> raw logits [K, N, V] of all heads, -inf outside the token map."""
        return torch.stack([self._head_logits(hidden_NH, i) for i in range(self.config["num_heads"])])

    def _head_logits(self, x_NH: Tensor, i: int) -> Tensor:
        for j in range(self.config["num_hidden_layers"]):
            weight = self.tensors[f"blocks.{i}.layers.{j}.weight"]
            bias = self.tensors[f"blocks.{i}.layers.{j}.bias"] if self.config["medusa_fc_bias"] else None
            x_NH = x_NH + F.silu(F.linear(x_NH, weight, bias))
        logits = F.linear(x_NH, self.tensors[f"lm_heads.{0 if self.config['original_lm_head'] else i}.weight"])
        if "token_map" not in self.tensors:
            return logits
        wide_NV = logits.new_full((len(logits), self.config["vocab_size"]), -torch.inf)
        wide_NV[:, self.tensors["token_map"]] = logits
        return wide_NV


def read_medusa(folder: Path) -> ServedMedusa:
    """A folder of this layout. ValueError for a missing, unknown or mis-shaped tensor, or a config that is not one."""
    path = folder / CONFIG_NAME
    config = read_object(path)
    if config.get("model_type") != "medusa":
        raise ValueError(f"{path} is no config of Medusa heads: its model_type must be 'medusa'")
    wrong = [name for name in SIZES if type(config.get(name)) is not int or config[name] < 1]
    wrong += [name for name in FLAGS if type(config.get(name)) is not bool]
    if wrong:
        raise ValueError(f"{path} lacks {', '.join(wrong)}, or has no such size or flag; export the checkpoint again")
    tensors = read_tensors(folder / WEIGHTS_NAME, _shapes(config), "vLLM's Medusa heads")
    if "token_map" in tensors and not _is_token_map(tensors["token_map"], config["vocab_size"]):
        raise ValueError(
            f"{folder / WEIGHTS_NAME}: token_map must be different ids below {config['vocab_size']}; it is damaged"
        )
    return ServedMedusa(config, tensors)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that vLLM makes room for."""
    hidden, rows = config["hidden_size"], config["truncated_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if config["medusa_fc_bias"]:
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
    for i in range(1 if config["original_lm_head"] else config["num_heads"]):
        shapes[f"lm_heads.{i}.weight"] = (rows, hidden)
    if rows < config["vocab_size"]:
        shapes["token_map"] = (rows,)
    return shapes


def _is_token_map(ids_D: Tensor, vocab_size: int) -> bool:
    is_inside = ids_D.dtype == torch.long and int(ids_D.min()) >= 0 and int(ids_D.max()) < vocab_size
    return is_inside and len(ids_D.unique()) == len(ids_D)


def check_medusa(folder: Path, head: MedusaHeads) -> None:
    """ValueError unless the folder, read as vLLM reads it, gives this head's logits, bit for bit."""
    served = read_medusa(folder)
    target = head.target.get
    hidden_NH = torch.randn(PROBE_STATES, head.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden_NH = hidden_NH.to(target.device, head.trainable_dtype())
    tensors = {name: tensor.to(target.device) for name, tensor in served.tensors.items()}
    logits_KNV = ServedMedusa(served.config, tensors).logits(hidden_NH)
    ids_D = _drafted(head).to(target.device)
    states_KNH = head(hidden_NH[None], torch.zeros_like(hidden_NH[None, :, 0], dtype=torch.long))[:, 0]
    for k, states_NH in enumerate(states_KNH, start=1):
        # A soft cap would make a number of -inf: families' changes go to what the head may draft alone.
        theirs_ND = target.finish_logits(logits_KNV[k - 1][:, ids_D]).float()
        is_drafted = torch.isin(logits_KNV[k - 1].argmax(dim=-1), ids_D)
        if not _same(theirs_ND, head.logits(states_NH, k), head.trainable_dtype()) or not is_drafted.all():
            raise ValueError(
                f"{folder}: head {k} gives other logits when it is read as vLLM reads it; please report it"
            )


def _same(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """But for the order of additions: a product with more rows of an output head may take another one."""
    return bool((one - other).abs().max() <= NUM_ROUNDINGS * torch.finfo(dtype).eps * other.abs().max())
