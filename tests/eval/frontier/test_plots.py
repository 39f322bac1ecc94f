"""The picture: both files readable and whole, everything on it that the table has, the same bytes every time."""

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import eval.frontier.plots
from eval.frontier.frontier import Frontier
from eval.frontier.plots import draw_frontier, require_matplotlib, save_figure
from eval.frontier.points import DYNAMIC, LOSSLESS, PEER, PLAIN, STATIC
from eval.frontier.stats import Estimate
from tests.eval.frontier.test_report import NONE, make_point
from tests.eval.planting import planted

NAN = float("nan")


def place(name: str, family: str, x: float, y: float, spread: float = 0.02) -> object:
    acceptance, reward = (Estimate(value, value - spread, value + spread) for value in (x, y))
    return make_point(name, family, acceptance=acceptance, reward=reward)


POINTS = [
    make_point("plain", PLAIN, acceptance=NONE),
    place("lossless, token", LOSSLESS, 0.4, 0.8),
    place("static, w = 0.5", STATIC, 0.6, 0.6),
    place("static, w = 0.7", STATIC, 0.5, 0.5),  # dominated
    place("static, w = 0", STATIC, 1.0, 0.2),
    place("lenience", "lenience", 0.55, 0.55),
    place("dynamic, lam = $1$", DYNAMIC, 0.8, 0.75),
    place("peer", PEER, 0.58, 0.61, spread=NAN),
]
FRONTIER = Frontier(POINTS, [], "lossless, token", 0.775)


def test_files(tmp_path: Path) -> None:
    paths = save_figure(draw_frontier(FRONTIER, "tiny <target> & draft, $5"), tmp_path / "new" / "pareto")
    assert [path.name for path in paths] == ["pareto.png", "pareto.svg"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["pareto.png", "pareto.svg"]
    with Image.open(paths[0]) as image:
        image.load()
        assert min(image.size) > 500
        assert len(image.convert("L").getcolors(256)) > 10
    root = ET.fromstring(paths[1].read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"acceptance rate", "reward", "lossless reward", "reward floor", "static", "lenience"} <= texts
    assert {PEER, "dynamic", "dynamic, lam = $1$", "tiny <target> & draft, $5"} <= texts
    assert PLAIN not in texts
    links = [value for element in root.iter() for key, value in element.attrib.items() if key.endswith("href")]
    assert all(link.startswith("#") for link in links)  # nothing from outside


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_figure(draw_frontier(FRONTIER, "t"), tmp_path / name)
    for kind in ("png", "svg"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def check_drawing(code: object = eval.frontier.plots) -> None:
    """What is drawn, as data: the static line through its undominated points, every point once, bars, both levels."""
    (axes,) = code.draw_frontier(FRONTIER, "t").axes  # type: ignore[attr-defined]
    lines = [np.round(np.array(line.get_xydata()), 6).tolist() for line in axes.lines]
    assert [[0.4, 0.8], [0.6, 0.6], [1.0, 0.2]] in [sorted(line) for line in lines]
    levels = {line[0][1] for line in lines if len(line) == 2 and line[0][1] == line[1][1]}
    assert levels == {0.8, 0.775}
    drawn = {container.get_label(): container for container in axes.containers}
    assert set(drawn) == {LOSSLESS, STATIC, "lenience", DYNAMIC, PEER}
    for family, container in drawn.items():
        ours = [point for point in POINTS if point.family == family]
        points, _, (across, upright) = container
        assert points.get_xydata().tolist() == [[one.acceptance.value, one.reward.value] for one in ours]
        half = 0.0 if family == PEER else 0.02  # no interval, no bar
        for segments, column in ((across.get_segments(), 0), (upright.get_segments(), 1)):
            for segment in segments:
                assert segment[1][column] - segment[0][column] == pytest.approx(2 * half)
    colours = [container[0].get_color() for container in drawn.values()]
    assert len(set(colours)) == len(colours)


def test_drawing() -> None:
    check_drawing()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for i in front]", "for i in range(len(x))]"),
        ("[*by_family[family], lossless] if", "by_family[family] if"),
        ("xerr=_bars([point.acceptance", "xerr=_bars([point.reward_change"),
        ("figure.value - figure.low", "figure.low"),
        ("axes.axhline(frontier.floor,", "axes.axhline(0.0,"),
        ("if point.family != PLAIN and", "if point.family != STATIC and"),
        ("COLOURS[index % len(COLOURS)]", "COLOURS[0]"),
        ("if math.isfinite(size) else 0.0", "if math.isfinite(size) else 1.0"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_drawing(planted(eval.frontier.plots, right, wrong))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr(eval.frontier.plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'foretoken\[eval\]', or set plot=false"):
        require_matplotlib()


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = draw_frontier(FRONTIER, "t")

    def half(path: Path, **unused: object) -> None:
        Path(path).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        save_figure(figure, tmp_path / "pareto")
    assert list(tmp_path.iterdir()) == []
