"""The stories' reward: known texts, trl's signature, bad columns."""

import pytest

from eval.rewards.loading import load_reward
from eval.rewards.stories import make_reward
from train.data.prompts import DataOptions, load_prompts

STORY = "One day Rosa ran to the lake with 12 maps. A friend brought 30 more. That makes 42 maps.\n#### 42"


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (STORY, 1.0),
        (STORY.replace("Rosa", "Otis").replace("maps", "pies"), 1.0),
        (STORY.replace("#### 42", "#### 43"), 0.75),
        (STORY.replace("42", "41"), 0.5),
        (STORY.replace("12", "30").replace(" 30 more", " 12 more"), 0.5),
        (STORY.replace("12", "1").replace("30", "2").replace("42", "3"), 0.0),
        (STORY.replace("42 maps", "042 maps"), 1.0),
        (STORY.replace(" 12", ""), 0.0),
        (STORY + " 42", 0.0),
        ("", 0.0),
    ],
)
def test_share_of_right_numbers(text: str, share: float) -> None:
    assert make_reward()(completions=[text], answer=[STORY]) == [share]
    chat = [[{"role": "assistant", "content": text}]]
    assert make_reward("all")(completions=chat, answer=[STORY]) == [float(share == 1.0)]


def test_every_generated_story_is_right() -> None:
    answers = [prompt.answer for prompt in load_prompts(DataOptions(source="stories", max_prompts=200))]
    reward, name = load_reward("stories", {"count": "all"})
    assert name == "stories"
    assert set(reward(completions=answers, answer=answers)) == {1.0}


def test_share_of_perfect_texts_is_logged() -> None:
    logged: dict[str, float] = {}
    make_reward()(completions=[STORY, "12"], answer=[STORY, STORY], log_metric=logged.__setitem__)
    assert logged == {"stories/all_right": 0.5}


@pytest.mark.parametrize(
    ("answer", "message"), [(["no number"], "must be a story"), ([None], "answer"), (None, "answer")]
)
def test_bad_columns_are_told(answer: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward()(completions=[STORY], answer=answer)


def test_bad_option_is_told() -> None:
    with pytest.raises(ValueError, match="count='most' must be one of share, all"):
        make_reward("most")
