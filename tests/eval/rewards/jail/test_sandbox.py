"""Hostile programs: each gets its verdict, and leaves this process, its files and its machine as they were.

Every plan of protection that works here is tried. Faults planted in the jail show that each guard is needed.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.rewards.jail import sandbox
from eval.rewards.jail.sandbox import PLANS, Limits, Outcome, Plan, Program, Protection, Sandbox, probe, run_program
from tests.eval.rewards.faulty import Fault, plant_faults

if sys.platform != "linux":
    pytest.skip("nothing but Linux can shut a program in", allow_module_level=True)

WORKING = [plan for plan in PLANS if isinstance(probe(plan), Protection)]
if not WORKING:
    pytest.skip(f"no plan works here: {[probe(plan) for plan in PLANS]}", allow_module_level=True)

LIMITS = Limits(cpu_s=1, wall_s=60)
TEST = ["assert f(1) == 2"]
MARK = "lingering"  # how a program names a process that might outlive it


@pytest.fixture(params=WORKING)
def plan(request: pytest.FixtureRequest) -> Plan:
    return request.param


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that no program may touch, beside the one in which they work. Both are checked after each test."""
    folder, workplace = tmp_path / "canary", tmp_path / "work"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("here")
    workplace.mkdir()
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(workplace))
    before = listing(folder)
    yield folder
    assert listing(folder) == before
    assert list(workplace.iterdir()) == []
    assert not lingering()


def listing(folder: Path) -> list[tuple[str, int, bytes]]:
    return sorted((str(p), p.stat().st_mode, p.read_bytes() if p.is_file() else b"") for p in folder.rglob("*"))


