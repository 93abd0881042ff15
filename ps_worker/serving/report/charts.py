"""Charts as SVG, without a script: lines, rows of bars or dots, columns, stacked bars, and calibration.

Series are told apart by a colour, which the style sheet of the page has for light and dark screens, and from
the seventh on by dashes, too. Each mark has its figures as a `title`, which browsers show under the pointer.
Coordinates are pixels of a drawing 600 wide; the page scales it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from ps_worker.serving.report.axes import Axis, shown, without_outliers
from ps_worker.serving.report.runs import Point

WIDTH = 600
HEIGHT = 280
COLOURS = 6
MAX_POINTS = 600
"""Of a line; one with more shows the lowest and highest in each of so many stretches."""

_TOP, _BOTTOM = 26, 44
_LETTER, _DIGIT = 6.8, 7.7  # mean widths of characters of 12 pixels
_LINE = 15
_BOLD = 1.12  # how much wider bold letters are
_MAX_LABEL = 22
_DOTTED = 40
_ROW = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A named row of points.

    Attributes:
        name: At its end, and in the titles of its points.
        number: Chooses colour and dashes, from 0.
        points: (x, y), ascending by x.
    """

    name: str
    number: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A figure of each series for one label, as the importance of a slot in each run.

    Attributes:
        label: At the left, or below a column.
        values: One for each series; None: it has none.
        note: Added to the title of its marks.
    """

    label: str
    values: Sequence[float | None]
    note: str = ""


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


def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    levels: Sequence[tuple[str, float]] = (),
    is_from_zero: bool = False,
) -> str:
    """Returns a chart of lines; values far above all others end at its upper edge.

    Args:
        series: At least one point in all.
        x: Label of the axis, with its unit.
        y: Likewise.
        levels: Named values to compare with, drawn as dashed lines.
        is_from_zero: The vertical axis begins at 0.
    """
    values = [b for each in series for _, b in each.points]
    shown_values = without_outliers(values)
    across = [a for each in series for a, _ in each.points]
    labels = [(each.points[-1][1], each.name, f"label c{_colour(each)}") for each in series]
    labels += [(value, name, "label level") for name, value in levels]
    right = 14 + _BOLD * max(_width(_short(name, _MAX_LABEL)) for _, name, _ in labels)
    compared = [*(value for _, value in levels), *([0.0] if is_from_zero else [])]
    vertical = Axis.over([*shown_values, *compared], HEIGHT - _BOTTOM, _TOP)
    left = _left_of(vertical)
    whole = all(float(a).is_integer() for a in across)
    if x == "step":
        across.append(0.0)
    horizontal = Axis.over(across, left, WIDTH - right, is_whole=whole)
    parts = [_frame(horizontal, vertical, x, y)]
    parts += [
        f'<line class="level" x1="{left:.1f}" x2="{horizontal.end:.1f}" '
        f'y1="{vertical.at(value):.1f}" y2="{vertical.at(value):.1f}"/>'
        for _, value in levels
    ]
    for each in series:
        parts.append(_line(each, horizontal, vertical, x, y))
    ends = [(_inside(vertical, value), name, kind) for value, name, kind in labels]
    for place, (_, name, kind) in zip(_apart([end for end, _, _ in ends]), ends, strict=True):
        parts.append(_text(name, horizontal.end + 8, place + 4, kind))
    return _svg(parts, HEIGHT, f"{y} by {x}")


def calibration(series: Sequence[Series]) -> str:
    """Returns a chart of click rates by predictions, with the line on which both are equal."""
    values = [value for each in series for point in each.points for value in point]
    vertical = Axis.over([0.0, *values], HEIGHT - _BOTTOM, _TOP)
    left = _left_of(vertical)
    horizontal = Axis(vertical.low, vertical.high, left, WIDTH - 80, vertical.ticks)
    parts = [
        _frame(horizontal, vertical, "mean prediction of a bucket", "click rate"),
        f'<line class="level" x1="{left:.1f}" y1="{vertical.start}" x2="{horizontal.end}" '
        f'y2="{vertical.end}"/>',
        _text("calibrated", horizontal.end + 6, vertical.end + 4, "label level"),
    ]
    parts += [
        _line(each, horizontal, vertical, "predicted", "click rate", dotted=True) for each in series
    ]
    return _svg(parts, HEIGHT, "click rate by mean prediction")


def rows(
    labelled: Sequence[Labelled],
    names: Sequence[str],
    *,
    x: str,
    is_bars: bool,
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Returns a chart with a row a label: bars from 0, or dots on an axis that need not begin there.

    Args:
        labelled: The rows, from the top.
        names: Of the series.
        x: Label of the axis, with its unit.
        is_bars: Bars, else dots.
        levels: Named values to compare with.
    """
    values = [value for each in labelled for value in each.values if value is not None]
    compared = [value for _, value in levels] + ([0.0] if is_bars else [])
    left = 12 + min(_width(max((each.label for each in labelled), key=len)), 190)
    height_of_row = max(_ROW, (8 if is_bars else 5) * len(names) + 10)
    bottom = _TOP + height_of_row * len(labelled)
    axis = Axis.over([*values, *compared], left, WIDTH - 30)
    parts = [_grid(axis, axis.labels(), _TOP - 4, bottom), _text(x, axis.end, bottom + 36, "axis")]
    for name, level in levels:
        at = axis.at(level)
        parts.append(
            f'<line class="level" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 4}" y2="{bottom}"/>'
        )
        parts.append(_text(name, at, _TOP - 10, "tick level middle"))
    for index, each in enumerate(labelled):
        top = _TOP + index * height_of_row
        label = _short(each.label, 29)
        parts.append(_text(label, left - 8, top + height_of_row / 2 + 4, "tick name", each.label))
        for number, value in enumerate(each.values):
            if value is None:
                continue
            title = escape(f"{each.label}, {names[number]}: {shown(value)} {each.note}".strip())
            colour, at = f"c{number % COLOURS}", axis.at(value)
            if is_bars:
                size = (height_of_row - 8) / len(names)
                start, end = sorted((axis.at(0.0), at))
                parts.append(
                    f'<rect class="bar {colour}" x="{start:.1f}" y="{top + 4 + number * size:.1f}" '
                    f'width="{max(end - start, 0.8):.1f}" height="{size - 1:.1f}" rx="1.5">'
                    f"<title>{title}</title></rect>"
                )
            else:
                middle = top + height_of_row / 2 + 5 * (number - (len(names) - 1) / 2)
                parts.append(
                    f'<circle class="dot {colour}" cx="{at:.1f}" cy="{middle:.1f}" r="4.5">'
                    f"<title>{title}</title></circle>"
                )
    return _svg(parts, bottom + 44, x)


