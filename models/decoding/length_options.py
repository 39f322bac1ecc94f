"""From a configuration to how much a block drafts: the names by which users choose it, and their parameters."""

from dataclasses import dataclass

from ..drafters.base import Drafter
from ..drafters.stop import CONFIDENCE, ENTROPY, DraftStop, with_stop
from ..parameters import given_parameters
from .length import AdaptiveLength, FixedLength, Length

FIXED, ADAPTIVE = "fixed", "adaptive"
# kind -> what the bench says of K under it, and the options that are its parameters, all of them needed.
LENGTHS: dict[str, tuple[str, tuple[str, ...]]] = {
    FIXED: ("K = {}", ()),
    ADAPTIVE: ("adaptive K to {}", ()),
    ENTROPY: ("K to {} by entropy", ("threshold", "scale")),
    CONFIDENCE: ("K to {} by confidence", ("threshold",)),
}


@dataclass
class LengthOptions:
    """How much of K a block drafts.

    kind: one of LENGTHS; fixed and adaptive are described in `length`, the others in `drafters.stop`, with their
    parameters. None: not given.
    """

    kind: str = FIXED
    threshold: float | None = None
    scale: float | None = None


def check_length(options: LengthOptions) -> DraftStop | None:
    """What ends drafts early, if anything does. ValueError for a kind, or a parameter of it, that does not fit."""
    given = given_parameters("length", options, {kind: names for kind, (_, names) in LENGTHS.items()})
    return DraftStop(options.kind, **given) if given else None


def make_length(options: LengthOptions, drafter: Drafter, num_draft_tokens: int) -> tuple[Drafter, Length]:
    """The drafter as it is to draft, and what chooses its lengths. ValueError for a drafter that cannot stop."""
    if (stop := check_length(options)) is not None:
        drafter = with_stop(drafter, stop)
    make = AdaptiveLength if options.kind == ADAPTIVE else FixedLength
    return drafter, make(num_draft_tokens)


def name_length(options: LengthOptions, num_draft_tokens: int) -> str:
    """For tables: K, and what becomes of it."""
    return LENGTHS[options.kind][0].format(num_draft_tokens)
