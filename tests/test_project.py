"""The project's own promises: what the README names exists, versions agree, imports go one way.

Each check is a function of a text or a folder, so that it can also be run on a broken one and be seen to fail.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.docs.pages import PAGES

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
WRITTEN = "\n".join(path.read_text() for path in PAGES)
LAYERS = ["scripts", "rl", "eval", "train", "models"]
ROOMS = ("cache", "decoding", "drafters", "export", "heads", "processors", "target", "verification")
HEAVY_FOR_INFERENCE = {"datasets", "deepspeed", "hydra", "omegaconf", "trl", "wandb"}


def find_packages() -> set[str]:
    """Folders at the top level that hold Python code of ours, tests apart."""
    return {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}


# ---- commands in the README and in docs/ (tests/docs runs them) ----


def find_commands(text: str) -> list[list[str]]:
    """The words of each shell command in `text`: lines of code blocks and inline code, comments cut off."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", prose)
    commands = [part.split() for line in lines for part in re.sub(r"(^|\s)#.*", "", line).split("&&")]
    return [words for words in commands if words]


def module_exists(name: str, root: Path) -> bool:
    top = name.partition(".")[0]
    if (root / top).is_dir():
        path = root.joinpath(*name.split("."))
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    return importlib.util.find_spec(top) is not None


