"""A target that is too large for one device: its layers over several GPUs, the CPU's memory and the disk.

The plan is ours and the moving accelerate's (hooks bring a layer's weights or inputs to where it runs). All that draft
heads read, embeddings, final norm and output head, lies on the main device, where the heads and their trainer are.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from accelerate.utils import convert_file_size_to_int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .quantization import plain_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_MAP, AUTO_MAP = "none", "auto"
DEVICE_MAPS = (NO_MAP, AUTO_MAP)
CPU, DISK = "cpu", "disk"
# Of what a GPU has free: the rest is for activations, caches and heads.
GPU_SHARE = 0.8


def require_one_device(device_map: str, command: str) -> None:
    """ValueError where a command that trains or takes apart the target itself is to have it spread."""
    if device_map != NO_MAP:
        raise ValueError(
            f"model.device_map={device_map}: {command} works on the target's own weights, which must lie on one "
            "device; set model.device_map=none"
        )


def parse_limits(limits: Sequence[str]) -> dict[str, int]:
    """`cuda:0=20GiB`, `cpu=64GiB`, ... -> bytes by device. ValueError for what is neither."""
    parsed = {}
    for limit in limits:
        device, _, size = limit.partition("=")
        try:
            parsed[device] = convert_file_size_to_int(size)
        except ValueError:
            parsed[device] = -1
        if parsed[device] < 0 or not (device == CPU or device.startswith("cuda:")):
            raise ValueError(f"model.max_memory has {limit!r}; write a list such as ['cuda:0=20GiB','cpu=64GiB']")
    return parsed


def own_gpus(num_gpus: int) -> list[str]:
    """The GPUs that this process may use, its main one first: that of its number, as torch's launchers have it.

    The others are dealt out evenly among the processes on this machine.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    of = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    if 0 < num_gpus < of:
        raise ValueError(f"model.device_map=auto: {of} processes and {num_gpus} GPUs; start at most one process a GPU")
    more = max(0, num_gpus // of - 1)
    first = of + local * more
    return [f"cuda:{gpu}" for gpu in (local, *range(first, first + more)) if num_gpus]


def budgets(limits: Mapping[str, int]) -> dict[str, int]:
    """Bytes a device, fastest first; the disk comes last and takes what is left."""
    found = {
        gpu: int(torch.cuda.mem_get_info(gpu)[0] * GPU_SHARE)
        for gpu in own_gpus(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    }
    found[CPU] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if strange := sorted(set(limits) - set(found)):
        raise ValueError(f"model.max_memory names {', '.join(strange)}; this process has {', '.join(found)}")
    return {device: limits.get(device, size) for device, size in found.items()}


def plan_layers(layer_bytes: Sequence[int], rest_bytes: int, room: Mapping[str, int]) -> list[str]:
    """A device for each layer, in order; the first device also holds the rest. ValueError where that does not fit."""
    left = dict(room)
    main = next(iter(left))
    left[main] -= rest_bytes
    if left[main] < 0:
        raise ValueError(
            f"the target's embeddings, norm and output head take {rest_bytes / 1e9:.2f} GB and {main} may hold "
            f"{room[main] / 1e9:.2f} GB; raise model.max_memory, or free memory"
        )
    plan: list[str] = []
    for size in layer_bytes:
        # Layers go on where the last one lies, or further on: a pass goes once through the devices.
        later = list(left)[list(left).index(plan[-1]) :] if plan and plan[-1] != DISK else [] if plan else list(left)
        plan.append(next((device for device in later if left[device] >= size), DISK))
        if plan[-1] != DISK:
            left[plan[-1]] -= size
    return plan


def device_map(config: PreTrainedConfig, dtype: torch.dtype, limits: Sequence[str]) -> dict[str, str]:
    """Module names -> devices, as from_pretrained takes it."""
    room = budgets(parse_limits(limits))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # weights that two modules share count once
    decoder = model.get_decoder()
    names = {module: name for name, module in model.named_modules()}
    layers = list(decoder.layers)
    sizes = [sum(weight.nbytes for weight in layer.parameters()) for layer in layers]
    plan = plan_layers(sizes, sum(weight.nbytes for weight in model.parameters()) - sum(sizes), room)
    main = next(iter(room))
    inside = {names[layer]: device for layer, device in zip(layers, plan, strict=True)}
    # Everything else by its own name: a module that holds layers has none of its own.
    around = {
        name: main
        for name, module in model.named_modules()
        if not any(True for _ in module.children()) and not any(name.startswith(f"{layer}.") for layer in inside)
    }
    return {**around, **inside}


def stored(model: nn.Module, name: str) -> Tensor:
    """A weight by its name in the state dict, also where it lies on the CPU or the disk until its layer runs."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    weight: Tensor = getattr(module, own)
    return weight if not weight.is_meta else module._hf_hook.weights_map[own]  # type: ignore[index, union-attr]


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy with all its weights in memory as plain numbers, and none of the hooks that bring them there."""
    hooks = {id(hook): None for part in module.modules() if (hook := getattr(part, "_hf_hook", None)) is not None}
    copied = copy.deepcopy(module, {**hooks, **plain_layers(module)})
    for part in copied.modules():
        for name in ("_hf_hook", "_old_forward", "forward"):
            part.__dict__.pop(name, None)
    for name, weight in list(copied.named_parameters()):
        if weight.is_meta:
            path, _, own = name.rpartition(".")
            setattr(copied.get_submodule(path), own, nn.Parameter(stored(module, name).clone(), weight.requires_grad))
    return copied
