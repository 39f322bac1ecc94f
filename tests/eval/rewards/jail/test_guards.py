"""Each item of the table of guards: its probe gets through where a hole is planted, and nothing does otherwise."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from eval.rewards.jail import guards, hostile, sandbox, seccomp
from eval.rewards.jail.guards import GUARDS, PLANS, PROBE, Plan, open_targets, probe_test, render_table
from eval.rewards.jail.linux import landlock_version
from eval.rewards.jail.sandbox import Limits, Program, Protection, Sandbox, probe, run_program
from eval.rewards.jail.seccomp import CLONE3, FILES, KERNEL, build_program
from tests.eval.rewards.faulty import AS_A_USER, Fault, plant_faults

if sys.platform != "linux":
    pytest.skip("nothing but Linux can shut a program in", allow_module_level=True)

WORKING = {plan for plan in PLANS if isinstance(probe(plan), Protection)}
# What an ordinary user's privileges may not reach, on some systems, even where nothing shuts a program in.
OFTEN_CLOSED = {"other-memory", "keyrings", "kernel", "ipc"}
NO_LANDLOCK: Fault = ("cell", "        linux.restrict_paths(", "        (lambda *given: None)(")
NO_FILTER: Fault = ("cell", "        seccomp.filter_calls(has_own_user)", "        pass")
NO_ROOT: Fault = (
    "cell",
    "folder = linux.enter_private_root(",
    "(lambda *given: None)(",
)
NO_CAPABILITIES_DROPPED: Fault = ("cell", "        linux.drop_capabilities()", "        pass")
NO_USER = ("cell", "os.setresuid(uid, uid, uid)\n    elif", "pass\n    elif")


def without(group: str) -> Fault:
    """The filter without one of its groups of calls."""
    return ("seccomp", f"\n{group} = {{", f"\n{group}: dict[str, tuple[int, int | None]] = {{}}\nWAS_{group} = {{")


def no_rule(name: str) -> Fault:
    return ("seccomp", f"{name} = Rule(", f"{name} = Rule((None, None), 0, ()) or Rule(")


NO_TRUNCATING: Fault = ("seccomp", ", *truncating_rules()]", "]")
NO_OWN: Fault = ("seccomp", "rules += [*own_process_rules(pid), ", "rules += [")
OLD: Fault = ("linux", "    version = landlock_version()", "    version = 1")
# (plan, faults, what the probe then has to find); where Landlock and the filter both guard, both are left out.
HOLES: list[tuple[Plan, list[Fault], set[str]]] = [
    ("landlock", [NO_LANDLOCK], {"secrets", "readable", "disk", "packages", "leftovers", "terminal", "processes"}),
    ("landlock", [without("SOCKETS")], {"network", "unix-sockets"}),
    ("landlock", [no_rule("PAIRS")], {"unix-sockets"}),
    ("landlock", [without("SOCKETS"), OLD], {"network", "unix-sockets", "abstract-sockets"}),
    ("landlock", [without("IPC")], {"ipc"}),
    ("landlock", [without("KEYRINGS")], {"keyrings"}),
    ("landlock", [without("MEMORY")], {"memory"}),
    ("landlock", [("cell", "(resource.RLIMIT_AS,", "(resource.RLIMIT_CORE, 0 and")], {"memory"}),
    (
        "landlock",
        [without("STARTS"), ("cell", "(resource.RLIMIT_NPROC, ", "(resource.RLIMIT_CORE, 0 and ")],
        {"forks"},
    ),
    ("landlock", [without("KERNEL")], {"kernel"}),
    ("landlock", [without("FILES")], {"modes"}),
    ("landlock", [without("FILES"), OLD], {"modes", "disk"}),
    ("landlock", [NO_TRUNCATING, OLD], {"packages"}),
    ("landlock", [without("SIGNALS"), NO_OWN], {"signals"}),
    ("landlock", [without("OTHER_PROCESSES"), NO_LANDLOCK, NO_CAPABILITIES_DROPPED], {"other-memory"}),
    ("landlock", [NO_FILTER, NO_LANDLOCK, NO_CAPABILITIES_DROPPED], set(GUARDS) - {"forks"}),
    (
        "namespaces",
        [AS_A_USER, NO_ROOT],
        {"secrets", "readable", "names", "disk", "packages", "modes", "leftovers", "terminal"},
    ),
    ("namespaces", [without("KERNEL")], {"kernel"}),
    ("namespaces", [without("MEMORY")], {"memory"}),
    ("namespaces", [without("KEYRINGS")], {"keyrings"}),
    ("namespaces", [without("IPC"), ("cell", " | linux.CLONE_NEWIPC", "")], {"ipc"}),
    ("namespaces", [without("SOCKETS"), ("cell", " | linux.CLONE_NEWNET", "")], {"network", "abstract-sockets"}),
    ("namespaces", [("cell", "(resource.RLIMIT_NPROC, ", "(resource.RLIMIT_CORE, 0 and ")], {"forks"}),
    (
        "permissions",
        [NO_USER],
        {"secrets", "disk", "packages", "modes", "terminal", "signals"},
    ),
    ("permissions", [without("SOCKETS")], {"network", "unix-sockets", "abstract-sockets"}),
    ("permissions", [without("IPC")], {"ipc"}),
]


def find_open(plan: Plan, **limits: int) -> set[str]:
    """The names of what the probe gets past."""
    with open_targets(Limits.processes, Limits.memory_mb) as targets:
        outcome = run_program(Program(PROBE, [probe_test(targets)]), Limits(**limits), plan, [targets["packages"]])
    if outcome.status == "passed":
        return set()
    assert outcome.message.startswith("AssertionError: "), outcome
    return set(outcome.message.removeprefix("AssertionError: ").split())


BEFORE: dict[Plan, set[str]] = {}  # what is open without any hole


@pytest.fixture(scope="module")
def reachable() -> set[str]:
    """What this very process's user can do, shut in by nothing."""
    with open_targets(Limits.processes, Limits.memory_mb) as targets:
        code = f"{PROBE}\nimport json; print(json.dumps(find_open({targets!r})))"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(json.loads(said))


