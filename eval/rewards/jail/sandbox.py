"""Model-written code is run here, never in the trainer's process: which protections work is tried out, not assumed.

Starts one supervisor (`jail.supervisor`) an answer and reads its verdict. What shuts the code in is described there.
"""

import contextlib
import functools
import json
import os
import py_compile
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from eval.rewards.jail.guards import GUARDS, PLANS, PROBE, Plan, open_targets, probe_test
from eval.rewards.jail.placement import find_view, require_own_folders

Status = Literal["passed", "failed", "timeout", "memory", "crashed"]
MEANS = {
    "namespaces": "a root folder, processes, network and IPC of their own (namespaces)",
    "landlock": "Landlock",
    "permissions": "file permissions alone",
    "none": "NOTHING BUT LIMITS",
}
ROOT = Path(__file__).resolve().parents[3]
START = (
    "import sys; sys.path.insert(0, {root!r}); from eval.rewards.jail.supervisor import main; sys.path.pop(0); main()"
)
GRACE_S = 60.0  # beyond the limit on wall clock, for starting and clearing away on a busy machine
VERDICT_BYTES = 1 << 16
BROKEN = "the sandbox for model-written code does not work (plan {}): "


@dataclass(frozen=True)
class Limits:
    """Bounds on one answer. ValueError unless all are positive, and whole but for wall_s.

    cpu_s: CPU seconds a process. wall_s: seconds from start to end, far more so that a busy machine changes no reward.
    memory_mb: address space a process. file_mb: each file. disk_mb: all files together (held in memory where there are
    namespaces). processes: with threads; an answer may take processes x memory_mb in all.
    """

    cpu_s: int = 5
    wall_s: float = 30.0
    memory_mb: int = 512
    file_mb: int = 8
    disk_mb: int = 32
    processes: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value}: a limit on model-written code must be positive")
            if name != "wall_s" and not isinstance(value, int):
                raise ValueError(f"{name}={value}: this limit must be a whole number")


@dataclass(frozen=True)
class Program:
    """An answer, and pieces of code that run after it, in order, and raise where it is wrong."""

    answer: str
    tests: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """passed: every test ended. failed: one raised, or the answer did. timeout, memory: over that limit. crashed: the
    process ended before its tests did. message: what was raised, or why. wall_ms: all of it, process start included."""

    status: Status
    message: str
    wall_ms: float


@dataclass(frozen=True)
class Protection:
    """A plan that works here, and what it leaves open (names of `guards.GUARDS`). passed_over: the stronger plans,
    each with why it does not work here."""

    plan: Plan
    is_open: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


class Sandbox:
    """Runs programs. ValueError when nothing here guards disk and processes, unless `unsafe`."""

    def __init__(self, limits: Limits | None = None, workers: int = 2, unsafe: bool = False) -> None:
        """workers: programs at a time in `run_all`."""
        if workers < 1:
            raise ValueError(f"workers={workers}: must be at least 1")
        self.limits = limits or Limits()
        self.workers = workers
        self.protection = find_protection(unsafe)
        compile_jail()

    def run(self, program: Program) -> Outcome:
        """One program, in a process of its own. RuntimeError when the sandbox itself does not work."""
        return run_program(program, self.limits, self.protection.plan)

    def run_all(self, programs: Sequence[Program]) -> list[Outcome]:
        """Their outcomes in order. Threads suffice: each waits for a process."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self.run, programs))

    def describe(self) -> str:
        """One line: what guards, which limits hold, what stays open."""
        limits = self.limits
        still_open = "; ".join(GUARDS[name].means for name in self.protection.is_open)
        passed_over = "".join(f"; not used: {reason}" for reason in self.protection.passed_over)
        return (
            f"model-written code is shut in by {MEANS[self.protection.plan]}; limits: {limits.cpu_s} s CPU, "
            f"{limits.wall_s:g} s in all, {limits.memory_mb} MB memory and {limits.processes} processes, "
            f"{limits.file_mb} MB a file, {limits.disk_mb} MB of files; open: "
            f"{still_open or 'nothing known'}{passed_over}"
        )


@functools.cache
def compile_jail() -> None:
    """Keep the jail's modules compiled beside their sources: supervisors write nothing there, one per answer."""
    for path in Path(__file__).parent.glob("*.py"):
        with contextlib.suppress(OSError):  # a read-only installation: as before, only slower
            py_compile.compile(str(path))


