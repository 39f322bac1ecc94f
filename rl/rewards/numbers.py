r"""Reading the number that a text gives as its answer, exactly: a `Fraction`, never a float.

Read: 18, -3, 1,234.50, .5, 3/4, 1 1/2, 2½, \frac{3}{4}; with a currency before and words, units or % behind. Not read:
numbers in words, 1e6, multipliers (of "3 million" the 3), decimal commas, sums ("3 + 4" is none, "3 + 4 = 7" is 7).
A per cent sign counts as a unit: 25% is 25, as GSM8K writes it.
"""

import re
from fractions import Fraction

# Full-width digits, minus sign and the dashes that stand for it, the slash of ½ and the like.
FOLDED = str.maketrans("０１２３４５６７８９\u2212\u2013\uff0d\u2044", "0123456789---/") | {
    ord(sign): f" {fraction}" for sign, fraction in {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4"}.items()
}
LATEX = (
    (re.compile(r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\[,;!]|\\ |~)(?=[0-9]{3})"), ","),
    (re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\[,;! ()\[\]]|\\left|\\right|\*\*"), " "),
)

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(
    # Not part of a name, an index, an exponent or a longer number: x2, a_1, m^2, 1,23.
    r"(?<![\w^.])(?<![0-9],)(?<!\^\{)(?<!_\{)"
    # A minus between two things subtracts, and is no sign.
    r"(?:(?<![)\]}])(?P<minus>-))?[$€£¥₩]?"
    rf"(?:(?:(?P<whole>{INTEGER}) +)?(?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?!/?[0-9])"
    # Digits that are grouped in another way than by thousands are no number.
    rf"|(?P<decimal>{INTEGER}?\.[0-9]+|{INTEGER}(?![0-9]|,[0-9])))"
)
MAX_CHARS = 64  # of one number: Python itself refuses to read those of thousands of digits
OPERATOR = re.compile(r"\s*(?:\\times|\\cdot|\\div|[*^×÷+/!]|-\s*[0-9])")

# "#### 18", but not the headings of Markdown: "#### Step 2", "#### 1. Eggs".
HASHES = re.compile(r"####[ \t]*+(?![A-Za-z]|[0-9]+[.):]\s+\S)([^\n]+)")
BOXED = re.compile(r"\\f?boxed\s*\{")
ANSWER = re.compile(r"(?i)\banswer\b\s*(?:is\b|[:=])[\s:*]*([^\n]+)")


def normalise(text: str) -> str:
    """The text with its numbers in plain notation."""
    text = text.translate(FOLDED)
    for pattern, replacement in LATEX:
        text = pattern.sub(replacement, text)
    return text


def value(match: re.Match[str]) -> Fraction | None:
    """What a match of NUMBER stands for; None for a division by zero, or far too many digits."""
    if len(match[0]) > MAX_CHARS:
        return None
    if match["decimal"]:
        size = Fraction(match["decimal"].replace(",", ""))
    elif int(match["bottom"]) == 0:
        return None
    else:
        size = Fraction((match["whole"] or "0").replace(",", "")) + Fraction(int(match["top"]), int(match["bottom"]))
    return -size if match["minus"] else size


def boxed_content(text: str) -> str | None:
    r"""What the last closed \boxed{...} holds, of the last few that open."""
    for match in reversed([*BOXED.finditer(text)][-3:]):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end]
    return None


def marked_answer(text: str) -> str | None:
    r"""What the text itself calls its answer: after the first ####, in the last \boxed{}, after the last "answer is".

    The first ####: a base model goes on with a question and an answer of its own.
    """
    if match := HASHES.search(text):
        return match[1]
    if (content := boxed_content(text)) is not None:
        return content
    matches = ANSWER.findall(text)
    return matches[-1] if matches else None


def answer_number(text: str) -> Fraction | None:
    """The answer's number: of what is marked as answer, else the last number in the text; None when there is none."""
    marked = marked_answer(text)
    if marked is not None:
        result = normalise(marked).rpartition("=")[2]
        match = NUMBER.search(result)
        return None if match is None or OPERATOR.match(result, match.end()) else value(match)
    *_, last = [None, *NUMBER.finditer(normalise(text))]
    return None if last is None else value(last)


def plain_number(text: str) -> Fraction | None:
    """The number that the whole text is, with nothing but a currency or % around it; None when it is anything else."""
    text = normalise(text).strip().rstrip("%").rstrip()
    match = NUMBER.fullmatch(text)
    return None if match is None else value(match)
