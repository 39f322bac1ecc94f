"""Values as text, between the answer's process and the judge's: plain data, read strictly.

Neither pickle nor marshal: what comes from the answer must not be able to build, import or call anything here. Plain
are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, a dict's views, range,
slice, Ellipsis; of the standard library Counter, OrderedDict, defaultdict (its factory a builtin type or none), deque,
Decimal, Fraction, date, time, datetime, timedelta; builtin types by name; and numpy's numbers, and its arrays where the
reader has imported numpy. An object of a class derived from a builtin one of these is reduced to it, with nothing of
its own.

Containers that can change are listed in a table, the innermost first, so that what is shared stays shared and nothing
can contain itself. One that came with the request is named by its place there: the reader then updates its own.
"""

import builtins
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_BYTES = 16 << 20
MAX_DEPTH = 100
SMALL = 1 << 62  # larger integers travel as hexadecimal text, which has no limit on digits
BUILTINS: dict[str, Any] = dict(vars(builtins))
CHANGEABLE = ("list", "set", "bytearray", "deque", "OrderedDict", "defaultdict", "Counter", "dict")
VIEWS = {"dict_keys": 1, "dict_values": 1, "dict_items": 2}
NUMPY_KINDS = "biufcSUmM"


class Refused(BaseException):
    """No value that can be judged. No `Exception`, lest a test take it for one that the answer raised."""


class Writer:
    """Writes one message. export: the node for what is no plain data, or Refused."""

    def __init__(self, export: Callable[[Any], list[Any]], received: Sequence[Any] = ()) -> None:
        """received: the changeable containers of the request that this message replies to."""
        self.export = export
        self.origins = {id(container): number for number, container in enumerate(received)}
        self.table: list[list[Any]] = []
        self.containers: list[Any] = []  # in the table's order; also keeps their ids from being used again
        self.places: dict[int, int] = {}
        self.unfinished: set[int] = set()

    def write(self, value: Any) -> bytes:
        """The message. Refused when it is too deep, too large, or contains itself."""
        root = self.node(value, 0)
        text = json.dumps([self.table, root], separators=(",", ":")).encode()
        if len(text) > MAX_BYTES:
            raise Refused(f"a value of more than {MAX_BYTES >> 20} MB cannot be judged")
        return text

    def nodes(self, values: Iterable[Any], depth: int) -> list[Any]:
        """The node of each."""
        return [self.node(value, depth + 1) for value in values]

    def node(self, value: Any, depth: int) -> Any:
        """JSON for one value: None, bool, small int, float and str as they are, else a list that begins with a tag."""
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            return value if -SMALL < value < SMALL else ["int", hex(value)]
        if kind is str:
            return value if value.isascii() or not has_surrogate(value) else text_node(value)
        if depth > MAX_DEPTH:
            raise Refused(f"a value nested more than {MAX_DEPTH} deep cannot be judged")
        name = plain_name(kind)
        if name in CHANGEABLE:
            return self.reference(value, name, depth)
        if name in ("tuple", "frozenset", *VIEWS):
            return [name, self.nodes(iterate(name, value), depth)]
        if name in LEAVES:
            return [name, *self.nodes(LEAVES[name][0](value), depth)]
        if kind is type and (builtin := builtin_name(value)) is not None:
            return ["type", builtin]
        if kind.__module__ == "numpy" and (reduced := numpy_node(value)) is not None:
            return reduced if kind.__name__ == "ndarray" else self.node(reduced[0], depth + 1)
        return self.derived(value, depth)

    def derived(self, value: Any, depth: int) -> Any:
        """An object of a derived class as what it is derived from; anything else is exported."""
        for base in type(value).__mro__[1:]:
            if base in REDUCTIONS:
                return self.node(REDUCTIONS[base](value), depth)
        return self.export(value)

    def reference(self, value: Any, name: str, depth: int) -> list[Any]:
        """The place in the table of a container that can change."""
        key = id(value)
        if key in self.unfinished:
            raise Refused("a value that contains itself cannot be judged")
        if key not in self.places:
            self.unfinished.add(key)
            entry = [name, self.origins.get(key), *self.content(value, name, depth)]
            self.unfinished.remove(key)
            self.places[key] = len(self.table)
            self.table.append(entry)
            self.containers.append(value)
        return ["at", self.places[key]]

    def content(self, value: Any, name: str, depth: int) -> list[Any]:
        """What stands in the table of one container: its elements (a dict's as pairs), then what else it has."""
        if name == "bytearray":
            return [value.hex()]
        if name == "deque":
            return [self.nodes(value, depth), value.maxlen]
        if name in ("list", "set"):
            return [self.nodes(list(value), depth)]
        pairs = [self.nodes(pair, depth) for pair in list(value.items())]
        if name != "defaultdict":
            return [pairs]
        return [pairs, builtin_name(value.default_factory)]


