"""What a completion is worth, asked of the very functions that training is rewarded by.

Calls them as trl would; owns no reward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.frontier.questions import Question
from eval.rewards.loading import RewardOptions, check_rewards, load_reward
from eval.rewards.reading.thoughts import read_answers
from models.decoding.stops import Detokenizer
from train.data.reward_rows import fresh


@dataclass(frozen=True)
class Reward:
    """A reward function under its name."""

    name: str
    function: Callable[..., Any]

    def score(
        self,
        questions: Sequence[Question],
        texts: Sequence[str],
        tokens: Sequence[Sequence[int]],
        tokenizer: Detokenizer,
    ) -> list[float]:
        """One number per completion; questions, texts and tokens side by side. ValueError for what is no reward.

        tokenizer: the target's, by which answers are told from thoughts.
        """
        columns: dict[str, list[Any]] = {
            name: [fresh(question.columns.get(name)) for question in questions] for name in _columns(questions)
        }
        columns["completion_answers"] = read_answers(tokenizer, [one.ids for one in questions], tokens)
        try:
            values = self.function(
                prompts=[fresh(question.prompt) for question in questions],
                completions=[_completion(*pair) for pair in zip(questions, texts, strict=True)],
                completion_ids=[list(ids) for ids in tokens],
                trainer_state=None,
                log_extra=_ignore,
                log_metric=_ignore,
                **columns,
            )
        except Exception as error:
            raise ValueError(f"reward {self.name!r} raised {type(error).__name__}: {error}") from error
        return check_rewards(values, len(questions), self.name)


def load(options: RewardOptions) -> Reward:
    """ValueError where none is chosen, for an unknown name, or a function that cannot be called as trl does."""
    if not options.spec:
        raise ValueError(
            "no reward is chosen; add reward=NAME (conf/reward has them), or reward.spec=module:function for your own"
        )
    function, name = load_reward(options.spec, options.options)
    return Reward(name, function)


def _columns(questions: Sequence[Question]) -> Sequence[str]:
    return list(dict.fromkeys(name for question in questions for name in question.columns))


def _completion(question: Question, text: str) -> str | list[Mapping[str, str]]:
    """As trl gives it: a conversation goes on as one."""
    return text if isinstance(question.prompt, str) else [{"role": "assistant", "content": text}]


def _ignore(*unused: object) -> None:
    """In place of trl's logs."""
