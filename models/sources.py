"""Saying in one line what is wrong with a place that should hold a model."""

from __future__ import annotations

import re
from pathlib import Path

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def require_weights(folder: Path) -> None:
    """ValueError unless the folder holds a transformers model: config.json and weights."""
    if not folder.is_dir():
        raise ValueError(f"model.name={str(folder)!r} is not a folder; give an existing folder or a hub name")
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        missing.append("weights (model.safetensors)")
    if missing:
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
        raise ValueError(
            f"model.name={str(folder)!r} lacks {' and '.join(missing)} (it holds: {held}); "
            "point it at a folder written by save_pretrained"
        )


def hub_error_message(name: str, error: Exception) -> str:
    """One line on why from_pretrained gave no model, and what to do about it."""
    text = f"{error} {error.__cause__ or ''}".lower()
    # The hub answers 401 for a repository that does not exist, too, so that what it says in words comes first.
    if "not a valid git identifier" in text:
        return f"model {name!r} has no such revision; check model.revision"
    if "not a valid model identifier" in text or "repository not found" in text:
        return (
            f"model {name!r} is neither a folder here nor a repository on the hub that you may see; check model.name, "
            "and if it is private run `hf auth login` or set HF_TOKEN"
        )
    if "gated" in text or re.search(r"\b40[13]\b", text):
        return (
            f"model {name!r} is gated or private: accept its licence on its hub page, then run `hf auth login` "
            "or set HF_TOKEN; or set model.name to a local folder"
        )
    if any(sign in text for sign in ("couldn't connect", "connection", "offline mode", "cached files")):
        return (
            f"model {name!r} could not be fetched: the hub is out of reach and the local cache does not have it. "
            "Go online once, set model.name to a local folder, or use +model=smollm2, which needs no hub"
        )
    return f"model {name!r} could not be loaded: {' '.join(str(error).split())[:300]}"
