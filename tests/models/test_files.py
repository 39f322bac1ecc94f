"""Files and folders: whole or not at all, whatever goes wrong, and a full disk is told in one line."""

import errno
import shutil
from collections import namedtuple
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models import files
from models.files import DiskFull, atomic_write, new_files, require_disk, telling_full, whole_folder, write_text
from tests.disks import SmallDisk, small_disk

__all__ = ["small_disk"]


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


def test_write_text(tmp_path: Path) -> None:
    """Makes the folder, ends lines as they are, replaces what was there."""
    path = tmp_path / "a" / "b.txt"
    write_text(path, "한국\r\n")
    assert path.read_bytes() == "한국\r\n".encode()
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [one.name for one in path.parent.iterdir()] == ["b.txt"]


def fill_and_raise(folder: AbstractContextManager[Path], error: type[BaseException]) -> None:
    with folder as scratch:
        (scratch / "a").write_text("half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whole_folder(error: type[BaseException], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(error):
        fill_and_raise(whole_folder(folder), error)
    assert list(tmp_path.iterdir()) == []
    with whole_folder(folder) as scratch:
        (scratch / "old").write_text("x")
    with pytest.raises(error):
        fill_and_raise(whole_folder(folder), error)
    assert [path.name for path in folder.iterdir()] == ["old"]
    with whole_folder(folder) as scratch:
        (scratch / "new").write_text("y")
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_moved_in_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged."""
    folder = tmp_path / "folder"
    write_text(folder / "old", "x")
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"), whole_folder(folder) as scratch:
        (scratch / "new").write_text("y")
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace their namesakes, the one that describes them last; others stay."""
    folder = tmp_path / "folder"
    for name in ("config.json", "a", "other"):
        write_text(folder / name, "old")
    moved = []
    replace = files.os.replace
    monkeypatch.setattr(files.os, "replace", lambda old, new: moved.append(Path(new).name) or replace(old, new))
    with pytest.raises(KeyboardInterrupt):
        fill_and_raise(new_files(folder, last="config.json"), KeyboardInterrupt)
    assert moved == []
    with new_files(folder, last="config.json") as scratch:
        for name in ("z", "config.json", "a"):
            (scratch / name).write_text("new")
    assert moved == ["a", "z", "config.json"]
    held = {path.name: path.read_text() for path in folder.iterdir()}
    assert held == {"config.json": "new", "a": "new", "z": "new", "other": "old"}
    assert list(tmp_path.iterdir()) == [folder]


def test_everything_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the move must not find an empty file under the final name."""
    events: list[str] = []
    flush, replace = files.flush, files.os.replace
    monkeypatch.setattr(files, "flush", lambda path: events.append(f"flush {path.name}") or flush(path))
    monkeypatch.setattr(files.os, "replace", lambda a, b: events.append(f"move {Path(b).name}") or replace(a, b))
    write_text(tmp_path / "x", "text")
    assert [event.split(".")[0] for event in events] == ["flush ", "move x", f"flush {tmp_path.name}"]
    events.clear()
    with new_files(tmp_path / "f", last="config.json") as scratch:
        (scratch / "a").write_text("x")
    # What is moved is in the folder already, for good.
    assert [event for event in events if ".partial" not in event] == ["flush a", "flush f", "move a", "flush f"]


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), False),  # there is room
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_only_a_full_disk_is_called_one(error: Exception, is_full: bool, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, telling_full(tmp_path / "x"):
        raise error
    assert (raised.value is not error) == is_full
    assert isinstance(raised.value, DiskFull) == is_full


# On a real disk that is full

TENSORS = {"a": torch.zeros(2**19)}  # 2 MiB


@pytest.mark.parametrize("what", ["text", "tensors", "archive"])
def test_a_full_disk(what: str, small_disk: SmallDisk) -> None:
    """As the system, safetensors and torch each tell of it: one kind of error, the old file whole, nothing half."""

    def write(path: Path) -> None:
        if what == "text":
            write_text(path, "x" * 2**21)
        elif what == "tensors":
            with atomic_write(path, 2**21) as scratch:
                save_file(TENSORS, scratch)
        else:
            with atomic_write(path) as scratch:
                torch.save(TENSORS, scratch)

    place = small_disk.folder / "file"
    place.write_text("old")
    small_disk.leave(2**20)
    with pytest.raises(DiskFull) as error:
        write(place)
    needed = "needs more than 1.0 MB" if what == "archive" else "needs 2.1 MB"
    assert str(error.value) == (
        f"{place} could not be written, the disk is full ({needed}, 1.0 MB were free); free some space or choose "
        "another folder, and give the same command again: what was there before is untouched"
    )
    assert place.read_text() == "old"
    assert small_disk.names() == ["file"]
    small_disk.clear()
    write(place)
    assert place.stat().st_size >= 2**21


@pytest.mark.parametrize("free", [0, 4096])
def test_not_even_a_folder(free: int, small_disk: SmallDisk) -> None:
    """With no page left, or one: every way of writing says the same."""
    small_disk.leave(free)
    for write in (
        lambda: write_text(small_disk.folder / "new" / "text", "x" * 2**14),
        lambda: fill(whole_folder(small_disk.folder / "b")),
        lambda: fill(new_files(small_disk.folder / "c", "config.json")),
    ):
        with pytest.raises(DiskFull, match="the disk is full"):
            write()
    assert [name for name in small_disk.names() if name != "new"] == []


def fill(folder: "AbstractContextManager[Path]") -> None:
    with folder as scratch:
        (scratch / "x").write_text("x" * 2**14)
