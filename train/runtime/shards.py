"""A folder of numbered shard files that belong to one manifest: written whole or not at all, so that work can go on.

The manifest says what the shards were made from. A folder made from anything else is refused, never mixed. Knows
nothing of what a shard holds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.files import PARTIAL, is_left_over, telling_full, write_text

MANIFEST = "manifest.json"


class ShardFolder:
    """`folder` with its manifest and the shard files `shard-00000<suffix>`, ..."""

    def __init__(self, folder: Path, manifest: dict[str, Any], suffix: str) -> None:
        """Creates the folder, or takes up one with the same manifest. ValueError for another one's."""
        self.folder = folder
        self.suffix = suffix
        manifest = json.loads(json.dumps(manifest))  # as it reads back: tuples are lists
        found = read_manifest(folder)
        if found is None:
            write_text(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        elif found != manifest:
            raise ValueError(
                f"{folder} holds the work of another run: {_difference(found, manifest)}; "
                "choose another folder, or delete this one to make it anew"
            )
        _remove_left_over(folder)

    def path(self, index: int) -> Path:
        """Where shard `index` is, or will be."""
        return self.folder / f"shard-{index:05d}{self.suffix}"

    def journal(self, index: int) -> Journal:
        """Rows of shard `index` while it is not whole."""
        return Journal(self.folder / f"part-{index:05d}.jsonl")

    def missing(self, num_shards: int) -> list[int]:
        """Shards that have not been written yet."""
        return [index for index in range(num_shards) if not self.path(index).is_file()]


class Journal:
    """Rows of an unfinished shard, each on disk as soon as it comes: a stopped run pays for none of them twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[int, Any]:
        """What was noted, by row. A line that a crash cut short is dropped, here and in the file."""
        rows: dict[int, Any] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    row, value = json.loads(line)
                except (ValueError, TypeError):
                    continue
                rows[row] = value
            write_text(self.path, "".join(map(_journal_line, rows, rows.values())))
        return rows

    def add(self, row: int, value: Any) -> None:
        """Note one row."""
        line = _journal_line(row, value)
        with telling_full(self.path, len(line)), self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def remove(self) -> None:
        """Once the shard is whole."""
        self.path.unlink(missing_ok=True)


def _journal_line(row: int, value: Any) -> str:
    return json.dumps([row, value]) + "\n"


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


def _remove_left_over(folder: Path) -> None:
    """Half-written files of processes that were killed: a hidden-state shard may be gigabytes."""
    for path in folder.glob(f".*{PARTIAL}"):
        try:
            if path.is_file() and is_left_over(path):
                path.unlink()
        except FileNotFoundError:  # another process was first
            pass


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    return ", ".join(f"{key} is {found.get(key)!r}, now {wanted.get(key)!r}" for key in keys[:4])
