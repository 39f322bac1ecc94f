"""How a command of the documentation is run to its end within seconds: with a tiny target, in this process.

Each command keeps the words that are written on the page. The target's name becomes `tiny` (its label, and with it
every folder, stays), and what decides the size is put behind.
"""

import argparse
import importlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from transformers import PrinterCallback

import eval.frontier.pairs
from rl import diversed
from tests.docs.pages import Command
from train.data import testbed
from train.data.sources import stdlib

FEW_STEPS = (
    "trainer.max_steps=2",
    "trainer.per_device_train_batch_size=2",
    "trainer.warmup_steps=0",
    "trainer.logging_steps=1",
    "trainer.save_steps=1",
)
FEW_TEXTS = ("data.max_prompts=40", "answers.max_new_tokens=8")
DISTILLING = (*FEW_TEXTS, *FEW_STEPS, "trainer.eval_steps=1", "trainer.autocast=false", "trainer.max_length=256")
# What makes a command small, by its module.
SMALL: dict[str, tuple[str, ...]] = {
    "train.regenerate": FEW_TEXTS,
    "train.mtp": (*DISTILLING, "trainer.start_tokens=64"),
    "train.draft": (*DISTILLING, "cut.fit_tokens=64"),
    "train.sft": ("data.max_prompts=40", "heldout_examples=2", *FEW_STEPS, "trainer.autocast=false"),
    "rl.diversed": (
        *FEW_STEPS,
        "heldout_prompts=2",
        "floor.prompts=2",
        "trainer.per_device_train_batch_size=4",
        "trainer.num_generations=2",
        "trainer.num_iterations=1",
        "trainer.eval_steps=1",
        "trainer.max_completion_length=8",
    ),
    "eval.bench": ("prompts_per_task=1", "short_tokens=0", "long_tokens=4", "rounds=1", "warmup_rounds=0"),
    "eval.pareto": (
        *(f"rules.{name}=null" for name in ("lenience", "typical", "cascade", "budget")),
        "rules.static.target_weight=[0.5]",
        "peer_weights=[]",
        "num_prompts=2",
        "samples=1",
        "max_new_tokens=8",
        "num_resamples=100",
        "shown_prompts=1",
    ),
    "eval.verification_cost": ("rounds=1", "batch_sizes=[1]"),
    "eval.theory": ("--samples", "2", "--models", "2"),
    "scripts.generate": ("--max-new-tokens", "4"),
    "scripts.export": (),
}
# Modules whose `main` takes the words itself; the others are Hydra's and read sys.argv.
WITH_PARSER = ("scripts.generate", "scripts.export", "eval.theory")
LARGE = ("llama", "smollm2", "qwen", "gemma")
TINY_SCHOOL = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "max_steps": 3}


def shrink(command: Command, instead: Mapping[str, str]) -> list[str]:
    """The command's arguments as they are run. instead: words that stand for one, or for a placeholder within one."""
    words: list[str] = []
    for word in command.arguments:
        for placeholder, value in instead.items():
            word = value if word == placeholder else word.replace(f"={placeholder}", f"={value}")
        name, _, value = word.partition("=")
        if name == "+model" and value in LARGE:
            words += ["+model=tiny", f"model.label={value}"]
        else:
            words += ["tiny"] if word in LARGE else [word] if word in command.arguments else word.split()
    if command.module == "eval.bench" and not any(word.startswith("tasks=") for word in words):
        words.append("tasks=[completion,chat]")
    return [*words, *SMALL[command.module]]


def run_module(module: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m MODULE WORDS` in this process; whatever goes wrong is raised, an exit code included."""
    main: Callable[..., Any] = importlib.import_module(f"{module}.__main__" if module == "eval.theory" else module).main
    monkeypatch.setattr(sys, "stdin", io.StringIO("A prompt."))
    if module in WITH_PARSER:
        code = main(list(words))
        assert code in (None, 0), f"{module} {' '.join(words)} ended with {code}"
        return
    GlobalHydra.instance().clear()
    # Hydra's own handlers would close those of the tests.
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
    monkeypatch.setattr(sys, "argv", [module, *words, *quiet])
    main()


def some_library(folder: Path) -> Path:
    """A hundredth of Python's own library, which takes seconds to read."""
    if not (library := folder / "library").is_dir():
        library.mkdir()
        for path in sorted(Path(argparse.__file__).parent.glob("[a-f]*.py")):
            shutil.copy(path, library)
    return library


@contextmanager
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything happens in this folder, with a testbed of a few thousand weights; errors come with their traceback."""
    default = testbed.TestbedOptions()
    small = testbed.TestbedOptions(replace(default.target, **TINY_SCHOOL), replace(default.draft, **TINY_SCHOOL))
    for module in (diversed, eval.frontier.pairs):
        monkeypatch.setattr(module, "ensure_testbed", partial(testbed.ensure_testbed, options=small))
    read = stdlib.load
    monkeypatch.setattr(stdlib, "load", lambda seed, share, path=None: read(seed, share, path or some_library(folder)))
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *args, **kwargs: None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    try:
        yield
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()  # it remembers the folder that it was started in
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
