"""The GSM8K reward: references against themselves, faulty data, symbolic equivalence, hostile expressions."""

import json
import math
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from eval.rewards import gsm8k
from eval.rewards.gsm8k import make_reward
from tests.eval.rewards.reading.test_numbers import READ

REFERENCES = ["16 - 3 = <<16-3=13>>13\n#### 18", "#### 1,018", "#### -3", "7"]


def test_references_score_against_themselves_alone() -> None:
    reward = make_reward()
    for index in range(len(REFERENCES)):
        completions = [REFERENCES[index]] * len(REFERENCES)
        expected = [float(other == index) for other in range(len(REFERENCES))]
        assert reward(prompts=[""] * 4, completions=completions, answer=REFERENCES, trainer_state=None) == expected


@pytest.mark.parametrize(
    "wrong", ["#### {n}1", "#### {n}.5", "#### 0.{n}", "#### {n},000", "{n} + 1 = 99", "no", "#### {n}/7"]
)
def test_perturbed_answers_score_nothing(wrong: str) -> None:
    answers = [f"#### {n}" for n in (7, 18, 20, 1000)]
    completions = [wrong.format(n=n) for n in (7, 18, 20, 1000)]
    assert make_reward()(completions=completions, answer=answers) == [0.0] * 4


def test_conversations_are_read_too() -> None:
    completions = [[{"role": "assistant", "content": "The answer is 18."}]]
    assert make_reward()(completions=completions, answer=["#### 18"]) == [1.0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "needs the dataset column 'answer'"),
        ({"answer": ["1", "2"]}, "column 'answer' has 2 values for 1 completions"),
        ({"answer": ["#### many"]}, "reference answer 'many' is no plain number"),
        ({"answer": [None]}, "column 'answer' holds None; it must be text, as '... #### 18', or a number"),
        ({"answer": [["18"]]}, "column 'answer' holds \\['18'\\]"),
        ({"answer": [{"value": 18}]}, "column 'answer' holds"),
        ({"answer": [True]}, "column 'answer' holds True"),
        ({"answer": [math.nan]}, "column 'answer' holds nan"),
    ],
)
def test_faulty_data_is_an_error_and_no_reward(columns: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward()(completions=["#### 1"], **columns)


def test_unknown_equivalence() -> None:
    with pytest.raises(ValueError, match="equivalence='sympy' must be one of number, symbolic"):
        make_reward(equivalence="sympy")


def test_symbolic_equivalence() -> None:
    pytest.importorskip("math_verify")
    reward = make_reward(equivalence="symbolic")
    completions = ["\\boxed{3 \\times 6}", "#### 18", "\\boxed{19}", "18", "no number", "\\boxed{1 + x}", "\\boxed{x}"]
    answers = ["18"] * 5 + ["$x + 1$", "$x + 1$"]
    assert reward(completions=completions, answer=answers) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_a_number_is_its_own_reference() -> None:
    answers = [18, 18.0, 2.5, np.int64(18), np.float64(0.1), -3]
    completions = ["18", "18", "2.5", "18", "0.1", "-3"]
    assert make_reward()(completions=completions, answer=answers) == [1.0] * 6
    assert make_reward()(completions=["19"] * 6, answer=answers) == [0.0] * 6


NUMBERS = {text: number for text, number in READ.items() if number is not None}


@pytest.mark.parametrize("equivalence", ["number", "symbolic"])
def test_verdicts_are_the_same_with_and_without_math_verify(equivalence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if equivalence == "symbolic":
        pytest.importorskip("math_verify")
    else:
        monkeypatch.setitem(sys.modules, "math_verify", None)
    reward = make_reward(equivalence=equivalence)
    assert len(NUMBERS) > 60
    right, wrong = ([str(number + by) for number in NUMBERS.values()] for by in (0, 1))
    completions = list(NUMBERS)
    assert reward(completions=completions, answer=right) == [1.0] * len(completions)
    assert reward(completions=completions, answer=wrong) == [0.0] * len(completions)


def test_hostile_expressions_neither_end_nor_hold_up_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a thread other than the main one matter."""
    pytest.importorskip("math_verify")
    reward = make_reward(equivalence="symbolic")
    assert reward(completions=["\\boxed{2 \\times 9}"], answer=["18"]) == [1.0]  # started and warm
    monkeypatch.setattr(gsm8k.PROVER, "cpu_s", 1.0)
    hostile = [
        "\\boxed{9^{9^{9^{9^9}}}}",
        "\\boxed{(10^{10})!!}",
        "\\boxed{" + "(" * 5000 + "}",
        "\\boxed{\\sqrt{" * 500,
    ]
    paid: list[float] = []
    judge = threading.Thread(target=lambda: paid.extend(reward(completions=hostile, answer=["18"] * len(hostile))))
    started = time.monotonic()
    judge.start()
    judge.join(120)
    assert paid == [0.0] * len(hostile)
    assert time.monotonic() - started < 100
    monkeypatch.setattr(gsm8k.PROVER, "cpu_s", 10.0)
    assert reward(completions=["\\boxed{2 \\times 9}"], answer=["18"]) == [1.0]


@pytest.mark.slow
@pytest.mark.skipif("GSM8K_FOLDER" not in os.environ, reason="GSM8K_FOLDER names a folder with GSM8K's *.jsonl")
def test_every_reference_of_gsm8k_is_paid_and_none_that_is_off_by_one() -> None:
    files = sorted(Path(os.environ["GSM8K_FOLDER"]).glob("*.jsonl"))
    answers = [json.loads(line)["answer"] for file in files for line in file.read_text("utf-8").splitlines()]
    assert answers
    reward = make_reward()
    split = [answer.rpartition("####") for answer in answers]
    off = [f"{work}#### {int(number.replace(',', '')) + 1}" for work, _, number in split]
    boxed = [f"{work}So it is $\\boxed{{{number.strip()}}}$." for work, _, number in split]
    said = [f"{work}The answer is **{number.strip()}**." for work, _, number in split]
    assert set(reward(completions=off, answer=answers)) == {0.0}
    for completions in (answers, boxed, said):
        assert set(reward(completions=completions, answer=answers)) == {1.0}
