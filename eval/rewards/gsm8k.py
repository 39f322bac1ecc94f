"""1 for the right number, else 0: GSM8K and tasks like it. Column: `answer`, the reference, its number last after ####.

`numbers` says what counts as a number, and reads it exactly; math-verify is not asked about plain numbers, since it
finds none in *73*, (73) or 약73개, takes 73% for 0.73 and €1.234,50 for 1.234. equivalence="symbolic" also accepts what
math-verify proves equal (3 x 6 for 18), and takes references that are no numbers; it may think for seconds about one.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from eval.rewards.loading import Reward, answer_texts, require_column
from eval.rewards.reading.bounded import BoundedProcess, OutOfBounds
from eval.rewards.reading.columns import text_of
from eval.rewards.reading.numbers import answer_number, marked_answer, plain_number

NAME = "gsm8k"
SYMBOLIC = "eval.rewards.reading.symbolic"
PROVER = BoundedProcess()
EQUIVALENCES = ("number", "symbolic")


def make_reward(equivalence: str = "number") -> Reward:
    """The reward. equivalence: number | symbolic (needs math-verify)."""
    if equivalence not in EQUIVALENCES:
        raise ValueError(f"equivalence={equivalence!r} must be one of {', '.join(EQUIVALENCES)}")
    if equivalence == "symbolic" and importlib.util.find_spec("math_verify") is None:
        raise ValueError("equivalence=symbolic needs math-verify: pip install 'foretoken[rl]', or use number")
    judge = is_same_number if equivalence == "number" else is_equivalent

    def gsm8k(
        completions: Sequence[Any],
        answer: Sequence[Any] | None = None,
        completion_answers: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """trl's signature; 1.0 or 0.0 per completion."""
        references = require_column(answer, "answer", NAME, len(completions))
        return score(answer_texts(completions, completion_answers), references, judge)

    return gsm8k


def score(texts: Sequence[str], answers: Sequence[Any], judge: Callable[[str, str], bool]) -> list[float]:
    """1.0 where the judge accepts the text for the reference."""
    return [float(judge(text, reference(answer))) for text, answer in zip(texts, answers, strict=True)]


def reference(answer: object) -> str:
    """What follows the last #### of a reference, or all of it."""
    return text_of(answer, NAME, "answer", "text, as '... #### 18', or a number").rpartition("####")[2].strip()


def is_same_number(text: str, expected: str) -> bool:
    """Whether the text's answer is the expected number, exactly. ValueError when none is expected."""
    number = plain_number(expected)
    if number is None:
        raise ValueError(
            f"reward {NAME!r}: the reference answer {expected!r:.80} is no plain number; correct the column 'answer', "
            "or set equivalence=symbolic"
        )
    return answer_number(text) == number


def is_equivalent(text: str, expected: str) -> bool:
    """Whether the text's answer is the expected number, or math-verify proves it equal to the expected expression."""
    number, marked = plain_number(expected), marked_answer(text)
    if number is not None and answer_number(text) == number:
        return True
    if marked is None and (number is not None or not text.strip()):
        return False
    try:
        return bool(PROVER.call(SYMBOLIC, "is_equal", expected, text if marked is None else marked, marked is not None))
    except OutOfBounds:
        return False
