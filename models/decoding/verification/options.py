"""From a configuration to a rule: the names by which users choose one, and the parameters that each has."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

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
    if options.kind not in RULES:
        raise ValueError(f"verifier.kind={options.kind!r} is unknown; choose one of {', '.join(RULES)}")
    make, names = RULES[options.kind]
    given: dict[str, Any] = {
        field.name: value
        for field in fields(options)
        if field.name not in ("kind", "distance_budget") and (value := getattr(options, field.name)) is not None
    }
    for name in given:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise ValueError(f"verifier.{name}={given[name]} is no parameter of {options.kind}, which has: {allowed}")
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"verifier.{missing[0]} is missing: {options.kind} needs {', '.join(names)}")
    rule = make(**given)
    if rule.is_lossless and options.distance_budget != math.inf:
        raise ValueError(
            f"verifier.distance_budget={options.distance_budget}: {options.kind} is lossless and spends nothing; leave "
            "it out, or choose a relaxed rule"
        )
    return rule
