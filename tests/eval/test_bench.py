"""The command from its options to its files, on random weights."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

import eval.bench
from eval.bench import BenchConfig, draft_token_counts, run_bench
from models.checkpoint import save_heads
from models.drafters.options import NONE
from models.heads import HeadOptions, build_head
from models.target.tiny import make_tiny_target
from tests.drafters import WITHOUT_CHECKPOINT
from train.data.sources.seen import seen_record
from train.runtime.config import checked
from train.runtime.presets import CONF

ROOT = CONF.parent


def configure(*overrides: str) -> BenchConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked(compose("bench", list(overrides)), BenchConfig)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "heads"
    head = build_head(make_tiny_target(), HeadOptions("mtp", 3))
    save_heads(folder, head, {"data": {"heldout_fraction": 0.1}})
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    rows = [
        {"prompt": f"Say {n} of {task} {split}", "task": task, "split": split}
        for task in ("chat", "maths")
        for split in ("train", "test")
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small(prompts: Path, folder: Path) -> list[str]:
    return [
        "+model=tiny",
        "data=jsonl",
        f"data.path={prompts}",
        "tasks=[]",
        "prompts_per_task=3",
        "short_tokens=5",
        "long_tokens=18",
        "rounds=2",
        f"output_dir={folder}",
    ]


def measure(folder: Path, words: list[str]) -> dict[str, Any]:
    run_bench(configure(*words))
    return json.loads((folder / "bench.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_CHECKPOINT if kind != NONE])
def test_every_drafter_beside_plain(kind: str, prompts: Path, tmp_path: Path) -> None:
    """With its own K: what it costs and gives is counted, and nothing it writes is different."""
    words = [*small(prompts, tmp_path), f"drafter={kind}", "rounds=1", "with_generate=false", "prompt_lookup_tokens=0"]
    record = measure(tmp_path, [*words, "tasks=[chat]"])
    (name,) = [row["method"] for row in record["methods"][1:]]
    assert re.fullmatch(rf"{kind} lossless, K = [1-9]\d*", name)
    assert record["drafters"][kind]["kind"] == kind
    row = record["methods"][1]
    assert row["counters"]["drafted"] > 0
    assert row["agreement"]["num_identical"] == row["agreement"]["num_sequences"] == 6


def test_lengths_beside_the_fixed_one(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Every K fixed, and the chooser within the longest; two sources in one draft among them."""
    hybrid = "{kind:hybrid,first:ngram,second:model}"
    words = [*small(prompts, tmp_path), "drafter=heads", f"others=[ngram,{hybrid}]", f"checkpoint={checkpoint}"]
    words += ["length=adaptive", "num_draft_tokens=[1,2]", "rounds=1", "with_generate=false", "prompt_lookup_tokens=0"]
    record = measure(tmp_path, [*words, "tasks=[chat]"])
    rows = record["methods"][1:]
    assert [row["method"] for row in rows] == [
        f"{name} lossless, {length}"
        for name in ("heads", "ngram", "hybrid")
        for length in ("K = 1", "K = 2", "adaptive K to 2")
    ]
    for row in rows:
        assert row["agreement"]["num_identical"] == row["agreement"]["num_sequences"]
    by_name = {row["method"]: row["counters"] for row in rows}
    adaptive, fixed = by_name["heads lossless, adaptive K to 2"], by_name["heads lossless, K = 2"]
    assert 0 < adaptive["drafted"] < fixed["drafted"]  # some blocks try other lengths


