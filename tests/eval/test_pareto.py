"""The command from its options to its files, on random weights and a reward made up here."""

import csv
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

import eval.frontier.pairs
import eval.pareto
from eval.pareto import ParetoConfig, run_pareto
from models.checkpoint import heads_record, model_record, save_ensemble, save_heads
from models.ensemble import EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.target.tiny import make_tiny_target
from train.data.sources.seen import seen_record
from train.runtime.config import checked
from train.runtime.presets import CONF

ROOT = CONF.parent
REWARD = """
import os, signal
def letters(completions, answer, task, **kwargs):
    assert set(answer) <= {str(n) for n in range(8)} and set(task) == {"chat"}
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(char.isalpha() for char in text) / max(1, len(text)) for text in texts]

calls = []

def failing(answer, **given):
    calls.append(given)
    return [0.5 if len(calls) < 8 else None for _ in answer]

def interrupting(**given):
    calls.append(given)
    if len(calls) == 15:  # of six points a turn
        os.kill(os.getpid(), signal.SIGINT)
    return letters(**given)
"""


def configure(*overrides: str) -> ParetoConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose("pareto", list(overrides)), ParetoConfig)


def make_ensemble(draft_size: int = 32) -> EnsembleHead:
    head = EnsembleHead(EnsembleOptions(draft_size=draft_size, target_size=32, initial_weight=0.4))
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(head.output.weight, std=0.3, generator=generator)
    return head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft heads, ensemble heads for them and for the sibling model, prompts and a module with a reward."""
    folder = tmp_path_factory.mktemp("pareto")
    target, draft = make_tiny_target(), make_tiny_target(1)
    save_heads(folder / "heads", build_head(target, HeadOptions("mtp", 3)), {"data": {"source": "jsonl"}})
    trained = {"config": {"lam": 0.5, "data": {"source": "gsm8k", "path": ""}, "model": {"source": "auto"}}}
    save_ensemble(folder / "for_heads", make_ensemble(), target, heads_record(folder / "heads"), trained)
    save_ensemble(folder / "for_model", make_ensemble(), target, model_record(draft), trained)
    rows = [{"prompt": f"<script>{n}", "answer": str(n), "split": "test"} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_of_pareto.py").write_text(REWARD)
    return folder


@pytest.fixture(autouse=True)
def _rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def small(folder: Path, output: Path) -> list[str]:
    families = ("lenience", "typical", "cascade", "budget")
    return [
        "+model=tiny",
        "data=jsonl",
        f"data.path={folder / 'prompts.jsonl'}",
        "reward=function",
        "reward.spec=reward_of_pareto:letters",
        *(f"rules.{name}=null" for name in families),
        "rules.static.target_weight=[0.7,0.2]",
        "num_prompts=3",
        "samples=2",
        "prompts_per_turn=2",
        "max_new_tokens=14",
        "num_resamples=200",
        f"output_dir={output}",
    ]


def model_words(folder: Path, output: Path) -> list[str]:
    return [*small(folder, output), "drafter=model", f"checkpoints=[{folder / 'for_model'}]"]


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with a draft model: static, a budget, a rule of one's own, the peer, and a trained head."""
    output = tmp_path_factory.mktemp("run") / "out"
    sys.path.insert(0, str(folder))
    try:
        words = [
            *model_words(folder, output),
            "peer_weights=[0.5]",
            "rules.budget={kind:static,target_weight:0.0,distance_budget:[0.5]}",
            "+rules.mine={kind:gap,top_k:10,gap:[0.5]}",
            "shown_prompts=2",
        ]
        sitting = run_pareto(configure(*words))
    finally:
        sys.path.remove(str(folder))
    assert sitting.is_complete
    return output


NAMES = [
    "plain",
    "lossless, token",
    "lossless, block",
    "static, w = 0.7",
    "static, w = 0.2",
    "budget, w = 0, budget = 0.5",
    "mine, top_k = 10, gap = 0.5",
    "dynamic, lam = 0.5",
    "transformers static, w = 0.5",
]


def test_files_and_points(run: Path) -> None:
    files = ["pareto.csv", "pareto.json", "pareto.md", "pareto.png", "pareto.svg", "samples.jsonl", "tokens.html"]
    assert sorted(path.name for path in run.iterdir()) == files
    record = json.loads((run / "pareto.json").read_text(encoding="utf-8"))
    points = {point["name"]: point for point in record["frontier"]["points"]}
    assert list(points) == NAMES
    assert (record["is_complete"], record["num_prompts"], record["task"]) == (True, 3, "prompts")
    assert record["reward"] == "letters"
    assert record["drafter"]["kind"] == "model"
    assert points["dynamic, lam = 0.5"]["settings"]["trained_on"] == "gsm8k"
    assert [one["name"] for one in record["frontier"]["dominance"]] == ["dynamic, lam = 0.5"]
    assert [family["name"] for family in record["frontier"]["families"]] == [
        "lossless", "static", "budget", "mine", "dynamic", "transformers static",
    ]  # fmt: skip
    table = (run / "pareto.md").read_text(encoding="utf-8")
    assert all(f"| {name} " in table for name in NAMES)
    rows = list(csv.DictReader((run / "pareto.csv").open(encoding="utf-8")))
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        for key in ("acceptance", "reward", "tokens_per_s"):
            value = points[row["name"]][key]["value"]
            assert row[key] == ("" if value == "nan" else repr(value))
    ET.parse(run / "pareto.svg")


