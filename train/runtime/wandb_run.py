"""logger=wandb: one run of Weights & Biases for a command, or for a job of a sweep, and what goes into it as a file.

The curves are written by transformers' callback, which takes up the run that is open. WANDB_PROJECT names another
project, WANDB_MODE=offline needs no account.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.runtime.jsonl_logger import WANDB, check_logger
from train.runtime.ranks import is_main

PROJECT = "foretoken"


@contextmanager
def wandb_run(config: Any) -> Iterator[None]:
    """A run for as long as this lasts, where `config.logger` asks for one. ValueError where wandb is not there.

    It ends here and not with the process, because the jobs of a multirun share one.
    """
    if getattr(config, "logger", None) != WANDB or not is_main():
        yield
        return
    check_logger(WANDB)
    import wandb

    run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), config=asdict(config))
    try:
        yield
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def log_artifact(kind: str, name: str, paths: Sequence[Path]) -> None:
    """These files as an artifact of the open run; nothing where none is open."""
    run = _open_run()
    if run is None:
        return
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=kind)
    for path in paths:
        artifact.add_file(str(path), skip_cache=True)
    run.log_artifact(artifact)


def log_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table in the open run; nothing where none is open."""
    run = _open_run()
    if run is not None:
        import wandb

        run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})


def _open_run() -> Any:
    """None where wandb is not there, or no run is open, as in every process but the first."""
    try:
        import wandb
    except ImportError:
        return None
    return wandb.run
