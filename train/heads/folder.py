"""Which draft heads a command means that names none: those of its work_dir, whatever their kind."""

from __future__ import annotations

from pathlib import Path

from models.checkpoint import CONFIG_NAME, read_object
from train.runtime.shards import MANIFEST


def find_heads(checkpoint: str, work_dir: str) -> Path:
    """The folder that was named, else the only one in `work_dir` that holds finished heads.

    Those that `train.mtp` made there come before copies of them, such as an export. ValueError for none or several.
    """
    if checkpoint:
        return Path(checkpoint)
    held = [path.parent for path in sorted(Path(work_dir).glob(f"*/{CONFIG_NAME}")) if _holds_heads(path)]
    found = [folder for folder in held if (folder / MANIFEST).is_file()] or held
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"work_dir={work_dir!r} holds no finished draft heads; train them (python -m train.mtp, with the same "
            "+model and work_dir), or name their folder with checkpoint=FOLDER"
        )
    raise ValueError(
        f"work_dir={work_dir!r} holds several draft heads: {', '.join(map(str, found))}; say which with "
        f"checkpoint={found[0]}"
    )


def _holds_heads(config: Path) -> bool:
    try:
        return read_object(config).get("kind") == "heads"
    except ValueError:
        return False