def find_dangling(words: list[str], root: Path) -> Iterator[str]:
    """What a command names and the project does not have: module, script, make target, or file of a Hydra group."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
    for option, name in pairwise(words):
        if option == "-m" and words[0] != "pytest" and not module_exists(name, root):
            yield f"module {name}"
        if option == "bash" and not (root / name).is_file():
            yield f"script {name}"
        if option == "make" and not re.search(rf"^{re.escape(name)}:", (root / "Makefile").read_text(), flags=re.M):
            yield f"make target {name}"
    for word in words:
        group, equals, value = word.lstrip("+").partition("=")
        folder = root / "conf" / group
        if equals and re.fullmatch(r"[a-z_]+", group) and value != "NAME" and re.fullmatch(r"\w+", value):
            if word.startswith("+") and not folder.is_dir():
                yield f"group conf/{group}"
            elif folder.is_dir() and not (folder / f"{value}.yaml").is_file():
                yield f"option {group}={value}"


@pytest.mark.parametrize("words", find_commands(WRITTEN), ids=" ".join)
def test_command_refers_to_what_exists(words: list[str]) -> None:
    assert list(find_dangling(words, ROOT)) == []


def test_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_readme_commands_are_found() -> None:
    found = {" ".join(words) for words in find_commands(README)}
    assert {"bash scripts/quickstart.sh", "bash scripts/test.sh", "python -m train.mtp +model=llama"} <= found


@pytest.mark.parametrize(
    ("line", "dangling"),
    [
        ("python -m train.no_such_thing +model=smollm2", "module train.no_such_thing"),
        ("python -m no_such_package_at_all", "module no_such_package_at_all"),
        ("OMP_NUM_THREADS=1 bash scripts/none.sh", "script scripts/none.sh"),
        ("make no_such_target", "make target no_such_target"),
        ("python -m train.mtp +model=no_such_model", "option model=no_such_model"),
        ("python -m train.mtp +no_such_group=x", "group conf/no_such_group"),
    ],
)
def test_planted_command_is_reported(line: str, dangling: str) -> None:
    (words,) = find_commands(f"```bash\n{line}  # a comment\n```\n")
    assert dangling in list(find_dangling(words, ROOT))


def test_every_model_is_listed() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    (table,) = re.findall(r"^\| `\+model=` \|.*?\n\n", text, flags=re.M | re.S)
    listed = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.M))
    assert listed == {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}


# ---- versions ----


def read_constraints(text: str) -> dict[str, str]:
    """Name -> version; every line must pin one exactly."""
    pins = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()
            assert canonicalize_name(name) not in pins, f"{name} is pinned twice"
            pins[canonicalize_name(name)] = version
    return pins


def find_unmet(requirements: list[str], pins: dict[str, str]) -> list[str]:
    """Requirements that have no pin, or one outside their range."""
    parsed = [Requirement(text) for text in requirements]
    return [
        str(wanted)
        for wanted in parsed
        if not wanted.specifier.contains(pins.get(canonicalize_name(wanted.name), "0.0.0.dev0"))
        or canonicalize_name(wanted.name) not in pins
    ]


def test_constraints_satisfy_every_requirement() -> None:
    project = PYPROJECT["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert len(requirements) > 12
    assert find_unmet(requirements, read_constraints((ROOT / "constraints.txt").read_text())) == []


def test_unmet_requirements_are_reported() -> None:
    pins = read_constraints("# a comment\ntorch==2.10.0\nnumpy==2.4.6\n")
    assert find_unmet(["torch>=2.11", "numpy>=2", "tqdm"], pins) == ["torch>=2.11", "tqdm"]


def test_promised_ranges_are_stated() -> None:
    ranges = {(wanted := Requirement(text)).name: wanted.specifier for text in PYPROJECT["project"]["dependencies"]}
    assert ranges["torch"] == SpecifierSet(">=2.11")
    assert ranges["transformers"] == SpecifierSet(">=5.17,<6")


def test_one_minimum_python_everywhere() -> None:
    minimum = re.search(r"^MIN_PYTHON=(\S+)$", (ROOT / "scripts" / "setup_env.sh").read_text(), flags=re.M).group(1)
    assert PYPROJECT["project"]["requires-python"] == f">={minimum}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == minimum
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + minimum.replace(".", "")
    assert f"Python {minimum} or newer" in README


def test_readme_installs_the_tested_torch() -> None:
    pinned = read_constraints((ROOT / "constraints.txt").read_text())["torch"]
    assert set(re.findall(r"torch==([\d.]+)", README)) == {pinned}


def test_changelog_has_entries_and_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    assert sections, "CHANGELOG.md has no section"
    assert all(re.search(r"^- \S", section, flags=re.M) for section in sections), "a section of CHANGELOG.md is empty"
    released = [section.split()[0] for section in sections if not section.startswith("Unreleased")]
    assert not released or released[0] == PYPROJECT["project"]["version"]


# ---- imports ----


def test_every_package_is_checked() -> None:
    packages = find_packages()
    assert {"models", "scripts"} <= packages
    assert set(PYPROJECT["tool"]["mypy"]["files"]) == packages
    assert set(PYPROJECT["tool"]["importlinter"]["root_packages"]) == packages


def test_contracts_are_stated() -> None:
    contracts = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    assert contracts["layers"]["layers"] == LAYERS
    assert set(contracts["models-alone"]["forbidden_modules"]) == HEAVY_FOR_INFERENCE
    assert contracts["hydra-entry-points"]["forbidden_modules"] == ["hydra"]


def run_import_linter(root: Path, extra_module: tuple[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run the project's contracts on a skeleton of its packages, with one more module planted."""
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in PYPROJECT["tool"]["importlinter"]["root_packages"]:
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
    (root / "train" / "runtime").mkdir()
    (root / "train" / "runtime" / "__init__.py").touch()
    (root / "train" / "runtime" / "config.py").write_text("import hydra\n")
    for name in ROOMS:
        (root / "models" / name).mkdir()
        (root / "models" / name / "__init__.py").touch()
    for name in ("checkpoint", "ensemble", "files", "sampling"):
        (root / "models" / f"{name}.py").touch()
    (root / "train" / "mtp.py").write_text("import train.runtime.config\n")
    if extra_module is not None:
        path, source = extra_module
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).parent.joinpath("__init__.py").touch()
        (root / path).write_text(source)
    command = "import sys; sys.path.insert(0, ''); from importlinter.cli import lint_imports_command as c; c()"
    return subprocess.run(
        [sys.executable, "-P", "-c", command, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=300
    )


def test_layered_imports_pass(tmp_path: Path) -> None:
    done = run_import_linter(tmp_path, ("eval/speed/report.py", "import models\nimport train.mtp as _unused\n"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/target/model.py", "import train\n"),
        ("train/data/prompts.py", "import eval\n"),
        ("eval/speed/report.py", "import scripts\n"),
        ("models/target/model.py", "import omegaconf\n"),
        ("models/target/model.py", "def load() -> None:\n    from datasets import Dataset\n"),
        ("train/data/prompts.py", "import hydra\n"),
        ("eval/speed/report.py", "import rl\n"),
        ("models/cache/ragged.py", "import models.heads\n"),
        ("models/drafters/base.py", "from ..decoding import rows\n"),
        ("models/verification/token.py", "from ..target import model\n"),
        ("models/target/model.py", "from .. import cache\n"),
    ],
)
def test_planted_import_is_refused(tmp_path: Path, path: str, source: str) -> None:
    done = run_import_linter(tmp_path, (path, source))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
