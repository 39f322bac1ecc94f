"""A draft model out of the target itself: some of its layers, and a start for them in closed form.

A layer whose followers are gone hands on something that no layer after it has ever seen. `fit_start` therefore refits
each kept layer's last matrix (the MLP's down projection) by least squares, so that the layer's output comes near what
the target holds where the next kept layer reads it: the layers between are replaced by a linear map of what the layer
has computed. After ReplaceMe (Shopkhoev et al. 2025, arXiv 2505.02819), with two deviations: the map is fitted on the
MLP's inner activations, which are wider than its output, and on the draft's own activations, layer by layer, so that
the errors of earlier ones are made up for.

Shape suffixes: B texts, T time, N positions of all texts, H hidden, I inner width of the MLP.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from models.target.model import Target
from models.target.quantization import NONE

# Lists of a model's configuration that have an entry a layer.
PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
# Weight of the old matrix in the fit, relative to the mean square of an activation. SmolLM2 cut to 8 of 30 layers and
# fitted to 4k tokens: held-out acceptance 0.03, 0.21, 0.46, 0.47 at 0.001, 0.01, 0.1, 0.3; 0.00 unfitted.
RIDGE = 0.1
# Largest gap between what a fitted layer was said to put out and what it does, relative to the largest entry.
FIT_TOLERANCE = 1e-2


@dataclass
class CutOptions:
    """layers: so many of the target's own layers, evenly spread, become the draft; 0: `model.draft` is trained.
    fit_tokens: training text that the cut layers are fitted to before they are trained; 0: they start as they are."""

    layers: int = 0
    fit_tokens: int = 16384


def spread_evenly(num_layers: int, num_kept: int) -> list[int]:
    """Indices of the layers that stay, from the first to the last: [0] if it is one."""
    return [round(i * (num_layers - 1) / max(1, num_kept - 1)) for i in range(num_kept)]


def cut_layers(target: Target, num_kept: int) -> Target:
    """A copy of the target, in float32, with `num_kept` of its layers, evenly spread; all else stays."""
    num_layers = len(target.layers())
    if not 1 <= num_kept < num_layers:
        raise ValueError(f"cut.layers={num_kept} must be at least 1 and less than the target's {num_layers} layers")
    if target.quantization != NONE:
        raise ValueError(
            f"cut.layers={num_kept} with model.quantization={target.quantization}: cut the draft from the target's "
            "plain weights, or name a draft model with model.draft"
        )
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


def fit_start(draft: Target, target: Target, texts: Sequence[Tensor]) -> None:
    """Refit the down projections of `draft`, which `cut_layers` made of `target`, on these texts' token ids.

    ValueError where a layer does not end in an MLP whose down projection is added to the residual stream as it is.
    """
    kept = spread_evenly(len(target.layers()), len(draft.layers()))
    ids_BT = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(target.device)
    is_text_BT = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).bool()
    is_text_BT = is_text_BT.to(target.device)
    # What the target holds where the next kept layer reads, and at the end.
    goals = [layer - 1 for layer in kept[1:]] + [len(target.layers()) - 1]
    goals_NH = _layer_outputs(target, ids_BT, is_text_BT, goals)
    with ExitStack() as hooks:
        for layer, goal_NH in zip(draft.layers(), goals_NH, strict=True):
            down = getattr(getattr(layer, "mlp", None), "down_proj", None)
            if not isinstance(down, nn.Linear):
                raise ValueError(f"{type(layer).__name__} has no mlp.down_proj to fit; set cut.fit_tokens=0")
            fit = _FitLayer(down, goal_NH, is_text_BT)
            hooks.enter_context(_removed(down.register_forward_hook(fit.see_inner)))
            hooks.enter_context(_removed(layer.register_forward_hook(fit.refit)))
        said_BTH = draft.hidden(ids_BT)
    gap = (draft.hidden(ids_BT) - said_BTH)[is_text_BT].abs().max() / said_BTH[is_text_BT].abs().max()
    if not gap <= FIT_TOLERANCE:
        raise ValueError(
            f"{type(draft.layers()[0]).__name__} does not add its mlp.down_proj to the residual stream as it is "
            f"(relative gap {gap:.2g}), so it cannot be fitted; set cut.fit_tokens=0"
        )


class _FitLayer:
    """The hooks that fit one layer in the middle of a pass: the layers after it read what it puts out then."""

    def __init__(self, down: nn.Linear, goal_NH: Tensor, is_text_BT: Tensor) -> None:
        self.down = down
        self.goal_NH = goal_NH
        self.is_text_BT = is_text_BT

    def see_inner(self, module: nn.Module, inputs: tuple[Tensor], output_BTH: Tensor) -> None:
        """Keeps what the down projection read and gave."""
        self.inner_BTI, self.output_BTH = inputs[0], output_BTH

    def refit(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Changes the down projection, and gives the layer's output with the new one."""
        output_BTH = output[0] if isinstance(output, tuple) else output
        wanted_NH = self.goal_NH - output_BTH[self.is_text_BT].float()
        # A few positions, a text's first above all, hold values a hundred times as large as the others'.
        weight_N1 = 1 / self.goal_NH.square().mean(dim=-1, keepdim=True)
        change_HI = least_squares(self.inner_BTI[self.is_text_BT].float(), wanted_NH, weight_N1)
        with torch.no_grad():
            self.down.weight += change_HI.to(self.down.weight.dtype)
            refitted_BTH = output_BTH - self.output_BTH + F.linear(self.inner_BTI, self.down.weight, self.down.bias)
        return (refitted_BTH, *output[1:]) if isinstance(output, tuple) else refitted_BTH


def least_squares(inner_NI: Tensor, wanted_NH: Tensor, weight_N1: Tensor) -> Tensor:
    """The [H, I] change D that minimises sum_n weight_n |D inner_n - wanted_n|^2 + ridge |D|^2."""
    scaled_NI = inner_NI * weight_N1
    gram_II = scaled_NI.T @ inner_NI
    gram_II.diagonal().add_(RIDGE * gram_II.diagonal().mean())
    return torch.linalg.solve(gram_II, scaled_NI.T @ wanted_NH).T


@torch.no_grad()
def _layer_outputs(target: Target, ids_BT: Tensor, is_text_BT: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The residual stream [N, H] after each of these layers, float32."""
    found: dict[int, Tensor] = {}

    def keep(index: int, output: Any) -> None:
        found[index] = (output[0] if isinstance(output, tuple) else output)[is_text_BT].float()

    with ExitStack() as hooks:
        for index in set(layers):
            handle = target.layers()[index].register_forward_hook(lambda *a, index=index: keep(index, a[2]))
            hooks.enter_context(_removed(handle))
        target.hidden(ids_BT)
    return [found[index] for index in layers]


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    """Takes a hook away, however it ends."""
    try:
        yield
    finally:
        handle.remove()
