"""Options: every shipped file composes and passes, and a user's mistake is one line and code 2 before a model loads."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import MISSING, OmegaConf

from eval.bench import BenchConfig
from models.target.model import TargetOptions
from rl.diversed import DiversedConfig
from train.draft import DraftConfig
from train.mtp import MTPConfig
from train.regenerate import RegenerateConfig
from train.runtime import config as config_module
from train.runtime.config import checked
from train.runtime.jsonl_logger import LOGGERS
from train.runtime.presets import CONF

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = {
    "mtp": MTPConfig,
    "regenerate": RegenerateConfig,
    "bench": BenchConfig,
    "diversed": DiversedConfig,
    "draft": DraftConfig,
}


def names_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def compose_checked(*overrides: str, name: str = "mtp") -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose(name, overrides=list(overrides)), SCHEMAS[name])


# What is shipped


@pytest.mark.parametrize("model", names_of("model"))
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_model(name: str, model: str) -> None:
    config = compose_checked(f"+model={model}", name=name)
    assert config.model.label == model
    assert isinstance(config.model, TargetOptions)
    if hasattr(config, "paths"):
        assert config.paths.answers == f"outputs/{model}/answers"


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group in ("heads", "loss", "trainer", "data") for choice in names_of(group)],
)
def test_every_choice_of_every_group(group: str, choice: str) -> None:
    """And each says something of its own."""
    config = compose_checked("+model=tiny", f"{group}={choice}")
    if group == "heads":
        assert config.heads.kind == choice
        assert config.paths.heads == f"outputs/tiny/{choice}"
    if group == "loss":
        assert getattr(config.loss, choice) > 0


def test_choices_differ() -> None:
    for group in ("heads", "loss", "trainer", "data", "model"):
        plus = "+" if group == "model" else ""
        found = [
            getattr(
                compose_checked("+model=tiny", f"{plus}{group}={c}") if not plus else compose_checked(f"+model={c}"),
                group,
            )
            for c in names_of(group)
        ]
        assert all(one != other for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("experiment", names_of("experiment"))
def test_every_experiment(experiment: str) -> None:
    """By the command that its file begins with."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    command = re.search(r"^# python -m (?P<module>\S+) (?P<overrides>.*)$", text, flags=re.M)
    assert command is not None
    overrides = command["overrides"].split()
    assert f"experiment={experiment}" in overrides
    compose_checked(*overrides, name=command["module"].rpartition(".")[2])


@pytest.mark.parametrize("group", ["heads", "loss", "trainer", "data", "model"])
def test_every_file_begins_with_what_it_is(group: str) -> None:
    for choice in names_of(group):
        assert (CONF / group / f"{choice}.yaml").read_text().startswith("# ")


def test_overrides_arrive_typed() -> None:
    config = compose_checked(
        "+model=tiny", "heads.num_draft_tokens=6", "trainer.learning_rate=3e-4", "cache.enabled=false", "work_dir=/w",
        "model.wheel.requirement='a==1'", "data.tasks=[chat,maths]", "+data.chat_template_kwargs.enable_thinking=false",
        *(f"logger={LOGGERS[-1]}",),
    )  # fmt: skip
    assert config.heads.num_draft_tokens == 6
    assert config.trainer.learning_rate == 3e-4
    assert config.cache.enabled is False
    assert config.paths.heads == "/w/mtp"
    assert config.model.wheel.requirement == "a==1"
    assert config.data.tasks == ["chat", "maths"]
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


# Mistakes, in process


@dataclass
class Inner:
    number: int = 1


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    name: str = "x"
    needed: str = MISSING


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inner": {"number": 2, "nope": 3}}, r"bad option inner\.nope: .*'nope'"),
        ({"nope": 1}, r"bad option nope: .*'nope'"),
        ({"inner": {"number": "many"}}, r"bad option inner\.number: .*'many'.* could not be converted to Integer"),
        ({"name": "${nowhere}"}, r"bad option name: .*nowhere"),
        ({}, r"bad option needed: .*needed"),
    ],
)
def test_checked_refuses(given: dict[str, Any], message: str) -> None:
    """One line that names the option."""
    with pytest.raises(ValueError, match=message) as error:
        checked(OmegaConf.create({**({"needed": "y"} if given else {}), **given}), Outer)
    assert "\n" not in str(error.value)
    assert "`--cfg job` prints all options" in str(error.value)


