"""A folder of numbered shard files that belong to one manifest: written whole or not at all, so that work can go on.

The manifest says what the shards were made from. A folder made from anything else is refused, never mixed. Knows
nothing of what a shard holds.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.ranks import rank

MANIFEST = "manifest.json"
PARTIAL = ".partial"
# What is being written is younger than this. What is older was left by a process that was killed.
LEFT_OVER_S = 3600.0


class ShardFolder:
    """`folder` with its manifest and the shard files `shard-00000<suffix>`, ..."""

    def __init__(self, folder: Path, manifest: dict[str, Any], suffix: str) -> None:
        """Creates the folder, or takes up one with the same manifest. ValueError for another one's."""
        self.folder = folder
        self.suffix = suffix
        manifest = json.loads(json.dumps(manifest))  # as it reads back: tuples are lists
        found = read_manifest(folder)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / MANIFEST) as path:
                path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        elif found != manifest:
            raise ValueError(
                f"{folder} holds the work of another run: {_difference(found, manifest)}; "
                "choose another folder, or delete this one to make it anew"
            )
        _remove_left_over(folder)

    def path(self, index: int) -> Path:
        """Where shard `index` is, or will be."""
        return self.folder / f"shard-{index:05d}{self.suffix}"

    def missing(self, num_shards: int) -> list[int]:
        """Shards that have not been written yet."""
        return [index for index in range(num_shards) if not self.path(index).is_file()]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, None where there is none. ValueError for one that cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete {folder} and run again") from error
    return manifest


def require_same_run(folder: Path, made_from: dict[str, Any], **parts: Any) -> None:
    """ValueError for a folder that holds training with other options, models or text: going on would mix the two.

    made_from: what it holds, and fingerprints. parts: the options, a dataclass each.
    """
    options = {f"{part}.{name}": value for part, fields in parts.items() for name, value in asdict(fields).items()}
    ShardFolder(folder, {**made_from, **options}, suffix="")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; moves it into place on success, removes it on any failure."""
    # Of processes on several machines, two may have the same id.
    scratch = path.with_name(f".{path.name}.{rank()}-{os.getpid()}{PARTIAL}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder`: takes the place of `folder` on success, and is removed on any failure."""
    room = folder.with_name(f".{folder.name}.{os.getpid()}{PARTIAL}")
    scratch, old = room / "new", room / "old"
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def require_disk(folder: Path, needed_bytes: int, what: str, remedy: str) -> None:
    """ValueError, before any work, when the disk under `folder` has less than `needed_bytes` free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{what} needs {needed_bytes / 1e6:,.1f} MB under {folder}, "
            f"but {free_bytes / 1e6:,.1f} MB are free; {remedy}"
        )


def _remove_left_over(folder: Path) -> None:
    """Half-written files of processes that were killed: a hidden-state shard may be gigabytes."""
    for path in folder.glob(f".*{PARTIAL}"):
        try:
            if path.is_file() and time.time() - path.stat().st_mtime > LEFT_OVER_S:
                path.unlink()
        except FileNotFoundError:  # another process was first
            pass


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    return ", ".join(f"{key} is {found.get(key)!r}, now {wanted.get(key)!r}" for key in keys[:4])
