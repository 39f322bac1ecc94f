"""What model-written code is kept from, by which plan and means, and the code that tries each.

One table (`GUARDS`) says it; a plan is used only after `PROBE`, run inside it, has failed at every item that is not
tolerated. It attacks targets that are there for it (`open_targets`), never the trainer's own files.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Plan = Literal["namespaces", "landlock", "permissions", "none"]
# From strongest.
PLANS: tuple[Plan, ...] = ("namespaces", "landlock", "permissions")
ROOT_FOLDER, LANDLOCK, OWN_USER = "root folder of its own", "Landlock", "user of its own"
NAMESPACE, FILTER, LIMIT = "namespace", "filter of system calls", "limit"


@dataclass(frozen=True)
class Guard:
    """means: what the answer cannot do. kept_by: the means, for each plan that has one. is_tolerated: whether a plan
    that leaves it open is used all the same, and says so."""

    means: str
    kept_by: Mapping[Plan, str] = field(default_factory=dict)
    is_tolerated: bool = False


def by(namespaces: str, landlock: str = "", permissions: str = "") -> dict[Plan, str]:
    """The means of each plan that has one."""
    plans: dict[Plan, str] = {"namespaces": namespaces, "landlock": landlock, "permissions": permissions}
    return {plan: means for plan, means in plans.items() if means}


GUARDS = {
    "secrets": Guard("reading files that only the user may read", by(ROOT_FOLDER, LANDLOCK, OWN_USER)),
    "readable": Guard("reading files that others may read", by(ROOT_FOLDER, LANDLOCK), is_tolerated=True),
    "names": Guard("asking whether a file exists, its size and times", by(ROOT_FOLDER), is_tolerated=True),
    "disk": Guard("changing, adding or deleting the user's files", by(ROOT_FOLDER, LANDLOCK, OWN_USER)),
    "packages": Guard(
        "changing the interpreter or its packages", by("read-only mounts", f"{LANDLOCK}, {FILTER}", OWN_USER)
    ),
    "modes": Guard(
        "changing modes, owners, times or attributes of the user's files",
        by(ROOT_FOLDER, f"{OWN_USER} (root), {FILTER} (others)", OWN_USER),
    ),
    "leftovers": Guard("leaving files in folders that anyone may write to", by(ROOT_FOLDER, LANDLOCK), True),
    "signals": Guard(
        "signalling, slowing or limiting other processes",
        by(NAMESPACE, f"{OWN_USER} (root), {FILTER} (others)", OWN_USER),
    ),
    "other-memory": Guard(
        "reading or writing other processes' memory",
        by(f"{NAMESPACE}, {FILTER}", f"{LANDLOCK}, {FILTER}", f"{OWN_USER}, {FILTER}"),
    ),
    "processes": Guard("listing processes and their command lines", by(NAMESPACE, LANDLOCK), is_tolerated=True),
    "network": Guard("the network", by(f"{NAMESPACE}, {FILTER}", FILTER, FILTER)),
    "unix-sockets": Guard(
        "unix sockets that have a path (service managers, container daemons)",
        by(f"{ROOT_FOLDER}, {FILTER}", FILTER, FILTER),
    ),
    "abstract-sockets": Guard("abstract unix sockets", by(f"{NAMESPACE}, {FILTER}", FILTER, FILTER)),
    "ipc": Guard(
        "shared memory, semaphores and queues of other processes", by(f"{NAMESPACE}, {FILTER}", FILTER, FILTER)
    ),
    "keyrings": Guard("the kernel's keyrings", by(FILTER, FILTER, FILTER)),
    "terminal": Guard("reading from, writing or typing into a terminal", by(ROOT_FOLDER, LANDLOCK, OWN_USER)),
    "kernel": Guard("new namespaces, mounts, io_uring, bpf, userfaultfd, perf events", by(FILTER, FILTER, FILTER)),
    "forks": Guard("more processes than the limit", by(LIMIT, LIMIT, LIMIT)),
    "memory": Guard("more memory than the limit, also as files in memory", by(*[f"{LIMIT}, {FILTER}"] * 3)),
}


def render_table() -> str:
    """The table in Markdown, for the documentation."""
    rows = [f"| kept out | {' | '.join(PLANS)} |", "| --- |" + " --- |" * len(PLANS)]
    for name, guard in GUARDS.items():
        cells = (guard.kept_by.get(plan, "**open**") for plan in PLANS)
        rows.append(f"| {name}: {guard.means} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


# Tries to do harm, and tells what it could do. Each attempt is a function that raises where it is kept from it.
PROBE = Path(__file__).with_name("hostile.py").read_text()


def probe_test(targets: Mapping[str, Any]) -> str:
    """The test that runs after PROBE, and raises with the names of what was found open."""
    return f"found = find_open({dict(targets)!r})\nif found: raise AssertionError(' '.join(found))"


def libc_call(name: str, *arguments: object) -> int:
    """A call of the C library; -1 where it fails or does not exist."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    return -1 if call is None else int(call(*arguments))


