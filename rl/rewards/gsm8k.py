"""1 for the right number, else 0: GSM8K and tasks like it. Column: `answer`, the reference, its number last after ####.

`numbers` says what counts as a number. equivalence="symbolic" also accepts what math-verify proves equal (3 x 6 for
18), and takes references that are no numbers; it may think for seconds about one answer, and only in the main thread.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from rl.rewards.loading import Reward, completion_text, require_column
from rl.rewards.numbers import answer_number, marked_answer, plain_number

NAME = "gsm8k"
EQUIVALENCES = ("number", "symbolic")


def make_reward(equivalence: str = "number") -> Reward:
    """The reward. equivalence: number | symbolic (needs math-verify)."""
    if equivalence not in EQUIVALENCES:
        raise ValueError(f"equivalence={equivalence!r} must be one of {', '.join(EQUIVALENCES)}")
    if equivalence == "symbolic" and importlib.util.find_spec("math_verify") is None:
        raise ValueError("equivalence=symbolic needs math-verify: pip install 'foretoken[rl]', or use number")
    judge = is_same_number if equivalence == "number" else is_equivalent

    def gsm8k(completions: Sequence[Any], answer: Sequence[str] | None = None, **kwargs: Any) -> list[float]:
        """trl's signature; 1.0 or 0.0 a completion."""
        answers = require_column(answer, "answer", NAME, len(completions))
        return score(completions, answers, judge)

    return gsm8k


def score(completions: Sequence[Any], answers: Sequence[str], judge: Callable[[str, str], bool]) -> list[float]:
    """1.0 where the judge accepts the completion's text for the reference."""
    pairs = zip(completions, answers, strict=True)
    return [float(judge(completion_text(completion), reference(answer))) for completion, answer in pairs]


def reference(answer: str) -> str:
    """What follows the last #### of a reference, or all of it."""
    if not isinstance(answer, str):
        raise ValueError(f"reward {NAME!r}: column 'answer' holds {answer!r}; it must be text, as '... #### 18'")
    return answer.rpartition("####")[2].strip()


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
    if marked is None:
        return False
    from math_verify import parse, verify

    wanted, got = (parse(f"\\boxed{{{part}}}", parsing_timeout=2) for part in (expected, marked.strip().strip("$")))
    return bool(verify(wanted, got, timeout_seconds=2))
