"""Planted faults: a module made anew with one place of its source changed, and whether a check refuses it."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace


def as_code(module: ModuleType) -> SimpleNamespace:
    """The module's names, as checks take them."""
    return SimpleNamespace(**vars(module))


def planted(module: ModuleType, right: str, wrong: str) -> SimpleNamespace:
    """All names of the module with `wrong` in place of the first `right` in its source."""
    source = inspect.getsource(module)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = ModuleType(f"{module.__name__}_faulty")
    sys.modules[faulty.__name__] = faulty  # dataclasses look their module up
    try:
        exec(compile(source.replace(right, wrong, 1), faulty.__name__, "exec"), faulty.__dict__)
    finally:
        del sys.modules[faulty.__name__]
    return as_code(faulty)


def fails(check: Callable[[SimpleNamespace], None], code: SimpleNamespace) -> bool:
    """Whether a check refuses this code."""
    try:
        check(code)
    except (AssertionError, IndexError, KeyError, TypeError, ValueError):
        return True
    return False
