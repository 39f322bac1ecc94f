"""The code reward: from a completion to a program, and what passes. Programs are MBPP's and HumanEval's kind."""

import json
from typing import Any

import numpy as np
import pytest

from eval.rewards.code import humaneval_program, make_program, make_reward, mbpp_program
from eval.rewards.jail.sandbox import PLANS, Outcome, Program, Protection, Sandbox, probe
from eval.rewards.reading.extraction import extract_code

needs_sandbox = pytest.mark.skipif(
    not any(isinstance(probe(plan), Protection) for plan in PLANS), reason="nothing here can shut a program in"
)

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
STUB = """import math


def helper(x):
    return x * 2


def area(r: float) -> float:
    ''' Area of a circle.
    >>> area(0)
    0
    '''
"""
BODY = "    return math.pi * r * r * helper(1) / 2\n"
CHECK = "def check(candidate):\n    assert abs(candidate(1.0) - 3.14159) < 1e-4\n    assert candidate(0) == 0\n"


# ---- from text to code ----


@pytest.mark.parametrize(
    "text",
    [
        ADD,
        f"```python\n{ADD}```",
        f"Here it is:\n\n```py\n{ADD}```\nIt adds `a` and `b`.",
        f"```\n{ADD}```",
        f"```python\n{ADD}",
        f"```python\nx = 1\n```\nand then\n```python\n{ADD}```\nUse it so:\n```python\nprint(add(1, 2))\n```",
        f"```python\ndef add(a, b):\n    return 0\n```\nNo:\n```python\n{ADD}```",
        f"[BEGIN]\n{ADD}[DONE]\nYou are an expert",
        f"[BEGIN]\n{ADD}",
    ],
)
def test_code_is_found(text: str) -> None:
    assert extract_code(text, ["add"]) == ADD


def test_mbpp_program() -> None:
    program = mbpp_program(f"```python\n{ADD}```", ADD_TESTS, "x = 1", ["import math"])
    assert program == Program(ADD, ["import math", "x = 1", *ADD_TESTS])


HUMANEVAL = {
    "body": BODY,
    "body and prose": BODY + "\nThis computes the area.\n\n    (indented)\n",
    "body and more code": BODY + "\n\ndef test():\n    area(1)\n\n\nif __name__ == '__main__':\n    test(\n",
    "body that uses a later name": "    return PI * r * r\n\n\nPI: float = math.pi\n",
    "whole function": f"```python\ndef area(r):\n{BODY}```",
    "whole function without a fence": f"def area(r):\n{BODY}",
    "whole file": f"```python\n{STUB}{BODY}```",
    "fenced body": f"```python\n{BODY}```",
}


@needs_sandbox
@pytest.mark.parametrize("name", HUMANEVAL)
def test_humaneval_program(name: str) -> None:
    program = humaneval_program(STUB, HUMANEVAL[name], CHECK, "area")
    assert Sandbox().run(program) == Outcome("passed", "", pytest.approx(0, abs=1e9))


@needs_sandbox
def test_function_named_as_a_builtin() -> None:
    sandbox = Sandbox()
    total = "def sum(a, b):\n    return a + b\n"
    assert sandbox.run(mbpp_program(total, ["assert sum(1, 2) == 3"])).status == "passed"
    # Beside a function of its own, a builtin in the tests stays the builtin.
    cheat = "def near(x):\n    return x + 9\ndef abs(x):\n    return 0\n"
    assert sandbox.run(mbpp_program(cheat, ["assert abs(near(1) - 1) < 1"])).status == "failed"


@needs_sandbox
def test_setup_uses_the_answers_classes() -> None:
    answer = "class Node:\n    def __init__(self, x):\n        self.x = x\n\ndef get(node):\n    return node.x\n"
    assert Sandbox().run(mbpp_program(answer, ["assert get(root) == 3"], "root = Node(3)")).status == "passed"


def test_rows_without_tests_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs the columns test_list .* this row has text"):
        make_program("", ADD, {"text": "Add two numbers."})
    with pytest.raises(ValueError, match=r"does not hold the function 'area'.*code_prompt"):
        make_program("Write a function.", BODY, {"test": CHECK, "entry_point": "area"})


