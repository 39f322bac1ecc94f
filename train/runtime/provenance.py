"""How something that was trained came about: command, commit, versions."""

import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def origin(module: str, packages: tuple[str, ...]) -> dict[str, Any]:
    """Command (`python -m module` with its arguments), commit and versions of foretoken, torch and these packages."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit(),
        "versions": {name: version(name) for name in ("foretoken", "torch", *packages)},
    }


def commit() -> str:
    """Short hash; "+changes" behind it where tracked files differ from it; "unknown" outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
