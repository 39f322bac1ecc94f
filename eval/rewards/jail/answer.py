"""The answer's process: executes the answer, then does what the judge's process asks of it, one request at a time.

Nothing here is trusted: the answer may replace all of it. All that leaves this process are messages that `codec` reads
strictly on the other side. It was forked before the tests were read, so they are nowhere in its memory.
"""

import builtins
import functools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from eval.rewards.jail.calls import Peer

ANSWER = "answer"
GENUINE = dict(vars(builtins))


class Remote:
    """An object of the tests (a lambda, an instance of a class of theirs), for the answer to use."""

    def __init__(self, peer: Peer, number: int) -> None:
        vars(self)["_ask"] = functools.partial(self._forward, peer)

    def _forward(self, peer: Peer, operation: str, *arguments: Any) -> Any:
        return peer.ask(operation, self, *arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)


def get_item(target: Any, key: Any) -> Any:
    """target[key]"""
    return target[key]


def set_item(target: Any, key: Any, value: Any) -> None:
    """target[key] = value"""
    target[key] = value


OPERATIONS: Mapping[str, Any] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "getitem": get_item,
    "setitem": set_item,
}


def serve(answer: str, reading: int, writing: int) -> None:
    """Execute the answer, and serve until the judge is gone. Raises `calls.Lost` then."""
    module = ModuleType(ANSWER)
    sys.modules[ANSWER] = module  # where dataclasses and pickle look for it
    names = vars(module)

    def perform(operation: str, *arguments: Any) -> Any:
        if operation == "start":
            exec(compile(answer, f"<{ANSWER}>", "exec"), names)
            return {name: kind_of(value) for name, value in names.copy().items() if is_visible(name)}
        if operation == "value":
            return names[arguments[0]]
        return OPERATIONS[operation](*arguments)

    Peer(reading, writing, Remote, lambda value: True, perform, describe, revive).serve_forever()


def is_visible(name: object) -> bool:
    """Whether tests may use this name of the answer's."""
    return isinstance(name, str) and not name.startswith("__")


def kind_of(value: Any) -> tuple[Any, ...]:
    """What a name stands for: ("callable", object), ("exception", own name, name of its base), ("module",) or
    ("value",)."""
    if isinstance(value, ModuleType):
        return ("module",)
    if isinstance(value, type) and issubclass(value, BaseException):
        return ("exception", value.__name__, value.__mro__[1].__name__)
    return ("callable", value) if callable(value) else ("value",)


def describe(error: BaseException) -> tuple[Any, ...]:
    """An exception as plain data: the names of its classes, and its arguments, or its text if it has others."""
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    if GENUINE.get(kinds[0]) is type(error) and all(type(part) in (int, float, str, bool) for part in error.args):
        return kinds, error.args
    return kinds, (str(error),)


def revive(kinds: tuple[str, ...], arguments: tuple[Any, ...]) -> BaseException:
    """An exception of the tests' code, as the nearest builtin one."""
    kind = next(GENUINE[name] for name in kinds if isinstance(GENUINE.get(name), type))
    return kind(*arguments)
