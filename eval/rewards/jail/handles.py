"""What stands in the judge's process for an object of the answer's: it can be used, never judged.

Its attributes, elements and methods give plain data, or handles again. Comparison, truth, arithmetic, hashing and the
like would be the answer's own idea of them, and are refused.
"""

from collections.abc import Callable
from typing import Any

from eval.rewards.jail.calls import Peer
from eval.rewards.jail.codec import Refused

BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
REFUSED = (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__contains__", "__hash__"),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__int__", "__float__", "__complex__", "__index__", "__round__"),
    *("__trunc__", "__floor__", "__ceil__", "__bytes__", "__format__", "__instancecheck__", "__subclasscheck__"),
    *("__reduce_ex__", "__delattr__", "__delitem__", "__enter__", "__exit__", "__await__", "__aiter__", "__fspath__"),
    *(f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in BINARY),
)
READABLE = ("__name__", "__doc__", "__qualname__")  # of the names that Python itself asks for


class Handle:
    """One object of the answer's."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # What libraries look for to treat an object in a way of its own (`__array_interface__`) is not there.
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __iter__(self) -> Any:
        return Iterator(self._peer.ask("iter", self))

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __len__(self) -> int:
        return int(self._peer.ask("len", self))

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __repr__(self) -> str:
        return str(self._peer.ask("repr", self))


class Iterator:
    """Python wants an iterator from `iter`, whatever the answer gave for one."""

    def __init__(self, source: Any) -> None:
        self.next = source.__next__ if isinstance(source, Handle) else iter(source).__next__

    def __iter__(self) -> "Iterator":
        return self

    def __next__(self) -> Any:
        return self.next()


def refuse(name: str) -> Callable[..., Any]:
    """The method that refuses one operation."""

    def method(self: Handle, *arguments: object) -> Any:
        raise Refused(f"an object of the answer's own, or one that is no plain data, cannot be judged ({name})")

    return method


for _name in REFUSED:
    setattr(Handle, _name, refuse(_name))
