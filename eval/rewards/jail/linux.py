"""Linux's means of shutting a process in, called through ctypes: namespaces, a root folder of its own, Landlock.

Each function does one thing or raises OSError that names it. When to call which is the supervisor's matter.
"""

import ctypes
import errno
import itertools
import os
from collections.abc import Sequence

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

# These numbers are the same on every architecture: calls this young share one table.
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

# Landlock's rights by the version (ABI) that brought them. Not covered by any: chmod, chown, times.
FS_READ = 0b1101  # execute, read a file, list a folder
FS_WRITE_FILE, FS_READ_FILE = 1 << 1, 1 << 2
FS_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
NET_RIGHTS = {4: 0b11}  # bind and connect TCP
SCOPES = {6: 0b11}  # abstract unix sockets, signals


def succeed(result: int, what: str) -> int:
    """The result, or OSError when it tells of failure."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    """One of prctl's settings of this process."""
    succeed(LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)), what)


def unshare(flags: int) -> None:
    """Leave the named namespaces for new, empty ones."""
    succeed(LIBC.unshare(flags), "unshare")


def map_own_user(uid: int, gid: int) -> None:
    """In a new user namespace: this user and group are themselves, and nobody else exists."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    arguments = [text if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = LIBC.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3])
    succeed(result, f"mount of {source} on {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show a folder or file with all that is mounted below it in another place, read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    settings = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    path, size = os.fsencode(target), ctypes.c_size_t(ctypes.sizeof(settings))
    result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, settings, size)
    succeed(result, f"mount_setattr of {target}")


def enter_private_root(folder: str, readable: Sequence[str], links: Sequence[Sequence[str]], megabytes: int) -> str:
    """Make `folder` the root of all paths: in memory, bounded, with the readable paths in it and nothing else.

    readable: paths without symbolic links, none below another. links: (place, target) of symbolic links that lead to
    them. The mounts are this namespace's own, and vanish with its last process. Returns the working folder, writable:
    /tmp, or another where one of the paths lies in /tmp.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,nr_inodes=4096,mode=755")
    root = f"{folder}/root"
    for path in readable:
        furnish(root, path)
    for name in ("null", "zero", "random", "urandom"):
        furnish(root, f"/dev/{name}", is_device=True)
    for place, target in links:
        if not os.path.lexists(root + place):  # it is there where it lies in a readable folder
            os.makedirs(os.path.dirname(root + place), exist_ok=True)
            os.symlink(target, root + place)
    os.chdir(folder)
    # With both paths the same the old root ends up over the new one, and comes off.
    succeed(LIBC.pivot_root(b".", b"."), "pivot_root")
    succeed(LIBC.umount2(b".", MNT_DETACH), "umount2")
    # One folder further in: to a process in a chroot the kernel refuses user namespaces, and with them mounts.
    os.chroot("/root")
    return make_working_folder([*readable, *(place for place, _ in links)])


def make_working_folder(taken: Sequence[str]) -> str:
    """Make, enter and return a writable folder that is none of these paths, above none and below none."""
    names = itertools.chain(["/tmp"], (f"/answer{number or ''}" for number in itertools.count()))
    folder = next(name for name in names if not any(is_within(name, path) or is_within(path, name) for path in taken))
    # Programs write to /tmp by name, too: also where an interpreter lies in it, unless it is itself shown read-only.
    for path in {"/tmp", folder}:
        os.makedirs(os.path.realpath(path), exist_ok=True)
        try:
            os.chmod(path, 0o1777)
        except OSError as error:
            if path == folder or error.errno != errno.EROFS:
                raise
    os.chdir(folder)
    return folder


def is_within(path: str, folder: str) -> bool:
    """Whether the path is this folder or lies below it."""
    return (path.rstrip("/") + "/").startswith(folder.rstrip("/") + "/")


def furnish(root: str, path: str, is_device: bool = False) -> None:
    """Show one path of the system in the new root."""
    place = root + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        open(place, "w").close()
    if is_device:
        mount(path, place, None, MS_BIND)
    else:
        bind_read_only(path, place)


def landlock_version() -> int:
    """Landlock's ABI here; 0 when the kernel has none."""
    return max(0, LIBC.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def granted(rights: dict[int, int], version: int) -> int:
    """The bits that this version knows."""
    return sum(bits for since, bits in rights.items() if since <= version)


def restrict_paths(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Landlock: nothing but these paths can be opened, and (as far as the version goes) no socket, no signal outside.

    Needs no_new_privs. What it cannot refuse: chmod, chown, times; truncate before version 3.
    """
    version = landlock_version()
    every = granted(FS_RIGHTS, version)
    rules = (ctypes.c_uint64 * 3)(every, granted(NET_RIGHTS, version), granted(SCOPES, version))
    ruleset = succeed(
        LIBC.syscall(SYS_LANDLOCK_CREATE, rules, ctypes.c_size_t(ctypes.sizeof(rules)), ctypes.c_uint32(0)), "Landlock"
    )
    for paths, rights in ((readable, FS_READ), (writable, every)):
        for path in paths:
            # A file takes only the rights that a file can have.
            allow(ruleset, path, rights if os.path.isdir(path) else rights & (FS_WRITE_FILE | FS_READ_FILE))
    succeed(LIBC.syscall(SYS_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)), "Landlock")
    os.close(ruleset)


def allow(ruleset: int, path: str, rights: int) -> None:
    """Add one path and what may be done under it."""

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))

    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    beneath = Beneath(rights, handle)
    result = LIBC.syscall(SYS_LANDLOCK_ADD, ruleset, 1, ctypes.byref(beneath), ctypes.c_uint32(0))
    os.close(handle)
    succeed(result, f"Landlock for {path}")


def drop_capabilities() -> None:
    """Give up every capability. With no_new_privs none comes back."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    succeed(LIBC.capset(header, none), "capset")
