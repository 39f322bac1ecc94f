"""The check of options that choose a kind and give that kind's parameters, as those of drafters and verifiers do."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any


def given_parameters(group: str, options: Any, kinds: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The parameters that `options` gives for its kind, all that the kind has.

    group: the options' name in messages. options: a dataclass with a field `kind`; its fields that stand for None
    where they are not given are parameters. kinds: kind -> the names of its parameters. ValueError for an
    unknown kind, a parameter that it lacks, or one that belongs to another kind.
    """
    if options.kind not in kinds:
        raise ValueError(f"{group}.kind={options.kind!r} is unknown; choose one of {', '.join(kinds)}")
    names = kinds[options.kind]
    parameters = [field.name for field in fields(options) if field.default is None]
    given = {name: value for name in parameters if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise ValueError(f"{group}.{name}={value} is no parameter of {options.kind}, which has: {allowed}")
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"{group}.{missing[0]} is missing: {options.kind} needs {', '.join(names)}")
    return given
