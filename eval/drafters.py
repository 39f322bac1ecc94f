"""The drafters of one bench: that of `drafter=` and those of `others=`, each under the name that its rows have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.drafters.base import Drafter
from models.drafters.build import make_drafter
from models.drafters.options import NONE, DrafterOptions, check_drafter, default_draft_tokens, needs_checkpoint
from models.target.model import Target, TargetOptions
from train.runtime.presets import read_preset


@dataclass(frozen=True)
class Drafting:
    """A drafter with its record for results. num_draft_tokens: its K where none is asked for."""

    drafter: Drafter
    num_draft_tokens: int
    record: dict[str, Any]


def choose_drafters(first: DrafterOptions, others: Sequence[Any]) -> dict[str, DrafterOptions]:
    """Options by name, before any model loads; of kind none there are none.

    others: names of conf/drafter, or mappings of such a `kind` and values in place of the file's own. A name is the
    kind, and where a kind occurs more than once the parameters in which these differ. ValueError for what is no
    drafter, or one twice.
    """
    given = [(options, check_drafter(options)) for options in (first, *map(_read_other, others))]
    named: dict[str, DrafterOptions] = {}
    for options, parameters in given:
        name = options.kind
        if name == NONE:
            continue
        alike = [values for other, values in given if other.kind == name]
        differing = [key for key, value in parameters.items() if any(other[key] != value for other in alike)]
        if differing:
            name += f" ({', '.join(f'{key} = {parameters[key]}' for key in differing)})"
        if name in named:
            raise ValueError(f"others names {name} a second time; leave it out, or give it other parameters")
        named[name] = options
    return named


def load_drafters(
    chosen: Mapping[str, DrafterOptions], model: TargetOptions, target: Target, checkpoint: Path | None
) -> dict[str, Drafting]:
    """All of them in memory. ValueError for what does not fit the target.

    model: the options that the target was loaded with. checkpoint: folder of trained heads, where one of them needs it.
    """
    loaded = {}
    for name, options in chosen.items():
        folder = checkpoint if needs_checkpoint(options) else None
        drafter, record = make_drafter(options, model, target, folder)
        assert drafter is not None
        loaded[name] = Drafting(drafter, default_draft_tokens(drafter), record)
    return loaded


def _read_other(entry: Any) -> DrafterOptions:
    values = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(values, Mapping) or not isinstance(values.get("kind"), str):
        raise ValueError(
            f"others names {entry!r}: must be a file of conf/drafter, as ngram, or one with other values, as "
            "{kind:suffix,min_match:2}"
        )
    return read_preset(DrafterOptions, "drafter", values["kind"], values, "others")
