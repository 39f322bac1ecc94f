"""A stopped run's folder, copied: what goes on in the copy must not read the old one."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from train.runtime.checkpoints import BEST, STATE_NAME, newest_first


def copy_run(old: Path, new: Path, then: str) -> None:
    """Copy a work_dir. then: `gone` removes the old one, `other` leaves other weights in it."""
    shutil.copytree(old, new)
    if then == "gone":
        shutil.rmtree(old)
        return
    for path in old.rglob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)


def pin_best(folder: Path) -> Path:
    """Have the best checkpoint so far be better than all that will come; returns its namesake in this folder."""
    file = next(newest_first(folder)) / STATE_NAME
    state = json.loads(file.read_text())
    assert Path(state[BEST]).parent != folder  # it names the old one
    file.write_text(json.dumps(state | {"best_metric": 1e9}))
    return folder / Path(state[BEST]).name
