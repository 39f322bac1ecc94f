"""The draft model that is trained: a smaller sibling of the target, or a few of the target's own layers.

Owns what of it is trained (all weights, or LoRA matrices beside them), what a checkpoint of it holds (the trained
tensors alone), and its export as a folder that transformers reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.drafters.model import ModelDrafter, load_draft
from models.files import new_files
from models.target.model import Target, TargetOptions
from train.distill.cut import CutOptions, cut_layers
from train.distill.lora import LoraOptions, add_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Student(nn.Module):
    """A causal language model in float32 of which some tensors are trained.

    `view` is the same live model as a `Target`: for logits without gradients, and to decode with.
    """

    def __init__(self, draft: Target, lora: LoraOptions, train_embeddings: bool, seed: int = 0) -> None:
        """`draft` becomes the view; its weights are changed in place."""
        super().__init__()
        self.view = draft
        self.model: PreTrainedModel = draft.model
        self._adapted = add_lora(self.model, lora, seed) if lora.rank else None
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
        with new_files(folder, last="config.json") as scratch:
            self.model.to(dtype).save_pretrained(scratch)
            self.view.tokenizer.save_pretrained(scratch)


def start_draft(target: Target, options: TargetOptions, cut: CutOptions) -> Target:
    """The draft before training, in float32. ValueError where there is none, or it cannot draft for the target."""
    if cut.layers:
        draft = cut_layers(target, cut.layers)
    else:
        quarter = max(1, round(len(target.layers()) / 4))
        instead = f", or cut the draft from the target with cut.layers=N (a quarter: cut.layers={quarter})"
        draft = load_draft(options, target, "float32", instead)
    # What cannot draft shows here, and not after hours of training.
    ModelDrafter(draft, target)
    return draft
