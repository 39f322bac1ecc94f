"""Modules made anew from changed source, for faults that are planted to see that a check catches them."""

from types import ModuleType


def blank_module(name: str, package: str | None) -> ModuleType:
    """Return an empty module whose relative imports are those of the package."""
    module = ModuleType(name)
    module.__package__ = package
    return module