def test_checked_gives_plain_dataclasses() -> None:
    config = checked(OmegaConf.create({"inner": {"number": "7"}, "needed": "y"}), Outer)
    assert config == Outer(Inner(7), "x", "y")
    assert type(config.inner) is Inner


def test_values_out_of_range_are_refused_with_the_rest() -> None:
    for override, message in [
        ("loss.beta=2", r"loss\.beta=2\.0 must lie in"),
        ("loss.kl=-1", r"must be 0 or more"),
        ("answers.engine=oracle", r"answers\.engine='oracle' is unknown"),
        ("answers.batch_size=0", r"answers\.batch_size=0 must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            compose_checked("+model=tiny", override)


# Mistakes, from the command line: one process that imports once and forks for each command.

FORKER = """
import json, os, sys, tempfile
import train.mtp, train.regenerate
import models.target.model
def loaded(*args): print("A MODEL LOADS", file=sys.stderr)
results = []
for module, arguments in json.loads(sys.argv[1]):
    out, err = (tempfile.TemporaryFile("w+") for _ in range(2))
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        train.mtp.load_target = train.regenerate.load_target = loaded
        sys.argv = [module, *arguments]
        try:
            getattr(train, module).main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 70
        else:
            code = 0
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out.seek(0), err.seek(0)
    results.append([status, out.read(), err.read()])
print(json.dumps(results))
"""

COMMANDS: dict[str, tuple[str, list[str], str]] = {
    "no model": (
        "mtp",
        [],
        "no target model is chosen; add +model=NAME with NAME one of gemma, gemma3_270m, llama, qwen, smollm2, "
        "testbed, tiny",
    ),
    "no model to answer": ("regenerate", [], "no target model is chosen; add +model=NAME"),
    "plus forgotten": ("mtp", ["model=tiny"], "+model=NAME"),
    "unknown model": ("mtp", ["+model=gpt9"], "gpt9"),
    "unknown key": ("mtp", ["+model=tiny", "trainer.learning_rat=1"], "learning_rat"),
    "stray plus key": ("mtp", ["+model=tiny", "+trainer.nope=1"], "bad option trainer.nope"),
    "stray top key": ("mtp", ["+model=tiny", "+nope=1"], "nope"),
    "wrong type": ("mtp", ["+model=tiny", "trainer.learning_rate=fast"], "fast"),
    "out of range": ("mtp", ["+model=tiny", "loss.beta=7"], "loss.beta=7.0 must lie in (0, 1]"),
    "unknown logger": ("mtp", ["+model=tiny", "logger=papyrus"], "logger='papyrus' is unknown"),
    "unknown choice": ("mtp", ["+model=tiny", "heads=eagle9"], "eagle9"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    calls = [
        [module, [*arguments, f"work_dir={tmp_path_factory.mktemp('out')}"]]
        for module, arguments, _ in COMMANDS.values()
    ]
    done = run_forker(calls, tmp_path_factory.mktemp("cwd"))
    return dict(zip(COMMANDS, done, strict=True))


def run_forker(calls: Sequence[Any], cwd: Path) -> list[tuple[int, str, str]]:
    command = [sys.executable, "-c", FORKER, json.dumps(calls)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@pytest.mark.parametrize("case", COMMANDS)
def test_mistakes_stop_the_command(case: str, outcomes: dict[str, tuple[int, str, str]]) -> None:
    """No traceback, no model loaded, the option named, and a code that says failure."""
    code, out, err = outcomes[case]
    print(code, out, err)
    assert code not in (0, 70)
    assert COMMANDS[case][2] in out + err
    assert "Traceback" not in out + err
    assert "A MODEL LOADS" not in out + err


# These are told by what reads the option, not by what reads options.
COMMANDS_OWN = ("out of range", "unknown logger")


@pytest.mark.parametrize("case", COMMANDS)
def test_errors_are_one_line_and_code_2(case: str, outcomes: dict[str, tuple[int, str, str]]) -> None:
    code, _, err = outcomes[case]
    assert code == 2
    lines = [line for line in err.splitlines() if line.strip()]
    assert lines[0].startswith("error: ")
    assert lines[1:] == (["(set HYDRA_FULL_ERROR=1 for the traceback)"] if case in COMMANDS_OWN else [])


def test_commands_run_from_their_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher on another machine finds functions by module and name, and there __main__ is the launcher's own."""

    def main(config: Any) -> None: ...

    assert config_module._started_as(main) is None
    main.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="train.mtp"))
    assert config_module._started_as(main) == "train.mtp"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # a script by its path
    assert config_module._started_as(main) is None
