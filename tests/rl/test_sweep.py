"""A sweep over lambda: Hydra's multirun, a W&B agent's command line and Optuna, each run in a folder, all in one plot.

On the testbed with two models of a few thousand weights, by the commands that the files name.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from transformers import PrinterCallback

import eval.frontier.pairs
from eval import pareto
from rl import diversed
from rl.diversed import check_metric
from train.data import testbed
from train.runtime.presets import CONF

LAMBDAS = (0.01, 0.1, 1.0, 10.0)
SIZE = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "max_steps": 3}
SMALL = [
    "heldout_prompts=2",
    "floor.prompts=2",
    "trainer.per_device_train_batch_size=8",
    "trainer.max_steps=2",
    "trainer.eval_steps=1",
    "trainer.save_steps=1",
    "trainer.max_completion_length=8",
]
FEW_POINTS = [
    *(f"rules.{name}=null" for name in ("lenience", "typical", "cascade", "budget")),
    "rules.static.target_weight=[0.5]",
    "peer_weights=[]",
    "num_prompts=2",
    "samples=1",
    "max_new_tokens=8",
    "num_resamples=100",
    "shown_prompts=0",
]
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is an optional extra")
needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is an optional extra")


@pytest.fixture(autouse=True)
def _small_testbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, without W&B's network and account."""
    default = testbed.TestbedOptions()
    small = testbed.TestbedOptions(replace(default.target, **SIZE), replace(default.draft, **SIZE))
    for module in (diversed, eval.frontier.pairs):
        monkeypatch.setattr(module, "ensure_testbed", partial(testbed.ensure_testbed, options=small))
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *args, **kwargs: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it remembers the folder that it was started in
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


def command(monkeypatch: pytest.MonkeyPatch, main: Callable[[], Any], *words: str) -> None:
    """`python -m MODULE WORDS`, in this process, whose log handlers Hydra's own would close."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["command", *words, "hydra/job_logging=none", "hydra/hydra_logging=none"])
    main()


def first_command(path: Path, module: str) -> list[str]:
    """The words of the command that a file begins with."""
    found = re.search(rf"^# +python -m {re.escape(module)} (.*)$", path.read_text(encoding="utf-8"), flags=re.M)
    assert found is not None
    return shlex.split(found[1])


def head_of(folder: Path) -> tuple[bytes, dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (folder / "model.safetensors").read_bytes(), config["measured"]


def test_multirun_into_one_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four lambdas, each as a run by itself would end; and the command in the file plots them in their order."""
    path = CONF / "sweep" / "lambda.yaml"
    command(monkeypatch, diversed.main, *first_command(path, "rl.diversed"), *SMALL)
    sweep = Path("outputs/testbed/diversed/lambda")
    assert {folder.name for folder in sweep.iterdir()} == {f"model-lam{lam}" for lam in LAMBDAS}
    alone = ["+model=testbed", "experiment=testbed", "lam=10", "output_dir=alone", *SMALL]
    command(monkeypatch, diversed.main, *alone)
    assert head_of(Path("alone")) == head_of(sweep / "model-lam10.0")
    assert head_of(sweep / "model-lam0.01") != head_of(sweep / "model-lam10.0")
    assert len(list(Path("outputs/hydra/diversed-sweep").glob("*/.hydra/overrides.yaml"))) == len(LAMBDAS)

    (sweep / "unfinished").mkdir()
    capsys.readouterr()
    command(monkeypatch, pareto.main, *first_command(path, "eval.pareto"), *FEW_POINTS)
    assert f"left out: {sweep / 'unfinished'} holds no finished head" in capsys.readouterr().out
    record = json.loads(Path("outputs/testbed/pareto/pareto.json").read_text(encoding="utf-8"))
    dynamic = [point for point in record["frontier"]["points"] if point["family"] == "dynamic"]
    assert [point["settings"]["lam"] for point in dynamic] == list(LAMBDAS)
    assert Path("outputs/testbed/pareto/pareto.png").is_file()


