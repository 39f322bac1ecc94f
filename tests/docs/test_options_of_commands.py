"""The options of every command in README.md, docs/, conf/ and scripts/: parsed and checked as the commands do it."""

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from torch.distributed.run import get_args_parser as torchrun_parser

from scripts.document.options import COMMANDS
from tests.docs.pages import INERT, LAUNCHERS, MARKS, PAGES, ROOT, Command, commands_of, read_blocks, read_commands
from tests.docs.running import WITH_PARSER
from train.runtime.config import checked
from train.runtime.presets import CONF

MODULES = {module.__name__: (name, schema) for name, (module, schema) in COMMANDS.items()}
# Hydra's own flags, which the override parser does not know.
FLAGS = ("--multirun", "-m", "--cfg", "job")
# Other programs' modules, and those of ours that take no options.
OTHERS = ("venv", "pip", "scripts.document")
IN_COMMENT = re.compile(r"^# +(?P<command>(?:python -m|torchrun|deepspeed|accelerate) .*)$", flags=re.M)


def commands_in_comments(path: Path) -> list[Command]:
    """Commands that a file of conf/ or scripts/ tells of."""
    lines = [found["command"] for found in IN_COMMENT.finditer(path.read_text(encoding="utf-8"))]
    return [command for line in lines for command in read_commands(line)]


SOURCES = [*PAGES, *sorted(CONF.rglob("*.yaml")), *sorted((ROOT / "scripts").rglob("*.sh"))]
FOUND = [
    pytest.param(command, id=f"{path.relative_to(ROOT)}: {command.line}")
    for path in SOURCES
    for command in (commands_of(path) if path.suffix == ".md" else commands_in_comments(path))
    if command.module
]


def check_options(command: Command) -> Any:
    """What the command would be given: a checked dataclass a job, or argparse's namespace. Raises what it would."""
    check_launcher(command)
    module, words = command.module, list(command.arguments)
    if module in WITH_PARSER:
        return importlib.import_module(f"{module}.__main__" if module == "eval.theory" else module).parse_arguments(
            words
        )
    name, schema = MODULES[module]
    return [compose_checked(name, schema, job) for job in jobs_of([word for word in words if word not in FLAGS])]


def jobs_of(words: list[str]) -> list[list[str]]:
    """The overrides of each job: of a sweep one for every value, those of several options in step."""
    values = []
    for override in OverridesParser.create().parse_overrides(words):
        name = override.input_line.partition("=")[0]
        swept = override.sweep_string_iterator() if override.is_sweep_override() else None
        values.append([override.input_line] if swept is None else [f"{name}={value}" for value in swept])
    return [[of[min(job, len(of) - 1)] for of in values] for job in range(max(map(len, values), default=1))]


def compose_checked(name: str, schema: type, overrides: list[str]) -> Any:
    """As Hydra composes it for one job of the command."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(name, overrides, return_hydra_config=True)
    with open_dict(config):
        del config["hydra"]
    OmegaConf.set_struct(config, False)
    return checked(config, schema)


def check_launcher(command: Command) -> None:
    """The launcher's own parser takes its words. (deepspeed's is there only where deepspeed is.)"""
    launcher, *words = command.words
    if launcher == "torchrun":
        found = torchrun_parser().parse_args(words)
        assert (found.module, found.training_script) == (True, command.module)
    if launcher == "accelerate":
        assert words.pop(0) == "launch"
        found = launch_command_parser().parse_args(words)
        assert (found.module, found.training_script) == (True, command.module)
    if launcher == "deepspeed" and find_spec("deepspeed") is not None:
        from deepspeed.launcher.runner import parse_args

        found = parse_args(words)
        assert (found.module, found.user_script) == (True, command.module)


@pytest.mark.parametrize("command", FOUND)
def test_options_fit(command: Command) -> None:
    if command.module in OTHERS:
        assert command.module == "scripts.document" or find_spec(command.module)
        return
    if "--help" in command.words:
        assert command.module in {**MODULES, **dict.fromkeys(WITH_PARSER)}
        return
    check_options(command)


def test_every_source_is_read() -> None:
    ids = " ".join(str(parameter.id) for parameter in FOUND)
    for name in ("README.md", "conf/mtp.yaml", "conf/sweep/lambda.yaml", "conf/experiment/stories.yaml"):
        assert f"{name}: " in ids
    assert len(FOUND) > 40


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("python -m train.mtp +model=no_such_model", "no_such_model"),
        ("python -m train.mtp +model=llama heads=medusa heads.num_heads=3", "num_heads"),
        ("python -m train.mtp +model=llama trainer.max_steps=many", "many"),
        ("python -m train.mtp +model=llama +answers.engin=data", "engin"),
        ("python -m train.mtp heads=medusa", "no target model is chosen"),
        ("torchrun --nproc-per-node 2 -m train.mtp +model=llama data.path", "data.path"),
        ("torchrun --processes 2 -m train.mtp +model=llama", "2"),
        ("python -m scripts.export CHECKPOINT --to vllm", "2"),
        ("python -m scripts.generate --no-such-option 1", "2"),
        ("python -m rl.diversed --multirun +model=testbed lam=0.1,many", "many"),
    ],
)
def test_planted_mistake_is_found(line: str, message: str) -> None:
    (command,) = read_commands(line)
    with pytest.raises((Exception, SystemExit), match=message):
        check_options(command)


# How the pages are read


def test_commands_are_read_as_the_shell_does() -> None:
    block = (
        'A=1 B="x y" python -m train.mtp "tasks=[a, b]" x=1 \\\n  y=2  # needs a GPU\ncd z && make docs\n\n# nothing\n'
    )
    first, second, third = read_commands(block)
    assert first.words == ("python", "-m", "train.mtp", "tasks=[a, b]", "x=1", "y=2")
    assert (first.module, first.arguments) == ("train.mtp", ("tasks=[a, b]", "x=1", "y=2"))
    assert (first.mark, second.words, third.words) == (MARKS[0], ("cd", "z"), ("make", "docs"))


def test_languages_are_known() -> None:
    """A block without a language, or in one that is not run, would hide its commands."""
    starts = re.compile(rf"^(?:\$ )?(?:python -m|bash|make|{'|'.join(LAUNCHERS)}) ", flags=re.M)
    for path in PAGES:
        for block in read_blocks(path.read_text(encoding="utf-8")):
            assert block.language in ("bash", "python", "console", *INERT), f"{path.name}: {block}"
            assert block.language in ("bash", "console") or not starts.search(block.text), f"{path.name}: {block}"