def columns(labelled: Sequence[Labelled], names: Sequence[str], *, x: str, y: str) -> str:
    """Returns a chart with a group of columns a label, one for each series that has a value."""
    values = [value for each in labelled for value in each.values if value is not None]
    vertical = Axis.over([0.0, *values], HEIGHT - _BOTTOM, _TOP)
    left, end = _left_of(vertical), WIDTH - 16
    parts = [_lines_across(vertical, left, end), _text(y, 4, 12, "axis start")]
    parts.append(_text(x, end, HEIGHT - 6, "axis"))
    group = (end - left) / len(labelled)
    width = min(group * 0.8 / len(names), 48.0)
    for index, each in enumerate(labelled):
        middle = left + (index + 0.5) * group
        parts.append(_text(each.label, middle, HEIGHT - _BOTTOM + 17, "tick middle"))
        for number, value in enumerate(each.values):
            if value is None:
                continue
            top = vertical.at(value)
            start = middle + (number - len(names) / 2) * width
            title = escape(f"{each.label}, {names[number]}: {shown(value)} {each.note}".strip())
            parts.append(
                f'<rect class="bar c{number % COLOURS}" x="{start:.1f}" y="{top:.1f}" '
                f'width="{max(width - 1, 1):.1f}" height="{max(vertical.start - top, 0.8):.1f}" '
                f'rx="1.5"><title>{title}</title></rect>'
            )
    return _svg(parts, HEIGHT, f"{y} by {x}")


def stacked(
    totals: Sequence[tuple[str, Mapping[str, float]]], parts_of: Sequence[str], *, x: str, unit: str
) -> str:
    """Returns a bar for each run, divided into its parts, with their shares where there is room.

    Args:
        totals: Name of each run, and its values by part.
        parts_of: All parts, in the order in which they are drawn.
        x: Label of the axis, with its unit.
        unit: Of the values, as it is written behind a number.
    """
    left = 12 + min(_width(max((name for name, _ in totals), key=len)), 190)
    bottom = _TOP + 38 * len(totals)
    axis = Axis.over([0.0, *(sum(each.values()) for _, each in totals)], left, WIDTH - 30)
    drawn = [_grid(axis, axis.labels(), _TOP - 4, bottom), _text(x, axis.end, bottom + 36, "axis")]
    for index, (name, values) in enumerate(totals):
        top, so_far, total = _TOP + index * 38, 0.0, sum(values.values())
        drawn.append(_text(_short(name, 29), left - 8, top + 23, "tick name", name))
        for number, part in enumerate(parts_of):
            value = values.get(part, 0.0)
            start, end = axis.at(so_far), axis.at(so_far + value)
            so_far += value
            if value <= 0:
                continue
            share = f"{100 * value / total:.0f} %"
            drawn.append(
                f'<rect class="bar c{number % COLOURS}" x="{start:.1f}" y="{top + 6}" '
                f'width="{max(end - start - 1, 0.5):.1f}" height="24" rx="1.5">'
                f"<title>{escape(f'{name}, {part}: {shown(value)} {unit}, {share}')}</title></rect>"
            )
            if end - start > _width(share) + 6:
                drawn.append(_text(share, (start + end) / 2, top + 22, "tick middle on"))
    return _svg(drawn, bottom + 44, x)