def lingering() -> list[str]:
    """Processes anywhere that carry the mark."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += [entry] * (Path("/proc", entry, "comm").read_text().strip() == MARK)
    return found


def run(answer: str, plan: Plan, limits: Limits = LIMITS, test: list[str] = TEST) -> Outcome:
    return run_program(Program(answer, test), limits, plan)


NAME_PROCESS = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{MARK}')"
PROGRAMS = {
    "right": ("def f(x): return x + 1", "passed", ""),
    "wrong": ("def f(x): return x", "failed", "AssertionError"),
    "syntax": ("def f(x: return", "failed", "SyntaxError"),
    "missing": ("def g(x): return 2", "failed", "NameError"),
    "null byte": ("def f(x): return 2\0", "failed", "null"),
    "surrogate": ("def f(x): raise ValueError('\\ud800')", "failed", "ValueError"),
    "endless loop": ("def f(x):\n  while True: pass", "timeout", "CPU"),
    "endless loop at once": ("while True: pass", "timeout", "CPU"),
    "endless message": (
        "class E(Exception):\n  def __str__(self):\n    while True: pass\ndef f(x): raise E",
        "timeout",
        "CPU",
    ),
    "10 GB list": ("def f(x): return [0] * (10 * 2**30 // 8)", "memory", "MemoryError"),
    "growing": ("def f(x):\n  kept = []\n  while True: kept.append(bytearray(1 << 20))", "memory", "MemoryError"),
    "os._exit": ("import os\ndef f(x): os._exit(0)", "crashed", "exit status 0 before its tests ended"),
    "os._exit at once": ("import os\nos._exit(0)", "crashed", "exit status 0 before its tests ended"),
    "atexit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 3", "failed", "AssertionError"),
    "sys.exit": ("import sys\ndef f(x): sys.exit(0)", "failed", "SystemExit"),
    "interrupt": ("def f(x): raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
    "recursion": ("def f(x): return f(x)", "failed", "RecursionError"),
    "segfault": ("import ctypes\ndef f(x): return ctypes.string_at(0)", "crashed", "SIGSEGV"),
    "printing": ("def f(x):\n  while True: print('x' * 10000)", "timeout", "CPU"),
    "huge file": (
        "def f(x):\n  with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
        "failed",
        "File too large",
    ),
    "own file": ("def f(x):\n  open('t', 'w').write('2')\n  return int(open('t').read())", "passed", ""),
    "environment": ("import os\ndef f(x): return 2 if 'SECRET' not in os.environ else 0", "passed", ""),
    "always equal": (
        "class A:\n  def __eq__(self, other): return True\ndef f(x): return A()",
        "failed",
        "cannot be judged",
    ),
    "equal inside": (
        "class A(int):\n  __eq__ = lambda s, o: True\n  __hash__ = int.__hash__\ndef f(x): return [A(), {'k': (A(),)}]",
        "failed",
        "AssertionError",
    ),
    "builtins": (
        "import builtins\nbuiltins.AssertionError = lambda *a: False\n"
        "builtins.abs = lambda x: 2\ndef f(x):\n  builtins.abs = lambda x: 2\n  return 17",
        "failed",
        "AssertionError",
    ),
    "forged verdict": (
        "import os\nfor pipe in range(3, 64):\n  try: os.write(pipe, b'x' * 16 + b'passed\\n')\n"
        "  except OSError: pass\nos._exit(0)",
        "crashed",
        "before its tests ended",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_verdict(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hf_secret")
    answer, status, message = PROGRAMS[name]
    test = ["assert abs(f(1)) == 2"] if name == "builtins" else TEST
    outcome = run(answer, plan, test=test)
    assert (outcome.status, message in outcome.message) == (status, True), outcome


def test_sleeper_is_ended_by_the_clock(plan: Plan) -> None:
    outcome = run("import time\ndef f(x): time.sleep(600)", plan, Limits(wall_s=0.5))
    assert outcome.status == "timeout"
    assert "longer than 0.5 s" in outcome.message


def test_memory_stays_bounded(plan: Plan) -> None:
    """No process that ended so far was larger than the limit (these tests start no other large ones before it)."""
    run("def f(x):\n  kept = []\n  while True: kept.append(bytearray(b'x' * (1 << 20)))", plan, Limits(memory_mb=200))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    run("def f(x):\n  kept = []\n  while True: kept.append(bytearray(b'x' * (1 << 20)))", plan, Limits(memory_mb=100))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 200 * 1024)


def test_all_files_together_are_bounded(plan: Plan) -> None:
    answer = "def f(x):\n  for n in range(1000):\n    open(f'{n}', 'wb').write(bytes(1 << 20))\n  return 2"
    outcome = run(answer, plan, Limits(disk_mb=4))
    assert outcome.status in {"failed", "crashed"}
    assert "No space" in outcome.message or "more than 4 MB" in outcome.message


def test_deep_and_closed_folders_are_removed(plan: Plan) -> None:
    # Where modes cannot be changed (Landlock, without root), there are no closed folders.
    closing = "import os\ndef close(path):\n  try: os.chmod(path, 0)\n  except PermissionError: pass\n"
    answer = closing + ("def f(x):\n  for _ in range(300):\n    os.mkdir('d'); os.chdir('d')\n  close('.')\n  return 2")
    assert run(answer, plan).status in {"passed", "crashed"}
    answer = closing + "def f(x):\n  os.makedirs('a/b'); close('a/b'); close('a')\n  return 2"
    assert run(answer, plan).status == "passed"


def test_deletes_nothing_but_its_own(plan: Plan, canary: Path) -> None:
    """The canary is compared afterwards; what the program may do is empty its own folder."""
    answer = f"""
import os, shutil
def f(x):
    open('mine', 'w').close()
    for target in ({str(canary)!r}, '/tmp', '/home', '/etc', '.', os.getcwd()):
        shutil.rmtree(target, ignore_errors=True)
    for action in (lambda: open({str(canary / "new")!r}, 'x'), lambda: os.truncate({str(canary / "inner/file")!r}, 0)):
        try: action()
        except OSError: continue
        return 'done harm'
    return 2"""
    # Trying it on the real system would be a test that must never fail: only where no path of it can be reached.
    if plan != "namespaces":
        answer = answer.replace("'/tmp', '/home', '/etc', '.', ", "")
    assert run(answer, plan).status == "passed"


def test_reads_nothing_of_the_trainer(plan: Plan, canary: Path) -> None:
    if "readable" in probe(plan).is_open:
        pytest.skip(f"{plan} leaves readable what others may read")
    answer = f"""
