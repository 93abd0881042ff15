"""Charts: marks where their values are, whatever runs and values are named."""

import math
import re
from xml.etree import ElementTree

import pytest

from ctr_ps.ps_worker.extras.report.charts import (
    Series,
    lines,
    rows,
    thinned,
    without_outliers,
)
from ctr_ps.ps_worker.extras.report.page import shown

COLOUR = r"var\(--c0\)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (12345.6, "12,346"),
        (0.123456789, "0.12346"),
        (-0.5, "−0.5"),
        (math.nan, "–"),
        (None, "–"),
        (True, "True"),
        ("async", "async"),
    ],
)
def test_figures_are_written_for_people(value: object, text: str) -> None:
    assert shown(value) == text


def test_loss_of_an_untrained_model_does_not_flatten_the_curve() -> None:
    losses = [25.0, 3.0, *(0.14 - 0.001 * step for step in range(30))]

    assert max(without_outliers(losses)) == 0.14
    assert without_outliers([9.0, 0.1]) == [9.0, 0.1]


def test_thinned_lines_keep_their_extremes_and_ends() -> None:
    points = [(float(x), math.sin(x / 40)) for x in range(10_000)]
    points[5000] = (5000.0, 9.0)

    kept = thinned(points, 100)

    assert len(kept) <= 100
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (5000.0, 9.0) in kept
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert thinned(points[:50], 100) == points[:50]


def paths(svg: str) -> list[list[tuple[float, float]]]:
    """Returns the corners of each shape in the colour of the first series."""
    drawn = re.findall(rf'<path d="([^"]*)" clip-path[^>]*{COLOUR}', svg)
    numbers = [[float(each) for each in re.findall(r"[-\d.]+", path)] for path in drawn]
    return [list(zip(each[::2], each[1::2], strict=True)) for each in numbers]


def test_points_of_a_line_are_where_their_values_are() -> None:
    svg = lines(
        [Series(name="a", number=0, points=[(0, 0.0), (25, 0.75), (100, 1.0)])], x="x", y="y"
    )

    ((start, middle, end),) = paths(svg)
    assert middle[0] - start[0] == pytest.approx((end[0] - start[0]) / 4, abs=0.01)
    assert start[1] - middle[1] == pytest.approx(0.75 * (start[1] - end[1]), abs=0.01)
    assert start[1] > end[1]  # y grows downwards


def test_bars_go_from_zero_to_either_side() -> None:
    labelled = {"a": [0.2], "b": [-0.1]}

    first, second = paths(rows(labelled, ["run"], x="AUC lost"))

    zero = min(x for x, _ in first)
    assert max(x for x, _ in second) == pytest.approx(zero, abs=0.01)
    assert max(x for x, _ in first) - zero == pytest.approx(
        2 * (zero - min(x for x, _ in second)), abs=0.01
    )


def test_long_names_keep_the_end_in_which_they_differ() -> None:
    names = [f"2026-11-20-baseline-with-warmup-{number}" for number in (1, 2)]
    svg = rows({name: [1.0] for name in names}, ["run"], x="milliseconds")

    assert re.findall("2026[^<]*", svg) == [f"2026-11-20-bas…-with-warmup-{n}" for n in (1, 2)]


@pytest.mark.parametrize(
    "chart",
    [
        rows({"<a>": [-0.1, None]}, ["r", "<q>"], x="x"),
        rows({"<a>": [0.7, 0.8]}, ["r", "q"], x="x", is_bars=False),
        rows({"<r> $1$ 中文": [2.0]}, ["r"], x="<x>"),
        lines(
            [Series(name="<a>", number=7, points=[(1, 0.5)])], x="x", y="y", levels=[("<l>", 0.4)]
        ),
    ],
)
def test_charts_are_well_formed_whatever_they_are_named(chart: str) -> None:
    root = ElementTree.fromstring(f"<div>{chart}</div>")

    text = "".join(root.itertext())
    assert "<" in text
    assert "$1$ 中文" in text or "$" not in chart
