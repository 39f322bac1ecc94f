"""The checkpoint of trained parts: the only place that knows its files.

A folder with `config.json` (what it is, for which target, how it was made, what was measured) and `model.safetensors`
(trained tensors alone). Writing is all or nothing. Loading is strict both ways: an unknown or missing tensor, a wrong
shape, or another target is an error that says what was expected and what was found.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.heads import DraftHead, HeadOptions, build_head
from models.target import Target

FORMAT_VERSION = 1
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
CONCATENATION = "[state; embedding]"


def save_heads(
    folder: Path, head: DraftHead, provenance: dict[str, Any] | None = None, acceptance: dict[str, Any] | None = None
) -> None:
    """Write the head's trained tensors (float32) and its config.

    An older checkpoint there is replaced at the very end.
    """
    target = head.target.get
    config = {
        "format_version": FORMAT_VERSION,
        "kind": "heads",
        "head": asdict(head.options),
        "concatenation": CONCATENATION,
        "output_head": "own" if head.options.own_output_head else "target",
        "draft_vocab": None if head.draft_vocab is None else head.draft_vocab.tolist(),
        "target": {
            "name": target.name,
            "model_type": target.config.model_type,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "fingerprint": target.fingerprint(),
            "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        },
        "provenance": provenance or {},
        "acceptance": acceptance or {},
    }
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in head.state_dict().items()}
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        save_file(tensors, scratch / WEIGHTS_NAME)
        (scratch / CONFIG_NAME).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        _swap_in(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _swap_in(scratch: Path, folder: Path) -> None:
    """Put the finished files in place one by one, weights first; other files in the folder stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        os.replace(scratch / name, folder / name)


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json. ValueError for a folder that is no checkpoint, or one of a later format."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"checkpoint={str(folder)!r} has no {CONFIG_NAME}; give the folder that train.mtp wrote")
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


def load_heads(folder: Path | str, target: Target, dtype: torch.dtype | None = None) -> DraftHead:
    """The head on the target's device, in `dtype` (default: the target's), in eval mode. ValueError as above."""
    folder = Path(folder)
    config = read_config(folder)
    if config.get("kind") != "heads":
        raise ValueError(f"checkpoint={str(folder)!r} holds {config.get('kind')!r}, expected draft heads")
    _require_keys(folder, config, ("head", "draft_vocab", "target"))
    _require_keys(
        folder, config["target"], ("name", "hidden_size", "vocab_size", "fingerprint", "tokenizer_fingerprint")
    )
    _require_same_target(folder, config["target"], target)
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
    _load_strictly(head, folder / WEIGHTS_NAME)
    return head.to(target.dtype if dtype is None else dtype).eval().requires_grad_(False)


def _require_keys(folder: Path, found: Any, keys: Sequence[str]) -> None:
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise ValueError(
            f"{folder / CONFIG_NAME} lacks {', '.join(missing)}; the checkpoint is damaged, export it again"
        )


def _is_sorted_subset(ids: Tensor, vocab_size: int) -> bool:
    """Whether these are strictly rising ids of the vocabulary, and at least one."""
    return len(ids) > 0 and bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def _load_strictly(head: DraftHead, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is incomplete, export it again")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); export the checkpoint again") from error
    expected = head.state_dict()
    problems = [f"missing {name} {tuple(expected[name].shape)}" for name in expected.keys() - found.keys()]
    problems += [f"unknown {name} {tuple(found[name].shape)}" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if expected[name].shape != found[name].shape
    ]
    if problems:
        raise ValueError(f"{path} does not fit {head.kind} heads: {'; '.join(sorted(problems)[:5])}")
    if bad := [name for name, tensor in found.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(
            f"{path} holds numbers that are not finite in {', '.join(sorted(bad)[:3])}; the training went wrong"
        )
    head.load_state_dict(found)


def _require_same_target(folder: Path, made_for: dict[str, Any], target: Target) -> None:
    found = {
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