def f(x):
    for path in ({str(canary / "inner/file")!r}, '/proc/{os.getpid()}/environ', '/etc/passwd'):
        try: open(path).read()
        except OSError: continue
        return path
    return 2"""
    assert run(answer, plan).status == "passed"


def test_reaches_no_network(plan: Plan) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        port = server.getsockname()[1]
        outcome = run(f"import socket\ndef f(x): socket.create_connection(('127.0.0.1', {port}), 1)", plan)
        assert outcome.status == "failed"
        with pytest.raises(TimeoutError):
            server.accept()


def test_ends_no_process_of_ours(plan: Plan) -> None:
    answer = f"""
import os
def f(x):
    for pid in ({os.getpid()}, {os.getppid()}, -1):
        try: os.kill(pid, {int(signal.SIGTERM)} if pid > 0 else {int(signal.SIGCONT)})
        except OSError: pass
    return 2"""
    assert run(answer, plan).status == "passed"


def test_few_forks_are_counted(plan: Plan) -> None:
    """Forks that sleep, before any that go on forking: the limit holds, and none outlives its program."""
    answer = f"""
import os, time
def f(x):
    {NAME_PROCESS}
    num = 0
    for _ in range(20):
        try:
            if os.fork() == 0: time.sleep(600); os._exit(0)
            num += 1
        except OSError: break
    return 2 if num < {LIMITS.processes} else num"""
    assert run(answer, plan).status == "passed"


def test_fork_bomb(plan: Plan) -> None:
    """Only where the count was seen to hold (the probe of a plan tries it)."""
    assert "forks" not in probe(plan).is_open
    bomb = f"import os\n{NAME_PROCESS}\ndef f(x):\n  while True:\n    try: os.fork()\n    except OSError: pass"
    assert run(bomb, plan, Limits(cpu_s=1, wall_s=1.5)).status == "timeout"


def test_daemon_ends_with_its_program(plan: Plan) -> None:
    daemon = f"""
import os, time
def f(x):
    {NAME_PROCESS}
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(600)
            os._exit(0)
    except OSError: pass
    return 2"""
    assert run(daemon, plan).status == "passed"


def test_no_way_to_new_privileges(plan: Plan) -> None:
    answer = "import ctypes\ndef f(x): return 2 if ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == -1 else 0"
    assert run(answer, plan).status == "passed"


def test_program_ends_with_its_trainer(plan: Plan, tmp_path: Path) -> None:
    """kill -9 of the trainer ends the program and removes its folder."""
    script = f"""
import tempfile
from eval.rewards.jail.sandbox import Limits, Program, run_program
tempfile.tempdir = {tempfile.tempdir!r}
answer = "import time\\n{NAME_PROCESS}\\ntime.sleep(600)"
run_program(Program(answer, []), Limits(wall_s=600), {plan!r})
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=sandbox.ROOT)
    wait_until(lambda: bool(lingering()))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not lingering() and not any((tmp_path / "work").iterdir()))


def wait_until(condition: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_programs_side_by_side_keep_their_order() -> None:
    answers = [f"def f(x): return x + {n % 2}" for n in range(6)]
    outcomes = Sandbox(LIMITS, workers=3).run_all([Program(answer, TEST) for answer in answers])
    assert [outcome.status for outcome in outcomes] == ["failed", "passed"] * 3


def test_same_answer_gets_same_verdict() -> None:
    """The order of a set of strings does not change from run to run."""
    answer = "def f(x): raise ValueError(list({'a', 'b', 'c', 'd', 'e'}))"
    assert len({run(answer, WORKING[0]).message for _ in range(3)}) == 1


# ---- choosing a plan ----


def test_description_names_plan_and_limits() -> None:
    text = Sandbox(Limits(cpu_s=7, memory_mb=123)).describe()
    assert sandbox.MEANS[WORKING[0]] in text
    assert "7 s CPU" in text
    assert "123 MB memory" in text
    assert "\n" not in text


def test_refused_where_nothing_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "probe", lambda plan: "does not guard disk")
    with pytest.raises(ValueError, match=r"namespaces: does not guard disk; landlock: .* set unsafe=true"):
        Sandbox()
    unsafe = Sandbox(LIMITS, unsafe=True)
    assert "NOTHING BUT LIMITS" in unsafe.describe()
    assert unsafe.run(Program("def f(x): return 2", TEST)).status == "passed"


@pytest.mark.parametrize("option", ["cpu_s", "wall_s", "memory_mb", "processes"])
def test_limits_must_be_positive(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0: a limit on model-written code must be positive"):
        Limits(**{option: 0})


def test_workers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="workers=0: must be at least 1"):
        Sandbox(workers=0)


