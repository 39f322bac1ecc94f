"""The sandbox's own code with faults planted in it: supervisors start from a copy."""

import shutil
from pathlib import Path

import pytest

from eval.rewards.jail import sandbox

GENUINE = sandbox.ROOT
Fault = tuple[str, str, str]  # module of the jail, right text, wrong text
# Root keeps its user, without its rights: as an ordinary user, whose files and processes the answer may touch.
AS_A_USER: Fault = ("supervisor", "has_users = os.getuid() == 0", "has_users = False")


def plant_faults(folder: Path, monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> None:
    """Make the supervisor start from a copy of the code with these faults in it."""
    root = folder / "faulty"
    for part in ("eval", "eval/rewards", "eval/rewards/jail"):
        (root / part).mkdir(exist_ok=True, parents=True)
        for path in (GENUINE / part).glob("*.py"):
            shutil.copy(path, root / part)
    for module, right, wrong in faults:
        path = root / "eval" / "rewards" / "jail" / f"{module}.py"
        assert right in path.read_text(), f"the planted fault no longer matches the code: {right}"
        path.write_text(path.read_text().replace(right, wrong, 1))
    monkeypatch.setattr(sandbox, "ROOT", root)
