"""The number that a text gives as its answer, and planted faults are caught."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest

from eval.rewards.reading import numbers

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
    # wording around
    "*18*": 18,
    "The answer is *18*.": 18,
    "***18***": 18,
    "The answer is *18* eggs": 18,
    "__18__": 18,
    "The answer is __18__ eggs": 18,
    "_18_": 18,
    "~~17~~ 18": 18,
    "`18`": 18,
    "(18)": 18,
    "[18]": 18,
    '"18"': 18,
    "'18'": 18,
    "18!": 18,
    "#### 18!": 18,
    "The answer is 18!": 18,
    "18...": 18,
    "~18": 18,
    "≈18": 18,
    "=18": 18,
    "+18": 18,
    "#18": 18,
    "No.18": 18,
    "#### $18/hour": 18,
    "18km/h": 18,
    "#### 18 km/h": 18,
    "18°": 18,
    "\\boxed{18^\\circ}": 18,
    "\\boxed{\\text{18}}": 18,
    "\\boxed{\\textbf{\\text{18}}}": 18,
    "\\boxed{\\approx 18}": 18,
    "**Answer: 18**": 18,
    "**Answer**: 18": 18,
    "<answer>18</answer> or so, in 3 days": 18,
    "<answer>\n18\n</answer>": 18,
    "18-year": 18,
    # no spaces in the language
    "총18개입니다": 18,
    "18원": 18,
    "약18個": 18,
    "答案是18。": 18,
    "合計18個です": 18,
    "ทั้งหมด18บาท": 18,
    "١٨": 18,
    # grouping
    "1\u2009234": 1234,
    "1\u202f234\u202f567": 1234567,
    "1'234": 1234,
    "#### 1 234": 1234,
    "1e3": 1000,
    "1.5e-1": Fraction(3, 20),
    # what would be misread
    "€1.234,50": None,
    "She has 5, and pays €1.234,50": None,
    "1.2.3": None,
    "1,2,3": None,
    "1e300": None,
    "±18": None,
    "#### 3:4": None,
    "#### 2*3": None,
    "#### 2 * x": None,
    "#### 18 + tax": None,
    "\\boxed{5!}": None,
    "\\boxed{18/x}": None,
    "\\boxed{\\sqrt{9}}": None,
    "\\boxed{2\\pi}": None,
    "x2 and H2O, v2.5": None,
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
    (r"[$€£¥₩₹]?", ""),  # currency
    (r"(?![0-9]|[.,][0-9])", ""),  # 1000,000
    ("return -size if", "return size if"),  # signs lost
    (r"(?:(?<![)\]}])(?P<minus>-))?", r"(?P<minus>-)?"),  # (21)-3 is not -3
    (r"(?<![\^±])", ""),  # exponents
    (r"(?<![^\W{SPACELESS}])", ""),  # x2
    (r"[^\W{SPACELESS}]", r"\w"),  # 약73개
    (r"(?:,[0-9]{3})+(?![0-9])|", r"(?:,[0-9]{3})+(?![0-9])X|"),  # thousands
    (r"(?:(?P<whole>{INTEGER}) +)?", r"(?P<whole>X)?"),  # mixed fractions
    (r"(?:{INTEGER}?\.[0-9]+|", "(?:"),  # decimals
    (r"(?:[eE][-+]?[0-9]{{1,2}}(?![0-9.]))?", ""),  # 1e3
    ('or match["unread"]', ""),  # 1.234,50
    (r"[0-9]+(?:[.,][0-9]+)+|", ""),
    ("(?![A-Za-z]|[0-9]+[.):]\\s+\\S)", ""),  # headings
    ("[-3:]", "[:1]"),  # the first box
    ("matches[-1]", "None"),  # "the answer is"
    ('.rpartition("=")[2]', ""),  # x = 18
    ("*_, last =", "_, last, *_ ="),  # the first number
    ("or OPERATOR.match(result, match.end())", ""),
    ("or COMMAND.search(result[: match.start()])", ""),
    ("if is_formula and IN_FORMULA", "if IN_FORMULA"),
    ("if is_formula and", "if False and"),
    ("len(match[0]) > MAX_CHARS", "False"),
    ('int(match["bottom"]) == 0', "False"),
    ("text.translate(FOLDED)", "text"),
    ("str(int(digit[0]))", "digit[0]"),
    ('(re.compile(r"\\\\([$%#&_])"), r"\\1"),', ""),
    ("result = GROUPED.sub(", "str("),
    ("ELEMENT.findall(text) or", ""),
    ("for _ in range(MAX_STYLES)", "for _ in range(1)"),
    (r"\*(?=\S)([^*\n]*)(?<=\S)\*(?![\w(*])", "XXX()"),
    ("if match := HASHES.search(text):\n        return match[1], False", "if False:\n        return None, False"),
]


def is_wrong(read: Callable[[str], Fraction | None], text: str, number: Fraction | None) -> bool:
    try:
        return read(text) != number
    except (ValueError, TypeError, ZeroDivisionError):
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
        "*a" * 20000,
        "_" * 40000,
        "\\text{" * 10000,
        "<answer>" * 10000,
        "answer is " * 10000,
        "1.2" * 20000,
        "1e" * 20000,
        "1 234" * 10000,
    ):
        numbers.answer_number(text)
