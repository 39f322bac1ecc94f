"""The judge's process: runs the tests, on values that came as plain data. Nothing of the answer's is executed here.

What holds: the tests' own expressions meet builtins and modules that no answer has touched, and values of exactly the
types in `codec`, or handles that refuse to be judged. A verdict is passed only when every test has ended here while the
answer's process kept to the protocol; no channel leads from that process to where the verdict is written.

What cannot hold: that a test is worth its name. One that an empty list or NaN passes, that judges by an object which it
handed out to be changed, or whose expected values the answer knows by heart, is passed by such an answer. Names that
the tests expect of the answer (a helper, a constant) are the answer's; what the tests define or import themselves is
theirs. Not carried over: objects kept on both sides (a list that is handed over and changed later), coroutines, and
`is` between values that were handed over at different calls.
"""

import ast
import builtins
import contextlib
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from eval.rewards.jail.calls import Lost, Peer
from eval.rewards.jail.codec import Refused
from eval.rewards.jail.handles import Handle

MESSAGE_CHARS = 300
TESTS = "tests"
GENUINE = dict(vars(builtins))
# Functions of Python's that the answer may have called here on plain data: none that reads files, code or names.
HARMLESS = ("abs", "all", "any", "bin", "chr", "divmod", "hex", "len", "max", "min", "ord", "pow", "round", "sum")
HARMLESS_MODULES = ("math", "cmath", "_operator")
ALIASES = {"np": "numpy", "pd": "pandas"}


def judge(tests: Sequence[str], reading: int, writing: int) -> tuple[str, str] | None:
    """(passed | failed | memory, what was raised); None when the answer's process ended before the tests did.

    tests: pieces of code that raise when they fail.
    """
    exceptions: dict[str, type[BaseException]] = {}

    def revive(kinds: tuple[str, ...], arguments: tuple[Any, ...]) -> BaseException:
        return revived(kinds, arguments, exceptions)

    peer = Peer(reading, writing, Handle, may_export, perform, describe, revive)
    try:
        namespace = visible_names(peer, peer.ask("start"), tests, exceptions)
        for test in tests:
            exec(compile(test, "<test>", "exec"), namespace)
    except Lost:
        return None
    except MemoryError:
        return None if peer.is_lost else ("memory", "MemoryError")
    # SystemExit and KeyboardInterrupt included: an answer that leaves has not passed.
    except BaseException as error:
        return None if peer.is_lost else ("failed", explain(error))
    return None if peer.is_lost else ("passed", "")


def explain(error: BaseException) -> str:
    """One exception in a line or a few."""
    try:
        return (str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}")[:MESSAGE_CHARS]
    except BaseException:  # its text was to come from the answer
        return type(error).__name__


# ---- names ----


def visible_names(
    peer: Peer, answer: Any, tests: Sequence[str], exceptions: dict[str, type[BaseException]]
) -> dict[str, Any]:
    """What the tests see: their own builtins and modules, and the answer's names.

    A name that hides a builtin is kept from them, unless it is all they use of the answer (`assert sum(1, 2) == 3`).
    """
    used, own = names_in(tests)
    asked_for = [name for name in used - own if name in answer]
    names: dict[str, Any] = {"__name__": TESTS, "__builtins__": GENUINE}
    exceptions |= exception_classes(answer)
    for name, (kind, *rest) in answer.items():
        if type(name) is not str or name.startswith("__") or (name in GENUINE and asked_for != [name]):
            continue
        if kind == "exception":
            names[name] = exceptions[rest[0]]
        elif kind == "callable" and isinstance(rest[0], Handle | type):
            names[name] = rest[0]
        elif kind == "module" and name in used:
            # The one that tests mean by the name, whichever the answer gave it to.
            with contextlib.suppress(ImportError):
                names[name] = __import__(ALIASES.get(name, name))
        elif kind == "value" and name in used:
            with contextlib.suppress(Refused):  # perhaps a name that the tests only happen to use, too
                names[name] = peer.ask("value", name)
    return names


def names_in(tests: Sequence[str]) -> tuple[set[str], set[str]]:
    """The names that tests use, and those that they bind themselves."""
    used: set[str] = set()
    own: set[str] = set()
    for node in (node for test in tests for node in ast.walk(ast.parse(test))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
    return used, own


def exception_classes(answer: Mapping[str, Any]) -> dict[str, type[BaseException]]:
    """A class here for each exception class of the answer's, so that tests can catch it."""
    made: dict[str, type[BaseException]] = {}
    waiting = {rest[0]: rest[1] for kind, *rest in answer.values() if kind == "exception"}
    while waiting:
        ready = [name for name, base in waiting.items() if base not in waiting]
        for name in ready or list(waiting):  # the latter only where the answer's process lies
            base: Any = made.get(waiting[name], GENUINE.get(waiting[name]))
            if not (isinstance(base, type) and issubclass(base, BaseException)):
                base = Exception
            made[name] = type(name, (base,), {"__module__": "answer"})
            del waiting[name]
    return made


def revived(
    kinds: tuple[str, ...], arguments: tuple[Any, ...], exceptions: Mapping[str, type[BaseException]]
) -> BaseException:
    """The exception that the answer raised, as one of this process: its own class's counterpart, or the nearest
    builtin."""
    arguments = tuple(part if type(part) in (int, float, str, bool) else str(type(part)) for part in arguments)
    for name in kinds:
        kind = exceptions.get(name, GENUINE.get(name))
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(*arguments)
            except TypeError:  # some want arguments of their own
                return kind.__new__(kind)
    raise Refused("an exception that is none")


# ---- what the answer may ask of the tests ----


def may_export(value: object) -> bool:
    """Whether the answer may use this: functions and instances that the tests define, and harmless builtin ones."""
    if isinstance(value, BuiltinFunctionType):
        is_builtin = value.__name__ in HARMLESS and GENUINE.get(value.__name__) is value
        return is_builtin or value.__module__ in HARMLESS_MODULES
    if isinstance(value, MethodType):
        return may_export(value.__self__)
    kind = value if isinstance(value, FunctionType | type) else type(value)
    return kind.__module__ == TESTS


def perform(operation: str, target: Any, *arguments: Any) -> Any:
    """What the answer asks: a call on plain data, or a public attribute of an instance."""
    if not may_export(target):
        raise Refused("no object of the tests'")
    if operation == "call":
        args, kwargs = arguments
        return target(*args, **kwargs)
    name, *values = arguments
    if isinstance(target, FunctionType | MethodType | BuiltinFunctionType | type) or name.startswith("_"):
        raise AttributeError(name)
    if operation == "getattr":
        return getattr(target, name)
    if operation == "setattr":
        return setattr(target, name, *values)
    raise Refused("no operation on an object of the tests'")


def describe(error: BaseException) -> tuple[Any, ...]:
    """See `answer.describe`; the text of a failed assertion is none of the answer's business."""
    return tuple(kind.__name__ for kind in type(error).__mro__), ()
