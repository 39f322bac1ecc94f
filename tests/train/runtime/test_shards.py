"""Shard folders: written whole or not at all, tied to their manifest."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.files import LEFT_OVER_S
from train.runtime.shards import Journal, ShardFolder, read_manifest

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


def test_a_journal(tmp_path: Path) -> None:
    """What was noted reads back; a torn or damaged line is dropped for good, and later ones stand on their own."""
    journal = ShardFolder(tmp_path, MADE_FROM, ".txt").journal(2)
    assert journal.path == tmp_path / "part-00002.jsonl"
    assert journal.read() == {}
    journal.add(3, ["한국", 1])
    journal.add(0, {"a": None})
    assert Journal(journal.path).read() == {3: ["한국", 1], 0: {"a": None}}
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-4])
    assert journal.read() == {3: ["한국", 1]}
    journal.add(1, "x")
    assert journal.read() == {3: ["한국", 1], 1: "x"}
    journal.path.write_bytes(b"\xff\xfe\n[7\n7\n" + journal.path.read_bytes())
    assert journal.read() == {3: ["한국", 1], 1: "x"}
    journal.remove()
    journal.remove()
    assert journal.read() == {}


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


def test_what_a_process_of_this_machine_left_is_removed_at_once(tmp_path: Path) -> None:
    """And not what one that runs, or one of another machine, is writing."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    gone = tmp_path / f".shard-00000.txt.{host}-{ended.pid}.partial"
    others = [
        tmp_path / f".shard-00001.txt.{host}-{os.getpid()}.partial",
        tmp_path / f".shard-00002.txt.other-{host}-{ended.pid}.partial",
        tmp_path / f".shard-00003.txt.elsewhere-{ended.pid}.partial",
    ]
    for path in (gone, *others):
        path.write_text("x")
    ShardFolder(tmp_path, MADE_FROM, ".txt")
    assert not gone.exists()
    assert all(path.exists() for path in others)