def describe_protections(unsafe: bool = False) -> str:
    """`Sandbox.describe` with the default limits."""
    return Sandbox(unsafe=unsafe).describe()


def run_program(program: Program, limits: Limits, plan: Plan, shown: Sequence[str] = ()) -> Outcome:
    """See `Sandbox.run`. shown: folders that the program may read beside what its interpreter needs."""
    started = time.perf_counter()
    view = find_view(tuple(shown))
    request: dict[str, Any] = {"answer": program.answer, "limits": asdict(limits), "plan": plan}
    request |= {"parent_folder": tempfile.gettempdir(), "site_paths": view.packages}
    request |= {"readable": view.readable, "links": view.links}
    verdict = ask_supervisor(frame(request) + frame(list(program.tests)), limits.wall_s + GRACE_S)
    if verdict["status"] == "broken":
        raise RuntimeError(BROKEN.format(plan) + verdict["message"])
    return Outcome(cast(Status, verdict["status"]), verdict["message"], (time.perf_counter() - started) * 1000)


def frame(value: object) -> bytes:
    """One part of the request, length first: who reads the first part holds nothing of the second."""
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "big") + text


def ask_supervisor(request: bytes, timeout_s: float) -> dict[str, str]:
    """Start a supervisor, and return its verdict; {"status": "broken", ...} when it gives none."""
    # Neither the trainer's environment (keys!) nor its open files; and a fixed order of sets, so that the same answer
    # always gets the same reward.
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": "/tmp", "TMPDIR": "/tmp"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    with subprocess.Popen(
        [sys.executable, "-S", "-s", "-P", "-c", START.format(root=str(ROOT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd="/",
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            verdict = read_line(process.stdout, timeout_s)
            return json.loads(verdict) if verdict else {"status": "broken", "message": last_line(process)}
        except BrokenPipeError:
            return {"status": "broken", "message": last_line(process)}
        finally:
            # Its input's end tells it to end its child; it is killed itself only when that does not help.
            process.stdin.close()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def read_line(pipe: IO[bytes], timeout_s: float) -> bytes:
    """One line, or nothing when none comes in time or the pipe ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return pipe.readline(VERDICT_BYTES) if selector.select(timeout_s) else b""


def last_line(process: subprocess.Popen[bytes]) -> str:
    """What a supervisor without a verdict said last."""
    process.kill()
    assert process.stderr is not None
    said = process.stderr.read(VERDICT_BYTES).decode("utf-8", "replace").strip()
    return said.splitlines()[-1] if said else "its process gave no verdict in time"


# ---- which plan works here ----


def find_protection(unsafe: bool = False) -> Protection:
    """The strongest plan that was seen to work. ValueError when none was, unless `unsafe`."""
    reasons: list[str] = []
    for plan in PLANS:
        found = probe(plan)
        if isinstance(found, Protection):
            return replace(found, passed_over=tuple(reasons))
        reasons.append(f"{plan}: {found}")
    if unsafe:
        return Protection("none", tuple(GUARDS), tuple(reasons))
    raise ValueError(
        "nothing here keeps model-written code from this machine's files and processes ("
        + "; ".join(reasons)
        + "). Use Linux 5.13 or newer with Landlock, or where user namespaces are allowed (as root, a container needs "
        "neither: permissions do); or set unsafe=true where nothing is worth keeping"
    )


@functools.cache
def probe(plan: Plan) -> Protection | str:
    """Whether the plan holds here: by code that tries to break it. A string says why it does not."""
    try:
        require_own_folders()
        with open_targets(Limits.processes, Limits.memory_mb) as targets:
            outcome = run_program(Program(PROBE, [probe_test(targets)]), Limits(), plan, [targets["packages"]])
    except (RuntimeError, ValueError, OSError) as error:
        return str(error).removeprefix(BROKEN.format(plan))
    if outcome.status == "passed":
        return Protection(plan)
    if not outcome.message.startswith("AssertionError: "):
        return f"{outcome.status}: {outcome.message}"
    is_open = tuple(outcome.message.removeprefix("AssertionError: ").split())
    unguarded = [f"{name} ({GUARDS[name].means})" for name in is_open if not GUARDS[name].is_tolerated]
    return f"does not guard {', '.join(unguarded)}" if unguarded else Protection(plan, is_open)