class Reader:
    """Reads one message. resolve: what a node that is no plain data stands for."""

    def __init__(self, resolve: Callable[[str, int], Any], sent: Sequence[Any] = ()) -> None:
        """sent: the changeable containers of the request that this message replies to; updated as it says."""
        self.resolve = resolve
        self.sent = dict(enumerate(sent))
        self.containers: list[Any] = []

    def read(self, text: bytes) -> Any:
        """The value. Refused for anything that `Writer` does not write."""
        try:
            table, root = json.loads(text)
            for name, origin, *content in table:
                made = self.container(name, *content)
                self.containers.append(made if origin is None else self.update(origin, made))
            return self.value(root, 0)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Refused(f"a message that cannot be read: {type(error).__name__}: {error}") from None

    def values(self, nodes: Any, depth: int = 0) -> list[Any]:
        """The value of each node."""
        return [self.value(node, depth + 1) for node in nodes]

    def value(self, node: Any, depth: int) -> Any:
        """The value of one node."""
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise ValueError("an object")
            return node
        if depth > 2 * MAX_DEPTH:
            raise ValueError("too deep")
        tag, *parts = node
        if tag == "at":
            (place,) = parts
            return self.containers[index(place)]
        if tag in ("own", "yours"):
            return self.resolve(tag, index(*parts))
        if tag == "type":
            return builtin_type(*parts)
        if tag == "tuple":
            return tuple(self.values(parts[0], depth))
        if tag == "frozenset":
            return frozenset(self.values(parts[0], depth))
        if tag in VIEWS:
            return make_view(tag, self.values(parts[0], depth))
        if tag == "ndarray":
            return make_array(*parts)
        return LEAVES[tag][1](*self.values(parts, depth))

    def container(self, name: str, content: Any, more: Any = None) -> Any:
        """A new container."""
        if name == "bytearray":
            return bytearray.fromhex(content)
        if name == "list":
            return self.values(content)
        if name == "set":
            return set(self.values(content))
        if name == "deque":
            return stdlib("collections", name)(self.values(content), None if more is None else index(more))
        pairs = dict(map(self.values, content))
        if name == "dict":
            return pairs
        if name == "defaultdict":
            factory = None if more is None else builtin_type(more)
            return stdlib("collections", name)(factory, pairs)
        if name not in CHANGEABLE:
            raise ValueError("an unknown container")
        return stdlib("collections", name)(pairs)

    def update(self, origin: Any, made: Any) -> Any:
        """The reader's own container, once, with what the new one holds."""
        original = self.sent.pop(index(origin))
        if plain_name(type(original)) != plain_name(type(made)):
            raise ValueError("a container of another type")
        original.clear()
        (original.update if isinstance(original, set | dict) else original.extend)(made)
        return original


# ---- the kinds of plain data ----


def plain_name(kind: type) -> str:
    """The tag of exactly this type, or ""."""
    if kind.__module__ in ("builtins", "collections", "decimal", "fractions", "datetime"):
        name = kind.__name__
        if (name in CHANGEABLE or name in LEAVES or name in VIEWS or name in ("tuple", "frozenset")) and kind is (
            VIEW_TYPES.get(name) or BUILTINS.get(name) or getattr(sys.modules.get(kind.__module__), name, None)
        ):
            return name
    return ""


VIEW_TYPES: dict[str, type] = {
    "dict_keys": type({}.keys()),
    "dict_values": type({}.values()),
    "dict_items": type({}.items()),
}
VIEW_TYPES["ellipsis"] = type(...)


def stdlib(module: str, name: str) -> Any:
    """A class of the standard library, imported when first wanted. Never a name that came in a message unchecked."""
    return getattr(__import__(module), name)