@pytest.mark.parametrize(
    "test_list",
    [
        ADD_TESTS,
        tuple(ADD_TESTS),
        np.array(ADD_TESTS, dtype=object),
        "\n".join(ADD_TESTS),
        json.dumps(ADD_TESTS),
        json.dumps(ADD_TESTS, indent=1),
        repr(ADD_TESTS),
    ],
    ids=["list", "tuple", "array", "text", "json", "json over lines", "python"],
)
def test_tests_are_read_as_what_they_are(test_list: object) -> None:
    expected = ["\n".join(ADD_TESTS)] if isinstance(test_list, str) and test_list[0] == "a" else ADD_TESTS
    row = {"test_list": test_list, "test_imports": "import math", "test_setup_code": None}
    assert make_program("", ADD, row) == Program(ADD, ["import math", "", *expected])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"test_list": [ADD_TESTS]}, "column 'test_list' holds .*; it must be a list of pieces of Python code"),
        ({"test_list": [None]}, "column 'test_list' holds"),
        ({"test_list": {"inputs": ["1"]}}, "column 'test_list' holds"),
        ({"test_list": '{"inputs": ["1 2"], "outputs": ["3"]}\nprint('}, "column 'test_list' holds"),
        ({"test_list": '["assert add(1, 2) =='}, "column 'test_list' holds"),
        ({"test_list": ["add 1 and 2"]}, "column 'test_list' holds"),
        ({"test_list": "add 1 and 2"}, "column 'test_list' holds"),
        ({"test_list": [""]}, "column 'test_list' holds"),
        ({"test_list": 3}, "column 'test_list' holds 3"),
        ({"test_list": ADD_TESTS, "test_imports": ["import a b"]}, "column 'test_imports' holds"),
        ({"test_list": ADD_TESTS, "test_setup_code": ["x = 1"]}, "column 'test_setup_code' holds"),
        ({"test": [CHECK], "entry_point": "area"}, "column 'test' holds"),
        ({"test": "check area", "entry_point": "area"}, "column 'test' holds"),
        ({"test": CHECK, "entry_point": ["area"]}, "column 'entry_point' holds"),
        ({"test": CHECK, "entry_point": "the area"}, "column 'entry_point' holds"),
        ({"test": CHECK, "entry_point": "area", "code_prompt": [STUB]}, "column 'code_prompt' holds"),
    ],
)
def test_columns_of_the_wrong_shape_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="reward 'code': " + message) as caught:
        make_program(STUB, ADD, row)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_prompt_of_a_conversation() -> None:
    """A reworded prompt still gives the stub, from its fence or from the column."""
    row = {"test": CHECK, "entry_point": "area"}
    expected = humaneval_program(STUB, BODY, CHECK, "area")
    assert make_program(STUB, BODY, row) == expected
    chat = [{"role": "user", "content": f"Complete:\n```python\n{STUB}```\nAnswer with code."}]
    assert make_program(chat, BODY, row) == expected
    assert make_program("Area of a circle?", BODY, row | {"code_prompt": STUB}) == expected


# ---- the reward ----


@needs_sandbox
def test_reward_of_a_mixed_batch(capsys: pytest.CaptureFixture[str]) -> None:
    reward = make_reward(workers=2, limits={"cpu_s": 2})
    printed = capsys.readouterr().out
    assert printed.startswith("reward code: model-written code is shut in by ")
    assert printed.count("\n") == 1
    extra: dict[str, list[str]] = {}
    metrics: dict[str, float] = {}
    rewards = reward(
        prompts=["Add.", "Add.", "Add.", STUB],
        completions=[ADD, "def add(a, b):\n    return 3\n", [{"role": "assistant", "content": f"```\n{ADD}```"}], BODY],
        completion_ids=[[1]] * 4,
        test_list=[ADD_TESTS, ADD_TESTS, ADD_TESTS, None],
        test_setup_code=["", "", "", None],
        test=[None, None, None, CHECK],
        entry_point=[None, None, None, "area"],
        trainer_state=None,
        log_extra=extra.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert rewards == [1.0, 0.0, 1.0, 1.0]
    assert extra == {"code_outcome": ["passed", "failed AssertionError:", "passed", "passed"]}
    assert metrics == {
        "code/passed": 0.75,
        "code/failed": 0.25,
        "code/timeout": 0.0,
        "code/memory": 0.0,
        "code/crashed": 0.0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {"ram_mb": 1}}, "limits has no ram_mb; it takes cpu_s, wall_s, memory_mb"),
        ({"limits": {"cpu_s": -1}}, "cpu_s=-1"),
        ({"limits": {"memory_mb": 0.5}}, "memory_mb=0.5: this limit must be a whole number"),
        ({"workers": 0}, "workers=0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(**options)


@needs_sandbox
def test_code_in_a_thought_does_not_count() -> None:
    reward = make_reward()
    wrong = "```python\ndef add(a, b):\n    return 0\n```"
    completions = [
        f"<think>\n```python\n{ADD}```\n</think>\n{wrong}",
        f"<think>\n{wrong}\n</think>\n```python\n{ADD}```",
        f"<think>\n```python\n{ADD}```\n",
    ]
    row = {"prompts": ["Add."] * 3, "completions": completions, "test_list": [ADD_TESTS] * 3}
    assert reward(**row) == [0.0, 1.0, 0.0]
    answers = [f"```\n{ADD}```", "", ADD]
    assert reward(**row, completion_answers=answers) == [1.0, 0.0, 1.0]


def test_markdown_parser_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"reward=code needs markdown-it-py: pip install 'foretoken\[rl\]'"):
        make_reward()
