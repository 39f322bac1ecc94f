"""From a configuration to a drafter: the names by which users choose one, and the parameters that each has.

A kind is one module here with a function `build(options, context)`, which is imported only when it is chosen. To add a
kind, write that module, a line of KINDS, fields for its new parameters, and conf/drafter/KIND.yaml with their values.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from models.decoding.drafters.base import Drafter
from models.target import Target, TargetOptions

NONE = "none"
DEFAULT_DRAFT_TOKENS = 4
# kind -> the module of its builder, and the options that are its parameters, all of them needed.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    NONE: ("", ()),
    "heads": ("models.decoding.drafters.heads", ()),
    "model": ("models.decoding.drafters.model", ()),
    "ngram": ("models.decoding.drafters.ngram", ("min_match", "max_match")),
    "suffix": ("models.decoding.drafters.suffix", ("min_match", "min_probability", "remembered_tokens")),
    "universal": ("models.decoding.drafters.universal", ("method", "max_sequences")),
}
# Those that draft with trained heads.
WITH_CHECKPOINT = ("heads",)


@dataclass
class DrafterOptions:
    """Where drafted tokens come from.

    kind: one of KINDS. All others are parameters of single kinds, described by their drafters; None: not given.
    """

    kind: str = NONE
    min_match: int | None = None
    max_match: int | None = None
    min_probability: float | None = None
    remembered_tokens: int | None = None
    method: str | None = None
    max_sequences: int | None = None


@dataclass(frozen=True)
class DrafterContext:
    """What a builder may need besides its options.

    model: the options that the target was loaded with; `model.draft` names a second model. checkpoint: the trained
    heads' folder.
    """

    target: Target
    model: TargetOptions
    checkpoint: Path | None = None


# What a `build` gives: the drafter, and its record for checkpoints and results, of kind, name and fingerprint.
Build = Callable[[DrafterOptions, DrafterContext], tuple[Drafter, dict[str, Any]]]


def check_drafter(options: DrafterOptions) -> dict[str, Any]:
    """The given parameters, before any model loads. ValueError for a kind, or a parameter of it, that does not fit."""
    if options.kind not in KINDS:
        raise ValueError(f"drafter.kind={options.kind!r} is unknown; choose one of {', '.join(KINDS)}")
    _, names = KINDS[options.kind]
    given: dict[str, Any] = {
        field.name: value
        for field in fields(options)
        if field.name != "kind" and (value := getattr(options, field.name)) is not None
    }
    for name in given:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise ValueError(f"drafter.{name}={given[name]} is no parameter of {options.kind}, which has: {allowed}")
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"drafter.{missing[0]} is missing: {options.kind} needs {', '.join(names)}")
    return given


def make_drafter(
    options: DrafterOptions, model: TargetOptions, target: Target, checkpoint: Path | None = None
) -> tuple[Drafter | None, dict[str, Any]]:
    """The drafter and its record; None for kind none. ValueError for what does not fit the target.

    model: the options that the target was loaded with. checkpoint: folder of trained heads, for kinds that have some.
    """
    check_drafter(options)
    if options.kind == NONE:
        return None, {"kind": NONE}
    build: Build = importlib.import_module(KINDS[options.kind][0]).build
    return build(options, DrafterContext(target, model, checkpoint))


def default_draft_tokens(drafter: Drafter | None) -> int:
    """K where none is asked for: what its heads were trained for, or all that it can draft, or 4; 0 for None."""
    if drafter is None:
        return 0
    trained = getattr(getattr(drafter, "head", None), "num_draft_tokens", 0)
    return trained or drafter.max_draft_tokens or DEFAULT_DRAFT_TOKENS


def settings_record(options: DrafterOptions) -> dict[str, Any]:
    """The record of a drafter that is nothing but its parameters."""
    settings = ", ".join(f"{name}={value}" for name, value in check_drafter(options).items())
    return {"kind": options.kind, "name": options.kind, "fingerprint": settings}