def has_surrogate(value: str) -> bool:
    """Whether JSON could join two halves into one character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def text_node(value: str) -> list[str]:
    """Text with halves of characters in it."""
    return ["str", value.encode("utf-32-le", "surrogatepass").hex()]


def text(node: Any) -> str:
    """The node, which must be text."""
    if not isinstance(node, str):
        raise TypeError("no text where text must be")
    return node


def builtin_name(kind: object) -> str | None:
    """The name of a builtin type, None for anything else."""
    name = kind.__name__ if isinstance(kind, type) else ""
    return name if name and BUILTINS.get(name) is kind else None


def builtin_type(node: Any) -> type:
    """The builtin type of this name."""
    kind = BUILTINS[text(node)]
    if not isinstance(kind, type):
        raise TypeError("no type where a type must be")
    return kind


def index(node: Any) -> int:
    """The node, which must be a count."""
    if type(node) is not int or node < 0:
        raise TypeError("no count where a count must be")
    return node


def iterate(name: str, value: Any) -> Iterable[Any]:
    """The elements of a tuple, frozenset or view."""
    return map(tuple, value) if name == "dict_items" else list(value)


def make_view(name: str, values: list[Any]) -> Any:
    """A view of a dict that holds these."""
    if name == "dict_keys":
        return dict.fromkeys(values).keys()
    return dict(enumerate(values)).values() if name == "dict_values" else dict(values).items()


def numpy_node(value: Any) -> list[Any] | None:
    """["ndarray", ...] for an array of plain numbers or text, [number] for a number of numpy's, else None."""
    kind = value.dtype.kind if hasattr(value, "dtype") else ""
    if type(value).__name__ != "ndarray":
        return [value.item()] if kind in ("b", "i", "u", "f", "c", "S", "U") else None
    return ["ndarray", value.dtype.str, list(value.shape), value.tobytes().hex()] if kind in NUMPY_KINDS else None


def make_array(kind: Any, shape: Any, content: Any) -> Any:
    """numpy's array, where the tests have imported numpy: nothing else can compare it."""
    numpy = sys.modules.get("numpy")
    if numpy is None or numpy.dtype(text(kind)).kind not in NUMPY_KINDS:
        raise ValueError("an array, and tests that do not use numpy")
    return numpy.frombuffer(bytearray.fromhex(content), text(kind)).reshape([index(size) for size in shape])


# How values without parts that can change are taken apart and made: (parts of a value, value of parts).
LEAVES: Mapping[str, tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    "int": (lambda value: [hex(value)], lambda digits: int(text(digits), 16)),
    "str": (lambda value: text_node(value)[1:], lambda code: bytes.fromhex(code).decode("utf-32-le", "surrogatepass")),
    "bytes": (lambda value: [value.hex()], bytes.fromhex),
    "complex": (lambda value: [value.real, value.imag], lambda real, imag: complex(real, imag)),
    "range": (lambda value: [value.start, value.stop, value.step], range),
    "slice": (lambda value: [value.start, value.stop, value.step], slice),
    "ellipsis": (lambda value: [], lambda: ...),
    "Decimal": (lambda value: [str(value)], lambda digits: stdlib("decimal", "Decimal")(text(digits))),
    "Fraction": (
        lambda value: [value.numerator, value.denominator],
        lambda *terms: stdlib("fractions", "Fraction")(*terms),
    ),
    "date": (lambda value: [value.isoformat()], lambda day: stdlib("datetime", "date").fromisoformat(day)),
    "time": (lambda value: [value.isoformat()], lambda hour: stdlib("datetime", "time").fromisoformat(hour)),
    "datetime": (lambda value: [value.isoformat()], lambda when: stdlib("datetime", "datetime").fromisoformat(when)),
    "timedelta": (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda *parts: stdlib("datetime", "timedelta")(*parts),
    ),
}
# By the C level's own methods: those of the derived class are not asked.
REDUCTIONS: Mapping[type, Callable[[Any], Any]] = {
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0) if value else float.fromhex(float.hex(value)),
    complex: lambda value: complex(complex.__getattribute__(value, "real"), complex.__getattribute__(value, "imag")),
    str: lambda value: str.__getitem__(value, slice(None)) if type(value) is str else "".join([value]),
    bytes: lambda value: b"".join([value]),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    bytearray: lambda value: bytearray(memoryview(value)),
}