def is_usable(plan: Plan) -> bool:
    """Whether holes can be planted in a plan: Landlock's are, for root, tried as an ordinary user."""
    return plan in WORKING or (plan == "landlock" and os.getuid() == 0 and landlock_version() > 0)


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: f"{hole[0]}-{'-'.join(sorted(hole[2]))}"[:60])
def test_probe_finds_what_a_hole_opens(
    hole: tuple[Plan, list[Fault], set[str]], reachable: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, faults, expected = hole
    if not is_usable(plan):
        pytest.skip(f"{plan}: {probe(plan)}")
    as_user = [AS_A_USER] if os.getuid() == 0 and plan == "landlock" else []
    plant_faults(tmp_path, monkeypatch, *as_user)
    before = BEFORE[plan] = BEFORE.get(plan) or find_open(plan)
    plant_faults(tmp_path, monkeypatch, *as_user, *faults)
    after = find_open(plan)
    expected = expected & reachable
    assert expected - after == set()
    assert (before & expected) <= {"names"}


@pytest.mark.parametrize("version", range(1, 7))
def test_landlock_of_any_version_holds(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What older kernels' Landlock lets pass, the filter does not."""
    if version > landlock_version() or not is_usable("landlock"):
        pytest.skip("Landlock here is older than that")
    as_user = [AS_A_USER] if os.getuid() == 0 else []
    plant_faults(tmp_path, monkeypatch, *as_user, (OLD[0], OLD[1], f"    version = {version}"))
    assert find_open("landlock") == {"names"}


def test_every_item_is_attacked_and_reachable(reachable: set[str]) -> None:
    """Each item of the table has its attack, and each attack works where nothing keeps it out."""
    with open_targets(1, 1) as targets:
        assert set(hostile.attacks(targets)) == set(GUARDS)
    assert reachable >= set(GUARDS) - OFTEN_CLOSED


def test_holes_cover_each_item_of_each_plan() -> None:
    """So that no item of the landlock plan (the one with most parts) is believed without having been broken."""
    broken = set().union(*(expected for plan, _, expected in HOLES if plan == "landlock"))
    assert broken >= set(GUARDS)


@pytest.mark.parametrize("plan", PLANS)
def test_plan_leaves_open_what_the_table_says(plan: Plan) -> None:
    found = probe(plan)
    if not isinstance(found, Protection):
        pytest.skip(found)
    assert set(found.is_open) <= {name for name, guard in GUARDS.items() if plan not in guard.kept_by}


def test_only_tolerated_items_are_open_by_the_table() -> None:
    for name, guard in GUARDS.items():
        assert guard.is_tolerated == any(plan not in guard.kept_by for plan in PLANS), name


def test_table_is_the_documentation_s() -> None:
    assert render_table() in (Path(guards.__file__).parents[3] / "docs" / "verifier.md").read_text()


def test_weaker_plan_says_what_did_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    weaker: dict[Plan, Protection | str] = {"namespaces": "unshare: not permitted", "landlock": Protection("landlock")}
    monkeypatch.setattr(sandbox, "probe", weaker.__getitem__)
    assert Sandbox().describe().endswith("; not used: namespaces: unshare: not permitted")


# ---- the filter ----

HEADERS = {0: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 1: "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_are_the_kernel_s(column: int) -> None:
    if not Path(HEADERS[column]).exists():
        pytest.skip("the kernel's headers are not installed")
    defined = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(HEADERS[column]).read_text())
    }
    named = {name: value for name, value in vars(seccomp).items() if name.isupper() and isinstance(value, dict)}
    groups = [value for value in named.values() if value.keys() & defined.keys()]
    assert len(groups) >= 10
    for name, numbers in (item for group in groups for item in group.items()):
        if name in defined or numbers[column] is None:
            assert numbers[column] == defined.get(name), name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("own_user", [True, False])
def test_filter_by_hand(machine: str, own_user: bool) -> None:
    """Run by an interpreter of its own, for both architectures: what it returns for calls that matter."""
    program = build_program(machine, own_user, pid=77)
    architecture, column = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}[machine]

    def call(numbers: tuple[int | None, int | None], *arguments: int) -> int:
        number = numbers[column]
        assert number is not None
        return evaluate(program, architecture, number, arguments)

    allow, refused = 0x7FFF0000, 0x00050001
    assert call((0, 63), 5) == allow  # read
    for family in (1, 2, 10, 16, 17, 40):
        assert call((41, 198), family) == refused
    assert [call((53, 199), 1, kind) for kind in (1, 2, 5, 1 | 0o2004000, 2 | 0o2004000)] == [
        allow, refused, allow, allow, refused
    ]  # fmt: skip
    assert call(CLONE3["clone3"]) == 0x00050000 | 38
    assert call(KERNEL["io_uring_setup"]) == refused
    assert call((16, 29), 0, 0x5412) == call((16, 29), 0, 0x5412 | 1 << 40) == refused
    assert call((16, 29), 0, 0x5401) == allow
    threads = 0x3D0F00
    assert call((56, 220), threads) == (allow if own_user else 0x00050000 | 11)
    assert call((56, 220), threads | 0x10000000) == (refused if own_user else 0x00050000 | 11)
    assert [call((62, 129), pid) for pid in (77, 1, 0, 0xFFFFFFFF)] == (
        [allow] * 4 if own_user else [allow] + [refused] * 3
    )
    assert [call((302, 261), pid) for pid in (0, 77, 78)] == ([allow] * 3 if own_user else [allow, allow, refused])
    assert call(FILES["fchmodat"]) == (allow if own_user else refused)
    for flags in (0, 0o1, 0o1101, 0o1002):
        assert call((257, 56), 0, 0, flags) == allow
    for flags in (0o1000, 0o1003):
        assert call((257, 56), 0, 0, flags) == (allow if own_user else refused)
    assert evaluate(program, 0x40000003, 1, ()) == 0x80000000  # 32-bit x86
    if machine == "x86_64":
        assert evaluate(program, architecture, 0x40000000 | 41, ()) == 0x80000000  # x32


