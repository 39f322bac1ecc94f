"""`rl.diversed` from prompts to a checkpoint on tiny models; stopped runs end the same; mistakes are told in a line."""

import json
import math
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from transformers import PrinterCallback

from eval.rewards.loading import RewardOptions
from models.checkpoint import load_ensemble, save_heads
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter
from models.heads import HeadOptions as DraftHeadOptions
from models.heads import build_head
from models.target.model import TargetOptions, load_target
from models.target.tiny import make_tiny_target
from rl import diversed as diversed_module
from rl.diversed import DiversedConfig, DrafterOptions, HeadOptions, check_options, train_verifier
from rl.floor import CollapseOptions, FloorOptions
from rl.options import RLOptions
from rl.prompts import load_datasets, to_dataset
from rl.resume import STATE_NAME
from tests.train.copies import copy_run, pin_best
from tests.train.interrupts import interrupt_at
from train.data import testbed
from train.data.prompts import DataOptions, Prompt
from train.data.reward_rows import reward_rows
from train.data.sources.record import content_of
from train.data.sources.seen import fingerprint, seen_in
from train.runtime.config import INTERRUPTED, checked
from train.runtime.presets import CONF

MAX_STEPS = 6


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No progress on the screen, and a module of the user's with rewards in it."""
    toys = ModuleType("toy_rewards")
    vars(toys)["distinct"] = distinct
    vars(toys)["no_kwargs"] = lambda completions: [0.0] * len(completions)
    vars(toys)["gives_none"] = lambda completions, **kwargs: [None] * len(completions)
    monkeypatch.setitem(sys.modules, "toy_rewards", toys)
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *args, **kwargs: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def distinct(completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
    assert all(isinstance(one, str) for one in answer)
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def make_config(folder: Path, **changes: Any) -> DiversedConfig:
    """9 training prompts, 4 a rollout, so 2 rollouts of 2 updates an epoch; evaluated and saved every 2 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"Say {i}.", "answer": i, "note": f"n{i}", "split": "train" if i < 9 else "selection"}
        for i in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DiversedConfig(
        model=TargetOptions(name="tiny", source="random", dtype="float32", device="cpu"),
        work_dir=str(folder),
        data=DataOptions(source="jsonl", path=str(folder / "prompts.jsonl")),
        reward=RewardOptions("toy_rewards:distinct"),
        num_draft_tokens=2,
        ensemble=HeadOptions(kind="mlp", width=4),
        lam=0.5,
        floor=FloorOptions(max_drop=0.01, prompts=2),
        collapse=CollapseOptions(weight=0.0),
        heldout_prompts=2,
        trainer=RLOptions(
            max_steps=MAX_STEPS,
            per_device_train_batch_size=8,
            num_generations=2,
            num_generations_eval=2,
            num_iterations=2,
            max_completion_length=6,
            learning_rate=0.02,
            eval_steps=2,
            save_steps=2,
        ),
        output_dir=str(folder / "out"),
    )
    return replace(config, **changes)


def read_log(config: DiversedConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.output_dir) / "log.jsonl").read_text().splitlines()]


def assert_ends_alike(config: DiversedConfig, uninterrupted: DiversedConfig) -> None:
    """Bit-identical tensors, the same measurements and the same log, clocks apart."""
    ends = []
    for one in (config, uninterrupted):
        folder = Path(one.output_dir)
        measured = json.loads((folder / "config.json").read_text())["measured"]
        log = [
            {key: value for key, value in line.items() if "time" not in key and "per_second" not in key}
            for line in read_log(one)
            if "train_runtime" not in line
        ]
        ends.append(((folder / "model.safetensors").read_bytes(), measured, log))
    assert ends[0][0] == ends[1][0]
    assert ends[0][1:] == ends[1][1:]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> DiversedConfig:
    config = make_config(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "toy_rewards", ModuleType("toy_rewards"))
        vars(sys.modules["toy_rewards"])["distinct"] = distinct
        train_verifier(config)
    return config


def copy_of(uninterrupted: DiversedConfig, folder: Path) -> DiversedConfig:
    shutil.copytree(uninterrupted.work_dir, folder)
    return replace(uninterrupted, work_dir=str(folder), output_dir=str(folder / "out"))


def test_everything_is_made(tmp_path: Path, uninterrupted: DiversedConfig, capsys: pytest.CaptureFixture) -> None:
    """The best head loads for its pair; its config has how it was made and what was measured; the log has it all."""
    config = copy_of(uninterrupted, tmp_path / "copy")
    folder = Path(config.output_dir)
    pair = diversed_module.load_pair(config)
    head = load_ensemble(folder, pair.target, pair.record)
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == head.state_dict().keys()
    written = json.loads((folder / "config.json").read_text())
    assert written["provenance"]["config"]["lam"] == 0.5
    assert "rl.diversed" in written["provenance"]["command"]
    train, selection = load_datasets(config.data, config.heldout_prompts)
    assert selection is not None
    for split, datasets in (("selection", [train]), ("test", [train, selection])):
        seen = {
            fingerprint(content_of(prompt)) for dataset in datasets for row in dataset for prompt in [row["prompt"]]
        }
        assert seen_in(written["provenance"], split) == seen
    log = read_log(config)
    objectives = {line["step"]: line["eval_objective"] for line in log if "eval_objective" in line}
    assert set(objectives) == {2, 4, 6}
    assert written["measured"]["objective"] == pytest.approx(max(objectives.values()), abs=1e-12)
    best = max(objectives, key=lambda step: objectives[step])
    kept = load_file(folder / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())
    assert {"lam", "weight", "certificate", "reward", "rewards/distinct/mean"} <= {key for line in log for key in line}
    # The finished command, once more: nothing is trained, and the same comes out.
    before = (folder / "model.safetensors").read_bytes()
    assert train_verifier(config) == pytest.approx(objectives[best], abs=1e-12)
    printed = capsys.readouterr().out
    assert f"best of step {best}" in printed
    assert "(lossless " in printed
    assert (folder / "model.safetensors").read_bytes() == before
    assert [line["step"] for line in read_log(config) if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("step", "stops_at"), [(0, 2), (3, 4), (4, 6)])
def test_interrupted_run_ends_the_same(
    step: int,
    stops_at: int,
    tmp_path: Path,
    uninterrupted: DiversedConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """It stops where a rollout ends, also in the second epoch and in the last step; the same command goes on."""
    config = make_config(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, diversed_module, step)
        with pytest.raises(SystemExit) as stop:
            train_verifier(config)
    assert stop.value.code == INTERRUPTED
    assert f"stopped at step {stops_at}; the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is before
    train_verifier(config)
    assert f"going on from {tmp_path / 'out' / f'checkpoint-{stops_at}'}" in capsys.readouterr().out
    assert_ends_alike(config, uninterrupted)


@pytest.mark.parametrize("then", ["gone", "other"])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_run_goes_on_in_a_copy_of_its_folder(
    is_pinned: bool,
    then: str,
    tmp_path: Path,
    uninterrupted: DiversedConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit as it would have ended; its best head is the copy's, which transformers notes by its old path."""
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, diversed_module, 3)
        with pytest.raises(SystemExit):
            train_verifier(config)
    copy_run(tmp_path / "out", tmp_path / "copy", then)
    copied = replace(config, output_dir=str(tmp_path / "copy"))
    best = pin_best(tmp_path / "copy") if is_pinned else None
    train_verifier(copied)
    if best is None:
        assert_ends_alike(copied, uninterrupted)
    else:
        assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()


