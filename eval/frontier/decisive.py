"""Where a trained head spends its trust on the testbed: w over the tokens that the prompt decides, and over the others.

The testbed's language says which tokens are which (`train.data.testbed_language.decisive_places`); a real task does
not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from eval.frontier.points import DYNAMIC, Point
from eval.frontier.tokens_html import TracedToken, trace
from models.decoding.rows import GenerationParams
from train.data.testbed_language import decisive_places


@dataclass(frozen=True)
class WeightsFound:
    """w of the verified tokens of each sort."""

    point: str
    decisive: list[float]
    free: list[float]


def find_weights(
    points: Sequence[Point], prompts: Sequence[Sequence[int]], params: GenerationParams, batch_size: int
) -> list[WeightsFound]:
    """One completion of each prompt under each dynamic point. Tokens that were not verified have no w."""
    found = []
    for point in points:
        if point.family == DYNAMIC and point.decoder is not None:
            traced = trace(point.decoder, prompts, params, batch_size)
            found.append(sort_weights(point.name, [(result.tokens, tokens) for result, tokens in traced]))
    return found


def sort_weights(point: str, texts: Sequence[tuple[Sequence[int], Sequence[TracedToken]]]) -> WeightsFound:
    """Token ids of each text, and what is known of them."""
    pairs = [
        (is_decisive, token.weight)
        for ids, tokens in texts
        for is_decisive, token in zip(decisive_places(ids), tokens, strict=True)
    ]
    decisive, free = ([w for one, w in pairs if one is wanted and w is not None] for wanted in (True, False))
    return WeightsFound(point, decisive, free)


def render_weights(found: Sequence[WeightsFound]) -> str:
    """A Markdown table: mean w, and how many tokens it is the mean of."""
    lines = ["| rule | w over decisive tokens | w over free tokens |", "| --- | ---: | ---: |"]
    lines += [f"| {one.point} | {_mean(one.decisive)} | {_mean(one.free)} |" for one in found]
    return "\n".join(lines)


def _mean(weights: Sequence[float]) -> str:
    return f"{fmean(weights):.3f} ({len(weights)} tokens)" if weights else "–"