def test_figures_follow_from_the_samples(run: Path) -> None:
    record = json.loads((run / "pareto.json").read_text(encoding="utf-8"))
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == len(NAMES) * 3 * 2
    for point in record["frontier"]["points"]:
        ours = [sample for sample in samples if sample["point"] == point["name"]]
        assert [(one["prompt"], one["sample"]) for one in ours] == [(n, i) for n in range(3) for i in range(2)]
        total = {key: sum(one["counters"][key] for one in ours) for key in ("accepted", "drafted", "emitted", "blocks")}
        assert total["emitted"] == sum(one["num_tokens"] for one in ours)
        assert point["reward"]["value"] == pytest.approx(sum(one["reward"] for one in ours) / 6)
        assert point["reward"]["low"] <= point["reward"]["value"] <= point["reward"]["high"]
        if point["name"] != "plain":
            assert point["acceptance"]["value"] == pytest.approx(total["accepted"] / total["drafted"])
        if point["family"] != "transformers static":
            assert point["certificate"]["value"] == pytest.approx(sum(one["certificate"] for one in ours) / 6)
        turns = [turn for turn in record["turns"] if turn["point"] == point["name"]]
        assert [turn["turn"] for turn in turns] == [0, 1]
        rate = total["emitted"] / sum(turn["seconds"] for turn in turns)
        assert point["tokens_per_s"]["value"] == pytest.approx(rate)
    by_name = {point["name"]: point for point in record["frontier"]["points"]}
    certificates = {name: point["certificate"]["value"] for name, point in by_name.items()}
    assert certificates["lossless, token"] == certificates["lossless, block"] == certificates["plain"] == 0
    assert 0 < certificates["static, w = 0.7"] < certificates["static, w = 0.2"]
    assert 0 < certificates["budget, w = 0, budget = 0.5"] <= 0.5
    assert certificates["transformers static, w = 0.5"] == "nan"
    assert by_name["static, w = 0.2"]["acceptance"]["value"] > by_name["lossless, token"]["acceptance"]["value"]


def test_page_shows_lossless_and_dynamic(run: Path) -> None:
    page = (run / "tokens.html").read_text(encoding="utf-8")
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    sections = root.findall("body/section")
    assert len(sections) == 2
    for number, section in enumerate(sections):
        titles = [heading.text.strip() for heading in section.findall("h3")]
        assert titles == ["lossless, token", "dynamic, lam = 0.5"]
        assert "<script>" in section.find("pre").text
        lossless, dynamic = section.findall("p")
        assert not any(span.get("style") for span in lossless)
        assert any(span.get("style") for span in dynamic), number
    assert "<script" not in page