def test_broken_sandbox_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "START", "raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match=r"does not work .*no such thing"):
        run("def f(x): return 2", WORKING[0])


# ---- planted faults ----

needs_namespaces = pytest.mark.skipif("namespaces" not in WORKING, reason="the faults are in the namespaces plan")


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes the supervisor start from a copy of the code with faults in it."""

    def plant(*faults: Fault) -> None:
        plant_faults(tmp_path, monkeypatch, *faults)

    return plant


NO_USER = [
    ("cell", "os.setresuid(uid, uid, uid)\n    elif", "pass\n    elif"),
    ("cell", "\n        linux.drop", "\n        pass#"),
]
OUTER_PROCESSES = ("cell", "        linux.unshare(linux.CLONE_NEWPID)\n", "")
NO_ROOT = ("cell", "folder = linux.enter_private_root(", "(lambda *given: None)(")


@needs_namespaces
@pytest.mark.parametrize(
    ("faults", "open_door"),
    [
        ([NO_ROOT, *NO_USER], "disk"),
        ([("supervisor", "        leave_namespaces()", "        pass"), OUTER_PROCESSES, *NO_USER], "signals"),
        ([("cell", "(resource.RLIMIT_NPROC, ", "(resource.RLIMIT_CORE, 0 and ")], "forks"),
    ],
    ids=["disk", "signals", "forks"],
)
def test_probe_refuses_a_plan_with_a_hole(faults: list[tuple[str, str, str]], open_door: str, plant: object) -> None:
    if os.getuid() != 0 and open_door == "signals":
        pytest.skip("without root, leaving this out fails altogether")
    plant(*faults)
    found = probe.__wrapped__("namespaces")
    assert isinstance(found, str)
    assert open_door in found


BURNING = "import time\ndef f(x):\n  while time.process_time() < 1.7: pass\n  return 2"
BIG_LIST = "def f(x):\n  big = bytes(700 << 20)\n  return 2"
PLANTED = {
    "left by SystemExit": ("judge", "except BaseException as error", "except Exception as error", "sys.exit", LIMITS),
    "any result": ("handles", '("__eq__", ', "(", "always equal", LIMITS),
    "no memory limit": ("cell", "(resource.RLIMIT_AS,", "(resource.RLIMIT_CORE, 0 and", BIG_LIST, LIMITS),
    "no CPU limit": ("cell", "(resource.RLIMIT_CPU,", "(resource.RLIMIT_CORE, 0 and", BURNING, LIMITS),
    "no clock": (
        "supervisor",
        "if now > deadline",
        "if False",
        "import time\ntime.sleep(2)\ndef f(x): return 2",
        Limits(wall_s=0.2),
    ),
    "files of any size": (
        "cell",
        "(resource.RLIMIT_FSIZE,",
        "(resource.RLIMIT_CORE, 0 and",
        "def f(x):\n  open('b', 'wb').write(bytes(9 << 20))\n  return 2",
        LIMITS,
    ),
    "any number of files": (
        "linux",
        "size={megabytes}m",
        "size=64m",
        "def f(x):\n  for n in 'abcdef': open(n, 'wb').write(bytes(7 << 20))\n  return 2",
        LIMITS,
    ),
    "environment kept": (
        "supervisor",
        "request = json",
        "os.environ['SECRET'] = ''; request = json",
        "environment",
        LIMITS,
    ),
}


@needs_namespaces
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_changes_the_verdict(name: str, plant: object) -> None:
    module, right, wrong, program, limits = PLANTED[name]
    answer = PROGRAMS[program][0] if program in PROGRAMS else program
    test = ["assert abs(f(1)) == 2"] if program == "builtins" else TEST
    genuine = run(answer, "namespaces", limits, test)
    plant((module, right, wrong))
    faulty = run(answer, "namespaces", limits, test)
    assert (genuine.status, genuine.message) != (faulty.status, faulty.message)


@needs_namespaces
def test_planted_litter_is_seen(plant: object, tmp_path: Path) -> None:
    plant(("supervisor", "        remove(folder)", "        pass"))
    run("def f(x): return 2", "namespaces")
    (litter,) = (tmp_path / "work").iterdir()
    litter.rmdir()
