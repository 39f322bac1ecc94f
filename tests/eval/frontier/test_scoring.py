"""Rewards are found by name at run time and called as trl calls them; what they return is checked."""

from pathlib import Path
from typing import Any

import pytest

from eval.frontier.questions import Question
from eval.frontier.scoring import Reward, RewardOptions, load


class Letters:
    """A tokenizer whose tokens are characters."""

    all_special_tokens: tuple[str, ...] = ()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


LETTERS = Letters()
QUESTIONS = [
    Question("one", [1], {"answer": "1", "extra": [1, 2]}),
    Question([{"role": "user", "content": "two"}], [2], {"answer": "2"}),
]


def test_called_as_trl_would() -> None:
    seen: dict[str, Any] = {}

    def keep(**given: Any) -> list[float]:
        seen.update(given)
        given["log_metric"]("x", 1.0)
        given["log_extra"]("x", ["a", "b"])
        return [0, 1]

    assert Reward("keep", keep).score(QUESTIONS, ["a", "b"], [[5], [6, 7]], LETTERS) == [0.0, 1.0]
    assert seen["prompts"] == ["one", [{"role": "user", "content": "two"}]]
    assert seen["completions"] == ["a", [{"role": "assistant", "content": "b"}]]
    assert seen["completion_ids"] == [[5], [6, 7]]
    assert seen["answer"] == ["1", "2"]
    assert seen["extra"] == [[1, 2], None]
    assert seen["trainer_state"] is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [([1.0], "1 values for 2 completions"), ([1.0, None], "None"), ([1.0, float("nan")], "nan"), ("ab", "a str")],
)
def test_what_is_no_reward(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reward("mine", lambda **given: returned).score(QUESTIONS, ["a", "b"], [[], []], LETTERS)


def test_a_reward_that_raises_is_named() -> None:
    def broken(**given: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(ValueError, match="reward 'broken' raised KeyError: 'answer'"):
        Reward("broken", broken).score(QUESTIONS, ["a", "b"], [[], []], LETTERS)


def test_names_and_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_eval.py").write_text(
        "def length(completions, scale=1, **kwargs):\n    return [scale * len(text) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = load(RewardOptions("my_rewards_for_eval:length", {"scale": 2}))
    assert reward.name == "length"
    assert reward.score([Question("p", [1])], ["abc"], [[1]], LETTERS) == [6.0]
    question = Question("p", [1], {"answer": "#### 18"})
    ids = list(map(ord, "It is 18."))
    assert load(RewardOptions("gsm8k")).score([question], ["It is 18."], [ids], LETTERS) == [1.0]


def test_answers_are_told_from_thoughts() -> None:
    """By the token ids of prompt and completion, as in training."""
    seen: dict[str, Any] = {}

    def keep(**given: Any) -> list[float]:
        seen.update(given)
        return [0] * len(given["completions"])

    questions = [Question("p", list(map(ord, prompt))) for prompt in ("assistant: <think>\n", "assistant: ")]
    ids = list(map(ord, "5</think>7"))
    Reward("keep", keep).score(questions * 2, ["?"] * 4, [ids, ids, ids[:1], ids[:1]], LETTERS)
    assert seen["completion_answers"] == ["7", "7", "", "5"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [("", "no reward is chosen; add reward=NAME"), ("nope", "choose one of"), ("no_module_here:f", "no module")],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(RewardOptions(spec))
