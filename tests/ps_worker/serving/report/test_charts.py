"""Axes and charts: ticks that people read easily, marks where their values are, names that do not overlap."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ps_worker.serving.report.axes import Axis, shown, unit_of_bytes, without_outliers
from ps_worker.serving.report.charts import Labelled, Series, columns, lines, rows, stacked, thinned

FIGURES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20)
ALMOST_EQUAL = st.builds(
    lambda value, steps: [value + step * math.ulp(value) for step in steps],
    st.floats(-1e9, 1e9),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
)


@given(FIGURES | ALMOST_EQUAL, st.booleans())
@example([0.5, math.nextafter(0.5, 1.0)], False)
@example([0.0, 5e-324], False)
def test_axis_shows_all_values_between_a_few_round_ticks(
    values: list[float], is_whole: bool
) -> None:
    axis = Axis.over(values, 0, 100, is_whole=is_whole)
    margin = 1e-6 * (axis.high - axis.low)

    assert axis.low <= min(values) + margin
    assert axis.high >= max(values) - margin
    assert 2 <= len(axis.ticks) <= 8
    assert len(set(axis.labels())) == len(axis.ticks)
    assert all(-1e-6 <= axis.at(value) <= 100 + 1e-6 for value in values)
    step = axis.ticks[1] - axis.ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - each) for each in (1, 2, 2.5, 5, 10)) < 1e-5
    if is_whole:
        assert all(tick == round(tick) for tick in axis.ticks)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 4000], ["0", "1,000", "2,000", "3,000", "4,000"]),
        ([0.121, 0.139], ["0.120", "0.125", "0.130", "0.135", "0.140"]),
        ([-0.01, 0.02], ["−0.01", "0.00", "0.01", "0.02"]),
        ([], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_written_alike(values: list[float], labels: list[str]) -> None:
    assert Axis.over(values, 0, 1).labels() == labels


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


def test_bytes_have_the_unit_in_which_they_read_well() -> None:
    assert unit_of_bytes(1500) == ("KiB", 1024.0)
    assert unit_of_bytes(3 * 1024**3) == ("GiB", 1024.0**3)
    assert unit_of_bytes(0) == ("bytes", 1.0)


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


def test_points_of_a_line_are_where_their_values_are() -> None:
    svg = lines(
        [Series(name="a", number=0, points=[(0, 0.0), (50, 0.5), (100, 1.0)])], x="x", y="y"
    )
    circles = re.findall(r'<circle class="dot c0" cx="([\d.]+)" cy="([\d.]+)"', svg)
    across = [float(x) for x, _ in circles]
    down = [float(y) for _, y in circles]

    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)
    assert down[0] - down[1] == pytest.approx(down[1] - down[2], abs=0.2)
    assert down[0] > down[2]  # y grows downwards
    assert "<title>a: y 0.5, x 50</title>" in svg


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@example([math.nextafter(0.5, 1.0)])
def test_names_at_the_ends_of_lines_do_not_overlap(ends: list[float]) -> None:
    series = [
        Series(name=f"run{index}", number=index, points=[(0, 0.5), (9, end)])
        for index, end in enumerate(ends)
    ]
    svg = lines(series, x="step", y="AUC")
    places = sorted(
        float(y) for y in re.findall(r'<text class="label[^"]*" x="[\d.]+" y="([-\d.]+)"', svg)
    )

    assert len(places) == len(ends)
    assert all(after - before >= 14.9 for before, after in pairwise(places))


def test_long_names_keep_the_end_in_which_they_differ() -> None:
    names = [f"2026-11-20-baseline-with-warmup-{number}" for number in (1, 2)]
    series = [Series(name=name, number=0, points=[(1, 0.5)]) for name in names]

    texts = re.findall(r'<text class="label[^>]*>([^<]*)<', lines(series, x="step", y="AUC"))

    assert texts == ["2026-11-20…th-warmup-1", "2026-11-20…th-warmup-2"]


@pytest.mark.parametrize(
    "svg",
    [
        rows(
            [Labelled(label="<a>", values=[-0.1, None], note="&")],
            ["r", "<q>"],
            x="x",
            is_bars=True,
        ),
        rows([Labelled(label="<a>", values=[0.7, 0.8])], ["r", "q"], x="x", is_bars=False),
        columns([Labelled(label="3-4", values=[10.0, None])], ["r", "q"], x="x", y="<y>"),
        stacked(
            [("<r>", {"pull": 2.0, "push": 1.0})], ["pull", "push"], x="milliseconds", unit="ms"
        ),
        lines(
            [Series(name="<a>", number=7, points=[(1, 0.5)])], x="x", y="y", levels=[("<l>", 0.4)]
        ),
    ],
)
def test_charts_are_well_formed_whatever_they_are_named(svg: str) -> None:
    root = ElementTree.fromstring(svg)

    assert root.tag == "svg"
    assert any("<" in (each.text or "") for each in root.iter()) or "3-4" in svg


def test_parts_of_a_bar_are_told_in_the_unit_of_the_chart() -> None:
    svg = stacked([("run", {"pull": 1.5, "push": 0.5})], ["pull", "push"], x="time", unit="ms")

    assert re.findall("<title>(run, .*?)</title>", svg) == [
        "run, pull: 1.5 ms, 75 %",
        "run, push: 0.5 ms, 25 %",
    ]


def test_bars_go_from_zero_to_either_side() -> None:
    labelled = [Labelled(label="a", values=[0.2]), Labelled(label="b", values=[-0.1])]
    svg = rows(labelled, ["run"], x="AUC lost", is_bars=True)
    (right, wide), (left, narrow) = (
        (float(x), float(width))
        for x, width in re.findall(
            r'<rect class="bar c0" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg
        )
    )

    assert left + narrow == pytest.approx(right, abs=0.2)
    assert wide == pytest.approx(2 * narrow, abs=0.3)
