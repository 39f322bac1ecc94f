"""The rows that a reward sees: the same Python objects in training and in measurements, and those of the file."""

import datetime
import json
import math
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eval.frontier.questions import load_questions
from eval.frontier.scoring import Reward
from eval.rewards.loading import ARGUMENTS
from models.target.tiny import make_tiny_tokenizer
from rl.prompts import load_datasets, to_dataset
from rl.trainer import DiversedTrainer
from rl.trl_parts import checked_reward
from tests.rl.test_trainer import make_trainer
from train.data.prompts import DataOptions, Prompt, load_prompts
from train.data.reward_rows import RESERVED, reward_rows
from train.data.sources import hub
from train.data.sources.jsonl import OWN_COLUMNS

TOKENIZER = make_tiny_tokenizer()
NUM_TRAIN, NUM_HELDOUT = 2, 2
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["x", "y", "tests", "info"]), VALUES),
    min_size=NUM_TRAIN + NUM_HELDOUT,
    max_size=NUM_TRAIN + NUM_HELDOUT,
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> DiversedTrainer:
    """Two prompts a rollout, four completions each."""
    return make_trainer(tmp_path_factory.mktemp("trainer"))


def spell(values: Iterable[Any]) -> list[str]:
    """As text, since 1 == 1.0 == True, NaN is not NaN, and the order of keys counts for nothing in ==."""
    return sorted(map(repr, values))


