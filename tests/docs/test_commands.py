"""Every command of README.md and docs/ is run to its end, page by page, as a reader would paste it; and every snippet.

A page is a session in one folder: what a command needs, an earlier one of the page has made, or `BEFORE` makes. A
command that no way of running it is known for fails. Scripts of bash are run with a stub of what installs, and the
commands that they would start are run as those of a page.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from models.target.tiny import make_tiny_target
from tests.docs.pages import MARKS, PAGES, ROOT, Command, commands_of, read_blocks, read_commands
from tests.docs.running import SMALL, in_folder, run_module, shrink

# Made before a page's own commands.
BEFORE: dict[str, list[str]] = {}
# Files that a page takes for granted.
ROWS = [{"prompt": f"Say {n} and {n * n % 17}.", "answer": f"{n} and {n * n % 17}"} for n in range(40)]
QUESTIONS = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}. #### {2 * n}"} for n in range(40)]
FILES = {"prompts.jsonl": ROWS, "gsm8k.jsonl": QUESTIONS}
# What stands for a page's placeholders, and for what a tiny model has less of.
INSTEAD: dict[str, dict[str, str]] = {
    "docs/training.md": {"DRAFT": "outputs/llama/cut", "cut.layers=8": "cut.layers=1"},
    "docs/decoding.md": {"reward=gsm8k": "reward=gsm8k data.path=gsm8k.jsonl"},
    "docs/verifier.md": {"reward=gsm8k": "reward=gsm8k data.path=gsm8k.jsonl"},
    "docs/serving.md": {'"meta-llama/Llama-3.1-8B-Instruct"': '"target"'},
    "docs/scaling.md": {},
}
SWEEP = "tests/rl/test_sweep.py::test_multirun_into_one_plot"
# Commands that another test runs: the beginning of the line -> that test.
ELSEWHERE = {
    "bash scripts/quickstart.sh": "tests/docs/test_commands.py::test_stages_of_a_script",
    "bash scripts/diversed.sh": "tests/docs/test_commands.py::test_stages_of_a_script",
    "bash scripts/test.sh": "tests/docs/test_commands.py::test_checks_of_the_script",
    "make ": "tests/docs/test_commands.py::test_targets_of_make",
    "python -m venv .venv": "tests/docs/test_commands.py::test_an_environment_is_made",
    "source .venv/bin/activate": "tests/docs/test_commands.py::test_an_environment_is_made",
    "python -m pip install -c constraints.txt": "tests/test_project.py::test_constraints_satisfy_every_requirement",
    "python -m rl.diversed --multirun +model=testbed experiment=testbed sweep=lambda": SWEEP,
    "python -m rl.diversed --multirun +model=testbed experiment=testbed sweep=optuna": (
        "tests/rl/test_sweep.py::test_optuna_takes_both_metrics"
    ),
    "python -m eval.pareto +model=testbed drafter=model reward=testbed max_new_tokens=44 "
    "checkpoints=[outputs/testbed/diversed/lambda/*]": SWEEP,
    "wandb sweep scripts/sweeps/lambda.yaml": "tests/rl/test_sweep.py::test_wandb_makes_of_the_file_what_we_think",
}
# Pages that take longer than the default suite may.
SLOW_PAGES = ("docs/training.md", "docs/verifier.md", "docs/decoding.md", "docs/serving.md", "docs/scaling.md")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def how(command: Command) -> str:
    """module: it is run here. elsewhere: by the test that ELSEWHERE names. Otherwise the mark that excuses it."""
    if any(f"{command.line} ".startswith(f"{start.rstrip()} ") for start in ELSEWHERE):
        return "elsewhere"
    if command.mark:
        return command.mark
    if command.module in SMALL:
        return "module"
    raise LookupError(f"nothing runs `{command.line}`: add it to SMALL or ELSEWHERE, or mark it {' or '.join(MARKS)}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_accounted_for(page: Path) -> None:
    for command in commands_of(page):
        assert how(command)


def test_a_command_that_nothing_runs_is_found() -> None:
    for line in ("python -m eval.nothing", "curl example.org", "bash scripts/setup_env.sh", "bash scripts/test.shx"):
        (command,) = read_commands(line)
        with pytest.raises(LookupError, match="nothing runs"):
            how(command)
    (marked,) = read_commands("vllm serve x  # needs a GPU")
    assert how(marked) == "needs a GPU"


@pytest.mark.parametrize("node", sorted(set(ELSEWHERE.values())))
def test_the_other_tests_are_there(node: str) -> None:
    path, _, name = node.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), flags=re.M)


def run_command(command: Command, instead: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        run_module(command.module, shrink(command, instead), monkeypatch)
    except (Exception, SystemExit) as error:
        raise AssertionError(f"`{command.line}` ended with {type(error).__name__}: {error}") from error


def run_python(text: str, names: dict[str, object]) -> None:
    """A snippet, in the page's own names; one that begins with a comment of a file's name is that file."""
    first = text.partition("\n")[0]
    if found := re.fullmatch(r"# (\w+\.py)", first):
        Path(found[1]).write_text(text, encoding="utf-8")
        return
    try:
        exec(compile(text, "<snippet>", "exec"), names)
    except Exception as error:
        raise AssertionError(f"the snippet that begins with {first!r} raised {error!r}") from error


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=name_of(p), marks=[pytest.mark.slow] * (name_of(p) in SLOW_PAGES)) for p in PAGES]
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead, names = INSTEAD.get(name_of(page), {}), {"__name__": "snippet"}
    with in_folder(tmp_path, monkeypatch):
        for name, rows in FILES.items():
            Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tiny = make_tiny_target()
        tiny.model.save_pretrained("target")
        tiny.tokenizer.save_pretrained("target")
        for line in BEFORE.get(name_of(page), []):
            (command,) = read_commands(line)
            run_command(command, instead, monkeypatch)
        for block in read_blocks(page.read_text(encoding="utf-8")):
            if block.language == "python":
                text = block.text
                for written, value in instead.items():
                    text = text.replace(written, value)
                run_python(text, names)
            if block.language == "bash":
                for command in read_commands(block.text):
                    if how(command) == "module" and "--help" not in command.words:
                        run_command(command, instead, monkeypatch)


# Scripts


STUB = """\
fail() { printf 'error: %s\\n' "$*" >&2; exit 1; }
keep_buffers() { :; }
require_free_gb() { :; }
setup_env() { PYTHON=python; }
step() { shift; if [ "$1" = setup_env ]; then "$@"; else printf 'STEP'; printf ' %q' "$@"; printf '\\n'; fi; }
"""


def steps_of(script: str, folder: Path, *words: str) -> list[str]:
    """The commands that a script starts, one a line as the shell would take them."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "setup_env.sh").write_text(STUB)
    copy = folder / "scripts" / script
    copy.write_text((ROOT / "scripts" / script).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["bash", str(copy), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("STEP ") for line in done.stdout.splitlines() if line.startswith("STEP ")]


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        ("quickstart.sh", ["train.mtp", "eval.bench"]),
        pytest.param(
            "diversed.sh",
            ["train.sft", "train.mtp", "rl.diversed", "rl.diversed", "rl.diversed", "eval.pareto"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stages_of_a_script(
    script: str, modules: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the options that the script gives it, on what the one before has made."""
    commands = [command for line in steps_of(script, tmp_path) for command in read_commands(line)]
    assert [command.module for command in commands] == modules
    with in_folder(tmp_path, monkeypatch):
        for command in commands:
            run_command(command, {}, monkeypatch)


def test_checks_of_the_script(tmp_path: Path) -> None:
    """Every program that it calls is one that the development environment has, and its words reach pytest."""
    steps = steps_of("test.sh", tmp_path, "tests/models", "-k", "cache")
    programs = [line.split()[0] for line in steps]
    assert programs == ["ruff", "ruff", "mypy", "lint-imports", "pytest"]
    assert steps[-1].endswith(" tests/models -k cache")
    for module in ("ruff", "mypy", "importlinter", "pytest", "xdist"):
        assert importlib.util.find_spec(module) is not None


def targets_of_make() -> Iterator[str]:
    for page in PAGES:
        yield from (command.words[1] for command in commands_of(page) if command.words[0] == "make")


@pytest.mark.parametrize("target", sorted({*targets_of_make(), "help"}))
def test_targets_of_make(target: str) -> None:
    """make knows them, and what they would run."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_an_environment_is_made(tmp_path: Path) -> None:
    """By the README's own line; what it then installs, the test of the constraints looks at."""
    (line,) = re.findall(r"^python -m venv .*$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    command = f"{line} && command -v python"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / ".venv" / "bin" / "python")
