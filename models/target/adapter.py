"""A folder of low-rank adapters, as peft writes it, and the model that they were trained on, together as one model.

Adapters are merged into the weights: decoding then costs what the model alone costs, and a fingerprint covers them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def is_adapter(folder: Path) -> bool:
    """Whether this folder holds adapters, and no model by itself."""
    return (folder / ADAPTER_CONFIG).is_file()


def require_adapter(folder: Path) -> None:
    """ValueError unless adapters that name their model are there."""
    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ValueError(
            f"model.name={str(folder)!r} has {ADAPTER_CONFIG} and lacks {ADAPTER_WEIGHTS[0]}; point it at a folder "
            "that peft's save_pretrained wrote"
        )
    base_of(folder)


def base_of(folder: Path) -> tuple[str, str]:
    """Name or folder, and revision, of the model that these adapters are for. ValueError where they do not tell."""
    path = folder / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON ({error}); export the adapters again") from error
    base = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} names no base_model_name_or_path; write there which model the adapters are for")
    return str(base), str(config.get("revision") or "main")


def has_tokenizer(folder: Path) -> bool:
    """Whether the adapters brought a tokenizer (a chat template, say); otherwise it is the base model's."""
    return (folder / "tokenizer_config.json").is_file()


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapters in its weights. ValueError where they are damaged, or for another model."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # peft fills what is missing with random numbers, and only warns.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, folder).merge_and_unload(safe_merge=True)
    except Exception as error:  # peft, torch and safetensors each have their own for a file that does not fit
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the adapters in {folder} do not go into {base_of(folder)[0]!r}: {reason}") from error
