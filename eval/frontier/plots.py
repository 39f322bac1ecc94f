"""The frontier as a picture: acceptance to the right, reward upwards, intervals as bars. Needs matplotlib, no screen.

Draws figures that were computed elsewhere.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.frontier.frontier import Frontier, PointFigures
from eval.frontier.points import DYNAMIC, LOSSLESS, PLAIN, STATIC
from eval.frontier.stats import Estimate, undominated
from models.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers; shapes tell the rules apart without colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D1F", "#7F7F7F")
MARKERS = ("s", "^", "v", "D", "P", "X", "<", ">", "h")
DYNAMIC_COLOUR = "#D55E00"
FORMATS = ("png", "svg")


def require_matplotlib() -> None:
    """ValueError where it is missing; to be asked before any long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: pip install 'foretoken[eval]', or set plot=false")


def draw_frontier(frontier: Frontier, title: str) -> "Figure":
    """The static line, every other rule's points, the dynamic ones, the lossless reward and the floor below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    by_family: dict[str, list[PointFigures]] = {}
    for point in frontier.points:
        if point.family != PLAIN and math.isfinite(point.acceptance.value):
            by_family.setdefault(point.family, []).append(point)
    lossless = next(point for point in frontier.points if point.name == frontier.lossless)
    axes.axhline(lossless.reward.value, color="black", linewidth=0.8, linestyle="--", label="lossless reward")
    if frontier.floor < lossless.reward.value:
        axes.axhline(frontier.floor, color="black", linewidth=0.8, linestyle=":", label="reward floor")
    others = [family for family in by_family if family != DYNAMIC]
    for index, family in enumerate(others):
        colour = "black" if family == LOSSLESS else COLOURS[index % len(COLOURS)]
        line = [*by_family[family], lossless] if family == STATIC else []
        _draw_family(axes, by_family[family], line, color=colour, marker=MARKERS[index % len(MARKERS)])
    if DYNAMIC in by_family:
        dynamic = by_family[DYNAMIC]
        _draw_family(axes, dynamic, dynamic, color=DYNAMIC_COLOUR, marker="*", markersize=13, zorder=5)
        _name_points(axes, dynamic)
    axes.set_xlabel("acceptance rate")
    axes.set_ylabel("reward")
    axes.set_title(_escaped(title), fontsize=10)
    axes.grid(alpha=0.25)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def save_figure(figure: "Figure", stem: Path) -> list[Path]:
    """stem.png and stem.svg, each whole or not at all; the same figure gives the same bytes."""
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]
    for path, kind in zip(paths, FORMATS, strict=True):
        # Text stays text, and no date: a drawing that is made again can be compared.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "frontier"}), atomic_write(path) as scratch:
            figure.savefig(scratch, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return paths


def _draw_family(axes: "Axes", points: Sequence[PointFigures], line: Sequence[PointFigures], **style: Any) -> None:
    """A family's points with their intervals; through `line`, straight lines between what is undominated of it."""
    if line:
        x, y = [point.acceptance.value for point in line], [point.reward.value for point in line]
        front = undominated(x, y)
        axes.plot([x[i] for i in front], [y[i] for i in front], color=style["color"], linewidth=1.2)
    axes.errorbar(
        [point.acceptance.value for point in points],
        [point.reward.value for point in points],
        xerr=_bars([point.acceptance for point in points]),
        yerr=_bars([point.reward for point in points]),
        linestyle="none",
        elinewidth=0.8,
        label=_escaped(points[0].family),
        **{"markersize": 6, **style},
    )


def _name_points(axes: "Axes", points: Sequence[PointFigures]) -> None:
    """Names beside points; those of points that lie together are stacked."""
    named: list[tuple[float, float]] = []
    width, height = (abs(high - low) for low, high in (axes.get_xlim(), axes.get_ylim()))
    for point in points:
        x, y = point.acceptance.value, point.reward.value
        num_near = sum(abs(x - u) < 0.15 * width and abs(y - v) < 0.03 * height for u, v in named)
        named.append((x, y))
        shift = (6, 6 + 11 * num_near)
        axes.annotate(_escaped(point.name), (x, y), xytext=shift, textcoords="offset points", fontsize=8)


def _bars(figures: Sequence[Estimate]) -> list[list[float]]:
    """Distances to the lower and the upper bounds; 0 where there is no interval."""
    below = [figure.value - figure.low for figure in figures]
    above = [figure.high - figure.value for figure in figures]
    return [[max(0.0, size) if math.isfinite(size) else 0.0 for size in sizes] for sizes in (below, above)]


def _escaped(text: str) -> str:
    """Names are text, and a $ in them starts no formula."""
    return text.replace("$", r"\$")
