"""Tries each thing that a plan should keep out, on targets made for it (`jail.guards`): for a jail alone."""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library; OSError when it fails."""
    function = getattr(LIBC, name)
    function.restype = ctypes.c_long
    result = function(*arguments)
    if ctypes.c_int(result).value == -1:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def system_call(numbers: dict[str, int], *arguments: object) -> int:
    """A system call without a function of its own."""
    return call("syscall", ctypes.c_long(numbers[os.uname().machine]), *arguments)


def connect(family: int, kind: int, address: Any) -> None:
    """Reach a listener."""
    with socket.socket(family, kind) as sender:
        sender.settimeout(1)
        sender.connect(address)
        sender.send(b"x")


def send_from_pair(address: str) -> None:
    """Reach a listener from a socket that was made as one of a pair."""
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        end.sendto(b"x", address)


def fork_all(count: int) -> None:
    """Start more processes than are allowed."""
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)


def attach(pid: int) -> None:
    """ptrace without stopping it."""
    call("ptrace", ctypes.c_long(0x4206), ctypes.c_long(pid), None, None)


def read_memory(pid: int) -> None:
    """process_vm_readv, of nothing: permission is looked at first."""
    place = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(place), 8)
    try:
        call("process_vm_readv", pid, vector, ctypes.c_ulong(1), vector, ctypes.c_ulong(1), ctypes.c_ulong(0))
    except OSError as error:
        if error.errno != 14:  # EFAULT: allowed, but nothing lies at this address there
            raise


def limit(pid: int) -> None:
    """Set a limit of another process, to what it is."""
    resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))


def type_into_terminal(path: str) -> None:
    """TIOCSTI, on what this process was started with or can open."""
    for terminal in (0, 1, 2, path, "/dev/tty"):
        try:
            handle = terminal if isinstance(terminal, int) else os.open(terminal, os.O_RDWR)
            fcntl.ioctl(handle, 0x5412, b"x")
        except OSError:
            continue
        return
    raise PermissionError


def change_attributes(path: str) -> None:
    """An attribute that a file's owner may set."""
    os.setxattr(path, "user.canary", b"x")


def attacks(target: dict[str, Any]) -> dict[str, list[Callable[[], object]]]:
    """By the guard's name, ways past it: each raises where it is kept out. What would hinder the others comes last."""
    folder, pid, terminal = target["folder"], target["pid"], target["terminal"]
    packages, secret, victim = f"{target['packages']}/module.py", f"{folder}/secret", f"{folder}/victim"
    local, abstract = ("127.0.0.1", target["port"]), target["abstract"]
    stream, datagram, unix = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.AF_UNIX
    segment, queue = target["segment"], target["queue"].encode()
    return {
        "secrets": [lambda: open(secret).read()],
        "readable": [lambda: open(victim).read()],
        "names": [lambda: os.stat(victim)],
        "modes": [
            lambda: os.chmod(victim, 0o644),
            lambda: os.utime(victim),
            lambda: os.chown(victim, os.getuid(), os.getgid()),
            lambda: change_attributes(victim),
            lambda: os.chmod(packages, 0o644),
            lambda: os.fchmod(os.open(packages, os.O_RDONLY), 0o644),
        ],
        "leftovers": [lambda: open(f"{folder}/shared/new", "x")],
        "packages": [
            lambda: open(packages, "r+").close(),
            lambda: os.open(packages, os.O_RDONLY | os.O_TRUNC),
            lambda: os.truncate(packages, 0),
            lambda: os.remove(packages),
            lambda: open(f"{target['packages']}/new.py", "x").close(),
        ],
        "disk": [
            lambda: os.open(victim, 3 | os.O_TRUNC),
            lambda: os.truncate(victim, 0),
            lambda: os.link(victim, "linked"),
            lambda: open(f"{folder}/new", "x").close(),
            lambda: os.rename(victim, f"{folder}/moved"),
            lambda: os.remove(victim),
        ],
        "signals": [
            lambda: os.kill(pid, 0),
            lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.Signals.SIGCONT),
            lambda: limit(pid),
            lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
            lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
        ],
        "other-memory": [
            lambda: open(f"/proc/{pid}/mem", "rb"),
            lambda: open(f"/proc/{pid}/environ").read(),
            lambda: read_memory(pid),
            lambda: system_call({"x86_64": 438, "aarch64": 438}, os.pidfd_open(pid), 0, 0),
            lambda: attach(pid),
        ],
        "processes": [lambda: open(f"/proc/{pid}/cmdline").read()],
        "network": [
            lambda: connect(socket.AF_INET, stream, local),
            lambda: connect(socket.AF_INET, datagram, local),
            lambda: socket.socket(socket.AF_VSOCK, stream),  # belongs to no namespace
        ],
        "unix-sockets": [
            lambda: connect(unix, stream, f"{folder}/stream"),
            lambda: connect(unix, datagram, f"{folder}/datagram"),
            lambda: send_from_pair(f"{folder}/datagram"),
        ],
        "abstract-sockets": [
            lambda: connect(unix, stream, f"{abstract}-stream"),
            lambda: connect(unix, datagram, f"{abstract}-datagram"),
            lambda: send_from_pair(f"{abstract}-datagram"),
        ],
        "ipc": [lambda: call("shmat", segment, None, 0), lambda: call("mq_open", queue, os.O_RDWR)],
        "keyrings": [lambda: system_call({"x86_64": 250, "aarch64": 219}, 0, -3, 0)],  # the session keyring's number
        "terminal": [
            lambda: os.open(terminal, os.O_RDWR | os.O_NOCTTY),
            lambda: type_into_terminal(terminal),
        ],
        "memory": [lambda: bytearray(target["memory_mb"] << 20), lambda: os.memfd_create("held")],
        "forks": [lambda: fork_all(target["processes"] + 4)],
        "kernel": [
            lambda: system_call({"x86_64": 425, "aarch64": 425}, 1, ctypes.create_string_buffer(120)),  # io_uring
            lambda: system_call({"x86_64": 323, "aarch64": 282}, 1),  # userfaultfd
            lambda: call("unshare", 0x10000000),  # a user namespace
        ],
    }


def find_open(target: dict[str, Any]) -> list[str]:
    """The guards that something got past."""
    found = []
    for name, ways in attacks(target).items():
        for way in ways:
            try:
                way()
            except Exception:
                continue
            found.append(name)
            break
    return found
