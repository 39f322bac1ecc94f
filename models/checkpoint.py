"""The checkpoints of trained parts, draft heads and ensemble heads: the only place that knows their files.

A folder with `config.json` (what it is, for which target and drafter, how it was made, what was measured) and
`model.safetensors` (trained tensors alone). Writing is all or nothing. Loading is strict both ways: an unknown or
missing tensor, a wrong shape, another target or another drafter is an error that says what was expected and what was
found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .ensemble import EnsembleHead, EnsembleOptions
from .files import finish_save, new_files
from .heads import DraftHead, HeadOptions, build_head
from .target.model import Target
from .target.quantization import NONE

FORMAT_VERSION = 1
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
# In config.json: of the weights that it describes.
WEIGHTS_SHA256 = "weights_sha256"
TARGET_KEYS = ("name", "hidden_size", "vocab_size", "fingerprint", "tokenizer_fingerprint")
DRAFTER_KEYS = ("kind", "name", "fingerprint")


def save_heads(
    folder: Path, head: DraftHead, provenance: dict[str, Any] | None = None, acceptance: dict[str, Any] | None = None
) -> None:
    """Write the draft head's trained tensors (float32) and its config.

    An older checkpoint there is replaced at the very end.
    """
    config = {
        "format_version": FORMAT_VERSION,
        "kind": "heads",
        "head": _head_options(head.options),
        "concatenation": head.concatenation,
        "output_head": "own" if head.options.own_output_head else "target",
        "draft_vocab": None if head.draft_vocab is None else head.draft_vocab.tolist(),
        "target": _target_record(head.target.get),
        "provenance": provenance or {},
        "acceptance": acceptance or {},
    }
    _write(folder, head, config)


def _head_options(options: HeadOptions) -> dict[str, Any]:
    """Without the layers read where none are: most kinds have none."""
    return {name: value for name, value in asdict(options).items() if name != "reads" or value}


def save_ensemble(
    folder: Path,
    head: EnsembleHead,
    target: Target,
    drafter_record: dict[str, Any],
    provenance: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
) -> None:
    """Write the ensemble head's tensors (float32) and its config, as `save_heads` does.

    drafter_record: what it was trained with, see `heads_record` and `model_record`. ValueError for a target of another
    width than the head's.
    """
    if head.options.target_size != target.hidden_size:
        raise ValueError(
            f"the ensemble head reads hidden states of width {head.options.target_size}, those of target "
            f"{target.name!r} are {target.hidden_size} wide: save it for the target that it was trained for"
        )
    config = {
        "format_version": FORMAT_VERSION,
        "kind": "ensemble",
        "ensemble": asdict(head.options),
        "target": _target_record(target),
        "drafter": {key: drafter_record[key] for key in DRAFTER_KEYS},
        "provenance": provenance or {},
        "measured": measured or {},
    }
    _write(folder, head, config)


def heads_record(folder: Path | str) -> dict[str, str]:
    """What an ensemble's checkpoint says of draft heads as its drafter: a hash of their options and tensors."""
    folder = Path(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is incomplete, export it again")
    with path.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256")
    digest.update(json.dumps([config.get("head"), config.get("draft_vocab")], sort_keys=True).encode())
    return {"kind": "heads", "name": folder.name, "fingerprint": digest.hexdigest()[:16]}


def model_record(model: Target) -> dict[str, str]:
    """What an ensemble's checkpoint says of a separate draft model."""
    return {"kind": "model", "name": model.name, "fingerprint": model.fingerprint()}


def _target_record(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "quantization": target.quantization,
        "fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
    }


def _write(folder: Path, module: nn.Module, config: dict[str, Any]) -> None:
    write_files(folder, {name: tensor.float() for name, tensor in module.state_dict().items()}, config)


def write_files(
    folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], texts: Mapping[str, str] | None = None
) -> None:
    """All files, written beside the folder and swapped in when they are whole. texts: others, by name."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    written = {CONFIG_NAME: json.dumps(config, indent=1, ensure_ascii=False) + "\n", **(texts or {})}
    needed = sum(tensor.nbytes for tensor in tensors.values()) + sum(len(text.encode()) for text in written.values())
    with new_files(folder, last=CONFIG_NAME, needed_bytes=needed) as scratch:
        save_file(tensors, scratch / WEIGHTS_NAME)
        if "format_version" in config:  # one of ours, not a server's
            sealed = {**config, WEIGHTS_SHA256: sha256_of(scratch / WEIGHTS_NAME)}
            written[CONFIG_NAME] = json.dumps(sealed, indent=1, ensure_ascii=False) + "\n"
        for name, text in written.items():
            (scratch / name).write_text(text, encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json. ValueError for a folder that is no checkpoint, or one of a later format."""
    finish_save(folder, CONFIG_NAME)
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(
            f"checkpoint={str(folder)!r} has no {CONFIG_NAME}; give the folder that train.mtp wrote (draft heads), or "
            "rl.diversed (an ensemble head)"
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON ({error}); the checkpoint is damaged, export it again") from error
    version = config.get("format_version") if isinstance(config, dict) else None
    if version is None:
        raise ValueError(
            f"{path} has no format_version: it is no Foretoken checkpoint (a transformers model goes into model.name)"
        )
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this Foretoken reads {FORMAT_VERSION}; use the version that wrote it"
        )
    return config


