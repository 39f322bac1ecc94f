"""The filter of system calls that a shut-in process runs under, built here as a BPF program.

It keeps what the other means of a plan leave open: sockets of every family, a user's other processes where they have
the same user, IPC and keyrings that outlive an answer, and the parts of the kernel that no answer needs. Refused calls
fail with an error, as if the permission were missing; a call of another architecture (32-bit, x32) ends the process.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping
from typing import NamedTuple

from eval.rewards.jail import linux

# AUDIT_ARCH of a 64-bit process, and the column of CALLS.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
SECCOMP_NUMBER = {"x86_64": 317, "aarch64": 277}
X32_BIT = 0x40000000
SECCOMP_SET_MODE_FILTER = 1
# Without this flag, kernels before 5.16 slow the process down against speculation attacks.
SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1 << 2
RETURN_KILL, RETURN_ERROR, RETURN_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, JUMP, JUMP_EQUAL, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16

# By name of the call; None where the architecture has none.
Numbers = Mapping[str, tuple[int, int | None]]

# Refused in every plan, by what they would open. Numbers: x86_64, aarch64.
SOCKETS = {"socket": (41, 198)}
OTHER_PROCESSES = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
IPC = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
KEYRINGS = {"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)}
# Files in memory count towards no limit.
MEMORY = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
KERNEL = {
    "io_uring_setup": (425, 425),  # opens sockets and files past this filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
}
# Refused as well where the answer has the trainer's own user, to whom the kernel lets it do as it likes. What Landlock
# covers since its version 3 (truncate) and not at all (modes, owners, times, attributes):
FILES = {
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# ... and what reaches processes by their number, user or group.
SIGNALS = {
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
# Such a process may start no other (its user's count of processes is not its own). EAGAIN is the limit's own error.
STARTS = {"clone": (56, 220), "fork": (57, None), "vfork": (58, None)}
# Calls that tell the C library to use an older one, whose arguments can be looked at.
CLONE3 = {"clone3": (435, 435)}
OPENAT2 = {"openat2": (437, 437)}

NEW_NAMESPACES = 0x7E020000
SOCK_STREAM, SOCK_SEQPACKET = 1, 5
TERMINAL_REQUESTS = (0x5412, 0x541C, 0x540E)  # TIOCSTI, TIOCLINUX, TIOCSCTTY: type into a terminal, or take it
O_ACCMODE, O_TRUNC = 0o3, 0o1000


class Rule(NamedTuple):
    """A call whose argument decides: `argument & mask` in `values`, or, when `refused`, in none of them."""

    numbers: tuple[int | None, int | None]
    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    refused: bool = False


# A pair of connected streams reaches nobody; one of datagrams could send to any address.
PAIRS = Rule((53, 199), 1, (SOCK_STREAM, SOCK_SEQPACKET), mask=0xF)
IOCTL = Rule((16, 29), 1, TERMINAL_REQUESTS, refused=True)
CLONE = Rule((56, 220), 0, (0,), mask=NEW_NAMESPACES)


def own_process_rules(pid: int) -> list[Rule]:
    """Signals, limits and scheduling: of this process alone."""
    killing = [Rule(numbers, 0, (pid,)) for numbers in ((62, 129), (200, 130), (234, 131))]  # kill, tkill, tgkill
    limits = [(302, 261), (203, 122), (142, 118), (144, 119), (314, 274)]  # prlimit64 and sched_set...
    return [*killing, *(Rule(numbers, 0, (0, pid)) for numbers in limits)]


def truncating_rules() -> list[Rule]:
    """Opening to read, and truncating by it: what Landlock lets pass before its version 3."""
    emptied = (O_TRUNC, O_TRUNC | O_ACCMODE)
    return [
        Rule(numbers, place, emptied, mask=O_TRUNC | O_ACCMODE, refused=True)
        for numbers, place in (((2, None), 1), ((257, 56), 2))  # open, openat
    ]


def statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def refuse(error: int) -> bytes:
    """End the filter: the call fails with this error."""
    return statement(RETURN, RETURN_ERROR | error)


def decide(rule: Rule, number: int) -> bytes:
    """The instructions for one rule; with the call's number in the accumulator before, and after if it is another."""
    compared = b""
    for left, value in zip(range(len(rule.values) - 1, -1, -1), rule.values, strict=True):
        compared += statement(JUMP_EQUAL, value, left + 1, 0)  # over the remaining comparisons and the first ending
    endings = [statement(RETURN, RETURN_ALLOW), refuse(errno.EPERM)]
    without, within = endings if rule.refused else reversed(endings)
    # An argument's low half: what is looked at fits in it, and the kernel ignores the rest (both are little-endian).
    body = statement(LOAD, ARGUMENTS_AT + 8 * rule.argument) + statement(AND, rule.mask) + compared + without + within
    return statement(JUMP_EQUAL, number, 0, len(body) // 8) + body


def build_program(machine: str, own_user: bool, pid: int) -> bytes:
    """The filter's instructions. own_user: whether other processes and files belong to other users, or to none."""
    architecture, column = ARCHITECTURES[machine]
    rules = [PAIRS, IOCTL]
    refused: list[tuple[int, Numbers]] = [
        (errno.EPERM, group) for group in (SOCKETS, OTHER_PROCESSES, IPC, KEYRINGS, MEMORY, KERNEL)
    ]
    refused.append((errno.ENOSYS, CLONE3))
    if own_user:
        rules.append(CLONE)
    else:
        rules += [*own_process_rules(pid), *truncating_rules()]
        refused += [(errno.EPERM, FILES), (errno.EPERM, SIGNALS), (errno.EAGAIN, STARTS), (errno.ENOSYS, OPENAT2)]
    program = statement(LOAD, ARCHITECTURE_AT) + statement(JUMP_EQUAL, architecture, 1, 0)
    program += statement(RETURN, RETURN_KILL) + statement(LOAD, NUMBER_AT)
    if machine == "x86_64":
        program += statement(JUMP_AT_LEAST, X32_BIT, 0, 1) + statement(RETURN, RETURN_KILL)
    for rule in rules:
        if (number := rule.numbers[column]) is not None:
            program += decide(rule, number)
    for error, group in refused:
        present = [numbers[column] for numbers in group.values() if numbers[column] is not None]
        for left, number in zip(range(len(present), 0, -1), present, strict=True):
            assert number is not None
            program += statement(JUMP_EQUAL, number, left, 0)  # to the refusal, behind an ending that is jumped over
        program += statement(JUMP, 1) + refuse(error)
    return program + statement(RETURN, RETURN_ALLOW)


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(own_user: bool) -> None:
    """Put the filter on this process and all that it starts, for good. Needs no_new_privs. OSError where it cannot."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}; there is one for x86_64 and aarch64")
    program = build_program(machine, own_user, os.getpid())
    number = SECCOMP_NUMBER[machine]
    given = Program(len(program) // 8, program)
    result = linux.LIBC.syscall(number, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, ctypes.byref(given))
    linux.succeed(result, "seccomp")
