"""What checkpoints were trained and chosen on, by their own record: prompts that must not be measured on."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.checkpoint import read_config
from train.data.prompts import DataOptions
from train.data.sources.seen import seen_in

MIXED = "mixed"


def seen_by(folders: Iterable[Path], data: DataOptions, split: str) -> set[str]:
    """Fingerprints of the prompts that must not be asked of a split, since these checkpoints have seen them.

    ValueError where more is held out here than was in training: too much would have been trained on. A checkpoint that
    notes no prompts is older than the split into selection and test; a line tells that it may be chosen by the test.
    """
    seen: set[str] = set()
    for folder in folders:
        provenance = read_config(folder).get("provenance", {})
        if split != "train":
            _require_unseen(folder, provenance, data)
        if "prompts" not in provenance and split in ("test", "fresh"):
            print(
                f"{folder} does not say which prompts chose it, the test's may be among them: train it again for "
                "figures that do not flatter it"
            )
        seen |= seen_in(provenance, split)
    return seen


def _require_unseen(folder: Path, provenance: dict[str, Any], data: DataOptions) -> None:
    """ValueError where prompts that are held out here were trained on. Of another source, all are new."""
    trained = provenance.get("config", {}).get("data") or provenance.get("data") or {}
    source, path = (trained.get(name, getattr(data, name)) for name in ("source", "path"))
    is_same = MIXED in (source, data.source) or (source, path) == (data.source, data.path)
    fraction = trained.get("heldout_fraction", data.heldout_fraction)
    if is_same and data.heldout_fraction > fraction:
        raise ValueError(
            f"data.heldout_fraction={data.heldout_fraction}: {folder} had {fraction} in training, where some of these "
            f"prompts occurred; use at most data.heldout_fraction={fraction}"
        )
