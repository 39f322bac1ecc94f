"""A draft model of another vocabulary: three lossless ways to draft with it (Timor et al. 2025, arXiv 2502.05202).

slem: text, re-tokenised; judged as certain tokens. slrs: text, with the exact mass of every text that begins with the
same token; for draft vocabularies of bytes or characters. tli: the tokens that both vocabularies have. All three share
one translation layer, and none ever rewrites what the target has settled.
"""

from typing import Any

from ...checkpoint import model_record
from ...target.model import Target
from ..model import load_draft
from ..options import DrafterContext, DrafterOptions
from .base import UniversalDrafter
from .slem import StringExactMatch
from .slrs import MAX_SEQUENCES, StringRejectionSampling
from .tli import TokenIntersection

METHODS = ("slem", "slrs", "tli")


def make_universal(method: str, draft: Target, target: Target, max_sequences: int = MAX_SEQUENCES) -> UniversalDrafter:
    """The drafter of this method. max_sequences: bound of slrs alone. ValueError where the two models do not fit it."""
    if method not in METHODS:
        raise ValueError(f"drafter.method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method == "slrs":
        return StringRejectionSampling(draft, target, max_sequences)
    return StringExactMatch(draft, target) if method == "slem" else TokenIntersection(draft, target)


def build(options: DrafterOptions, context: DrafterContext) -> tuple[UniversalDrafter, dict[str, Any]]:
    """See `options.Build`."""
    assert options.method is not None
    assert options.max_sequences is not None
    draft = load_draft(context.model, context.target)
    drafter = make_universal(options.method, draft, context.target, options.max_sequences)
    return drafter, {**model_record(draft), "kind": "universal", "method": options.method}
