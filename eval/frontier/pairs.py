"""From options to the pair that decodes, and to the trained ensemble heads that were made for it."""

from collections.abc import Sequence
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from eval.frontier.points import DYNAMIC, Dynamic, Pair
from eval.frontier.questions import TESTBED, task_name
from models.checkpoint import CONFIG_NAME, load_ensemble, model_record, read_config
from models.drafters.base import Drafter
from models.drafters.build import make_drafter
from models.drafters.model import ModelDrafter
from models.drafters.options import DrafterOptions, default_draft_tokens, needs_checkpoint
from models.target.model import TargetOptions, load_target
from train.data.testbed import ensure_testbed

# What makes an entry of `checkpoints` a pattern.
WILD = set("*?")


def load_pair(
    model: TargetOptions, options: DrafterOptions, heads_folder: Path | None, num_draft_tokens: int, work_dir: Path
) -> tuple[Pair, dict[str, Any]]:
    """Target and drafter, and the drafter's record. num_draft_tokens 0: the drafter's own K.

    The testbed is trained first where `work_dir` does not hold it yet.
    """
    drafter: Drafter | None
    if model.source == TESTBED:
        bed = ensure_testbed(work_dir / TESTBED, model.seed)
        target, drafter = bed.target, ModelDrafter(bed.draft, bed.target)
        record: dict[str, Any] = dict(model_record(bed.draft))
    else:
        target = load_target(model)
        folder = heads_folder if needs_checkpoint(options) else None
        drafter, record = make_drafter(options, model, target, folder)
    assert drafter is not None
    draft = drafter.draft if isinstance(drafter, ModelDrafter) else None
    return Pair(target, drafter, num_draft_tokens or default_draft_tokens(drafter), draft), record


def find_finished(pattern: str) -> list[str]:
    """The folders that this pattern matches and that hold a checkpoint, in the order of their lambda; others are told.

    ValueError where there is none.
    """
    folders = [path for path in map(Path, sorted(glob(pattern))) if path.is_dir()]
    done = [folder for folder in folders if (folder / CONFIG_NAME).is_file()]
    if not done:
        raise ValueError(
            f"checkpoints: no folder that matches {pattern!r} holds a finished head, of {len(folders)} there; check "
            "the pattern, or run the sweep to its end"
        )
    for folder in folders:
        if folder not in done:
            print(f"left out: {folder} holds no finished head")
    return [str(folder) for folder in sorted(done, key=_lam_of)]


def _lam_of(folder: Path) -> float:
    """Infinite where the checkpoint does not tell."""
    lam = training_of(read_config(folder)).get("lam")
    return float("inf") if lam is None else float(lam)


def name_checkpoints(entries: Sequence[str]) -> dict[str, Path]:
    """A point's name for each folder, or NAME=FOLDER, or all that a pattern (`FOLDER/*`) matches.

    ValueError for what is no ensemble head, before models load.
    """
    named: dict[str, Path] = {}
    for entry in chain.from_iterable(find_finished(one) if set(one) & WILD else [one] for one in entries):
        name, _, rest = entry.partition("=")
        folder = Path(entry if not rest or Path(entry).is_dir() else rest)
        config = read_config(folder)
        if config.get("kind") != "ensemble":
            raise ValueError(
                f"checkpoints names {str(folder)!r}, which holds {config.get('kind')!r}, not an ensemble head"
            )
        lam = training_of(config).get("lam")
        if folder != Path(entry):
            label = name
        else:
            label = f"{DYNAMIC}, {folder.name}" if lam is None else f"{DYNAMIC}, lam = {lam:g}"
        if label in named:
            raise ValueError(f"checkpoints: two of them would be called {label!r}; name them, as in NAME={folder}")
        named[label] = folder
    return named


def load_dynamics(named: dict[str, Path], pair: Pair, drafter_record: dict[str, Any]) -> list[Dynamic]:
    """The heads. ValueError for one that was trained for another target or drafter."""
    dynamics = []
    for name, folder in named.items():
        head = load_ensemble(folder, pair.target, drafter_record)
        training = training_of(read_config(folder))
        settings = {"checkpoint": str(folder), "kind": head.options.kind, "lam": training.get("lam")}
        dynamics.append(Dynamic(name, head, settings | {"trained_on": trained_on(training)}))
    return dynamics


def training_of(config: dict[str, Any]) -> dict[str, Any]:
    """The options that the head was trained with, as its checkpoint tells them; {} where it does not."""
    options: dict[str, Any] = config.get("provenance", {}).get("config", {})
    return options


def trained_on(training: dict[str, Any]) -> str | None:
    """Name of the prompts that it was trained on."""
    data = training.get("data", {})
    if "source" not in data:
        return None
    return task_name(training.get("model", {}).get("source", ""), data["source"], data.get("path", ""))