def test_same_seeds_same_samples(run: Path, folder: Path, tmp_path: Path) -> None:
    """Another batch size, fewer points: a point's completions are its own. And w = 1 is the lossless point."""
    words = [*model_words(folder, tmp_path), "batch_size=3", "peer_weights=[]", "plot=false", "shown_prompts=0"]
    run_pareto(configure(*words, "rules.static.target_weight=[0.7,1.0]"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pareto.csv",
        "pareto.json",
        "pareto.md",
        "samples.jsonl",
    ]

    def texts(where: Path, name: str) -> list[str]:
        lines = (where / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        return [sample["text"] for sample in map(json.loads, lines) if sample["point"] == name]

    for name in ("lossless, token", "static, w = 0.7", "dynamic, lam = 0.5"):
        assert texts(run, name) == texts(tmp_path, name)
        assert len(texts(run, name)) == 6
    assert texts(tmp_path, "static, w = 1") == texts(tmp_path, "lossless, token")


def test_heads_and_transfer(run: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    words = [*small(folder, tmp_path / "a"), "drafter=heads", f"checkpoint={folder / 'heads'}", "shown_prompts=0"]
    words += [f'checkpoints=["mine={folder / "for_heads"}"]', "plot=false", "num_prompts=2"]
    run_pareto(configure(*words, "task=first"))
    run_pareto(configure(*words, f"transfer=[{tmp_path / 'a'}]", f"output_dir={tmp_path / 'b'}"))
    table = (tmp_path / "b" / "transfer.md").read_text(encoding="utf-8")
    assert "first: acceptance" in table
    assert "prompts: acceptance" in table
    assert re.search(r"\| gsm8k +\| mine ", table)
    rows = list(csv.DictReader((tmp_path / "b" / "transfer.csv").open(encoding="utf-8")))
    assert [row["measured_on"] for row in rows] == ["first", "prompts"]
    assert rows[0]["acceptance"] == rows[1]["acceptance"]  # the very same prompts
    assert table in capsys.readouterr().out
    with pytest.raises(ValueError, match="was measured with drafter 'tiny'"):
        run_pareto(configure(*words, f"transfer=[{run}]"))


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_drafts_without_a_distribution(kind: str, folder: Path, tmp_path: Path) -> None:
    """One-hot q: static weights keep more of it at a price that is counted; and no peer drafts so."""
    words = [*small(folder, tmp_path), f"drafter={kind}", "plot=false", "num_prompts=2", "max_new_tokens=40"]
    run_pareto(configure(*words, "temperature=0.3", "top_k=10", "shown_prompts=1"))
    record = json.loads((tmp_path / "pareto.json").read_text(encoding="utf-8"))
    points = {point["name"]: point for point in record["frontier"]["points"]}
    assert list(points) == ["plain", "lossless, token", "lossless, block", "static, w = 0.7", "static, w = 0.2"]
    assert (record["drafter"]["kind"], record["drafter"]["num_draft_tokens"]) == (kind, 4)
    rates = [points[name]["acceptance"]["value"] for name in ("lossless, token", "static, w = 0.7", "static, w = 0.2")]
    assert 0 < rates[0] < rates[1] < rates[2]
    certificates = [points[name]["certificate"]["value"] for name in list(points)[1:]]
    assert certificates[:2] == [0, 0]
    assert 0 < certificates[2] < certificates[3]
    assert "static, w = 0.2" in (tmp_path / "tokens.html").read_text(encoding="utf-8")


MISTAKES = [
    (["drafter=none"], "drafter=none: rules judge drafts; choose one of heads, model, "),
    (["drafter.kind=oracle"], "drafter.kind='oracle' is unknown; choose one of none, heads, "),
    (["drafter=ngram", "drafter.max_match=null"], "drafter.max_match is missing: ngram needs min_match, max_match"),
    (["drafter=model", "checkpoint=x"], "checkpoint='x' is for drafter=heads"),
    (["temperature=0"], "temperature=0.0: greedy decoding leaves nothing to relax"),
    (["split=heldout"], "split='heldout' is unknown; choose test, selection or train"),
    (["num_prompts=0"], "num_prompts=0 must be at least 1"),
    (["samples=0"], "samples=0 must be at least 1"),
    (["max_new_tokens=1"], "max_new_tokens=1 must be at least 2"),
    (["num_resamples=5"], "num_resamples=5 must be at least 100"),
    (["reward_floor=-1"], "reward_floor=-1.0 must be at least 0"),
    (["confidence=95"], "confidence=95.0 must be between 0 and 1"),
    (["reference=[1]"], "reference=[1.0] must be two numbers"),
    (["peer_weights=[0.5,0]"], "peer_weights names 0.0"),
    (["rules.static.target_weight=[2]"], "rules.static: target_weight=2"),
    (["+rules.mine={kind:nope}"], "rules.mine: verifier.kind='nope' is unknown"),
    (["+rules.mine={kind:fly,depth:3}"], "rules.mine has depth, which no rule takes"),
    (["rules.static.kind=mentored", "~rules.static.target_weight", "+rules.static.kl_bound=1"], "kind must be static"),
    (["checkpoints=[nowhere]"], "checkpoint='nowhere' has no config.json"),
    (["checkpoints=[HEADS]"], "which holds 'heads', not an ensemble head"),
    (["checkpoints=[ENSEMBLE,ENSEMBLE]"], "two of them would be called 'dynamic, lam = 0.5'"),
    (["transfer=[nowhere]"], "transfer names 'nowhere', which holds no pareto.json"),
    (["drafter=heads", "checkpoint=nowhere"], "checkpoint='nowhere' has no config.json"),
    (["+nope=1"], "nope"),
    (["reward=function"], "reward.spec"),
    (["~reward"], "no reward is chosen; add reward=NAME"),
    (["reward.spec=nope"], "is no reward here; choose one of"),
    (["model.source=testbed", "drafter=heads"], "the testbed has no draft heads; use drafter=model"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes_stop_before_a_model_loads(
    words: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval.frontier.pairs, "load_target", lambda options: pytest.fail("a model was loaded"))
    words = [word.replace("HEADS", str(folder / "heads")) for word in words]
    words = [word.replace("ENSEMBLE", str(folder / "for_model")) for word in words]
    base = ["+model=tiny", "drafter=model"]
    base += [] if any("reward=" in word or "~reward" in word for word in words) else ["reward=gsm8k"]
    with pytest.raises(ValueError, match=r".") as caught:
        run_pareto(configure(*base, *(word for word in words if word != "~reward")))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_that_need_the_models(folder: Path, tmp_path: Path) -> None:
    """All before anything is decoded."""
    words = model_words(folder, tmp_path)
    for more, message in (
        ([f"checkpoints=[{folder / 'for_heads'}]"], "was trained for drafter 'heads', not for 'tiny'"),
        (["drafter=ngram"], "was trained for drafter 'tiny', not for 'ngram'"),
        (["shown_points=[nobody]"], "shown_points names 'nobody'; choose among plain; lossless, token"),
        (["num_prompts=9"], "num_prompts=9: data.source=jsonl has 8 test prompts"),
        (["max_new_tokens=600"], "max_new_tokens=600 leaves no room for a prompt"),
        (["data.heldout_fraction=0.2", "checkpoint=", "rules.static.target_weight=[0.5,0.5]"], "two points are called"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run_pareto(configure(*words, *more))
    assert list(tmp_path.iterdir()) == []


def test_prompts_seen_in_training_are_refused(folder: Path, tmp_path: Path) -> None:
    target = make_tiny_target()
    data = {"source": "jsonl", "path": str(folder / "prompts.jsonl"), "heldout_fraction": 0.1}
    save_heads(tmp_path / "heads", build_head(target, HeadOptions("mtp", 2)), {"data": data})
    words = [*small(folder, tmp_path / "out"), "drafter=heads", f"checkpoint={tmp_path / 'heads'}"]
    with pytest.raises(ValueError, match=r"use at most data\.heldout_fraction=0\.1"):
        run_pareto(configure(*words, "data.heldout_fraction=0.5"))


def test_prompts_that_a_checkpoint_has_seen_are_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By content, whatever the file calls them: of those that chose the head, the test has none."""
    target = make_tiny_target()
    seen = seen_record([("train", "<SCRIPT>0"), ("selection", " <script>1"), ("selection", "<script>2")])
    record = heads_record(folder / "heads")
    save_ensemble(tmp_path / "head", make_ensemble(), target, record, {"config": {"lam": 0.5}, "prompts": seen})
    words = [*small(folder, tmp_path / "out"), "drafter=heads", f"checkpoint={folder / 'heads'}"]
    words += [f"checkpoints=[{tmp_path / 'head'}]", "plot=false", "shown_prompts=0", "samples=1"]
    run_pareto(configure(*words, "num_prompts=5"))
    printed = capsys.readouterr().out
    assert "left out 3 of 8 prompts" in printed
    assert f"{folder / 'heads'} does not say which prompts chose it" in printed
    written = json.loads((tmp_path / "out" / "pareto.json").read_text())
    assert (written["split"], written["num_prompts"]) == ("test", 5)
    assert "5 test prompts of prompts" in (tmp_path / "out" / "pareto.md").read_text()
    with pytest.raises(ValueError, match=r"num_prompts=6: .*has 5 test prompts"):
        run_pareto(configure(*words, "num_prompts=6"))


@pytest.mark.parametrize("word", ["nope=1", "samples=many", "drafter=oracle", "reward=nope", "data.nope=1"])
def test_hydra_refuses(word: str) -> None:
    with pytest.raises(ConfigCompositionException):
        configure("+model=tiny", word)


def test_a_failing_reward_leaves_what_is_done(folder: Path, tmp_path: Path) -> None:
    words = [*model_words(folder, tmp_path), "reward.spec=reward_of_pareto:failing", "peer_weights=[]", "plot=false"]
    with pytest.raises(ValueError, match="reward 'failing', completion 0 of 2: None"):
        run_pareto(configure(*words))
    record = json.loads((tmp_path / "pareto.json").read_text(encoding="utf-8"))
    assert (record["is_complete"], record["num_prompts"]) == (False, 2)


def test_ctrl_c_writes_what_is_done(folder: Path, tmp_path: Path) -> None:
    """The command, interrupted in its third turn (by its own reward): whole files that cover the turns before it."""
    words = ["prompts_per_turn=1", "max_new_tokens=5", "peer_weights=[]", "plot=false"]
    words = [*model_words(folder, tmp_path / "out"), "reward.spec=reward_of_pareto:interrupting", *words]
    done = subprocess.run(
        [sys.executable, "-m", "eval.pareto", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 130, done.stderr
    record = json.loads((tmp_path / "out" / "pareto.json").read_text(encoding="utf-8"))
    assert (record["is_complete"], record["num_prompts"]) == (False, 2)
    assert "Stopped before its end: 2 of 3 prompts." in done.stdout
    samples = (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(samples) == 2 * 2 * 6
    names = ["pareto.csv", "pareto.json", "pareto.md", "samples.jsonl"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