def test_second_interrupt_stops_at_once(
    tmp_path: Path, uninterrupted: DiversedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, diversed_module, 3, times=2)
        with pytest.raises(KeyboardInterrupt):
            train_verifier(config)
    train_verifier(config)
    assert_ends_alike(config, uninterrupted)


def test_half_written_checkpoints_are_passed_over(tmp_path: Path, uninterrupted: DiversedConfig) -> None:
    """One without this trainer's own state, too: the same command goes on from the last whole one, and ends alike."""
    config = copy_of(uninterrupted, tmp_path / "copy")
    folder = Path(config.output_dir)
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    (folder / kept[-1] / STATE_NAME).unlink()
    train_verifier(config)
    assert (folder / kept[-1] / STATE_NAME).is_file()
    assert_ends_alike(config, uninterrupted)


def save_draft_heads(folder: Path, config: DiversedConfig) -> None:
    torch.manual_seed(0)
    save_heads(
        folder, build_head(load_target(config.model), DraftHeadOptions(kind="medusa", num_draft_tokens=2)).eval()
    )


def test_draft_heads_and_a_head_to_start_from(tmp_path: Path) -> None:
    """drafter=heads takes K from the heads; a second run starts from the first one's head, another pair must not."""
    trainer = replace(make_config(tmp_path).trainer, max_steps=2)
    config = make_config(tmp_path, drafter=DrafterOptions("heads"), num_draft_tokens=0, trainer=trainer)
    save_draft_heads(tmp_path / "mtp", config)
    train_verifier(config)
    pair = diversed_module.load_pair(config)
    assert isinstance(pair.drafter, HeadsDrafter)
    assert pair.num_draft_tokens == 2
    onwards = replace(config, start_from=config.output_dir, output_dir=str(tmp_path / "second"))
    start = diversed_module.make_head(onwards, pair)
    assert all(parameter.requires_grad for parameter in start.parameters())
    first = load_ensemble(Path(config.output_dir), pair.target, pair.record)
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in start.state_dict().items())
    with pytest.raises(ValueError, match="drafter") as caught:
        train_verifier(replace(onwards, drafter=DrafterOptions("model"), num_draft_tokens=2))
    assert "\n" not in str(caught.value)
    other = replace(onwards, num_draft_tokens=3)
    with pytest.raises(ValueError, match="num_draft_tokens=3: must be 1 to 2"):
        train_verifier(other)


