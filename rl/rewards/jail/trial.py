"""One answer and its tests, executed in the process that was shut in for them.

An answer that was written to please the tests rather than to solve the task meets: tests with builtins of their own,
which the answer cannot replace; results judged only when their comparison is not the answer's own; and a verdict that
counts only when the last test has ended. Code that searches the interpreter's memory (frames of callers, say) can
still forge a verdict, and what it patches in other modules stays patched: the jail holds either way, the score may not.
"""

import ast
import builtins
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

MESSAGE_CHARS = 300
ANSWER = "answer"
PLAIN = (bool, int, float, complex, str, bytes, type(None))
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")
# Taken before the answer runs. Methods of these two need no builtin to put everything back.
GENUINE = dict(vars(builtins))
LIVE = vars(builtins)


def run(answer: str, tests: Sequence[str]) -> tuple[str, str]:
    """(passed | failed | memory, what was raised). `tests` are pieces of code that raise when they fail."""
    try:
        module = ModuleType(ANSWER)
        sys.modules[ANSWER] = module  # where dataclasses and pickle look for it
        exec(compile(answer, f"<{ANSWER}>", "exec"), vars(module))
        LIVE.update(GENUINE)
        namespace = visible_names(vars(module), tests)
        for test in tests:
            exec(compile(test, "<test>", "exec"), namespace)
    except MemoryError:
        return "memory", "MemoryError"
    # SystemExit and KeyboardInterrupt included: an answer that leaves has not passed.
    except BaseException as error:
        LIVE.update(GENUINE)
        return "failed", f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]
    return "passed", ""


def visible_names(answer: Mapping[str, Any], tests: Sequence[str]) -> dict[str, Any]:
    """What the tests see: their own builtins and the answer's names, the functions among them judged.

    A name that hides a builtin is kept from them, unless that is all they use of the answer (`assert sum(1, 2) == 3`).
    """
    used = {node.id for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    is_asked_for_builtins = not any(name in answer and name not in GENUINE for name in used)
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": GENUINE}
    for name, value in answer.items():
        if not name.startswith("__") and (name not in GENUINE or is_asked_for_builtins):
            names[name] = judged(value) if callable(value) and not isinstance(value, type) else value
    return names


def judged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose result is refused when it brings its own idea of equality."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        LIVE.update(GENUINE)
        require_plain(result)
        return result

    return functools.update_wrapper(call, function)


def require_plain(value: object) -> None:
    """TypeError for an object, however deep in containers, that the answer itself taught to compare."""
    kind = type(value)
    if kind in PLAIN:
        return
    for name in COMPARISONS:
        method = getattr(kind, name, None)
        if isinstance(method, FunctionType) and method.__code__.co_filename.startswith(("<answer", "<string", "<test")):
            raise TypeError(f"a result of type {kind.__name__} with a {name} of its own cannot be judged")
    if isinstance(value, dict):
        require_plain([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for element in value:
            require_plain(element)
