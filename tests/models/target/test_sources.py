"""What is said where no model can be had: one line that names the cause and what to do.

A table over folders, each with its own damage, and one over what a hub answers, through its client and transformers.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from peft import LoraConfig, get_peft_model

from models.checkpoint import save_ensemble, save_heads
from models.ensemble import EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.target.model import TargetOptions, load_target
from models.target.sources import hub_message, load_error_message, require_model
from models.target.tiny import make_tiny_target

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in four files, as large ones are."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    target = make_tiny_target(seed=4)
    target.model.save_pretrained(folder, max_shard_size="50KB")
    target.tokenizer.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def options(name: Path | str) -> TargetOptions:
    return TargetOptions(name=str(name), dtype="float32", device="cpu")


def edit(path: Path, **changes: object) -> None:
    """Other values in a JSON file; None takes a key out."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        found = list(folder.glob(pattern))
        assert found
        for path in found:
            path.unlink()


def as_bin(folder: Path) -> Path:
    """The same weights as torch's file alone."""
    remove(folder, "*.safetensors", "*.index.json")
    torch.save(make_tiny_target(seed=4).model.state_dict(), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def as_parts(folder: Path, kind: str) -> None:
    """Trained parts in the model's place."""
    shutil.rmtree(folder)
    target = make_tiny_target()
    if kind == "heads":
        save_heads(folder, build_head(target, HeadOptions("mtp", 2)))
    elif kind == "ensemble":
        head = EnsembleHead(EnsembleOptions(draft_size=target.hidden_size, target_size=target.hidden_size))
        save_ensemble(folder, head, target, {"kind": "heads", "name": "x", "fingerprint": "y"})
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
        (folder / "model.safetensors").touch()


def as_adapter(folder: Path, base: str) -> None:
    """Adapters for a model that is somewhere else."""
    shutil.rmtree(folder)
    get_peft_model(make_tiny_target().model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder)
    edit(folder / "adapter_config.json", base_model_name_or_path=base)


SHARD = "model-00002-of-00004.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (
        lambda f: remove(f, "*"),
        r"lacks config\.json, weights \(.*\) and tokenizer f.*it holds: nothing",
    ),
    "no config": (lambda f: remove(f, "config.json"), r"lacks config\.json \(it holds: chat_template\.jinja, gener"),
    "config cut": (lambda f: cut(f / "config.json"), r"config\.json is no readable JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json is no JSON object"),
    "config of other bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json is no readable"),
    "no model type": (lambda f: edit(f / "config.json", model_type=None), r"config\.json has no model_type"),
    "unknown type": (lambda f: edit(f / "config.json", model_type="zork"), "could not be loaded: .*model type `zork`"),
    "no causal model": (lambda f: edit(f / "config.json", model_type="t5"), "could not be loaded: "),
    "no weights": (lambda f: remove(f, "*.safetensors", "*.index.json"), r"lacks weights \(model\.safetensors\) \(it"),
    "weights of another name": (
        lambda f: (remove(f, "*.index.json"), (f / SHARD).rename(f / "consolidated.safetensors")),
        r"lacks weights \(model\.safetensors\)",
    ),
    "shard missing": (
        lambda f: remove(f, SHARD),
        rf"lacks 1 of the 4 files that \S+ names, such as {SHARD}; fetch",
    ),
    "shards missing": (
        lambda f: remove(f, "*.safetensors"),
        r"lacks 4 of the 4 files that model\.safetensors\.index",
    ),
    "shard cut": (lambda f: cut(f / SHARD), rf"{SHARD} is damaged or cut short"),
    "shard empty": (lambda f: (f / SHARD).write_bytes(b""), rf"{SHARD} is damaged or cut short"),
    "shard a pointer": (
        lambda f: (f / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        rf"{SHARD} is a pointer of git-lfs and not the weights; run `git lfs pull`",
    ),
    "index cut": (lambda f: cut(f / "model.safetensors.index.json"), r"index\.json is no readable JSON"),
    "index without a map": (
        lambda f: edit(f / "model.safetensors.index.json", weight_map=None),
        r"index\.json has no weight_map",
    ),
    "bin cut": (lambda f: cut(as_bin(f)), r"pytorch_model\.bin is damaged or cut short"),
    "bin empty": (lambda f: as_bin(f).write_bytes(b""), r"pytorch_model\.bin is damaged or cut short"),
    "bin of other bytes": (lambda f: as_bin(f).write_bytes(b"no pickle" * 99), "could not be loaded: "),
    "no tokenizer": (lambda f: remove(f, "*token*"), r"lacks tokenizer files \(tokenizer\.json\)"),
    "tokenizer_config alone": (lambda f: remove(f, "tokenizer.json"), r"lacks tokenizer files \(tokenizer\.json\)"),
    "tokenizer cut": (lambda f: cut(f / "tokenizer.json"), "could not be loaded: its tokenizer does not load: "),
    "tokenizer of something else": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        "could not be loaded: its tokenizer does not load: ",
    ),
    "heads": (
        lambda f: as_parts(f, "heads"),
        r"holds draft heads of train\.mtp: .* checkpoint=.*made for 'tiny'",
    ),
    "ensemble": (lambda f: as_parts(f, "ensemble"), r"holds an ensemble head of rl\.diversed: give it in checkpoints"),
    "a server's heads": (lambda f: as_parts(f, "speculators"), "holds draft heads in a server's format"),
    "adapters of nothing": (
        lambda f: as_adapter(f, "/gated/401"),
        r"the adapters in .* are for a folder that is no model here: '/gated/401' is not a folder",
    ),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), "is a file; give the folder that holds it"),
    "no folder": (shutil.rmtree, "is not a folder; give an existing folder or a hub name"),
}
# Words that a hub's refusal has, in names that have nothing to do with it.
NAMES = ("model", "llama-401", "gated 403", "offline mode 404 cached files", "not a valid model identifier 한글")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_folders(damage: str, name: str, whole: Path, tmp_path: Path) -> None:
    """The same line whatever the folder is called, and nothing of a hub, a licence or a package in it."""
    folder = tmp_path / name
    shutil.copytree(whole, folder)
    do, message = DAMAGES[damage]
    do(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_target(options(folder))
    text = str(error.value)
    assert "\n" not in text
    assert str(folder) in text or damage in ("shard missing",)
    for word in ("gated", "401", "licence", "sentencepiece", "tiktoken", "no token at all", "out of reach"):
        assert word not in text.replace(str(folder), "").replace("/gated/401", "")


@pytest.mark.parametrize("name", NAMES)
def test_whole_folders_load(name: str, whole: Path, tmp_path: Path) -> None:
    """In four files, in one of torch's, and as the base of adapters, under each of the names."""
    expected = make_tiny_target(seed=4).fingerprint()
    shutil.copytree(whole, tmp_path / name)
    assert load_target(options(tmp_path / name)).fingerprint() == expected
    shutil.copytree(whole, tmp_path / f"{name} adapters")
    as_adapter(tmp_path / f"{name} adapters", str(tmp_path / name))
    assert load_target(options(tmp_path / f"{name} adapters")).tokenizer.get_vocab()
    as_bin(tmp_path / name)
    assert load_target(options(tmp_path / name)).fingerprint() == expected


def test_half_a_tokenizer_beside_adapters(whole: Path, tmp_path: Path) -> None:
    as_adapter(shutil.copytree(whole, tmp_path / "adapters"), str(whole))
    shutil.copy(whole / "tokenizer_config.json", tmp_path / "adapters")
    with pytest.raises(ValueError, match=r"has tokenizer_config\.json and no vocabulary beside it .*delete"):
        load_target(options(tmp_path / "adapters"))


@pytest.mark.parametrize(("path", "mode"), [("", 0o000), ("", 0o600), ("config.json", 0o000), (SHARD, 0o000)])
def test_what_may_not_be_read(path: str, mode: int, whole: Path) -> None:
    """In a process of another user where this is root's, whom no permission stops."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        folder = Path(shutil.copytree(whole, Path(scratch) / "model"))
        for file in folder.rglob("*"):
            file.chmod(0o644)
        folder.chmod(0o755)
        (folder / path).chmod(mode)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            try:
                require_model(folder)
                told = "nothing"
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(writer, told.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        folder.chmod(0o755)
    assert told.startswith("ValueError: ")
    assert f"{folder / path if path else folder}" in told
    assert "cannot be read (" in told.replace("'", "")


# The hub

GATED = "is gated or private: accept its licence on its hub page, then run `hf auth login` or set HF_TOKEN"
UNKNOWN = "is neither a folder here nor a repository on the hub that you may see; check model.name"
REACH = "could not be fetched: the hub is out of reach and the local cache does not have it.*\\+model=smollm2"
HUB = {
    "whole/m": "",
    "gated-401/m": GATED,
    "gated/m": GATED,
    "forbidden/m": GATED,
    "stranger/m": UNKNOWN,  # the hub answers 401 for a repository that does not exist
    "nobody-401-403-gated/m": UNKNOWN,
    "no/such/name": UNKNOWN,
    "old/m": "has no such revision; check model.revision",
    "teapot/m": "could not be fetched: the hub answers with status 418; try again later",
    "hangs-up/m": REACH,
    "bare/m": r"has no config\.json on the hub; choose a repository in transformers' format",
    "no-tokenizer/m": r"could not be loaded: it has no tokenizer files \(tokenizer\.json\)",
    "no-weights/m": r"could not be loaded: .*does not appear to have a file named .*model\.safetensors",
    "adapter/m": r"is an adapter on the hub; fetch it \(`hf download`\), and set model\.name to its folder",
}


@pytest.fixture(scope="module")
def told_of_hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("hub") / "model"
    target = make_tiny_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    command = [sys.executable, str(ROOT / "tests" / "models" / "hub_server.py"), str(folder), *HUB]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", HUB)
def test_hub(name: str, told_of_hub: dict[str, tuple[str, str]]) -> None:
    kind, text = told_of_hub[name]
    if not HUB[name]:
        assert text == "loaded"
        return
    assert kind == "ValueError"
    assert "\n" not in text
    assert re.match(f"model '{name}' {HUB[name]}", text)


def test_types_decide_wherever_they_stand() -> None:
    """As cause, as context, or two errors further down; words alone say nothing."""
    for cause in (OfflineModeIsEnabled("x"), LocalEntryNotFoundError("x"), ConnectionError("x"), TimeoutError()):
        error, middle = OSError("y"), KeyError("z")
        error.__cause__, middle.__context__ = middle, cause
        assert "out of reach" in (hub_message("a/b", error) or "")
    assert "HF_HOME" in (hub_message("a/b", PermissionError(13, "x")) or "")
    for words in ("401 gated repo", "repository not found", "offline mode", "not a valid git identifier"):
        assert hub_message("a/b", OSError(words)) is None


def test_an_error_that_is_its_own_cause() -> None:
    error = OSError("x")
    error.__context__ = KeyError("y")
    error.__context__.__context__ = error
    assert hub_message("a/b", error) is None


def test_long_texts_are_cut() -> None:
    assert len(load_error_message("a/b", OSError("word\n" * 500))) < 400
    assert "\n" not in load_error_message("a/b", OSError("word\n" * 500))