def test_folder_of_another_run_is_refused(tmp_path: Path, uninterrupted: DiversedConfig) -> None:
    config = copy_of(uninterrupted, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"holds the work of another run: lam is 0\.5, now 0\.25"):
        train_verifier(replace(config, lam=0.25))


# --- mistakes ---------------------------------------------------------------------------------------------------------


def with_trainer(**changes: Any) -> dict[str, Any]:
    return {"trainer": changes}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"lam": -0.1}, "lam=-0.1: must be a number of at least 0"),
    ({"lam": math.nan}, "lam=nan: must be a number of at least 0"),
    ({"entropy": -1.0}, "entropy=-1.0"),
    ({"likelihood": "logits"}, "likelihood='logits': must be one of verdicts, tokens"),
    ({"ratio": "batch"}, "ratio='batch'"),
    ({"drafter": DrafterOptions("none")}, "drafter must be one of model, heads"),
    ({"drafter": DrafterOptions("heads"), "likelihood": "tokens"}, "likelihood=tokens with drafter=heads"),
    ({"drafter": DrafterOptions("heads"), "checkpoint": "nowhere"}, "checkpoint='nowhere' has no config.json"),
    ({"checkpoint": "heads"}, "checkpoint='heads' is for drafter=heads"),
    ({"start_from": "nowhere"}, "'nowhere' has no config.json"),
    ({"reward": RewardOptions("gsm9k")}, "reward='gsm9k' is no reward here; choose one of"),
    ({"reward": RewardOptions("toy_rewards:nothing")}, "has no 'nothing'"),
    ({"reward": RewardOptions("toy_rewards:no_kwargs")}, r"must end in \*\*kwargs"),
    ({"num_draft_tokens": -1}, "num_draft_tokens=-1"),
    ({"heldout_prompts": -1}, "heldout_prompts=-1"),
    ({"logger": "paper"}, "logger='paper' is unknown"),
    ({"ensemble": HeadOptions(kind="tree")}, "ensemble.kind='tree' is unknown"),
    ({"ensemble": HeadOptions(initial_weight=1.0)}, "ensemble.initial_weight=1.0"),
    ({"floor": FloorOptions(max_drop=-0.1)}, "floor.max_drop=-0.1"),
    ({"floor": FloorOptions(rate=0.0)}, "floor.rate=0.0"),
    ({"floor": FloorOptions(prompts=0)}, "floor.prompts=0"),
    ({"collapse": CollapseOptions(weight=1.0)}, "collapse.weight=1.0"),
    ({"collapse": CollapseOptions(patience=0)}, "collapse.patience=0"),
    ({"collapse": CollapseOptions(action="pray")}, "collapse.action='pray' is unknown"),
    (with_trainer(temperature=0.0), "temperature=0: a greedy rollout has no likelihood"),
    (with_trainer(num_generations=1), "trainer.num_generations=1: must be at least 2"),
    (with_trainer(per_device_train_batch_size=0), "trainer.per_device_train_batch_size=0: must be at least 1"),
    (with_trainer(gradient_accumulation_steps=0), "trainer.gradient_accumulation_steps=0: must be at least 1"),
    (with_trainer(num_iterations=0), "trainer.num_iterations=0: must be at least 1"),
    (with_trainer(steps_per_generation=-1), "trainer.steps_per_generation=-1: must be at least 1, or 0"),
    (with_trainer(num_generations=3), "= 8 completions: must be a multiple of trainer.num_generations=3"),
    (with_trainer(save_steps=3), "trainer.save_steps=3: must be a multiple of 2, the optimizer steps of one rollout"),
    (with_trainer(save_steps=2, eval_steps=4), "trainer.save_steps=2: must be a multiple of trainer.eval_steps=4"),
    (with_trainer(steps_per_generation=3, gradient_accumulation_steps=2), "trainer.steps_per_generation=3"),
    (with_trainer(max_completion_length=1), "max_completion_length=1"),
    (with_trainer(epsilon=0.0), "clip_low=0.0"),
    (with_trainer(per_device_train_batch_size=40), "there are 9 training prompts, and a rollout takes 20"),
    ({"data": DataOptions(source="jsonl", path="nowhere.jsonl")}, "data.path=nowhere.jsonl: no such file"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_mistakes_are_told_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(diversed_module, "load_pair", lambda config: pytest.fail("a model was loaded"))
    config = make_config(tmp_path)
    if isinstance(changes.get("trainer"), dict):
        changes = {"trainer": replace(config.trainer, **changes["trainer"])}
    with pytest.raises(ValueError, match=message) as caught:
        train_verifier(replace(config, **changes))
    assert "\n" not in str(caught.value)


def test_prompts_of_both_splits_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    for split, counts in (("train", "1 training and 0 selection"), ("selection", "0 training and 1 selection")):
        path.write_text(json.dumps({"prompt": "Hi", "split": split}) + "\n")
        with pytest.raises(ValueError, match=f"gives {counts} prompts"):
            load_datasets(DataOptions(source="jsonl", path=str(path)), 4)
    path.write_text(json.dumps({"prompt": "Hi", "split": "train"}) + "\n")
    train, heldout = load_datasets(DataOptions(source="jsonl", path=str(path)), 0)
    assert len(train) == 1
    assert heldout is None


def test_reward_without_a_number_is_told_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.measuring.sample_rollouts", lambda *args, **kwargs: pytest.fail("something was sampled"))
    with pytest.raises(ValueError, match="reward 'gives_none', completion 0 of 1: None"):
        train_verifier(make_config(tmp_path, reward=RewardOptions("toy_rewards:gives_none")))


def test_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = make_tiny_target(seed=1)
    draft.tokenizer.add_tokens(["<another>"])
    draft.model.save_pretrained(tmp_path / "draft")
    draft.tokenizer.save_pretrained(tmp_path / "draft")
    target = make_tiny_target(seed=0)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    options = TargetOptions(
        name=str(tmp_path / "target"), source="folder", dtype="float32", device="cpu", draft=str(tmp_path / "draft")
    )
    with pytest.raises(ValueError, match=r"has another vocabulary than target.*model\.draft") as caught:
        train_verifier(make_config(tmp_path, model=options))
    assert "\n" not in str(caught.value)


# --- prompts and options ----------------------------------------------------------------------------------------------


def test_columns_reach_the_rows(tmp_path: Path) -> None:
    """What a file has beside its prompts goes on to the reward, a missing value as None."""
    config = make_config(tmp_path)
    train, heldout = load_datasets(config.data, 2)
    assert heldout is not None
    assert (len(train), len(heldout)) == (9, 2)
    assert set(train[0]) == {"prompt", "answer", "note", "task"}
    for row in train:
        assert row["prompt"] == [{"role": "user", "content": f"Say {row['answer']}."}]
        assert row["note"] == f"n{row['answer']}"
    code = tmp_path / "code.jsonl"
    code.write_text(json.dumps({"text": "Add.", "code": "x", "test_list": ["assert 1"], "task_id": 3}) + "\n")
    train, _ = load_datasets(DataOptions(source="mbpp", path=str(code), heldout_fraction=0.0), 0)
    assert train[0]["test_list"] == ["assert 1"]
    assert train[0]["answer"] == "x"
    ragged = [Prompt("1", "chat", text="a", columns={"x": 1}), Prompt("2", "chat", text="b")]
    assert [row["x"] for row in to_dataset(reward_rows(ragged))] == [1, None]
    with pytest.raises(ValueError, match="columns named completions, which rewards are called with"):
        reward_rows([Prompt("1", "chat", text="a", columns={"completions": "b"})])
    with pytest.raises(ValueError, match=r"mixes raw text .* with chats"):
        to_dataset([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}])