@contextlib.contextmanager
def open_targets(processes: int, memory_mb: int) -> Iterator[dict[str, Any]]:
    """Files, listeners, a process, a terminal and IPC objects to attack, all open to every user where they can be: what
    guards them must be the plan."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretoken-probe-")))
        folder.chmod(0o755)
        for name, mode in (("secret", 0o600), ("victim", 0o644)):
            (folder / name).write_text("canary")
            (folder / name).chmod(mode)
        (folder / "shared").mkdir()
        (folder / "shared").chmod(0o777)
        # Shown to the probe beside the installed packages (`run_program`'s `shown`).
        packages = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretoken-packages-")))
        packages.chmod(0o755)
        (packages / "module.py").write_text("canary")
        (packages / "module.py").chmod(0o644)
        command = [sys.executable, "-S", "-s", "-c", "import sys; print(flush=True); sys.stdin.read()"]
        victim = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert victim.stdout is not None
        victim.stdout.readline()  # it is there
        stack.callback(victim.kill)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        targets = {"folder": str(folder), "packages": str(packages), "pid": victim.pid, "port": server.getsockname()[1]}
        targets |= open_unix_sockets(folder, stack) | open_ipc(stack) | {"terminal": open_terminal(stack)}
        yield targets | {"processes": processes, "memory_mb": memory_mb}


def open_unix_sockets(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Listeners for streams and datagrams, by path and by abstract name."""
    # A path for a socket has at most 107 bytes: it is given from within an open folder.
    handle = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, handle)
    abstract = f"\0{folder.name}"
    for kind, name in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "datagram")):
        for address in (f"/proc/self/fd/{handle}/{name}", f"{abstract}-{name}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            with contextlib.suppress(OSError):  # where there is no abstract name, there is nothing to keep out
                listener.bind(address)
                if kind == socket.SOCK_STREAM:
                    listener.listen()
        (folder / name).chmod(0o777)
    return {"abstract": abstract}


def open_ipc(stack: contextlib.ExitStack) -> dict[str, Any]:
    """A System V shared memory segment and a POSIX message queue; -1 and "" where the system has none."""
    segment = libc_call("shmget", 0, ctypes.c_size_t(4096), 0o1000 | 0o666)
    if segment >= 0:
        stack.callback(libc_call, "shmctl", segment, 0, None)
    queue = f"/foretoken-probe-{os.getpid()}"
    handle = libc_call("mq_open", queue.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    if handle < 0:
        return {"segment": segment, "queue": ""}
    stack.callback(libc_call, "mq_unlink", queue.encode())
    stack.callback(os.close, handle)
    return {"segment": segment, "queue": queue}


def open_terminal(stack: contextlib.ExitStack) -> str:
    """The path of a terminal that belongs to nobody's session; "" where there can be none."""
    try:
        ends = os.openpty()
    except OSError:
        return ""
    for end in ends:
        stack.callback(os.close, end)
    return os.ttyname(ends[1])
