"""Charts as SVG, drawn by Matplotlib, with HTML legends: lines, rows of bars or dots, calibration.

A colour in the drawing stands for a variable of the page's style sheet, which has values for light and dark
screens. Text remains text, in the font of the page. From the seventh series on, lines are dashed as well.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ctr_ps.ps_worker.extras.report.runs import Point

COLOURS = 6

_VARIABLES = {
    **{f"#0000c{number}": f"var(--c{number})" for number in range(COLOURS)},
    "#0000d0": "var(--muted)",
    "#0000d1": "var(--grid)",
    "#0000d2": "var(--level)",
}
*_SERIES, _MUTED, _GRID, _LEVEL = _VARIABLES

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GRID,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": _MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": _GRID,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text, not its outlines
    "text.parse_math": False,  # a run may be named $1
    "xtick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.color": _GRID,
    "ytick.labelcolor": _MUTED,
}
_WITHOUT_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

MAX_POINTS = 600
"""Of a line; one with more shows the lowest and highest in each of so many stretches."""

_DOTTED = 40  # most points of a line that get a dot each
_OUTLIER_SPANS = 1.5
_FEW = 8
_MAX_LABEL = 29


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A named row of points, ascending by x; from 0, its number chooses colour and dashes."""

    name: str
    number: int
    points: Sequence[Point]


Labelled = Mapping[str, Sequence[float | None]]
"""For each label a figure of each series, as the importance of a slot in each run; None: it has none."""


@mpl.rc_context(_STYLE)
def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    levels: Sequence[tuple[str, float]] = (),
    is_from_zero: bool = False,
) -> str:
    """Returns a chart of lines, with at least one point in all; values far above all others lie outside.

    `levels` are named values to compare with, drawn as dashed lines.
    """
    figure, axes = _figure(x, y)
    for each in series:
        _draw(axes, each, is_dotted=len(each.points) <= _DOTTED)
    for _, level in levels:
        axes.axhline(level, color=_LEVEL, linestyle="--", linewidth=1)
    if all(float(a).is_integer() for each in series for a, _ in each.points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    values = [b for each in series for _, b in each.points]
    kept = without_outliers(values)
    if len(kept) < len(values):
        kept += [level for _, level in levels]
        margin = 0.05 * (max(kept) - min(kept))
        axes.set_ylim(min(kept) - margin, max(kept) + margin)
    if is_from_zero:
        axes.set_ylim(bottom=0)
    named = [(each.number, each.name) for each in series]
    return _chart(figure, f"{y} by {x}", named, levels)


@mpl.rc_context(_STYLE)
def calibration(series: Sequence[Series]) -> str:
    """Returns a chart of click rates by predictions, with the line on which both are equal."""
    figure, axes = _figure("mean prediction of a bucket", "click rate")
    for each in series:
        _draw(axes, each, is_dotted=True)
    axes.axline((0, 0), slope=1, color=_LEVEL, linestyle="--", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    named = [(each.number, each.name) for each in series]
    return _chart(figure, "click rate by mean prediction", named, [("calibrated", 1.0)])


@mpl.rc_context(_STYLE)
def rows(
    labelled: Labelled,
    names: Sequence[str],
    *,
    x: str,
    is_bars: bool = True,
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Returns a chart with a row a label: bars from 0, or dots on an axis that need not begin there.

    Labels stand from the top, `names` are of the series, `levels` named values to compare with.
    """
    height = 0.8 + len(labelled) * (0.16 + 0.08 * len(names))
    figure, axes = _figure(x, "", height=height)
    thickness = 0.8 / len(names)
    for number in range(len(names)):
        shift = thickness * (number - (len(names) - 1) / 2)
        places, values = [], []
        for index, figures in enumerate(labelled.values()):
            if (value := figures[number]) is not None:
                places.append(index + shift)
                values.append(value)
        if is_bars:
            axes.barh(places, values, thickness, color=_colour(number))
        else:
            axes.plot(values, places, "o", color=_colour(number))
    for _, level in levels:
        axes.axvline(level, color=_LEVEL, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(labelled)), [_short(each) for each in labelled])
    axes.set_ylim(len(labelled) - 0.5, -0.5)
    return _chart(figure, x, enumerate(names), levels)


def without_outliers(values: Sequence[float]) -> list[float]:
    """Returns the values without those far above the others, such as the losses of a first, untrained model.

    Far is more than 1.5 times the span between the 5th and the 90th percentile above the latter.
    """
    if len(values) < _FEW:
        return list(values)
    ordered = sorted(values)
    low, high = ordered[round(0.05 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]
    limit = high + _OUTLIER_SPANS * (high - low)
    return [value for value in values if value <= limit]


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Returns at most `most` of the points, with the lowest and highest of each stretch, and both ends."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2 - 1
    chosen = {0, len(points) - 1}
    for stretch in range(stretches):
        start = stretch * len(points) // stretches
        indices = range(start, (stretch + 1) * len(points) // stretches)
        chosen.add(min(indices, key=lambda index: points[index][1]))
        chosen.add(max(indices, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(chosen)]


def _figure(x: str, y: str, *, height: float = 2.8) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, height))
    axes = figure.subplots()
    axes.set_xlabel(x, loc="right")
    axes.set_ylabel(y)
    return figure, axes


def _draw(axes: Axes, series: Series, *, is_dotted: bool) -> None:
    across, up = zip(*series.points, strict=True)
    dashes = "-" if series.number < COLOURS else "--"
    axes.plot(across, up, dashes, color=_colour(series.number), marker="o" if is_dotted else "")


def _chart(
    figure: Figure,
    label: str,
    named: Iterable[tuple[int, str]],
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Returns a drawing as HTML, with a legend where it shows more than one thing."""
    output = StringIO()
    with mpl.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        # Chinese in the name of a run: the font here only measures texts, the browser has others.
        warnings.filterwarnings("ignore", r"Glyph \d+ ")
        figure.savefig(output, format="svg", transparent=True, metadata=_WITHOUT_METADATA)
    _, tag, drawing = output.getvalue().partition("<svg ")
    for stand_in, variable in _VARIABLES.items():
        drawing = drawing.replace(stand_in, variable)
    keys = [
        f'<span class="key"><span class="swatch c{number % COLOURS}'
        f'{" striped" if number >= COLOURS else ""}"></span>{escape(name)}</span>'
        for number, name in named
    ]
    keys += [
        f'<span class="key"><span class="swatch level striped"></span>{escape(name)}</span>'
        for name, _ in levels
    ]
    legend = f'<div class="legend">{"".join(keys)}</div>' if len(keys) > 1 else ""
    return f'{legend}{tag}role="img" aria-label="{escape(label)}" {drawing}'


def _colour(number: int) -> str:
    return _SERIES[number % COLOURS]


def _short(text: str) -> str:
    """Returns a text without its middle where it is too long: names of runs often differ at the end."""
    if len(text) <= _MAX_LABEL:
        return text
    end = _MAX_LABEL // 2
    return f"{text[: _MAX_LABEL - 1 - end]}\N{HORIZONTAL ELLIPSIS}{text[-end:]}"