def compose_checked(*overrides: str) -> DiversedConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose("diversed", overrides=list(overrides)), DiversedConfig)


def test_shipped_options_are_those_of_the_schema() -> None:
    """The file documents every option, and says what the schema does; the commands of the issue compose."""
    config = compose_checked("+model=llama", "drafter=model", "reward=gsm8k", "lam=0.25")
    assert config.output_dir == "outputs/llama/diversed/model-lam0.25"
    plain = DiversedConfig(config.model, config.work_dir, output_dir=config.output_dir, lam=0.25)
    assert config == replace(plain, data=config.data, reward=config.reward)
    check_options(config)
    text = (CONF / "diversed.yaml").read_text()
    for options in (DiversedConfig, RLOptions, FloorOptions, CollapseOptions, HeadOptions):
        for name in set(options.__dataclass_fields__) - {"model", "data", "reward", "drafter"}:
            assert f"\n{name}:" in text or f"\n  {name}:" in text, name
    other = compose_checked("+model=tiny", "reward=function", "reward.spec=toy_rewards:distinct", "drafter=heads")
    assert (other.reward.spec, other.drafter.kind) == ("toy_rewards:distinct", "heads")
    with pytest.raises(ValueError, match="no target model is chosen"):
        compose_checked()


def test_testbed_experiment_composes() -> None:
    config = compose_checked("+model=testbed", "experiment=testbed")
    assert config.model.source == "testbed"
    assert (config.reward.spec, config.drafter.kind) == ("testbed", "model")
    check_options(config)


