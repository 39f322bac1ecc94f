"""Whether two expressions are equal, as far as math-verify (with sympy) can tell.

Hostile expressions (9^{9^{9^9}}) hold sympy up for ever or fill the memory, so this runs in a process of its own
(`bounded`), which also does without math-verify's own time limit, a signal that only a main thread may set.
"""

import logging


def is_equal(expected: str, got: str, is_marked: bool = True) -> bool:
    """Whether math-verify proves them equal. is_marked: `got` is the answer, not a text that has one somewhere."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    texts = (boxed(expected), boxed(got) if is_marked else got)
    wanted, given = (parse(text, parsing_timeout=None) for text in texts)
    return bool(verify(wanted, given, timeout_seconds=None))


def boxed(text: str) -> str:
    r"""In \boxed{}, by which math-verify knows an answer."""
    return f"\\boxed{{{text.strip().strip('$')}}}"
