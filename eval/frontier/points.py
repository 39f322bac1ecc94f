"""The points of a frontier: which rules, with which parameters, over one pair of target and drafter.

A family is one rule with a grid of parameters (`rules.NAME` of the configuration); its points make one frontier. Builds
what decodes; measures nothing.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from eval.speed.methods import DecoderMethod, Method
from eval.speed.peers import AssistedMethod
from models.decoding.decoder import Decoder
from models.drafters.base import Drafter
from models.ensemble import EnsembleHead
from models.sampling import SamplingParams
from models.target.model import Target
from models.verification.ensemble import DynamicEnsemble
from models.verification.options import VerifierOptions, make_rule

# Families that are always there, or have a meaning of their own. lossless: rules that keep the target's own law, token
# verification first. static: the line that other rules are held against.
PLAIN, LOSSLESS, STATIC, DYNAMIC, PEER = "plain", "lossless", "static", "dynamic", "transformers static"
KEYS = tuple(field.name for field in fields(VerifierOptions))
# Parameters that have a shorter name in a point's.
SHORT = {"target_weight": "w", "distance_budget": "budget", "lenience": "l", "kl_bound": "KL"}


@dataclass(frozen=True)
class Point:
    """One way of decoding. settings: its parameters. decoder: this project's, where it is one."""

    name: str
    family: str
    method: Method
    decoder: Decoder | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Who decodes: target, drafter, and the longest block. draft: the model behind the drafter, where there is one."""

    target: Target
    drafter: Drafter
    num_draft_tokens: int
    draft: Target | None = None


@dataclass(frozen=True)
class Dynamic:
    """A trained ensemble head under its name. settings: what its checkpoint tells (lam, folder, ...)."""

    name: str
    head: EnsembleHead
    settings: dict[str, Any] = field(default_factory=dict)


def expand(name: str, spec: Mapping[str, Any]) -> list[VerifierOptions]:
    """One `VerifierOptions` for every combination of the values that are lists. ValueError for what no rule takes."""
    if not isinstance(spec, Mapping):
        raise ValueError(
            f"rules.{name}={spec}: must be a rule with its parameters, as {{kind: static, target_weight: 0.5}}"
        )
    if unknown := [str(key) for key in spec if key not in KEYS]:
        raise ValueError(f"rules.{name} has {', '.join(unknown)}, which no rule takes; choose among {', '.join(KEYS)}")
    values = [value if isinstance(value, list) else [value] for value in spec.values()]
    combinations = [dict(zip(spec, choice, strict=True)) for choice in itertools.product(*values)]
    options = [VerifierOptions(**one) for one in combinations]
    for one in options:
        try:
            if make_rule(one).is_lossless:
                raise ValueError(f"{one.kind} is lossless, and is measured anyway")
        except (TypeError, ValueError) as error:
            raise ValueError(f"rules.{name}: {error}") from error
    return options


def expand_all(rules: Mapping[str, Mapping[str, Any] | None]) -> dict[str, list[VerifierOptions]]:
    """Every family of the configuration; null leaves one out. ValueError for a family's name that is taken."""
    families = {name: expand(name, spec) for name, spec in rules.items() if spec is not None}
    for taken in (PLAIN, LOSSLESS, DYNAMIC, PEER):
        if taken in families:
            raise ValueError(f"rules.{taken}: that name has a meaning already; give the rule another one")
    if any(options.kind != STATIC for options in families.get(STATIC, ())):
        raise ValueError("rules.static is the line that others are held against: its kind must be static")
    return families


def describe(name: str, options: VerifierOptions) -> tuple[str, dict[str, Any]]:
    """A point's name, and its parameters."""
    defaults = VerifierOptions()
    given = {key: getattr(options, key) for key in KEYS if getattr(options, key) != getattr(defaults, key)}
    given.pop("kind", None)
    words = [
        value if isinstance(value, str) else f"{SHORT.get(key, key)} = {value:g}"
        for key, value in sorted(given.items(), key=lambda pair: KEYS.index(pair[0]))
    ]
    # The budget comes last: it bounds what stands before it.
    return ", ".join([name, *sorted(words, key=lambda word: word.startswith(SHORT["distance_budget"]))]), given


def make_points(
    pair: Pair,
    families: Mapping[str, Sequence[VerifierOptions]],
    dynamics: Sequence[Dynamic],
    peer_weights: Sequence[float],
    sampling: SamplingParams,
    batch_size: int,
) -> list[Point]:
    """Every point, in the order of their turns. ValueError for two of one name."""

    def decode(name: str, family: str, decoder: Decoder, settings: dict[str, Any]) -> Point:
        return Point(name, family, DecoderMethod(name, decoder, sampling, batch_size), decoder, settings)

    def judged(verifier: VerifierOptions) -> Decoder:
        rule = make_rule(verifier)
        return Decoder(pair.target, pair.drafter, pair.num_draft_tokens, rule, verifier.distance_budget)

    points = [decode(PLAIN, PLAIN, Decoder(pair.target), {})]
    for name, kind in (("lossless, token", "lossless"), ("lossless, block", "block")):
        points.append(decode(name, LOSSLESS, judged(VerifierOptions(kind)), {}))
    for family, grid in families.items():
        for verifier in grid:
            name, settings = describe(family, verifier)
            points.append(decode(name, family, judged(verifier), settings))
    for dynamic in dynamics:
        rule = DynamicEnsemble(dynamic.head.weigh)
        decoder = Decoder(pair.target, pair.drafter, pair.num_draft_tokens, rule)
        points.append(decode(dynamic.name, DYNAMIC, decoder, dynamic.settings))
    points += _peers(pair, peer_weights, sampling)
    names = [point.name for point in points]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two points are called {repeated[0]!r}; leave out a repeated parameter or checkpoint")
    return points


def _peers(pair: Pair, weights: Sequence[float], sampling: SamplingParams) -> list[Point]:
    """transformers' own static ensemble; none where the drafter is no model."""
    if pair.draft is None:
        return []
    draft, count = pair.draft, pair.num_draft_tokens
    points = []
    for weight in weights:
        name = f"{PEER}, w = {weight:g}"
        method = AssistedMethod(
            name, pair.target, sampling, 1, draft=draft, num_draft_tokens=count, target_weight=weight
        )
        points.append(Point(name, PEER, method, settings={"target_weight": weight}))
    return points
