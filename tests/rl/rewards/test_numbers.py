"""The number that a text gives as its answer, and the GSM8K reward made of it; planted faults are caught."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest

from rl.rewards import numbers
from rl.rewards.gsm8k import make_reward

READ = {
    # the formats of answers
    "She sells 16 - 3 = 13 eggs.\n#### 18": 18,
    "####18": 18,
    "#### 18\n\nQ: How many are 7 and 5?\n#### 12": 18,
    "#### $1,234.50 a year": Fraction(2469, 2),
    "## Plan\n#### Step 1: eggs\n#### 2. Sell 9 of them\nThat gives \\boxed{18}.": 18,
    "First \\boxed{5}, no: $\\boxed{18}$": 18,
    "\\boxed{\\frac{3}{4}}": Fraction(3, 4),
    "\\boxed{18 \\text{ eggs in 3 days}}": 18,
    "\\boxed{x = 18} after 7 steps": 18,
    "\\boxed{18 but never closed": 18,
    "The answer is 18. I used 3 steps.": 18,
    "**Answer:** 18 of 20 eggs": 18,
    "The answer is $5 + 13 = 18$.": 18,
    "So 9 * 2 = 18 dollars.": 18,
    # signs
    "It is -18": -18,
    "It is \u221218": -18,
    "Debt: -$18": -18,
    "Debt: $-18": -18,
    "21-3": 3,
    "(21)-3": 3,
    "3 \u2013 5 eggs, 10\u201318": 18,
    "- 18 eggs": 18,
    # separators, decimals, fractions
    "1,234,567": 1234567,
    "1{,}234": 1234,
    "1\\,234": 1234,
    "#### 1000,000": None,
    "12,345.60": Fraction(61728, 5),
    "18.": 18,
    "18.00": 18,
    ".5": Fraction(1, 2),
    "3/4": Fraction(3, 4),
    "-3/4": Fraction(-3, 4),
    "2 1/2": Fraction(5, 2),
    "2½ cups": Fraction(5, 2),
    "2\\frac{1}{2}": Fraction(5, 2),
    "\\dfrac12": Fraction(1, 2),
    "\uff11\uff18": 18,
    # units
    "25%": 25,
    "\\boxed{25\\%}": 25,
    "€18": 18,
    "18kg": 18,
    "18 m^2": 18,
    "18 m^{2}": 18,
    "18 of type x2, a_1": 18,
    # no number
    "": None,
    "eighteen": None,
    "\\boxed{?} 18": None,
    "\\boxed{3 \\times 6}": None,
    "\\boxed{2^4}": None,
    "\\boxed{21-3}": None,
    "1/0": None,
    "#### " + "9" * 5000: None,
}


@pytest.mark.parametrize(("text", "number"), READ.items(), ids=lambda case: repr(case)[:40])
def test_number_read(text: str, number: Fraction | None) -> None:
    assert numbers.answer_number(text) == number


PLAIN = {
    "18": 18,
    "\\$18": 18,
    "25\\%": 25,
    " $1,000 ": 1000,
    "-3": -3,
    "25%": 25,
    "3/4": Fraction(3, 4),
    "18 eggs": None,
    "1 2": None,
    "": None,
}


@pytest.mark.parametrize(("text", "number"), PLAIN.items(), ids=repr)
def test_plain_number(text: str, number: Fraction | None) -> None:
    assert numbers.plain_number(text) == number


FAULTS = [
    (r"[$€£¥₩]?", ""),  # currency
    (r"(?![0-9]|,[0-9])", ""),  # 1000,000
    ("return -size if", "return size if"),  # signs lost
    (r"(?:(?<![)\]}])(?P<minus>-))?", r"(?P<minus>-)?"),  # (21)-3 is not -3
    (r"(?<![\w^.])", r"(?<![\w.])"),  # exponents
    (r"(?:,[0-9]{3})+(?![0-9])|", r"(?:,[0-9]{3})+(?![0-9])X|"),  # thousands
    (r"(?:(?P<whole>{INTEGER}) +)?", r"(?P<whole>X)?"),  # mixed fractions
    (r"{INTEGER}?\.[0-9]+|", ""),  # decimals
    ("(?![A-Za-z]|[0-9]+[.):]\\s+\\S)", ""),  # headings
    ("[-3:]", "[:1]"),  # the first box
    ("matches[-1]", "None"),  # "the answer is"
    ('.rpartition("=")[2]', ""),  # x = 18
    ("*_, last =", "_, last, *_ ="),  # the first number
    ("None if match is None or OPERATOR.match(result, match.end()) else", "None if match is None else"),
    ("len(match[0]) > MAX_CHARS", "False"),
    ('int(match["bottom"]) == 0', "False"),
    ("text = text.translate(FOLDED)", "pass"),
    (r'(re.compile(r"\\([$%])"), r"\1"),', ""),
    ("if match := HASHES.search(text):\n        return match[1]", "if False:\n        return None"),
]


def is_wrong(read: Callable[[str], Fraction | None], text: str, number: Fraction | None) -> bool:
    try:
        return read(text) != number
    except (ValueError, ZeroDivisionError):
        return True


@pytest.mark.parametrize(("right", "wrong"), FAULTS, ids=lambda text: text[:24])
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    source = inspect.getsource(numbers)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    names: dict[str, object] = {}
    exec(compile(source.replace(right, wrong, 1), "faulty numbers", "exec"), names)
    faulty = SimpleNamespace(**names)

    assert any(is_wrong(faulty.answer_number, *case) for case in READ.items()) or any(
        is_wrong(faulty.plain_number, *case) for case in PLAIN.items()
    )


def test_reading_takes_linear_time() -> None:
    """Texts made to send a backtracking expression round in circles."""
    for text in (
        "1," * 20000,
        "1,111" * 8000,
        "1 " * 20000 + "/",
        "\\boxed{" * 6000,
        "#" * 40000,
        "- " * 20000,
        "{," * 20000,
    ):
        numbers.answer_number(text)


# ---- the reward ----

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
        ({"answer": [None]}, "column 'answer' holds None"),
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