def evaluate(program: bytes, architecture: int, number: int, arguments: tuple[int, ...]) -> int:
    """Classic BPF, as far as the filter uses it."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *values)
    code = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            at += constant
        elif operation in (0x15, 0x35):
            holds = accumulator == constant if operation == 0x15 else accumulator >= constant
            at += if_true if holds else if_false
        else:
            assert operation == 0x06
            return constant


ORDINARY = {
    "threads": "import threading\ndef f(x):\n  t = threading.Thread(target=int); t.start(); t.join()\n  return 2",
    "subprocess": "import subprocess\ndef f(x): return int(subprocess.check_output(['echo', '2']))",
    "fork": """
import os
def f(x):
    if (pid := os.fork()) == 0: os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])""",
}
ALONE = {
    "asyncio": "import asyncio\nasync def g(): await asyncio.sleep(0); return 2\ndef f(x): return asyncio.run(g())",
    "own signals": """
import os, signal
signal.signal(10, lambda *given: None)
def f(x):
    os.kill(os.getpid(), 10); signal.raise_signal(10)
    return 2""",
    "files": """
import tempfile
def f(x):
    with tempfile.TemporaryFile('w+') as file:
        file.write('25'); file.truncate(1); file.seek(0)
        return int(file.read())""",
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [*ORDINARY, *ALONE])
def test_ordinary_programs_still_run(name: str, plan: Plan) -> None:
    if plan not in WORKING:
        pytest.skip(str(probe(plan)))
    if name in ORDINARY and plan == "landlock" and os.getuid() != 0:
        pytest.skip("no further process there, by the limit")
    outcome = run_program(Program((ORDINARY | ALONE)[name], ["assert f(1) == 2"]), Limits(), plan)
    assert outcome.status == "passed", outcome