def test_a_stop_needs_a_distribution(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    words = [*small(prompts, tmp_path), f"checkpoint={checkpoint}", "rounds=1", "with_generate=false"]
    words += ["prompt_lookup_tokens=0", "length=entropy", "length.threshold=0.9", "tasks=[chat]"]
    record = measure(tmp_path, [*words, "drafter=heads"])
    fixed, stopped = record["methods"][1:]
    assert stopped["method"].endswith("K to 3 by entropy")
    assert stopped["counters"]["drafted"] < fixed["counters"]["drafted"]
    with pytest.raises(ValueError, match="drafter ngram: length=entropy with NgramDrafter"):
        measure(tmp_path, [word for word in words if "checkpoint" not in word] + ["drafter=ngram"])
    with pytest.raises(ValueError, match="length=adaptive has no drafts to cut"):
        measure(tmp_path, [*small(prompts, tmp_path), "length=adaptive"])
    with pytest.raises(ValueError, match=r"length\.threshold=0.3 is no parameter of fixed"):
        measure(tmp_path, [*small(prompts, tmp_path), "+length.threshold=0.3"])


def test_several_drafters_in_one_table(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Each with each K and each rule, and one kind twice with other parameters: one seed, and laws that are exact."""
    others = "others=[suffix,{kind:ngram,max_match:2},heads]"
    words = [*small(prompts, tmp_path), "drafter=ngram", others, f"checkpoint={checkpoint}", "num_draft_tokens=[2,4]"]
    words += ["temperature=0.7", "verifier=static", "verifier.target_weight=0.5", "batch_size=3", "rounds=1"]
    record = measure(tmp_path, [*words, "with_generate=false", "tasks=[chat]", "long_tokens=0"])
    names = ["ngram (max_match = 8)", "suffix", "ngram (max_match = 2)", "heads"]
    assert list(record["drafters"]) == names
    assert record["drafters"][names[2]]["fingerprint"] == "min_match=1, max_match=2"
    assert record["drafters"]["heads"]["name"] == checkpoint.name
    found = [row["method"] for row in record["methods"]]
    assert found == [
        "plain",
        *[f"{name} {rule}, K = {count}" for name in names for count in (2, 4) for rule in ("lossless", "static")],
    ]
    table = (tmp_path / "bench.md").read_text()
    assert "ngram (max_match = 2): ngram, min_match=1, max_match=2." in table


def test_code_is_completed_and_texts_are_summarised(tmp_path: Path) -> None:
    """The generated prompts of these tasks, by a drafter that copies from them."""
    words = ["+model=tiny", "drafter=suffix", "tasks=[completion,summarise]", "prompts_per_task=2", "rounds=1"]
    words += ["short_tokens=24", "long_tokens=0", "warmup_rounds=0", "with_generate=false", "prompt_lookup_tokens=0"]
    record = measure(tmp_path, [*words, f"output_dir={tmp_path}"])
    assert list(record["groups"]) == ["completion short", "summarise short"]
    for rows in record["groups"].values():
        row = rows[-1]
        assert row["method"] == "suffix lossless, K = 4"
        assert row["counters"]["drafted"] > 0
        assert row["agreement"]["num_identical"] == row["agreement"]["num_sequences"] == 2


def test_rounds_do_not_remember_each_other(prompts: Path, tmp_path: Path) -> None:
    """A drafter that remembers other answers drafts the same in its first round as after a warm-up of the very same."""
    words = [*small(prompts, tmp_path), "drafter=suffix", "drafter.remembered_tokens=100000", "rounds=1"]
    words += ["with_generate=false", "prompt_lookup_tokens=0", "tasks=[chat]", "long_tokens=0"]
    counts = [measure(tmp_path, [*words, f"warmup_rounds={number}"])["methods"][1]["counters"] for number in (0, 2)]
    assert counts[0] == counts[1]
    assert counts[0]["drafted"] > 0


def test_greedy_bench_end_to_end(checkpoint: Path, prompts: Path, tmp_path: Path, capsys: Any) -> None:
    heads = ["drafter=heads", f"checkpoint={checkpoint}", "num_draft_tokens=[1,3,5]"]
    record = measure(tmp_path, [*small(prompts, tmp_path), *heads])
    assert record["is_complete"] is True
    rows = {row["method"]: row for row in record["methods"]}
    names = [f"heads lossless, K = {count}" for count in (1, 3, 5)]
    lookup = "transformers prompt lookup, 4 tokens"
    assert list(rows) == ["plain", "transformers generate", lookup, *names]
    assert set(record["groups"]) == {"chat short", "chat long", "maths short", "maths long"}
    for name, row in rows.items():
        ours = [run for run in record["runs"] if run["method"] == name]
        assert len(ours) == 4 * 2
        assert {run["round"] for run in ours} == {0, 1}
        # Every method wrote the same, so all have one number of tokens.
        assert sum(run["num_tokens"] for run in ours) == 2 * row["num_tokens"] == 2 * rows["plain"]["num_tokens"]
        rates = [
            sum(run["num_tokens"] for run in ours if run["round"] == number)
            / sum(run["seconds"] for run in ours if run["round"] == number)
            for number in (0, 1)
        ]
        assert row["tokens_per_s"]["median"] == pytest.approx(sum(rates) / 2)
        assert (row["tokens_per_s"]["low"], row["tokens_per_s"]["high"]) == pytest.approx((min(rates), max(rates)))
        assert row["peak_bytes"] > 2**20
        if name != "plain":
            assert row["agreement"]["num_identical"] == row["agreement"]["num_sequences"] == 12
    theirs = rows[lookup]["counters"]
    assert theirs["emitted"] == rows[lookup]["num_tokens"]
    assert theirs["sequences"] == 0
    assert rows[lookup]["mean_block_length"] == theirs["emitted"] / theirs["blocks"] > 1
    assert rows["transformers generate"]["counters"] is None
    for count, name in zip((1, 3, 5), names, strict=True):
        check_counts(rows[name], count)
        assert rows[name]["draft_over_target"]["median"] > 0
        assert rows[name]["pass_over_bare"]["median"] > 0
    plain = rows["plain"]["counters"]
    assert plain["drafted"] == plain["accepted"] == 0
    assert plain["blocks"] == plain["emitted"] - plain["sequences"]
    for key in ("emitted", "blocks", "accepted"):
        total = sum(
            row["counters"][key] for group in record["groups"].values() for row in group if row["method"] == names[1]
        )
        assert total == rows[names[1]]["counters"][key]
    table = capsys.readouterr().out
    assert "eval.bench" in record["run"]["command"]
    assert all(name in table for name in rows)
    assert (tmp_path / "bench.md").read_text() in table


def check_counts(row: dict[str, Any], num_draft_tokens: int) -> None:
    """A block emits what it keeps and one token more, but for a last one that a drafted token ends."""
    counters = row["counters"]
    assert counters["emitted"] == row["num_tokens"]
    num_cut = counters["sequences"] + counters["blocks"] + counters["accepted"] - counters["emitted"]
    assert 0 <= num_cut <= counters["sequences"] == 12
    assert len(counters["drafted_at"]) == num_draft_tokens
    assert sum(counters["drafted_at"]) == counters["drafted"]
    assert sum(counters["accepted_at"]) == counters["accepted"]
    assert counters["drafted_at"][0] <= counters["blocks"]
    assert row["mean_block_length"] == pytest.approx((counters["emitted"] - 12) / counters["blocks"])
    assert row["acceptance_rate"] == pytest.approx(counters["accepted"] / counters["drafted"])


def test_sampled_batched_bench(checkpoint: Path, prompts: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["drafter=heads", f"checkpoint={checkpoint}", "batch_size=2", "temperature=0.8", "top_k=20"]
    record = measure(tmp_path, [*small(prompts, tmp_path), *words])
    rows = {row["method"]: row for row in record["methods"]}
    assert list(rows) == ["plain", "transformers generate", "heads lossless, K = 3"]
    assert all(row["agreement"] is None for row in rows.values())
    check_counts(rows["heads lossless, K = 3"], 3)
    assert "no row for prompt lookup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drafter=heads"], "holds no finished draft heads; train them"),
        (["drafter=heads", "checkpoint=nowhere"], "'nowhere' has no config.json"),
        (["checkpoint=x"], "checkpoint='x' is for drafter=heads"),
        (["checkpoint=x", "drafter=model"], "checkpoint='x' is for drafter=heads"),
        (["num_draft_tokens=2"], "num_draft_tokens=2 is for a drafter; add drafter=NAME, with NAME one of heads, "),
        (["num_draft_tokens=two"], "num_draft_tokens='two'"),
        (["num_draft_tokens=[2,2]"], "a list of different ones"),
        (["drafter.kind=oracle"], "drafter.kind='oracle' is unknown; choose one of none, heads"),
        (["drafter.kind=ngram"], "drafter.min_match is missing: ngram needs min_match, max_match"),
        (["drafter=ngram", "drafter.remembered_tokens=9"], "drafter.remembered_tokens=9 is no parameter of ngram"),
        (["others=[oracle]"], "others names 'oracle', which is unknown; choose one of heads, "),
        (["others=[[ngram]]"], "others names ['ngram']: must be a file of conf/drafter"),
        (["others=[{min_match:2}]"], "others names {'min_match': 2}: must be a file of conf/drafter"),
        (["others=[{kind:ngram,nope:2}]"], "others ngram: Key 'nope' not in 'DrafterOptions'"),
        (["others=[{kind:ngram,min_match:few}]"], "others ngram: Value 'few'"),
        (["others=[{kind:ngram,min_probability:0.5}]"], "drafter.min_probability=0.5 is no parameter of ngram"),
        (["drafter=ngram", "others=[ngram]"], "others names ngram a second time"),
        (["prompt_lookup_tokens=[2,2]"], "prompt_lookup_tokens=[2, 2] must be a number of at least 1"),
        (["others=[heads]"], "holds no finished draft heads; train them"),
        (["verifier.kind=relaxed"], "verifier.kind='relaxed' is unknown; choose one of lossless"),
        (["verifier=static"], "verifier=static with temperature=0: greedy decoding leaves nothing to relax"),
        (["verifier=static", "temperature=1"], "verifier=static has no drafts to judge; add drafter="),
        (["verifier=static", "verifier.lenience=0.5"], "verifier.lenience=0.5 is no parameter of static"),
        (["verifier=static", "verifier.target_weight=2"], "target_weight=2"),
        (["splits=[train]"], "splits=['train'] must name each of test, selection, fresh at most once"),
        (["splits=[]"], "and one of them"),
        (["batch_size=0"], "batch_size=0 must be at least 1"),
        (["short_tokens=0", "long_tokens=0"], "leave nothing to measure"),
        (["temperature=-1"], "temperature=-1.0"),
        (["+drafter.nope=1"], "nope"),
        (["+nope=1"], "nope"),
    ],
)
def test_mistakes_stop_before_a_model_loads(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.bench, "load_target", lambda options: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r".") as caught:
        run_bench(configure("+model=tiny", *words))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["nope=1", "rounds=many", "drafter=oracle", "verifier=relaxed", "data.nope=1"])
def test_hydra_refuses(word: str) -> None:
    with pytest.raises(ConfigCompositionException):
        configure("+model=tiny", word)


def test_a_longer_block_than_a_drafter_can_is_told_with_its_name(prompts: Path, tmp_path: Path) -> None:
    head = build_head(make_tiny_target(), HeadOptions("medusa", 2))
    save_heads(tmp_path / "heads", head)
    words = [*small(prompts, tmp_path), "drafter=ngram", "others=[heads]", f"checkpoint={tmp_path / 'heads'}"]
    with pytest.raises(ValueError, match="drafter heads: num_draft_tokens=3: must be 1 to 2 with this drafter"):
        run_bench(configure(*words, "num_draft_tokens=3"))


def test_prompts_seen_in_training_are_refused(checkpoint: Path) -> None:
    words = ["+model=tiny", "drafter=heads", f"checkpoint={checkpoint}", "data.heldout_fraction=0.3"]
    with pytest.raises(ValueError, match=r"use at most data.heldout_fraction=0\.1"):
        run_bench(configure(*words))


def test_prompts_that_the_heads_have_seen_are_left_out(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = seen_record([("selection", f"Say {n} of chat test") for n in range(6)])
    save_heads(tmp_path / "heads", build_head(make_tiny_target(), HeadOptions("mtp", 3)), {"prompts": seen})
    words = [*small(prompts, tmp_path / "out"), "drafter=heads", f"checkpoint={tmp_path / 'heads'}"]
    with pytest.raises(ValueError, match=r"prompts_per_task=3: task 'chat' has 2 test prompts"):
        run_bench(configure(*words, "prompts_per_task=3"))
    assert "left out 6 of 16 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "counts"), [(0, []), (3, [3]), ([1, 3], [1, 3]), ([], [])])
def test_draft_token_counts(value: Any, counts: list[int]) -> None:
    assert draft_token_counts(value) == counts


@pytest.mark.parametrize("value", [-1, 1.5, True, False, None, "3", [0], [1, "2"], [[1]]])
def test_bad_draft_token_counts(value: Any) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens="):
        draft_token_counts(value)


@pytest.mark.parametrize(
    ("words", "message"), [([], "+model="), (["+model=tiny", "drafter=heads"], "holds no finished draft heads")]
)
def test_command_ends_with_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eval.bench", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in done.stderr


def test_ctrl_c_writes_what_is_done(prompts: Path, tmp_path: Path) -> None:
    """Interrupted within its second group, the command leaves whole files that cover the first one."""
    words = [*small(prompts, tmp_path / "out"), "rounds=60"]
    command = [sys.executable, "-m", "eval.bench", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stderr is not None
        seen = b""
        while b"chat long" not in seen:
            part = run.stderr.read1(1 << 16)
            assert part, seen
            seen = seen[-100:] + part
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 130
    assert "Stopped before its end: only chat short." in output.decode()
    record = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert record["is_complete"] is False
    assert list(record["groups"]) == ["chat short"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.md"}
