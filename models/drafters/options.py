"""From a configuration to a drafter: the names by which users choose one, and the parameters that each has.

A kind is one module here with a function `build(options, context)`, listed in `build`. To add a kind, write that
module, its line there and in KINDS, fields for its new parameters, and conf/drafter/KIND.yaml with their values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..parameters import given_parameters
from ..target.model import Target, TargetOptions
from .base import Drafter

NONE = "none"
DEFAULT_DRAFT_TOKENS = 4
# kind -> the options that are its parameters, all of them needed.
KINDS: dict[str, tuple[str, ...]] = {
    NONE: (),
    "heads": (),
    "model": (),
    "ngram": ("min_match", "max_match"),
    "lookahead": ("num_columns", "ngram_size", "num_guesses"),
    "suffix": ("min_match", "min_probability", "remembered_tokens"),
    "hybrid": ("first", "second", "min_match", "max_match", "min_probability", "remembered_tokens"),
    "tree": ("shape", "num_nodes", "top_k"),
    "universal": ("method", "max_sequences"),
}
# Those that draft with trained heads; a hybrid does where its second source are heads.
WITH_CHECKPOINT = ("heads", "tree")
# What a hybrid is made of.
FIRST_SOURCES, SECOND_SOURCES = ("ngram", "suffix", "model"), ("heads", "model")


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
    first: str | None = None
    second: str | None = None
    num_columns: int | None = None
    ngram_size: int | None = None
    num_guesses: int | None = None
    shape: str | None = None
    num_nodes: int | None = None
    top_k: int | None = None
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
    given = given_parameters("drafter", options, KINDS)
    for name, sources in (("first", FIRST_SOURCES), ("second", SECOND_SOURCES)):
        if name in given and given[name] not in sources:
            raise ValueError(f"drafter.{name}={given[name]!r} is no source for it; choose one of {', '.join(sources)}")
    if given.get("first") == given.get("second") == "model":
        raise ValueError("drafter.first=model and drafter.second=model: one of them must be another source")
    return given


def needs_checkpoint(options: DrafterOptions) -> bool:
    """Whether it drafts with trained heads."""
    return options.kind in WITH_CHECKPOINT or options.second in WITH_CHECKPOINT


def part_of(options: DrafterOptions, kind: str) -> DrafterOptions:
    """One source of a hybrid, with its share of the parameters."""
    return DrafterOptions(kind, **{name: getattr(options, name) for name in KINDS[kind]})


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
