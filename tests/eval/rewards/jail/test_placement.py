"""Where interpreter, packages and working folder may lie: with real virtual environments and moved interpreters."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.rewards.jail import linux, placement, sandbox
from eval.rewards.jail.guards import PLANS, Plan
from eval.rewards.jail.placement import arrange, resolve
from eval.rewards.jail.supervisor import remove
from tests.eval.rewards.faulty import plant_faults

if sys.platform != "linux":
    pytest.skip("nothing but Linux can shut a program in", allow_module_level=True)

# The system's Python where it is new enough: other users can read it, as the two plans with a user of their own need.
SYSTEM = Path("/usr/bin/python3")
SCRIPT = f"""
import sys; sys.path.insert(0, {str(sandbox.ROOT)!r})
from eval.rewards.jail.sandbox import *
found = probe(sys.argv[1])
if isinstance(found, str): sys.exit(found)
answer = '''
import json, os, tempfile, placed
def f(x):
    open("own", "w").write("2")
    with tempfile.NamedTemporaryFile() as file: file.write(b"x"); inside = os.path.dirname(file.name)
    return [placed.VALUE, os.path.samefile(inside, "."), os.environ["HOME"] == inside, len(os.listdir("."))]
'''
print(run_program(Program(answer, ["assert f(1) == [2, True, True, 1]"]), Limits(), sys.argv[1]))
"""


def find_interpreter() -> Path:
    """One that can run the sandbox."""
    if not SYSTEM.exists():
        return Path(sys.executable)
    command = [SYSTEM, "-c", "import sys, venv; print(sys.version_info >= (3, 11))"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    return SYSTEM if said.strip() == "True" else Path(sys.executable)


@pytest.fixture(scope="module")
def interpreter() -> Path:
    return find_interpreter()


def make_venv(interpreter: Path, folder: Path) -> Path:
    """A virtual environment with one package in it; returns its interpreter."""
    made = folder.parent / "made"  # its scripts cannot hold every name
    subprocess.run([interpreter, "-m", "venv", "--without-pip", made], check=True, capture_output=True)
    made.rename(folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "placed.py").write_text("VALUE = 2")
    return folder / "bin" / "python"


def move_interpreter(interpreter: Path, prefix: Path) -> Path:
    """An interpreter in a prefix of its own: a copied program, a link to the standard library, and one package."""
    command = "import os, sys; print(os.path.realpath(sys.executable)); print(os.path.dirname(os.__file__))"
    said = subprocess.run([interpreter, "-I", "-c", command], capture_output=True, text=True, check=True).stdout
    program, library = map(Path, said.split("\n")[:2])
    (prefix / "bin").mkdir(parents=True)
    shutil.copy(program, prefix / "bin" / "python3")
    own = prefix / "lib" / library.name
    own.mkdir(parents=True)
    for path in library.iterdir():
        if path.name not in ("site-packages", "dist-packages"):
            (own / path.name).symlink_to(path)
    (own / "placed.py").write_text("VALUE = 2")
    return prefix / "bin" / "python3"


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder directly in /tmp, open to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="foretoken-placed-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def run_there(python: Path, plan: Plan, temporary: Path | str, script: str = SCRIPT, **environment: str) -> str:
    """What the outcome was, or why the plan is refused."""
    settings = {"PATH": os.environ["PATH"], "TMPDIR": str(temporary), "HOME": "/nonexistent"} | environment
    done = subprocess.run([python, "-c", script, plan], env=settings, cwd="/", capture_output=True)
    return (done.stdout + done.stderr).decode("utf-8", "replace").strip()


@functools.cache
def ordinary(plan: Plan) -> str:
    """What this plan says where nothing is placed unusually; empty where it works."""
    return run_there(find_interpreter(), plan, "/tmp", script=SCRIPT.partition("answer = ")[0])


def expect_passed(said: str, plan: Plan) -> None:
    """Passed, or, where this plan does not work on this system at all, skipped."""
    if ordinary(plan):
        pytest.skip(ordinary(plan))
    assert "status='passed'" in said, said


# Where the virtual environment lies, and the temporary folder, each in a folder of its own directly in /tmp.
PLACES = {
    "in the temporary folder": ("venv", "."),
    "in it, deeper": ("a/b/venv", "."),
    "temporary folder beside it": ("venv", "work"),
    "temporary folder in it": ("venv", "venv/work"),
    "spaces": ("my venv, 1=2", "my work"),
    "other scripts": ("환경 ünïcode", "작업"),
    "quotes and braces": ("it's {venv} %s \\ \"", "it's {work}"),
    "not UTF-8": (os.fsdecode(b"venv-\xff"), os.fsdecode(b"work-\xfe")),
    "a name of ours": ("root/tmp/answer", "root"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PLACES)
def test_virtual_environment(name: str, plan: Plan, base: Path, interpreter: Path) -> None:
    venv, temporary = (base / part for part in PLACES[name])
    venv.parent.mkdir(parents=True, exist_ok=True)
    python = make_venv(interpreter, venv)
    temporary.mkdir(parents=True, exist_ok=True)
    expect_passed(run_there(python, plan, temporary), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("parent", ["/var/tmp", "/dev/shm", "/opt", "/srv", "/mnt"])
def test_elsewhere(parent: str, plan: Plan, interpreter: Path) -> None:
    if not os.access(parent, os.W_OK):
        pytest.skip(f"{parent} cannot be written to")
    with tempfile.TemporaryDirectory(dir=parent, prefix="foretoken-placed-") as folder:
        os.chmod(folder, 0o755)
        expect_passed(run_there(make_venv(interpreter, Path(folder, "venv")), plan, folder), plan)
        expect_passed(run_there(Path(folder, "venv/bin/python"), plan, "/tmp"), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_below_home(plan: Plan, base: Path, interpreter: Path) -> None:
    python = make_venv(interpreter, base / "venv")
    expect_passed(run_there(python, plan, "/tmp", HOME=str(base)), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_links_on_the_way(plan: Plan, base: Path, interpreter: Path) -> None:
    """A chain of relative and absolute links to the environment, one of them through `..`, and one to its packages."""
    (base / "real").mkdir()
    make_venv(interpreter, base / "real" / "venv")
    (packages,) = (base / "real" / "venv").glob("lib/python3*/site-packages")
    (base / "stored").mkdir()
    shutil.move(packages, base / "stored" / "packages")
    packages.symlink_to("../../../../stored/packages")
    (base / "links").mkdir()
    (base / "links" / "one").symlink_to("../links/two")
    (base / "links" / "two").symlink_to(base / "real")
    (base / "work").mkdir()
    (base / "tmp").symlink_to("work")
    expect_passed(run_there(base / "links" / "one" / "venv" / "bin" / "python", plan, base / "tmp"), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("prefix", [".", "python", "a link/python"])
def test_moved_interpreter(prefix: str, plan: Plan, base: Path, interpreter: Path) -> None:
    """Its own prefix in the temporary folder, even where that folder is the prefix; alone, and below an environment."""
    (base / "real").mkdir()
    (base / "a link").symlink_to("real")
    python = move_interpreter(interpreter, base / prefix)
    expect_passed(run_there(python, plan, base), plan)
    expect_passed(run_there(make_venv(python, base / "venv"), plan, base), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_mask_of_the_trainer_changes_nothing(plan: Plan, base: Path, interpreter: Path) -> None:
    python = make_venv(interpreter, base / "venv")
    before = os.umask(0o077)
    try:
        said = run_there(python, plan, base)
    finally:
        os.umask(before)
    expect_passed(said, plan)


def test_bind_mount(base: Path, interpreter: Path) -> None:
    make_venv(interpreter, base / "venv")
    (base / "mounted").mkdir()
    if ordinary("namespaces"):
        pytest.skip(ordinary("namespaces"))
    inner = f'mount --bind {base}/venv {base}/mounted && exec {base}/mounted/bin/python -c "$1" namespaces'
    command = ["unshare", "--mount", "sh", "-c", inner, "sh", SCRIPT]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(base)}, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    expect_passed(done.stdout + done.stderr, "namespaces")


@pytest.mark.parametrize("name", ['it\'s {a} "project" %s', "프로젝트", os.fsdecode(b"\xff")])
def test_project(name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next((plan for plan in PLANS if isinstance(sandbox.probe(plan), sandbox.Protection)), None)
    if plan is None:
        pytest.skip("no plan works here")
    plant_faults(base / name, monkeypatch)
    outcome = sandbox.run_program(sandbox.Program("def f(x): return 2", ["assert f(1) == 2"]), sandbox.Limits(), plan)
    assert outcome.status == "passed"


# ---- refused, in one line ----


@pytest.mark.parametrize("plan", PLANS)
def test_private_packages_are_refused_for_another_user(plan: Plan, base: Path, interpreter: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the answer runs as the same user")
    python = make_venv(interpreter, base / "venv")
    (packages,) = (base / "venv").glob("lib/python3*/site-packages")
    packages.chmod(0o700)
    said = run_there(python, plan, base)
    assert "cannot be read by other users: use a Python, and packages, installed outside private folders" in said
    assert "\n" not in said


@pytest.mark.parametrize("plan", ["landlock", "permissions"])
def test_private_temporary_folder_is_refused_for_another_user(plan: Plan, base: Path, interpreter: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the answer runs as the same user")
    (base / "private").mkdir(mode=0o700)
    said = run_there(make_venv(interpreter, base / "venv"), plan, base / "private")
    if ordinary(plan):
        pytest.skip(ordinary(plan))
    assert f"{base / 'private'} cannot be entered by other users: set TMPDIR to a folder that can" in said
    assert "\n" not in said


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "PYTHONPATH"])
@pytest.mark.parametrize("kept", ["HOME", "TMPDIR"])
def test_folder_with_all_of_the_user_is_not_shown(variable: str, kept: str, base: Path, interpreter: Path) -> None:
    """Libraries or packages put straight into the home or the temporary folder, or above it."""
    (base / "thing.dist-info").mkdir()
    (base / "inner").mkdir()
    python = make_venv(interpreter, base / "inner" / "venv")
    settings = {"HOME": "/nonexistent", "TMPDIR": "/var/tmp", kept: str(base / "inner"), variable: str(base)}
    said = run_there(python, "namespaces", settings.pop("TMPDIR"), **settings)
    assert f"holds {base}, and {base / 'inner'} lies in it, which model-written code must not read" in said
    assert "\n" not in said


# ---- the parts ----


def test_what_lies_in_another_path_is_not_mounted_again(tmp_path: Path) -> None:
    for name in ("a/b", "a-b", "c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/../c")
    paths = [str(tmp_path / name) for name in ("a/b", "link", "a", "a-b", "missing")]
    view = arrange(paths)
    assert view.readable == tuple(str(tmp_path / name) for name in ("a", "a-b", "c"))
    assert view.links[-1] == (str(tmp_path / "link"), "a/../c")


def test_links_without_end(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="too many symbolic links"):
        resolve(str(tmp_path / "one"))


def test_editable_sources_are_no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source" / "thing.egg-info").mkdir(parents=True)
    (tmp_path / "target" / "thing.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "source"), "", str(tmp_path / "target"), str(sandbox.ROOT)])
    assert placement.package_paths() == [str(tmp_path / "target")]


TAKEN = [
    ([], "/tmp"),
    (["/usr", "/tmpx"], "/tmp"),
    (["/tmp/venv"], "/answer"),
    (["/tmp"], "/answer"),
    (["/tmp/x", "/answer"], "/answer1"),
    (["/tmp/x", "/answer/y", "/answer1"], "/answer2"),
]


@pytest.mark.parametrize(("taken", "expected"), TAKEN)
def test_working_folder_collides_with_nothing(taken: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(linux.os, "makedirs", lambda path, exist_ok: made.append(path))
    monkeypatch.setattr(linux.os, "chmod", lambda path, mode: None)
    monkeypatch.setattr(linux.os, "chdir", made.append)
    assert linux.make_working_folder(taken) == expected
    assert made[-1] == expected


def test_removes_whatever_was_left(tmp_path: Path) -> None:
    """Without any program of the system, however deep, closed or oddly named."""
    folder = tmp_path / "left"
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "closed" / "inner" / "file").write_text("x")
    (folder / os.fsdecode(b"\xff\n")).write_text("x")
    (folder / "link").symlink_to(tmp_path)
    (folder / "closed").chmod(0)
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(1500):
        os.mkdir("d" * 20)
        os.chdir("d" * 20)
    os.chdir(here)
    remove(str(folder))
    assert os.listdir(tmp_path) == []