def legend(names: Iterable[str]) -> str:
    """Returns names with the colours of their series, as HTML."""
    return "".join(
        f'<span class="key"><span class="swatch c{number % COLOURS}'
        f'{" striped" if number >= COLOURS else ""}"></span>{escape(name)}</span>'
        for number, name in enumerate(names)
    )


def _line(
    series: Series, horizontal: Axis, vertical: Axis, x: str, y: str, *, dotted: bool = False
) -> str:
    places = [(horizontal.at(a), _inside(vertical, b)) for a, b in series.points]
    colour = f"c{_colour(series)}"
    dashes = " dashed" if series.number >= COLOURS else ""
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    parts = [f'<polyline class="line {colour}{dashes}" points="{path}"/>']
    radius = 3.5 if dotted or len(places) <= _DOTTED else 2.0
    kind = "dot" if dotted or len(places) <= _DOTTED else "dot hidden"
    for (a, b), (at_x, at_y) in zip(series.points, places, strict=True):
        title = escape(f"{series.name}: {y} {shown(b)}, {x} {shown(a)}")
        parts.append(
            f'<circle class="{kind} {colour}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="{radius}">'
            f"<title>{title}</title></circle>"
        )
    return "".join(parts)


def _frame(horizontal: Axis, vertical: Axis, x: str, y: str) -> str:
    labels = horizontal.labels()
    return "".join(
        [
            _lines_across(vertical, horizontal.start, horizontal.end),
            *_tick_labels(horizontal, labels, vertical.start + 17),
            _text(y, 4, 12, "axis start"),
            _text(x, horizontal.end, vertical.start + 38, "axis"),
        ]
    )


def _lines_across(vertical: Axis, left: float, right: float) -> str:
    parts = []
    for value, label in zip(vertical.ticks, vertical.labels(), strict=True):
        at = vertical.at(value)
        parts.append(
            f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(_text(label, left - 6, at + 4, "tick end"))
    return "".join(parts)


def _grid(axis: Axis, labels: Sequence[str], top: float, bottom: float) -> str:
    parts = [
        f'<line class="grid" x1="{axis.at(value):.1f}" x2="{axis.at(value):.1f}" '
        f'y1="{top}" y2="{bottom}"/>'
        for value in axis.ticks
    ]
    return "".join([*parts, *_tick_labels(axis, labels, bottom + 17)])


def _tick_labels(axis: Axis, labels: Sequence[str], at_y: float) -> list[str]:
    """Returns the labels below an axis, every second or third where all would not fit."""
    space = abs(axis.end - axis.start) / max(len(labels) - 1, 1)
    widest = _width(max(labels, key=len)) + 10
    every = next(each for each in range(1, len(labels) + 1) if each * space >= widest)
    pairs = list(zip(axis.ticks, labels, strict=True))[::every]
    return [_text(label, axis.at(value), at_y, "tick middle") for value, label in pairs]


def _apart(places: Sequence[float]) -> list[float]:
    """Returns the heights moved so far that lines of text at them do not touch, their order kept."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, index in pairwise(order):
        moved[index] = max(moved[index], moved[before] + _LINE)
    excess = max(moved, default=0.0) - (HEIGHT - _BOTTOM - 6)
    if excess > 0:  # up again, as far as needed
        limit = HEIGHT - _BOTTOM - 6.0
        for index in reversed(order):
            moved[index] = min(moved[index], limit)
            limit = moved[index] - _LINE
    return moved


def _inside(vertical: Axis, value: float) -> float:
    return min(max(vertical.at(value), vertical.end), vertical.start)


def _left_of(vertical: Axis) -> float:
    return 12 + _width(max(vertical.labels(), key=len))


def _colour(series: Series) -> int:
    return series.number % COLOURS


def _width(text: str) -> float:
    """Returns about how wide a text is that is shortened where it would be too long."""
    kept = text[: _MAX_LABEL + 8]
    return sum(_DIGIT if letter.isdigit() else _LETTER for letter in kept)


def _short(text: str, letters: int) -> str:
    """Returns a text without its middle where it is too long: names of runs often differ at the end."""
    if len(text) <= letters:
        return text
    end = letters // 2
    return f"{text[: letters - 1 - end]}\N{HORIZONTAL ELLIPSIS}{text[-end:]}"


def _text(text: str, x: float, y: float, kind: str, title: str = "") -> str:
    shown_text = escape(_short(text, _MAX_LABEL)) if "label" in kind else escape(text)
    hover = f"<title>{escape(title or text)}</title>" if title or shown_text != escape(text) else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{shown_text}{hover}</text>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