def test_testbed_experiment_runs_as_it_is_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two models of a few thousand weights, and otherwise the same: its tokenizer knows its own words alone."""
    size = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "max_steps": 3}
    default = testbed.TestbedOptions()
    small = testbed.TestbedOptions(replace(default.target, **size), replace(default.draft, **size))
    monkeypatch.setattr(diversed_module, "ensure_testbed", partial(testbed.ensure_testbed, options=small))
    short = [
        "heldout_prompts=2",
        "trainer.per_device_train_batch_size=8",
        "trainer.max_steps=2",
        "trainer.eval_steps=1",
    ]
    train_verifier(
        compose_checked(
            *(
                "+model=testbed",
                "experiment=testbed",
                f"work_dir={tmp_path}",
                "trainer.save_steps=1",
                "floor.prompts=2",
            ),
            *short,
        )
    )
    printed = capsys.readouterr().out
    assert "selection prompts: reward" in printed
    assert "an update epoch took" in printed


def test_testbed_is_loaded_as_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that +model=testbed names, with the testbed's own prompts."""
    calls: list[Any] = []

    class Bed:
        target, draft = make_tiny_target(seed=0), make_tiny_target(seed=1)

    def ensure(*args: Any, **kwargs: Any) -> Bed:
        calls.append((args, kwargs))
        return Bed()

    monkeypatch.setattr(diversed_module, "ensure_testbed", ensure)
    config = compose_checked("+model=testbed", f"work_dir={tmp_path}", "reward=function", "reward.spec=a:b")
    pair = diversed_module.load_pair(config)
    assert calls == [((tmp_path / "testbed", 0), {"device": "cpu"})]
    assert isinstance(pair.drafter, ModelDrafter)
    train, heldout = diversed_module.load_testbed_datasets(config.data, 5)
    assert heldout is not None
    assert set(train[0]) == {"prompt", "answer"}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    with pytest.raises(ValueError, match="the testbed has no draft heads"):
        diversed_module.load_pair(replace(config, drafter=DrafterOptions("heads")))
