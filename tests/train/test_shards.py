"""Shard folders: written whole or not at all, tied to their manifest."""

import json
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest

from train.shards import LEFT_OVER_S, ShardFolder, atomic_write, read_manifest, require_disk

MADE_FROM = {"holds": "things", "count": 3, "nested": {"a": [1, 2]}, "tuple": (1, 2)}


def test_makes_and_takes_up(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert read_manifest(folder) is None
    store = ShardFolder(folder, MADE_FROM, ".txt")
    assert read_manifest(folder) == json.loads(json.dumps(MADE_FROM))
    assert store.path(7) == folder / "shard-00007.txt"
    assert store.missing(3) == [0, 1, 2]
    store.path(1).write_text("x")
    again = ShardFolder(folder, MADE_FROM, ".txt")
    assert again.missing(3) == [0, 2]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_refuses_another_ones(tmp_path: Path) -> None:
    ShardFolder(tmp_path, MADE_FROM, ".txt")
    before = (tmp_path / "manifest.json").read_bytes()
    changed = {key: value for key, value in MADE_FROM.items() if key != "nested"} | {"count": 4, "new": "n"}
    with pytest.raises(ValueError, match="holds the work of another run") as error:
        ShardFolder(tmp_path, changed, ".txt")
    for part in ("count is 3, now 4", "new is None, now 'n'", "nested is {'a': [1, 2]}, now None", "delete this one"):
        assert part in str(error.value)
    assert "holds is" not in str(error.value)
    assert "tuple is" not in str(error.value)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_damaged_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"holds"')
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .*; delete .* and run again"):
        read_manifest(tmp_path)


def write_half(place: Path, error: type[BaseException]) -> None:
    with atomic_write(place) as path:
        path.write_text("half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_atomic_write_leaves_nothing_half(error: type[BaseException], tmp_path: Path) -> None:
    place = tmp_path / "shard"
    with pytest.raises(error):
        write_half(place, error)
    assert list(tmp_path.iterdir()) == []
    place.write_text("old")
    with pytest.raises(error):
        write_half(place, error)
    assert place.read_text() == "old"
    with atomic_write(place) as path:
        assert path.parent == tmp_path
        path.write_text("new")
        assert place.read_text() == "old"
    assert place.read_text() == "new"
    assert list(tmp_path.iterdir()) == [place]


def test_require_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the nearest folder that exists; exactly enough is enough."""
    asked = []
    usage = namedtuple("usage", "total used free")

    def disk_usage(path: Path) -> usage:
        asked.append(Path(path))
        return usage(10**10, 0, 2 * 10**9)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    require_disk(tmp_path / "not" / "yet", 2 * 10**9, "the cache", "free some")
    assert asked == [tmp_path]
    with pytest.raises(ValueError, match=r"the cache needs 2,100\.0 MB under .*yet, but 2,000\.0 MB are free;"):
        require_disk(tmp_path / "not" / "yet", 21 * 10**8, "the cache", "free some")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Not what another one is writing just now, and no shard, however old."""
    store = ShardFolder(tmp_path, MADE_FROM, ".txt")
    old, young, shard = (
        tmp_path / name for name in (".shard-00001.txt.0-7.partial", ".x.1-8.partial", "shard-00000.txt")
    )
    for path in (old, young, shard):
        path.write_text("x")
    for path in (old, shard):
        os.utime(path, (time.time() - LEFT_OVER_S - 60,) * 2)
    ShardFolder(tmp_path, MADE_FROM, ".txt")
    assert (old.exists(), young.exists(), shard.exists()) == (False, True, True)
    assert store.missing(2) == [1]
