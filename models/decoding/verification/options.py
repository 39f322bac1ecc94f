"""From a configuration to a rule: the names by which users choose one, and the parameters that each has."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from models.decoding.parameters import given_parameters
from models.decoding.verification.base import Rule
from models.decoding.verification.blockwise import BlockVerification
from models.decoding.verification.cascades import SpeculativeCascade
from models.decoding.verification.ensemble import StaticEnsemble
from models.decoding.verification.fly import FLy
from models.decoding.verification.lenience import Lenience
from models.decoding.verification.mentored import MentoredDecoding
from models.decoding.verification.thresholds import ProbabilityGap, ThresholdSampling, TypicalAcceptance
from models.decoding.verification.token import TokenVerification

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
    given = given_parameters("verifier", options, RULES)
    rule = RULES[options.kind][0](**given)
    if rule.is_lossless and options.distance_budget != math.inf:
        raise ValueError(
            f"verifier.distance_budget={options.distance_budget}: {options.kind} is lossless and spends nothing; leave "
            "it out, or choose a relaxed rule"
        )
    return rule
