"""Where and with what a figure was measured."""

import os
import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from train.runtime.provenance import commit

PACKAGES = ("foretoken", "torch", "transformers")


def describe_run(module: str, device: torch.device) -> dict[str, Any]:
    """Command, commit, hardware and versions, ready for JSON."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit(),
        "hardware": _hardware(device),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.M)
    except OSError:
        found = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{found[1] if found else platform.processor() or platform.machine()}, {cores} cores"
