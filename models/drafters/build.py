"""Makes the drafter that a configuration names."""

from pathlib import Path
from typing import Any

from ..target.model import Target, TargetOptions
from . import heads, hybrid, model, tree, universal
from .base import Drafter
from .options import NONE, Build, DrafterContext, DrafterOptions, check_drafter
from .text import lookahead, ngram, suffix

BUILDERS: dict[str, Build] = {
    "heads": heads.build,
    "model": model.build,
    "ngram": ngram.build,
    "lookahead": lookahead.build,
    "suffix": suffix.build,
    "hybrid": hybrid.build,
    "tree": tree.build,
    "universal": universal.build,
}


def make_drafter(
    options: DrafterOptions, model: TargetOptions, target: Target, checkpoint: Path | None = None
) -> tuple[Drafter | None, dict[str, Any]]:
    """Return the drafter and its record; None for kind none. ValueError for what does not fit the target.

    model: the options that the target was loaded with. checkpoint: folder of trained heads, for kinds that have some.
    """
    check_drafter(options)
    if options.kind == NONE:
        return None, {"kind": NONE}
    return BUILDERS[options.kind](options, DrafterContext(target, model, checkpoint))
