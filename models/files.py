"""Writing files and folders whole or not at all, and telling in one line what to do where the disk is full.

Everything that this project keeps goes through here: it is written under another name beside its place, flushed to the
disk, and moved to its place at the very end. Whatever goes wrong before, what was there stays as it was, and nothing
half is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

FULL = (errno.ENOSPC, errno.EDQUOT)
# How libraries that have errors of their own tell of a write that failed: safetensors by the system's number, torch by
# the place in its own code.
FULL_IN_SAFETENSORS = tuple(f"os error {number}" for number in FULL)
FAILED_IN_TORCH = ("inline_container", "PytorchStreamWriter")
MEGABYTE = 1e6
PARTIAL = ".partial"
# In a folder whose files are replaced: the new ones, complete, of which some may have been moved in already.
NEXT = ".next"
# Of Linux's renameat2, and what it says where names cannot be exchanged.
AT_FDCWD, RENAME_EXCHANGE = -100, 2
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
# What is being written is younger than this.
LEFT_OVER_S = 3600.0


class DiskFull(OSError):
    """There was no room; the message says where, how much was needed, and what to do."""


@contextmanager
def atomic_write(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Gives a temporary path beside `path`; moves it into place on success, removes it on any failure.

    needed_bytes: what it will take, where that is known, for the message of DiskFull.
    """
    scratch = _beside(path)
    try:
        with telling_full(path, needed_bytes):
            yield scratch
            flush(scratch)
            os.replace(scratch, path)
            flush(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, UTF-8, whole or not at all; makes the folder.

    A lone surrogate is written as \\udXXX, as JSON spells it: what a run has measured is never lost for one.
    """
    content = text.encode(errors="backslashreplace")
    with telling_full(path, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, len(content)) as scratch:
        scratch.write_bytes(content)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder`: takes the place of `folder` on success, and is removed on any failure.

    One rename decides, where the system can exchange two names; elsewhere two do, and a process that is killed between
    them leaves the old folder under the scratch's name.
    """
    room = _beside(folder)
    scratch, old = room / "new", room / "old"
    try:
        with telling_full(folder):
            scratch.mkdir(parents=True)
            yield scratch
            _flush_all(scratch)
            if not folder.exists():
                scratch.rename(folder)
            elif not _exchange(scratch, folder):
                folder.rename(old)
                try:
                    scratch.rename(folder)
                except BaseException:
                    old.rename(folder)
                    raise
            flush(folder.parent)
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def new_files(folder: Path, last: str, needed_bytes: int = 0) -> Iterator[Path]:
    """A scratch folder beside `folder`: on success its files replace those of their names, `last` as the last of all.

    Other files in `folder` stay. It is the file `last` that says what the others are. One rename decides: once the
    scratch folder is in `folder`, its files are the valid ones, and whoever reads there moves in what a killed process
    has not (`finish_save`); before, the old files are all there.
    """
    scratch = _beside(folder)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with telling_full(folder, needed_bytes):
            scratch.mkdir(parents=True)
            yield scratch
            _flush_all(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            finish_save(folder, last)
            os.rename(scratch, folder / NEXT)
            flush(folder)
            finish_save(folder, last)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def finish_save(folder: Path, last: str = "") -> None:
    """Move in the files of a save that was killed after it was decided, see `new_files`; call before reading them.

    Several processes may do so at once. ValueError where this one may not write there.
    """
    pending = folder / NEXT
    if not pending.is_dir():
        return
    try:
        for path in sorted(pending.iterdir(), key=lambda path: (path.name == last, path.name)):
            with suppress(FileNotFoundError):  # another process was first
                os.replace(path, folder / path.name)
        flush(folder)
        with suppress(FileNotFoundError):
            pending.rmdir()
    except PermissionError as error:
        raise ValueError(
            f"{folder} holds a save that was stopped half-way, in {NEXT}, and may not be written to ({error}); let "
            "somebody who may write there load it once"
        ) from error


@contextmanager
def telling_full(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns what the system or a library says of a full disk into DiskFull; other errors pass as they are."""
    free_before = free_bytes(path)
    try:
        yield
    except DiskFull:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_full(error, path):
            raise
        needed = f"needs {_megabytes(needed_bytes)}" if needed_bytes else f"needs more than {_megabytes(free_before)}"
        raise DiskFull(
            f"{path} could not be written, the disk is full ({needed}, {_megabytes(free_before)} were free); free some "
            "space or choose another folder, and give the same command again: what was there before is untouched"
        ) from error


def free_bytes(path: Path) -> int:
    """Room on the disk that `path` is on, or will be."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def require_disk(folder: Path, needed_bytes: int, what: str, remedy: str) -> None:
    """ValueError, before any work, when the disk under `folder` has less than `needed_bytes` free."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise ValueError(
            f"{what} needs {needed_bytes / MEGABYTE:,.1f} MB under {folder}, but {free / MEGABYTE:,.1f} MB are free; "
            f"{remedy}"
        )


def flush(path: Path) -> None:
    """Have the system put a file, or a folder's list of names, on the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the disk cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _beside(path: Path) -> Path:
    """A name of this process's own: of processes on several machines, two may have the same id."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}{PARTIAL}")


def is_left_over(scratch: Path) -> bool:
    """Whether the process that wrote this scratch file is gone: one of this machine that does not run any more.

    FileNotFoundError where it is not there. Of other machines' files only their age tells.
    """
    owner, _, pid = scratch.name.removesuffix(PARTIAL).rpartition("-")
    if time.time() - scratch.stat().st_mtime > LEFT_OVER_S:
        return True
    return pid.isdecimal() and owner.endswith(f".{socket.gethostname()}") and not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _flush_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        flush(path)


def _is_full(error: Exception, path: Path) -> bool:
    """Whether it was room that lacked. torch does not tell why it failed: then the disk is looked at."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, SafetensorError):
        return any(sign in str(error) for sign in FULL_IN_SAFETENSORS)
    return any(sign in str(error) for sign in FAILED_IN_TORCH) and free_bytes(path) < MEGABYTE


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.1f} MB"
