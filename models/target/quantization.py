"""Targets whose linear layers are held in 8 or 4 bits, by torchao or bitsandbytes where they are installed.

int8: torchao's weights of 8 bits, a scale a row (Int8WeightOnlyConfig). nf4: bitsandbytes' weights of 4 bits,
NormalFloat in blocks of 64 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314). Embeddings, norms and the output head stay
in model.dtype, and so do the sums. What either makes of a row depends on that row alone. With bitsandbytes' own 8 bits
it does not: which columns stay unrounded depends on all rows of the batch, so no batched decoder can be exact on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NONE, INT8, NF4 = "none", "int8", "nf4"
QUANTIZATIONS = (NONE, INT8, NF4)
PACKAGES = {INT8: "torchao", NF4: "bitsandbytes"}
PACKS_ON_CPU = "support_avx512bf16_for_cpu"


def check_quantization(name: str) -> None:
    """ValueError for a name that there is not, or whose package is not installed."""
    if name not in QUANTIZATIONS:
        raise ValueError(f"model.quantization={name!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}")
    if name != NONE and find_spec(PACKAGES[name]) is None:
        raise ValueError(
            f"model.quantization={name} needs a package that is not installed: "
            f"pip install 'foretoken[{PACKAGES[name]}]'"
        )


def loading_arguments(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """What from_pretrained is told besides. A quantised model is made on its device: not every one can be moved."""
    if name == NONE:
        return {}
    if name == INT8:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def settle(model: PreTrainedModel, name: str) -> None:
    """Before the first pass. ValueError where nothing was quantised: another kind of layer than nn.Linear, say."""
    layers = [module for module in model.modules() if is_quantized(module)]
    if name != NONE and not layers:
        raise ValueError(
            f"model.quantization={name}: {type(model).__name__} has no linear layer that {PACKAGES[name]} quantises; "
            "leave it out"
        )
    for layer in layers:
        # bitsandbytes (0.50) would repack the weights in the first pass on such a CPU, with their scales in bfloat16,
        # and mixes the scales up when a state_dict is taken after that.
        if hasattr(layer, PACKS_ON_CPU):
            setattr(layer, PACKS_ON_CPU, False)


def is_quantized(module: nn.Module) -> bool:
    """Whether this is a linear layer that holds something else than its plain weight."""
    if not isinstance(module, nn.Linear):
        return False
    weight = module.weight
    return type(weight) not in (nn.Parameter, Tensor) or not weight.is_floating_point()


def plain_layers(module: nn.Module) -> dict[int, nn.Module]:
    """For each quantised linear layer, by its id, a plain one of the same function, in float32: for a deep copy."""
    return {id(part): _plain(part) for part in module.modules() if is_quantized(part)}


@torch.no_grad()
def _plain(layer: nn.Module) -> nn.Linear:
    """The weight is what the layer makes of the identity, however it holds it."""
    assert isinstance(layer, nn.Linear)
    bias = None if layer.bias is None else layer.bias.detach()
    dtype = layer.weight.dtype if layer.weight.is_floating_point() else getattr(layer, "compute_dtype", torch.float32)
    identity = torch.eye(layer.in_features, device=layer.weight.device, dtype=dtype)
    out_IO = layer(identity).float()
    plain = nn.Linear(layer.in_features, layer.out_features, bias is not None, layer.weight.device, torch.float32)
    plain.weight.copy_((out_IO if bias is None else out_IO - bias.float()).T)
    if bias is not None:
        plain.bias.copy_(bias)
    return plain


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a quantised one consists of (its numbers, its scales), by name; a plain one itself."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(f"{name}.{part}", getattr(tensor, part))
