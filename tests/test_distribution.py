"""The wheel: the inference library under the name `foretoken`, and nothing of the checkout beside it."""

import json
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from models.checkpoint import save_heads
from models.heads import HeadOptions, build_head
from models.target.tiny import make_tiny_target
from tests.test_project import PYPROJECT, ROOT

TRAINING_ONLY = ("datasets", "deepspeed", "hydra", "omegaconf", "peft", "pyarrow", "trl", "wandb")
DECODE = """
import importlib.util, json, sys
import foretoken
from transformers import AutoModelForCausalLM, AutoTokenizer
found = [name for name in {names!r} if importlib.util.find_spec(name)]
model = AutoModelForCausalLM.from_pretrained({target!r})
tokenizer = AutoTokenizer.from_pretrained({target!r})
speculative = foretoken.load_speculative({heads!r}, model, tokenizer)
inputs = tokenizer("to be or not to be", return_tensors="pt")
same = model.generate(**inputs, max_new_tokens=12, do_sample=False).tolist()
ours = model.generate(**inputs, max_new_tokens=12, do_sample=False, custom_generate=speculative).tolist()
print(json.dumps([found, foretoken.__file__, same == ours, len(ours[0])]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from the tracked files alone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file() and name.split("/")[0] in ("models", "pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta as b; print(b.build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.whl"))


def needed_distributions(requirements: list[str]) -> set[str]:
    """Names of all distributions that the requirements bring, as they are installed here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform, or an accelerator's libraries
            continue
        found.add(name)
        waiting += [Requirement(text) for text in needs]
    return found


def link_distributions(names: set[str], site: Path) -> None:
    """Make the installed distributions, and no others, importable from the folder `site`."""
    for name in names:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))


def test_wheel_holds_the_inference_library_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if ".dist-info/" not in name}
    tracked = {"foretoken" + str(path.relative_to(ROOT))[6:] for path in (ROOT / "models").rglob("*.py")}
    assert code == tracked | {"foretoken/py.typed"}


def test_packages_are_all_folders_of_models() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "models").rglob("__init__.py")}
    packages = {"foretoken" + str(folder).replace("/", ".")[6:] for folder in folders}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages


def test_installed_alone_it_decodes_with_a_checkpoint(wheel: Path, tmp_path: Path) -> None:
    """In an environment with what the wheel asks for and nothing else; greedy text is transformers' own."""
    target = make_tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_heads(tmp_path / "heads", build_head(target, HeadOptions("mtp", num_draft_tokens=3)))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (metadata,) = site.glob("foretoken-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    asked = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    link_distributions(needed_distributions(asked), site)
    code = DECODE.format(names=TRAINING_ONLY, target=str(tmp_path / "target"), heads=str(tmp_path / "heads"))
    done = subprocess.run([python, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, file, is_same, length = json.loads(done.stdout.splitlines()[-1])
    assert found == []
    assert Path(file).is_relative_to(tmp_path / "env")
    assert is_same
    assert length > 12
