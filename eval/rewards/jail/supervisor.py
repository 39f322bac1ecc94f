"""Shuts two processes in, one that runs an answer and one that judges it, watches them, and clears away what is left.

Started as a process for each answer (`main`). Reads a request from its standard input, then leaves the tests there for
the judge (`cell`): they are in no process from which the answer's is forked. The input stays open: when it ends, the
trainer is gone and everything is ended. Writes a verdict, one line, to standard output.
Plans, from strongest: `namespaces` (a root folder, processes, network and IPC of its own), `landlock`, `permissions`
(root alone: a user who owns nothing), `none`. Root gives up its user in each of the first three.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from eval.rewards.jail import cell, linux

POLL_S = 0.005
DISK_POLL_S = 0.05
MAX_ENTRIES, MAX_DEPTH = 4096, 32
# Users that exist nowhere else, two per supervisor (answer, judge): limits that the kernel counts by user are then the
# answer's own, all its processes can be ended at once, and none of them may touch the judge's.
FIRST_UID, FIRST_JUDGE_UID = 1_800_000_000, 1_900_000_000


def main() -> None:
    """One request, one verdict."""
    request = json.loads(cell.read_frame(0))
    folder = os.path.join(request["parent_folder"], f"foretoken-answer-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    try:
        verdict = supervise(request, folder)
    finally:
        remove(folder)
    print(json.dumps(verdict))


def supervise(request: dict[str, Any], folder: str) -> dict[str, str]:
    """Run the answer in a child that is shut in; {"status", "message"}."""
    plan, limits = request["plan"], request["limits"]
    has_users = os.getuid() == 0 and plan != "none"
    uids: cell.Users = (FIRST_UID + os.getpid(), FIRST_JUDGE_UID + os.getpid()) if has_users else (None, None)
    if plan == "namespaces":
        leave_namespaces()
    elif sys.platform == "linux":
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, "subreaper")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        cell.run(request, folder, uids, writing)
    os.close(writing)
    answer_pid = int.from_bytes(os.read(reading, cell.PID_BYTES), "big")  # the judge has its tests then
    watched = None if plan == "namespaces" else folder
    status, cpu_s, ended_for = wait(pid, limits, watched, reading)
    if plan != "namespaces":  # there the kernel has ended all of them with the first
        end_stragglers(uids, (pid, answer_pid))
    report = os.read(reading, cell.REPORT_BYTES) if ended_for in ("", "reported") else b""
    if not report:
        return explain(status, cpu_s, ended_for, limits)
    verdict = json.loads(report)
    if "ended" in verdict:
        status, cpu_s = verdict["ended"]
        return explain(status, cpu_s, "", limits)
    return verdict


def leave_namespaces() -> None:
    """The next child is the first process of a namespace that ends with it. Without root, own the namespace first."""
    if os.getuid() == 0:
        linux.unshare(linux.CLONE_NEWPID)
        return
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
    linux.map_own_user(uid, gid)


def wait(pid: int, limits: dict[str, Any], watched: str | None, reading: int) -> tuple[int, float, str]:
    """Until the child has reported, ends, or is ended: exit status, CPU seconds, and why it was ended ("" when it was
    not)."""
    deadline = time.monotonic() + limits["wall_s"]
    next_look = 0.0
    reason = ""
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage.ru_utime + usage.ru_stime, reason
        now = time.monotonic()
        if now > deadline:
            reason = "timeout"
        elif ready := select.select([0, reading], [], [], POLL_S)[0]:
            reason = "stopped" if 0 in ready else "reported"
        elif watched is not None and now > next_look:
            reason = "disk" if is_over(watched, limits["disk_mb"] << 20) else ""
            next_look = time.monotonic() + DISK_POLL_S
        if reason:
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            return status, usage.ru_utime + usage.ru_stime, reason


def is_over(folder: str, limit_bytes: int) -> bool:
    """Whether the folder holds more than the limit, more entries than anyone needs, or deeper ones."""
    total = entries = 0
    folders = [(folder, 0)]
    while folders:
        path, depth = folders.pop()
        with contextlib.suppress(OSError), os.scandir(path) as listing:  # what vanishes meanwhile, or is closed to us
            for entry in listing:
                entries += 1
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                if total > limit_bytes or entries > MAX_ENTRIES or depth > MAX_DEPTH:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, depth + 1))
    return False


def end_stragglers(uids: Sequence[int | None], groups: Sequence[int]) -> None:
    """End what was left running: every process of these users, or, without them, these process groups."""
    for uid, group in zip(uids, groups, strict=True):
        if uid is None and group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        elif uid is not None and os.fork() == 0:
            os.setresuid(uid, uid, uid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
    if None in uids:
        return
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            os.waitpid(-1, 0)


def explain(status: int, cpu_s: float, reason: str, limits: dict[str, Any]) -> dict[str, str]:
    """The verdict on a process that ended without one."""
    if reason == "timeout":
        return {"status": "timeout", "message": f"ran longer than {limits['wall_s']} s"}
    if reason == "stopped":
        return {"status": "crashed", "message": "the trainer ended"}
    if reason == "disk":
        return {
            "status": "crashed",
            "message": f"wrote more than {limits['disk_mb']} MB, or too many or too deep folders",
        }
    if not os.WIFSIGNALED(status):
        return {
            "status": "crashed",
            "message": f"left with exit status {os.WEXITSTATUS(status)} before its tests ended",
        }
    killer = os.WTERMSIG(status)
    if killer in (signal.SIGKILL, signal.SIGXCPU) and cpu_s >= limits["cpu_s"] - 0.5:
        return {"status": "timeout", "message": f"used more than {limits['cpu_s']} s of CPU"}
    if killer == signal.SIGKILL:
        return {"status": "memory", "message": "killed from outside, most likely for want of memory"}
    return {"status": "crashed", "message": f"killed by {signal.Signals(killer).name}"}


def remove(folder: str) -> None:
    """Delete the working folder, whatever state it was left in. OSError if it stays."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # the usual case: what was written lay in memory
        return
    # Each inner folder is moved up before its own is deleted, so that no path gets long and nothing recurs.
    os.chmod(folder, 0o700)
    waiting = os.listdir(folder)
    while waiting:
        path = os.path.join(folder, waiting.pop())
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            inner = os.path.join(path, name)
            if not os.path.islink(inner) and os.path.isdir(inner):
                os.chmod(inner, 0o700)  # moving a folder writes to it
            waiting.append(f"moved-{os.urandom(8).hex()}")
            os.rename(inner, os.path.join(folder, waiting[-1]))
        os.rmdir(path)
    os.rmdir(folder)
