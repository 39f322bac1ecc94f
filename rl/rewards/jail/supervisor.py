"""Shuts one process in, lets it run an answer, watches it, and clears away whatever is left.

Started as a process for each answer (`main`). Reads a request, one line of JSON, from its standard input, which then
stays open: when it ends, the trainer is gone and everything is ended. Writes a verdict, one line, to standard output.
Plans, from strongest: `namespaces` (a root folder, processes, network and IPC of its own), `landlock`, `permissions`
(root alone: a user who owns nothing), `none`. Root gives up its user in each of the first three.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

from rl.rewards.jail import linux, seccomp, trial

REPORT_BYTES = 4096
POLL_S = 0.005
DISK_POLL_S = 0.05
MAX_ENTRIES, MAX_DEPTH = 4096, 32
# Users that exist nowhere else, one a supervisor: limits that the kernel counts by user are then the answer's own, and
# all processes of that user can be ended at once.
FIRST_UID = 1_800_000_000


def main() -> None:
    """One request, one verdict."""
    request = json.loads(sys.stdin.buffer.readline())
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
    uid = FIRST_UID + os.getpid() if os.getuid() == 0 and plan != "none" else None
    if plan == "namespaces":
        leave_namespaces()
    elif sys.platform == "linux":
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, "subreaper")
    nonce = os.urandom(16)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        run_inside(request, folder, uid, nonce, writing)
    os.close(writing)
    watched = None if plan == "namespaces" else folder
    status, cpu_s, ended_for = wait(pid, limits, watched)
    if plan != "namespaces":  # there the kernel has ended all of them with the first
        end_stragglers(uid, pid)
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError):
        kind, found, report = os.read(reading, REPORT_BYTES).partition(nonce)
        if found and not kind and not ended_for:
            return dict(zip(("status", "message"), report.decode("utf-8", "replace").split("\n", 1), strict=True))
    return explain(status, cpu_s, ended_for, limits)


def leave_namespaces() -> None:
    """The next child is the first process of a namespace that ends with it. Without root, own the namespace first."""
    if os.getuid() == 0:
        linux.unshare(linux.CLONE_NEWPID)
        return
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
    linux.map_own_user(uid, gid)


def run_inside(request: dict[str, Any], folder: str, uid: int | None, nonce: bytes, writing: int) -> NoReturn:
    """The child: give up everything, run the answer, report. Nothing returns from here."""
    try:
        shut_in(request, folder, uid)
    except BaseException as error:
        os.write(writing, nonce + f"broken\n{type(error).__name__}: {error}".encode()[: REPORT_BYTES - 64])
        os._exit(1)
    write, leave = os.write, os._exit
    status, message = trial.run(request["answer"], request["tests"])
    write(writing, nonce + f"{status}\n{message}".encode("utf-8", "replace"))
    leave(0)


def shut_in(request: dict[str, Any], folder: str, uid: int | None) -> None:
    """Take from this process what the plan and the limits say."""
    plan, readable = request["plan"], request["readable"]
    has_own_user = uid is not None or plan == "namespaces"
    os.setsid()
    os.umask(0o022)  # whatever the trainer's: folders made here are for the answer's user
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.path += request["site_paths"]
    if uid is not None:
        os.chown(folder, uid, uid)
    if plan == "namespaces":
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
        folder = linux.enter_private_root(folder, readable, request["links"], request["limits"]["disk_mb"])
    else:
        os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    if plan != "none":
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    if plan == "landlock":
        linux.restrict_paths([*readable, "/dev/zero", "/dev/urandom", "/dev/random"], [folder, "/dev/null"])
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif plan != "none":
        linux.drop_capabilities()
    require_writable(folder)
    require_readable([*readable, *request["site_paths"]])
    if sys.platform == "linux":
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL, "parent's death")
    # A count by user is the answer's own only with a user or a namespace of its own.
    set_limits(request["limits"], has_own_user, is_strict=plan != "none")
    if plan != "none":
        seccomp.filter_calls(has_own_user)


def set_limits(limits: dict[str, Any], has_own_count: bool, is_strict: bool) -> None:
    """Bounds that the kernel holds for each process; without a count of its own, no further process at all."""
    megabyte = 1 << 20
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits["processes"] if has_own_count else 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            if is_strict:
                raise


def require_readable(paths: list[str]) -> None:
    """PermissionError when the user that the answer runs as cannot read its interpreter's library."""
    for path in paths:
        if not os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK):
            raise PermissionError(
                f"{path} cannot be read by other users: use a Python, and packages, installed outside private folders"
            )


def require_writable(folder: str) -> None:
    """PermissionError when that user cannot reach the working folder by its path."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{os.path.dirname(folder)} cannot be entered by other users: set TMPDIR to a folder that can"
        )


def wait(pid: int, limits: dict[str, Any], watched: str | None) -> tuple[int, float, str]:
    """Until the child ends, or is ended: exit status, CPU seconds, and why it was ended ("" when it was not)."""
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
        elif select.select([0], [], [], POLL_S)[0]:
            reason = "stopped"
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


def end_stragglers(uid: int | None, group: int) -> None:
    """End what the answer left running: every process of its user, or, without one, its process group."""
    if uid is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    if os.fork() == 0:
        os.setresuid(uid, uid, uid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
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
