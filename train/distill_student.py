"""The draft model that is trained: a smaller sibling of the target, or a few of the target's own layers.

Owns what of it is trained (all weights, or LoRA matrices beside them), what a checkpoint of it holds (the trained
tensors alone), and its export as a folder that transformers reads.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from models.decoding.drafters.model import ModelDrafter
from models.target import Target, TargetOptions, load_target
from models.wheel import WheelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Lists of a model's configuration that have an entry a layer.
PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


@dataclass
class CutOptions:
    """layers: so many of the target's own layers, evenly spread, become the draft; 0: `model.draft` is trained."""

    layers: int = 0


@dataclass
class LoraOptions:
    """rank: of the matrices beside every linear layer, which alone are trained; 0: all weights are. scale: their
    product is multiplied by scale / rank (peft's lora_alpha)."""

    rank: int = 0
    scale: float = 32.0


class Student(nn.Module):
    """A causal language model in float32 of which some tensors are trained.

    `view` is the same live model as a `Target`: for logits without gradients, and to decode with.
    """

    def __init__(self, draft: Target, lora: LoraOptions, train_embeddings: bool, seed: int = 0) -> None:
        """`draft` becomes the view; its weights are changed in place."""
        super().__init__()
        self.view = draft
        self.model: PreTrainedModel = draft.model
        self._adapted = _add_lora(self.model, lora, seed) if lora.rank else None
        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        of_ends = {id(weight) for end in ends for weight in end.parameters()}
        for name, weight in self.model.named_parameters():
            is_end = id(weight) in of_ends
            weight.requires_grad_(train_embeddings if is_end else self._adapted is None or "lora_" in name)

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        """Token ids [B, T], padded on the right, -> hidden states [B, T, H] after the final norm."""
        # Right padding behind a causal mask changes nothing before it, so no mask is needed.
        return self.model.get_decoder()(input_ids=input_ids_BT, use_cache=False).last_hidden_state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The trained tensors alone."""
        return {name: weight.detach() for name, weight in self.named_parameters() if weight.requires_grad}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """ValueError unless exactly the trained tensors are there."""
        if differing := sorted(self.state_dict().keys() ^ state_dict.keys()):
            raise ValueError(f"a checkpoint of another draft: {len(differing)} tensors differ, such as {differing[0]}")
        loaded = super().load_state_dict(state_dict, strict=False)
        loaded.missing_keys.clear()
        return loaded

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write model and tokenizer as transformers does. The student is spent after it: LoRA matrices are merged."""
        if self._adapted is not None:
            self.model = self._adapted.merge_and_unload()
            self._adapted = None
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".export.{os.getpid()}.partial"
        try:
            self.model.to(dtype).save_pretrained(scratch)
            self.view.tokenizer.save_pretrained(scratch)
            for path in sorted(scratch.iterdir()):
                os.replace(path, folder / path.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def make_student(
    target: Target, options: TargetOptions, cut: CutOptions, lora: LoraOptions, train_embeddings: bool, seed: int
) -> Student:
    """The draft before training. ValueError where there is none, or where it cannot draft for the target."""
    draft = cut_layers(target, cut.layers) if cut.layers else _load_sibling(target, options)
    # What cannot draft shows here, and not after hours of training.
    ModelDrafter(draft, target)
    return Student(draft, lora, train_embeddings, seed)


def spread_evenly(num_layers: int, num_kept: int) -> list[int]:
    """Indices of the layers that stay, from the first to the last: [0] if it is one."""
    return [round(i * (num_layers - 1) / max(1, num_kept - 1)) for i in range(num_kept)]


def cut_layers(target: Target, num_kept: int) -> Target:
    """A copy of the target, in float32, with `num_kept` of its layers, evenly spread; all else stays."""
    num_layers = len(target.layers())
    if not 1 <= num_kept < num_layers:
        raise ValueError(f"cut.layers={num_kept} must be at least 1 and less than the target's {num_layers} layers")
    kept = spread_evenly(num_layers, num_kept)
    config = copy.deepcopy(target.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.num_hidden_layers = num_kept
    for name in PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(config, name, [values[layer] for layer in kept])
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(target.device)
    place = {old: new for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in target.decoder.state_dict().items():
        first, _, rest = name.partition(".")
        if first == "layers":
            layer, _, rest = rest.partition(".")
            if int(layer) not in place:
                continue
            name = f"layers.{place[int(layer)]}.{rest}"
        weights[name] = tensor
    model.get_decoder().load_state_dict(weights)
    model.get_output_embeddings().load_state_dict(target.output_head.state_dict())
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return Target(model, target.tokenizer, f"{num_kept} layers of {target.name}")


def _load_sibling(target: Target, options: TargetOptions) -> Target:
    """`model.draft` in float32, on the target's device; with random weights the sibling of the next seed."""
    sibling = replace(options, dtype="float32", device=str(target.device), draft="")
    if options.source == "random":
        return load_target(replace(sibling, seed=options.seed + 1))
    if not options.draft:
        raise ValueError(
            f"model.draft is empty, and {target.name!r} has no smaller sibling by default: name a model of the same "
            "tokenizer (model.draft=NAME or model.draft=path/to/folder), or cut the draft from the target with "
            f"cut.layers=N (a quarter: cut.layers={max(1, round(len(target.layers()) / 4))})"
        )
    return load_target(replace(sibling, name=options.draft, source="auto", revision="main", wheel=WheelOptions()))


def _add_lora(model: PreTrainedModel, options: LoraOptions, seed: int) -> Any:
    """peft's wrapper around the model, whose linear layers get LoRA matrices in place."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=options.rank, lora_alpha=options.scale, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)
