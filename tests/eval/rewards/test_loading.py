"""Which reward a name stands for, what is wrong with one that cannot be used, and what a reward may return."""

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.rewards import loading
from eval.rewards.loading import check_rewards, completion_text, load_reward, require_column, reward_names

USER_MODULE = """
import functools

def length(completions, scale=1.0, **kwargs):
    return [scale * len(text) for text in completions]

async def later(completions, **kwargs):
    return [0.0 for _ in completions]

def bare(prompts, completions):
    return [0.0 for _ in completions]

def positional(completions, /, **kwargs):
    return [0.0 for _ in completions]

constant = 3
"""


@pytest.fixture(autouse=True)
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_reward.py").write_text(USER_MODULE)
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "needy_reward.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_named_rewards_are_found() -> None:
    assert {"code", "gsm8k", "rouge"} <= set(reward_names())
    assert "loading" not in reward_names()
    reward, name = load_reward("gsm8k", {"equivalence": "number"})
    assert name == reward.__name__ == "gsm8k"
    assert reward(prompts=["?"], completions=["#### 2"], completion_ids=[[1]], answer=["2"], trainer_state=None) == [
        1.0
    ]


def test_users_own_function() -> None:
    reward, name = load_reward("user_reward:length")
    assert name == reward.__name__ == "length"
    assert reward(prompts=["a"], completions=["abc"], log_extra=None) == [3.0]
    scaled, name = load_reward("user_reward:length", {"scale": 2.0})
    assert name == scaled.__name__ == "length"
    assert scaled(completions=["abc"]) == [6.0]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("gsm9k", {}, "reward='gsm9k' is no reward here; choose one of .*gsm8k.*module:function"),
        ("", {}, "choose one of"),
        ("gsm8k", {"tolerance": 1}, "reward='gsm8k' has no option tolerance; it takes equivalence"),
        ("no_such_module_at_all:f", {}, "there is no module 'no_such_module_at_all'"),
        ("needy_reward:f", {}, "its module needs 'no_such_package_at_all', which is not installed"),
        ("broken_reward:f", {}, "importing broken_reward raised RuntimeError: no licence"),
        ("user_reward:missing", {}, "module user_reward has no 'missing'"),
        ("user_reward:", {}, "write module:function"),
        (":length", {}, "write module:function"),
        ("user_reward:constant", {}, "is a int, not a function"),
        ("user_reward:later", {}, "is async"),
        ("user_reward:bare", {}, r"must end in \*\*kwargs"),
        ("user_reward:positional", {}, "completions cannot be passed by name"),
        ("user_reward:length", {"skale": 1}, "has no option skale; it takes completions, scale"),
    ],
)
def test_unusable_reward_is_told_at_once(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(spec, options)


# ---- what a reward returns ----

GOOD = [[1.0, 0.5], (1, 0), [True, False], torch.tensor([1.0, 2.0]), [torch.tensor(1.0), 0.0], torch.zeros(2).numpy()]
BAD = [
    ([1.0, None], "completion 1 of 2: None; every completion needs a number"),
    ([math.nan, 1.0], "completion 0 of 2: nan; a reward must be finite"),
    ([1.0, math.inf], "completion 1 of 2: inf"),
    ([1.0, torch.tensor(math.nan)], "completion 1 of 2: nan"),
    ([1.0, "1.0"], "completion 1 of 2: '1.0' is a str, not a number"),
    ([1.0, [1.0]], "completion 1 of 2: .* is a list"),
    ([1.0], "returned 1 values for 2 completions"),
    ([1.0] * 3, "returned 3 values for 2 completions"),
    ([], "returned 0 values"),
    (None, "returned a NoneType; it must return a list of 2 numbers"),
    (1.0, "returned a float"),
    ("10", "returned a str"),
    ({0: 1.0, 1: 1.0}, "returned a dict"),
    (torch.zeros(2, 1), "completion 0 of 2: .* is a list"),
]


@pytest.mark.parametrize("values", GOOD, ids=repr)
def test_numbers_are_taken(values: object) -> None:
    checked = check_rewards(values, 2, "mine")
    assert all(type(value) is float for value in checked)
    assert checked == [float(value) for value in values]


@pytest.mark.parametrize(("values", "message"), BAD, ids=lambda case: repr(case)[:40])
def test_anything_else_is_refused(values: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"reward 'mine'.*{message}"):
        check_rewards(values, 2, "mine")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if value is None:", "if False:"),
        ("not math.isfinite(value)", "math.isinf(value)"),
        ("not math.isfinite(value)", "math.isnan(value)"),
        ("if len(values) != count:", "if len(values) < count:"),
        ("if len(values) != count:", "if len(values) > count:"),
        ("not isinstance(value, int | float)", "False"),
        ("or isinstance(values, str | bytes)", ""),
        ("not isinstance(values, Sequence)", "False"),
        ("value = value.item()", "pass"),
        ("values = values.tolist()", "pass"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    source = inspect.getsource(loading)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    names: dict[str, Any] = {"__name__": loading.__name__, "__file__": loading.__file__}
    exec(compile(source.replace(right, wrong, 1), "faulty loading", "exec"), names)
    faulty = SimpleNamespace(**names)

    def told(values: object) -> str:
        try:
            return repr(faulty.check_rewards(values, 2, "mine"))
        except ValueError as error:
            return str(error)
        except (TypeError, AttributeError) as error:
            return repr(error)

    def told_rightly(values: object) -> str:
        try:
            return repr(check_rewards(values, 2, "mine"))
        except ValueError as error:
            return str(error)

    assert any(told(values) != told_rightly(values) for values in [*GOOD, *(values for values, _ in BAD)])


# ---- what rewards share ----


def test_text_of_a_completion() -> None:
    assert completion_text("x") == "x"
    assert completion_text([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    for nothing in ([], None, [{"role": "assistant"}], [{"content": None}], 3):
        with pytest.raises(ValueError, match="a completion must be text, or messages"):
            completion_text(nothing)


def test_columns_fit() -> None:
    assert require_column(["a"], "answer", "mine", 1) == ["a"]
    with pytest.raises(ValueError, match="reward 'mine' needs the dataset column 'answer'"):
        require_column(None, "answer", "mine", 1)
    with pytest.raises(ValueError, match="column 'answer' has 1 values for 2"):
        require_column(["a"], "answer", "mine", 2)
