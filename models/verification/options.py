"""From a configuration to a rule: the names by which users choose one, and the parameters that each has."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..parameters import given_parameters
from .base import Rule
from .blockwise import BlockVerification
from .cascades import SpeculativeCascade
from .ensemble import StaticEnsemble
from .fly import FLy
from .lenience import Lenience
from .mentored import MentoredDecoding
from .thresholds import ProbabilityGap, ThresholdSampling, TypicalAcceptance
from .token import TokenVerification

# kind -> its rule, and the options that are its parameters, by name.
RULES: dict[str, tuple[Callable[..., Rule], tuple[str, ...]]] = {
    "lossless": (TokenVerification, ()),
    "block": (BlockVerification, ()),
    "static": (StaticEnsemble, ("target_weight",)),
    "lenience": (Lenience, ("lenience",)),
    "mentored": (MentoredDecoding, ("kl_bound",)),
    "cascade": (SpeculativeCascade, ("deferral", "alpha")),
    "typical": (TypicalAcceptance, ("epsilon", "delta")),
    "gap": (ProbabilityGap, ("top_k", "gap")),
    "thresholds": (ThresholdSampling, ("threshold_single", "threshold_acc")),
    "fly": (FLy, ("entropy", "window")),
}


@dataclass
class VerifierOptions:
    """The rule that judges a block.

    kind: one of RULES. distance_budget: most that the certificate of a sequence may reach. All others are parameters of
    single kinds, described by their rules; None: not given.
    """

    kind: str = "lossless"
    distance_budget: float = math.inf
    target_weight: float | None = None
    lenience: float | None = None
    kl_bound: float | None = None
    deferral: str | None = None
    alpha: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    top_k: int | None = None
    gap: float | None = None
    threshold_single: float | None = None
    threshold_acc: float | None = None
    entropy: float | None = None
    window: int | None = None


def make_rule(options: VerifierOptions) -> Rule:
    """The rule. ValueError for an unknown kind, a parameter that it lacks, or one that belongs to another kind."""
    given = given_parameters("verifier", options, {kind: names for kind, (_, names) in RULES.items()})
    rule = RULES[options.kind][0](**given)
    if rule.is_lossless and options.distance_budget != math.inf:
        raise ValueError(
            f"verifier.distance_budget={options.distance_budget}: {options.kind} is lossless and spends nothing; leave "
            "it out, or choose a relaxed rule"
        )
    return rule
