"""Prompts with their columns, from one's own files and from the testbed."""

import json
from pathlib import Path

import pytest

from eval.frontier.questions import load_questions, load_testbed_questions, task_name, turns_of
from models.target.tiny import make_tiny_tokenizer
from train.data import testbed_language as language
from train.data.prompts import DataOptions


@pytest.fixture
def data(tmp_path: Path) -> DataOptions:
    rows = [
        {"prompt": f"Add {n} and 1", "answer": str(n + 1), "tests": [f"f({n})"], "split": split, "task": "maths"}
        for n in range(6)
        for split in (["train", "test"][n % 2],)
    ]
    rows.append({"messages": [{"role": "user", "content": "x" * 300}], "split": "test"})
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataOptions("jsonl", str(path))


def test_columns_and_split(data: DataOptions) -> None:
    tokenizer = make_tiny_tokenizer()
    questions = load_questions(tokenizer, data, "test", 3, longest=100)
    by_answer = {question.columns["answer"]: question for question in questions}
    assert set(by_answer) == {"2", "4", "6"}
    two = by_answer["2"]
    assert two.prompt == [{"role": "user", "content": "Add 1 and 1"}]
    assert two.columns == {"answer": "2", "tests": ["f(1)"], "task": "maths"}
    assert tokenizer.decode(two.ids) == "<|start|>user\nAdd 1 and 1<|end|>\n<|start|>assistant\n"
    assert {q.columns["answer"] for q in load_questions(tokenizer, data, "train", 3, 100)} == {"1", "3", "5"}


def test_too_few(data: DataOptions) -> None:
    with pytest.raises(ValueError, match="has 4 test prompts, of which 3 have at most 100 tokens"):
        load_questions(make_tiny_tokenizer(), data, "test", 4, 100)


def test_testbed() -> None:
    tokenizer = language.make_tokenizer()
    questions = load_testbed_questions(tokenizer, 3, "test", 4)
    rows = language.testbed_prompts(4, 3, "test")
    assert [question.prompt for question in questions] == [row["prompt"] for row in rows]
    assert [question.columns for question in questions] == [{"answer": row["answer"]} for row in rows]
    assert tokenizer.decode(questions[0].ids) == rows[0]["prompt"]


def test_turns(data: DataOptions) -> None:
    questions = load_questions(make_tiny_tokenizer(), data, "test", 3, 100)
    assert turns_of(questions, 2) == [questions[:2], questions[2:]]


@pytest.mark.parametrize(
    ("where", "name"),
    [(("testbed", "gsm8k", ""), "testbed"), (("auto", "gsm8k", ""), "gsm8k"), (("auto", "jsonl", "a/b.jsonl"), "b")],
)
def test_task_names(where: tuple[str, str, str], name: str) -> None:
    assert task_name(*where) == name