class Seen:
    """A reward that keeps what it was asked about, row by row, and spoils it afterwards."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def __call__(self, **asked: Any) -> list[float]:
        columns = {name: asked[name] for name in asked if name not in ARGUMENTS[1:]}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        self.rows += spell(sorted(row.items()) for row in rows)
        for row in rows:
            row["prompts"][0]["content"] = "spoiled"
            for value in row.values():
                if isinstance(value, dict | list):
                    value.clear()
        return [0.0] * len(rows)


def seen_in_training(trainer: DiversedTrainer, data: DataOptions) -> list[str]:
    """By trl, in a rollout: each prompt four times."""
    seen = Seen()
    trainer.reward_funcs = [checked_reward(seen, "toy")]
    trainer.train_dataset, _ = load_datasets(data, NUM_HELDOUT)
    batch = next(iter(trainer.get_train_dataloader()))
    prompts = [row["prompt"] for row in batch]
    completions = [[{"role": "assistant", "content": ""}] for _ in batch]
    trainer._answers = [""] * len(batch)
    for _ in range(2):  # what the first call spoils, no other call sees
        trainer._calculate_rewards(batch, prompts, completions, [[1] for _ in batch])
    assert len(seen.rows) == 2 * 4 * NUM_TRAIN
    return sorted(set(seen.rows))


def seen_on_heldout(trainer: DiversedTrainer, data: DataOptions) -> list[str]:
    """When the head is measured while training."""
    seen = Seen()
    trainer.reward_funcs = [checked_reward(seen, "toy")]
    _, heldout = load_datasets(data, NUM_HELDOUT)
    rows = [row for row in heldout or () for _ in range(2)]
    trainer._ask_reward(rows, [[1] for _ in rows], ["" for _ in rows], ["" for _ in rows])
    assert len(seen.rows) == 2 * NUM_HELDOUT
    return sorted(set(seen.rows))


def seen_in_evaluation(data: DataOptions, split: str, count: int) -> list[str]:
    seen = Seen()
    questions = load_questions(TOKENIZER, data, split, count, 10_000)
    for turn in (questions[:1], questions[1:]):
        doubled = [question for question in turn for _ in range(2)]
        Reward("toy", seen).score(doubled, ["" for _ in doubled], [[1] for _ in doubled], TOKENIZER)
    return sorted(set(seen.rows))


def assert_seen_alike(trainer: DiversedTrainer, data: DataOptions, expected: list[dict[str, Any]] | None) -> None:
    """In training, while measuring there, in evaluation of both splits; and as the file has it, where that is given."""
    training, heldout = seen_in_training(trainer, data), seen_on_heldout(trainer, data)
    assert training == seen_in_evaluation(data, "train", NUM_TRAIN)
    assert heldout == seen_in_evaluation(data, "selection", NUM_HELDOUT)
    if expected is not None:
        assert sorted(training + heldout) == spell(sorted(row.items()) for row in expected)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The file, half of each split, and what a reward must be asked about its rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    asked, lines = [], []
    for number, row in enumerate(rows):
        own = {"prompt": f"p{number}", "split": "train" if number < NUM_TRAIN else "selection"}
        line = json.dumps(own | row)
        lines.append(line)
        read = json.loads(line)
        turns = [{"role": "user", "content": read["prompt"]}]
        asked.append({"prompts": turns, "task": "chat"} | {name: read.get(name) for name in names})
    path.write_text("\n".join(lines), encoding="utf-8")
    return asked


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_rows_of_json(trainer: DiversedTrainer, rows: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        asked = write_rows(path, rows)
        assert_seen_alike(trainer, DataOptions("jsonl", str(path)), asked)


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}, {"b": 2}, {}, None],
        [1, 2.5, True, "x"],
        [10**30, 1, 2, -(2**63) - 1],
        [[], [1], [[]], [[1, "x"]]],
        [{"b": 1, "a": 2}, {"a": 2, "b": 1}, {"a": {"z": None}}, {"a": {}}],
        [1.0, 1, 0.0, -0.0],
        [math.nan, math.inf, 1e308, 5e-324],
        ["2024-01-31", "2024-01-31T00:00:00Z", "x", ""],
    ],
)
def test_what_arrow_changes(trainer: DiversedTrainer, tmp_path: Path, values: list[Any]) -> None:
    asked = write_rows(tmp_path / "rows.jsonl", [{"x": value} for value in values])
    assert_seen_alike(trainer, DataOptions("jsonl", str(tmp_path / "rows.jsonl")), asked)


@pytest.mark.parametrize("suffix", [".parquet", ".pq"])
def test_rows_of_parquet(trainer: DiversedTrainer, tmp_path: Path, suffix: str) -> None:
    """As pyarrow reads them: there a nested key that is absent is None, and so it is everywhere."""
    rows = [
        {"x": {"a": 1}, "when": datetime.date(2024, 1, 31), "tests": [], "raw": b"\xff", "nothing": None},
        {"x": {"b": [2]}, "when": None, "tests": [["a"], []], "raw": None, "nothing": None},
        {"x": None, "when": datetime.date(1, 1, 1), "tests": None, "raw": b"", "nothing": None},
        {"x": {}, "when": None, "tests": [None], "raw": b"a", "nothing": None},
    ]
    splits = ["train"] * NUM_TRAIN + ["selection"] * NUM_HELDOUT
    path = tmp_path / f"rows{suffix}"
    table = [{"prompt": f"p{n}", "split": splits[n], "messages": None} | row for n, row in enumerate(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    expected = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        others = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
        expected.append({"prompts": [{"role": "user", "content": row["prompt"]}], "task": "chat"} | others)
    assert expected[0]["x"] == {"a": 1, "b": None}
    assert_seen_alike(trainer, DataOptions("jsonl", str(path)), expected)


def test_rows_of_the_hub(trainer: DiversedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": f"p{n}", "x": {"a": n} if n % 2 else {"b": "c"}, "tests": [str(n)] * n} for n in range(40)]
    monkeypatch.setattr(hub, "_open", lambda *_: Dataset.from_list(rows))
    data = DataOptions("hub", dataset="a/b", prompt_column="q", heldout_fraction=0.5)
    splits = [prompt.split for prompt in load_prompts(data)]
    train, _ = load_datasets(data, NUM_HELDOUT)
    seen = Seen()
    checked_reward(seen, "toy")(
        prompts=[row["prompt"] for row in train],
        completions=[""] * len(train),
        **{name: [row[name] for row in train] for name in train[0] if name != "prompt"},
    )
    assert sorted(set(seen.rows)) == seen_in_evaluation(data, "train", splits.count("train"))


def test_every_row_has_the_columns_of_all() -> None:
    """Of both splits: what one turn's rows lack altogether is None, as it is in training."""
    prompts = [
        Prompt("1", "chat", text="a", columns={"x": 1}),
        Prompt("2", "chat", text="b", split="selection", columns={"y": 2, "prompt": "not this"}, answer="c"),
    ]
    assert reward_rows(prompts) == [
        {"prompt": "a", "task": "chat", "x": 1, "y": None, "answer": None},
        {"prompt": "b", "task": "chat", "x": None, "y": 2, "answer": "c"},
    ]


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_a_reward_is_called_with(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{name: 1}] * (NUM_TRAIN + NUM_HELDOUT))
    data = DataOptions("jsonl", str(path))
    with pytest.raises(ValueError, match=f"columns named {name}, which rewards are called with"):
        load_datasets(data, NUM_HELDOUT)
    with pytest.raises(ValueError, match=f"columns named {name}, which rewards are called with"):
        load_questions(TOKENIZER, data, "selection", NUM_HELDOUT, 10_000)


def test_reserved_names_are_those_of_the_call() -> None:
    assert set(ARGUMENTS) <= set(RESERVED)


def test_a_dataset_keeps_its_rows_when_shuffled() -> None:
    rows = [{"prompt": str(n), "x": {"a": n} if n % 2 else {"b": n}} for n in range(8)]
    shuffled = to_dataset(rows).shuffle(seed=1).select(range(5))
    assert [row["x"] for row in shuffled] == [rows[int(row["prompt"])]["x"] for row in shuffled]
