r"""Reading the number that a text gives as its answer, exactly: a `Fraction`, never a float.

Read: 18, -3, 1,234.50, .5, 3/4, 1 1/2, 2½, 1e3, \frac{3}{4}, in the digits of any script; in emphasis, brackets or
quotation marks, with a currency before, and with words, units or % behind, also where a script puts no space between.
Not read: numbers in words, multipliers (of "3 million" the 3), decimal commas and other grouping (1.234,50), sums
("3 + 4" is none, "3 + 4 = 7" is 7). A per cent sign counts as a unit: 25% is 25, as GSM8K writes it.
"""

import re
from fractions import Fraction

# Full-width signs, the minus sign and the dashes that stand for it, the slash of ½ and the like.
FOLDED = str.maketrans("\u2212\u2013\uff0d\u2044\uff0b\uff0e\uff05\uff0f\uff1d", "---/+.%/=") | {
    ord(sign): f" {fraction}" for sign, fraction in {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4"}.items()
}
FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
# A thousands separator other than a comma: a space that does not break, or LaTeX's, or an apostrophe.
SEPARATOR = r"(?:\{,\}|\\[,;!]|\\ |~|[\u00a0\u2006-\u2009\u202f'’])"
MARKUP = (
    (re.compile(rf"(?<=[0-9]){SEPARATOR}(?=[0-9]{{3}}(?![0-9]))"), ","),
    (re.compile(r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), "°"),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\\(?:left|right|displaystyle|approx|sim|qquad|quad|bf|rm)(?![A-Za-z])"), " "),
    (re.compile(r"\\[,;:! ()\[\]]|\*\*"), " "),
    # Emphasis: *18*, __18__. An underscore within a name is none.
    (re.compile(r"(?<![\w)*])\*(?=\S)([^*\n]*)(?<=\S)\*(?![\w(*])"), r" \1 "),
    (re.compile(r"(?<![^\W_])_+|_+(?![^\W_]|\{)"), " "),
)
STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|boldsymbol|underline)\s*\{([^{}]*)\}")
MAX_STYLES = 3  # one in the other

# Letters of scripts that put no space before a number; those of other scripts make it part of a name, as in x2.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
ENDS = r"(?![0-9]|[.,][0-9])"
NUMBER = re.compile(
    # Not part of a name, an index, an exponent or a longer number: x2, a_1, m^2, 1,23.
    rf"(?<![^\W{SPACELESS}])(?<![\^±])(?<![0-9][.,])(?<!\^\{{)(?<!_\{{)"
    # A minus between two things subtracts, and is no sign.
    r"(?:(?<![)\]}])(?P<minus>-))?[$€£¥₩₹]?"
    rf"(?:(?:(?P<whole>{INTEGER}) +)?(?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?!/?[0-9])"
    rf"|(?P<decimal>(?:{INTEGER}?\.[0-9]+|{INTEGER}){ENDS}(?:[eE][-+]?[0-9]{{1,2}}(?![0-9.]))?)(?![eE][-+]?[0-9])"
    # Digits that are grouped in another way than by thousands are no number.
    r"|(?P<unread>[0-9]+(?:[.,][0-9]+)+|[0-9.]+[eE][-+]?[0-9]+))"
)
MAX_CHARS = 64  # of one number: Python itself refuses to read those of thousands of digits
GROUPED = re.compile(r"(\s*[-$€£¥₩₹]*[0-9]{1,3})((?: [0-9]{3})+)(?![0-9.,/]|\s*[0-9])")
# What makes a number behind which it stands a part of something to be computed. "!" and "/h" do so in a formula alone.
OPERATOR = re.compile(r"\s*(?:\\[A-Za-z]|[\^×÷]|[*+/]\s*[-0-9(\\{]|[*+]\s*[A-Za-z]|:[0-9]|-\s*[0-9])")
IN_FORMULA = re.compile(r"\s*[!*+/^]")
COMMAND = re.compile(r"\\[A-Za-z]+\s*(?:\[[^\]]*\]\s*)?[{(]?\s*$")

# "#### 18", but not the headings of Markdown: "#### Step 2", "#### 1. Eggs".
HASHES = re.compile(r"####[ \t]*+(?![A-Za-z]|[0-9]+[.):]\s+\S)([^\n]+)")
BOXED = re.compile(r"\\f?boxed\s*\{")
ELEMENT = re.compile(r"(?i)<answer>([^<]*[0-9][^<]*)")
ANSWER = re.compile(r"(?i)\banswer\b\s*(?:is\b|[:=])(?:[\s:]|\*\*|__|[*_](?=\s))*([^\n]+)")


def normalise(text: str) -> str:
    """The text with its numbers in plain notation."""
    text = FOREIGN_DIGIT.sub(lambda digit: str(int(digit[0])), text.translate(FOLDED))
    for _ in range(MAX_STYLES):
        text = STYLED.sub(r" \1 ", text)
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return text


def value(match: re.Match[str]) -> Fraction | None:
    """What a match of NUMBER stands for; None for a division by zero, far too many digits, or grouping not read."""
    if len(match[0]) > MAX_CHARS or match["unread"]:
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
    return find_marked(text)[0]


def find_marked(text: str) -> tuple[str | None, bool]:
    """`marked_answer`, and whether it is a formula rather than a line of text."""
    if match := HASHES.search(text):
        return match[1], False
    if (content := boxed_content(text)) is not None:
        return content, True
    matches = ELEMENT.findall(text) or ANSWER.findall(text)
    return (matches[-1] if matches else None), False


def answer_number(text: str) -> Fraction | None:
    """The answer's number: of what is marked as answer, else the last number in the text; None when there is none."""
    marked, is_formula = find_marked(text)
    if marked is None:
        *_, last = [None, *NUMBER.finditer(normalise(text))]
        return None if last is None else value(last)
    result = normalise(marked).rpartition("=")[2]
    result = GROUPED.sub(lambda match: match[1] + match[2].replace(" ", ","), result, count=1)
    match = NUMBER.search(result)
    if match is None or COMMAND.search(result[: match.start()]) or OPERATOR.match(result, match.end()):
        return None
    if is_formula and IN_FORMULA.match(result, match.end()):
        return None
    return value(match)


def plain_number(text: str) -> Fraction | None:
    """The number that the whole text is, with nothing but a currency or % around it; None when it is anything else."""
    text = normalise(text).strip().rstrip("%").rstrip()
    match = NUMBER.fullmatch(text)
    return None if match is None else value(match)
