"""The two processes of one answer: the judge's, and forked from it, before it reads its tests, the answer's.

Where there are namespaces the judge is the first process of one, and the answer's the first of another inside it, from
which the judge cannot be named; elsewhere each has a user of its own, or, without root, Landlock's domain of its own,
which refuses to trace or signal the other. The judge alone holds the pipe on which it reports.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

from eval.rewards.jail import answer, judge, linux, seccomp

REPORT_BYTES = 4096
REASON_BYTES = 2048
Users = tuple[int | None, int | None]  # the answer's, the judge's
PID_BYTES = 4
FRAME_BYTES = 8
READY = b"+"
ENDING_S = 2.0  # how long a process may take to end once its pipes are closed


def read_frame(descriptor: int) -> bytes:
    """One message of the trainer's, length first, and not a byte of the next. EOFError when it is not complete."""
    size, parts = FRAME_BYTES, b""
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            raise EOFError("the trainer ended")
        parts += part
        if size == FRAME_BYTES == len(parts):
            size += int.from_bytes(parts, "big")
    return parts[FRAME_BYTES:]


def run(request: dict[str, Any], folder: str, users: Users, report: int) -> NoReturn:
    """The judge's process: start the answer's, then judge and report. Nothing returns from here."""
    try:
        uid, judge_uid = users
        folder = enter(request, folder, uid)
        (asked, asking), (replies, replying) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (report, asking, replies):
                os.close(descriptor)
            run_answer(request, folder, uid, asked, replying)
        os.close(asked)
        os.close(replying)
        tests = json.loads(read_frame(0))
        shut_in(request, folder, judge_uid, uid)
        if sys.platform == "linux":
            linux.prctl(linux.PR_SET_DUMPABLE, 0, "protection from tracing")
        if (said := os.read(replies, REASON_BYTES)) != READY:
            give_up(report, said.decode("utf-8", "replace"))
    except BaseException as error:
        give_up(report, reason(error))
    os.write(report, pid.to_bytes(PID_BYTES, "big"))
    write, leave = os.write, os._exit
    judged = judge.judge(tests, replies, asking)
    verdict = ended(pid) if judged is None else {"status": judged[0], "message": judged[1]}
    write(report, json.dumps(verdict).encode())
    leave(0)


def reason(error: BaseException) -> str:
    """What failed, short enough for one write."""
    return f"{type(error).__name__}: {error}"[: REASON_BYTES // 4]


def give_up(report: int, message: str) -> NoReturn:
    """Report that the jail itself does not work."""
    verdict = {"status": "broken", "message": message}
    os.write(report, bytes(PID_BYTES) + json.dumps(verdict).encode())
    os._exit(1)


def ended(pid: int) -> dict[str, Any]:
    """How the answer's process ended: {"ended": [exit status, CPU seconds]}, or a verdict if it still runs."""
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return {"ended": [status, usage.ru_utime + usage.ru_stime]}
        time.sleep(0.001)
    return {"status": "crashed", "message": "closed its pipes before its tests ended"}


def run_answer(request: dict[str, Any], folder: str, uid: int | None, asked: int, replying: int) -> NoReturn:
    """The answer's process. Nothing returns from here."""
    try:
        shut_in(request, folder, uid, uid)
    except BaseException as error:
        os.write(replying, reason(error).encode())
        os._exit(1)
    os.write(replying, READY)
    with contextlib.suppress(BaseException):
        answer.serve(request["answer"], asked, replying)
    os._exit(0)


def enter(request: dict[str, Any], folder: str, uid: int | None) -> str:
    """What both processes share: their paths, and where there are namespaces, a root folder; what comes after is the
    answer's process alone in a namespace of processes. Returns the working folder, under its path there."""
    os.umask(0o022)  # whatever the trainer's: folders made here are for the answer's user
    sys.path += request["site_paths"]
    if uid is not None:
        os.chown(folder, uid, uid)
        os.chmod(folder, 0o750)  # the judge's group is the same: tests may read what the answer wrote
    if request["plan"] == "namespaces":
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
        megabytes = request["limits"]["disk_mb"]
        folder = linux.enter_private_root(folder, request["readable"], request["links"], megabytes)
        linux.unshare(linux.CLONE_NEWPID)
    else:
        os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    return folder


def shut_in(request: dict[str, Any], folder: str, uid: int | None, gid: int | None) -> None:
    """Take from this process what the plan and the limits say."""
    plan, readable = request["plan"], request["readable"]
    has_own_user = uid is not None or plan == "namespaces"
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    if plan != "none":
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    if plan == "landlock":
        linux.restrict_paths([*readable, "/dev/zero", "/dev/urandom", "/dev/random"], [folder, "/dev/null"])
    if uid is not None and gid is not None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    elif plan != "none":
        linux.drop_capabilities()
    require_entry(folder, os.W_OK if uid == gid else os.R_OK)  # the judge, with a user of its own, may only read there
    require_readable([*readable, *request["site_paths"]])
    if sys.platform == "linux":
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL, "parent's death")
    # A count by user is the answer's own only with a user or a namespace of its own; without root the judge is in it.
    set_limits(
        request["limits"],
        num_processes=request["limits"]["processes"] + (uid is None) if has_own_user else 0,
        is_strict=plan != "none",
    )
    if plan != "none":
        seccomp.filter_calls(has_own_user)


def set_limits(limits: dict[str, Any], num_processes: int, is_strict: bool) -> None:
    """Bounds that the kernel holds for each process. num_processes: of its user."""
    megabyte = 1 << 20
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, num_processes),
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


def require_entry(folder: str, use: int) -> None:
    """PermissionError when that user cannot reach the working folder by its path, for this use (os.R_OK, os.W_OK)."""
    if not os.access(folder, use | os.X_OK):
        raise PermissionError(
            f"{os.path.dirname(folder)} cannot be entered by other users: set TMPDIR to a folder that can"
        )