def read_target_name(folder: Path) -> str:
    """The name of the target that the checkpoint was made for. ValueError as `read_config`."""
    return str(_read_target(folder)["name"])


def read_target_quantization(folder: Path) -> str:
    """How the target that the checkpoint was made for is quantised. ValueError as `read_config`."""
    return str(_read_target(folder).get("quantization", NONE))


def _read_target(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    _require_keys(folder, config, ("target",))
    _require_keys(folder, config["target"], TARGET_KEYS)
    target: dict[str, Any] = config["target"]
    return target


def load_heads(folder: Path | str, target: Target, dtype: torch.dtype | None = None) -> DraftHead:
    """The head on the target's device, in `dtype` (default: the target's), in eval mode. ValueError as above."""
    folder = Path(folder)
    config = _read_kind(folder, "heads", "draft heads", ("head", "draft_vocab"), target)
    draft_vocab = None if config["draft_vocab"] is None else torch.tensor(config["draft_vocab"], dtype=torch.long)
    if draft_vocab is not None and not _is_sorted_subset(draft_vocab, target.vocab_size):
        raise ValueError(
            f"{folder / CONFIG_NAME}: draft_vocab must be rising ids below {target.vocab_size}; it is damaged"
        )
    try:
        options = HeadOptions(**config["head"])
    except TypeError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: head options do not fit this Foretoken ({error})") from error
    head = build_head(target, options, draft_vocab)
    _load_strictly(head, folder / WEIGHTS_NAME, f"{head.kind} heads", config.get(WEIGHTS_SHA256))
    return head.to(target.dtype if dtype is None else dtype).eval().requires_grad_(False)


def load_ensemble(folder: Path | str, target: Target, drafter_record: dict[str, Any]) -> EnsembleHead:
    """The ensemble head on the target's device, float32, in eval mode, without gradients.

    drafter_record: of the drafter that it will judge. ValueError for another target, another drafter, and as above.
    """
    folder = Path(folder)
    config = _read_kind(folder, "ensemble", "an ensemble head", ("ensemble", "drafter"), target)
    _require_keys(folder, config["drafter"], DRAFTER_KEYS)
    _require_same_drafter(folder, config["drafter"], drafter_record)
    try:
        options = EnsembleOptions(**config["ensemble"])
        head = EnsembleHead(options)
    except TypeError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: ensemble options do not fit this Foretoken ({error})") from error
    if options.target_size != target.hidden_size:
        raise ValueError(
            f"{folder / CONFIG_NAME}: ensemble.target_size is {options.target_size}, expected {target.hidden_size}, "
            "the target's; it is damaged"
        )
    _load_strictly(head, folder / WEIGHTS_NAME, f"the {options.kind} ensemble head", config.get(WEIGHTS_SHA256))
    return head.to(target.device).eval().requires_grad_(False)


def _read_kind(folder: Path, kind: str, name: str, keys: Sequence[str], target: Target) -> dict[str, Any]:
    """The config of a checkpoint of this kind, with these keys, made for this target."""
    config = read_config(folder)
    if config.get("kind") != kind:
        raise ValueError(f"checkpoint={str(folder)!r} holds {config.get('kind')!r}, expected {name}")
    _require_keys(folder, config, (*keys, "target"))
    _require_keys(folder, config["target"], TARGET_KEYS)
    _require_same_target(folder, config["target"], target)
    return config


def _require_keys(folder: Path, found: Any, keys: Sequence[str]) -> None:
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise ValueError(
            f"{folder / CONFIG_NAME} lacks {', '.join(missing)}; the checkpoint is damaged, export it again"
        )


def _is_sorted_subset(ids: Tensor, vocab_size: int) -> bool:
    """Whether these are strictly rising ids of the vocabulary, and at least one."""
    return len(ids) > 0 and bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def _load_strictly(module: nn.Module, path: Path, name: str, sha256: str | None) -> None:
    """sha256: of the file, as the config tells; None: older ones do not."""
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    tensors = read_tensors(path, shapes, name)
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise ValueError(
            f"{path} is not the file that {CONFIG_NAME} was written with: sha256 is {found[:16]}, expected "
            f"{sha256[:16]}; the two are of different saves: export or copy the checkpoint again"
        )
    module.load_state_dict(tensors)


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object. ValueError for a file that holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no readable JSON ({error}); export the checkpoint again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object; export the checkpoint again")
    return found


def read_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], name: str) -> dict[str, Tensor]:
    """The file's tensors, which must have exactly these names and shapes, and finite numbers; ValueError otherwise.

    name: what they are tensors of, for the message.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is incomplete, export it again")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); export the checkpoint again") from error
    problems = [f"missing {key} {shapes[key]}" for key in shapes.keys() - found.keys()]
    problems += [f"unknown {key} {tuple(found[key].shape)}" for key in found.keys() - shapes.keys()]
    problems += [
        f"{key} is {tuple(found[key].shape)}, expected {shapes[key]}"
        for key in shapes.keys() & found.keys()
        if found[key].shape != shapes[key]
    ]
    if problems:
        raise ValueError(f"{path} does not fit {name}: {'; '.join(sorted(problems)[:5])}")
    if bad := [key for key, tensor in found.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(
            f"{path} holds numbers that are not finite in {', '.join(sorted(bad)[:3])}; the training went wrong"
        )
    return found


def _require_same_target(folder: Path, made_for: dict[str, Any], target: Target) -> None:
    made_for = {"quantization": NONE, **made_for}  # older checkpoints do not say
    found = {
        "quantization": target.quantization,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        "fingerprint": target.fingerprint(),
    }
    wrong = [f"{key} is {value}, expected {made_for[key]}" for key, value in found.items() if made_for[key] != value]
    if wrong:
        raise ValueError(
            f"checkpoint={str(folder)!r} was trained for target {made_for['name']!r}, not for {target.name!r}: "
            f"{'; '.join(wrong)}"
        )


def _require_same_drafter(folder: Path, made_for: dict[str, Any], drafter: dict[str, Any]) -> None:
    wrong = [
        f"{key} is {drafter[key]}, expected {made_for[key]}"
        for key in ("kind", "fingerprint")
        if drafter[key] != made_for[key]
    ]
    if wrong:
        raise ValueError(
            f"checkpoint={str(folder)!r} was trained for drafter {made_for['name']!r}, not for {drafter['name']!r}: "
            f"{'; '.join(wrong)}"
        )