def test_pattern_without_a_finished_head(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    with pytest.raises(ValueError, match=r"no folder that matches '.*\*' holds a finished head, of 1 there"):
        eval.frontier.pairs.name_checkpoints([f"{tmp_path}/*"])


@pytest.mark.parametrize(
    ("metric", "num_prompts", "message"),
    [([], 1, "must name one or more"), (["speed"], 1, "must name one or more"), (["reward"], 0, "set heldout_prompts")],
)
def test_metric_that_is_not_measured(metric: list[str], num_prompts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_metric(metric, num_prompts)


def agent_words(path: Path, values: dict[str, Any]) -> list[str]:
    """The words that a W&B agent runs for these parameters, after `python -m MODULE`."""
    words = yaml.safe_load(path.read_text(encoding="utf-8"))["command"]
    assert words[:4] == ["${env}", "python", "-m", "rl.diversed"]
    found: list[str] = []
    for word in words[4:]:
        found += [f"{name}={value}" for name, value in values.items()] if word == "${args_no_hyphens}" else [word]
    return found


AGENT_FILE = CONF.parent / "scripts" / "sweeps" / "lambda.yaml"


def test_agents_lambdas_are_those_of_the_multirun() -> None:
    agent = yaml.safe_load(AGENT_FILE.read_text(encoding="utf-8"))["parameters"]
    hydra = yaml.safe_load((CONF / "sweep" / "lambda.yaml").read_text(encoding="utf-8"))["hydra"]["sweeper"]["params"]
    assert list(agent) == list(hydra) == ["lam"]
    assert tuple(agent["lam"]["values"]) == tuple(map(float, hydra["lam"].split(","))) == LAMBDAS


@needs_wandb
def test_wandb_makes_of_the_file_what_we_think() -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    words = create_sweep_command(yaml.safe_load(AGENT_FILE.read_text(encoding="utf-8"))["command"])
    args = create_sweep_command_args({"args": {"lam": {"value": 0.1}}})
    flat = [part for word in words for part in (args["args_no_hyphens"] if word == "${args_no_hyphens}" else [word])]
    assert flat[-len(agent_words(AGENT_FILE, {"lam": 0.1})) :] == agent_words(AGENT_FILE, {"lam": 0.1})


def logged(folder: Path) -> tuple[set[str], set[str]]:
    """Names of what an offline run has logged over time, and of the kinds of its artifacts."""
    sys.modules["wandb"].teardown()  # its service writes the file in the background
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    keys: set[str] = set()
    kinds: set[str] = set()
    for data in read_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        keys |= {item.key or item.nested_key[0] for item in record.history.item}
        requested = record.request.log_artifact.artifact.type
        kinds |= {record.artifact.type, requested} - {""}
    return keys, kinds


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log: blocks of 32 KiB, headers of 4 + 2 + 1 bytes."""
    at, record = 7, b""  # behind the file's own header
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += -at % 2**15
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
@needs_wandb
def test_agents_command_line_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an agent runs it, with the testbed for llama: curves, completions, the head; the frontier in another run."""
    words = [word.replace("llama", "testbed") for word in agent_words(AGENT_FILE, {"lam": 0.1})]
    command(
        monkeypatch,
        diversed.main,
        *words,
        "experiment=testbed",
        "log_checkpoint=true",
        "trainer.log_completions=true",
        *SMALL,
    )
    (folder,) = Path("wandb").glob("offline-run-*")
    keys, kinds = logged(folder)
    assert {"train/acceptance", "train/reward", "eval/acceptance", "completions"} <= keys
    assert "verifier" in kinds
    pattern = "checkpoints=[outputs/testbed/diversed/lambda/*]"
    words = ["+model=testbed", "drafter=model", "reward=testbed", pattern, "logger=wandb", *FEW_POINTS]
    command(monkeypatch, pareto.main, *words)
    (folder,) = set(Path("wandb").glob("offline-run-*")) - {folder}
    keys, kinds = logged(folder)
    assert "frontier" in keys
    assert "frontier" in kinds


@pytest.mark.slow
@needs_wandb
def test_each_job_of_a_multirun_has_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--multirun", "+model=testbed", "experiment=testbed", "sweep=lambda", "lam=1,2", "logger=wandb"]
    command(monkeypatch, diversed.main, *words, *SMALL)
    assert len(list(Path("wandb").glob("offline-run-*"))) == 2


@needs_optuna
def test_optuna_takes_both_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CONF / "sweep" / "optuna.yaml"
    words = first_command(path, "rl.diversed")
    command(monkeypatch, diversed.main, *words, "hydra.sweeper.n_trials=2", *SMALL)
    heads = list(Path("outputs/testbed/diversed/optuna").glob("*/config.json"))
    assert len(heads) == 2
    assert all(0.01 <= json.loads(head.read_text())["provenance"]["config"]["lam"] <= 10 for head in heads)
