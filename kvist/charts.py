"""Line charts as small SVG documents: no plotting package needed, and diffs are readable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 696, 48, 340  # of the area inside the axes
_COLOURS = ("#0b62a4", "#c8540a", "#2c7a2c", "#8a3ffc", "#b2003b", "#5c5c5c", "#00a0a0", "#c9a400", "#e377c2")
_LEGEND_COLUMN, _LEGEND_ROW = 310, 18
_MOST_DOTS = 50
_STYLE = "font-family:sans-serif;font-size:12px;fill:#222"


def svg_lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = True,
    log_y: bool = False,
) -> str:
    """Return a chart of named lines; a linear axis begins at zero, a logarithmic one takes positive values only.

    Raises ValueError where there is nothing to draw, or a logarithm of zero or less.
    """
    points = list(chain.from_iterable(series.values()))
    if not points:
        raise ValueError(f"series={series!r}: at least one point is needed")
    place_x, x_marks = _axis([x for x, _ in points], log_x, _LEFT, _RIGHT)
    place_y, y_marks = _axis([y for _, y in points], log_y, _BOTTOM, _TOP)
    legend_rows = -(-len(series) // 2)
    height = _HEIGHT + (legend_rows - 1) * _LEGEND_ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text((_LEFT + _RIGHT) / 2, 26, title, "middle", "font-size:15px;font-weight:bold"),
        _text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, x_label, "middle"),
        _text(18, (_TOP + _BOTTOM) / 2, y_label, "middle", turned=True),
    ]
    for mark in y_marks:
        parts.append(_rule(_LEFT, place_y(mark), _RIGHT, place_y(mark), "#ddd"))
        parts.append(_text(_LEFT - 8, place_y(mark) + 4, short_number(mark), "end"))
    for mark in x_marks:
        parts.append(_rule(place_x(mark), _BOTTOM, place_x(mark), _BOTTOM + 5, "#222"))
        parts.append(_text(place_x(mark), _BOTTOM + 19, short_number(mark), "middle"))
    parts.append(_rule(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "#222"))
    for index, (name, line) in enumerate(series.items()):
        parts += _line([(place_x(x), place_y(y)) for x, y in line], _COLOURS[index % len(_COLOURS)])
        left, top = _LEFT + index % 2 * _LEGEND_COLUMN, _BOTTOM + 60 + index // 2 * _LEGEND_ROW
        parts.append(_rule(left, top, left + 22, top, _COLOURS[index % len(_COLOURS)], 3))
        parts.append(_text(left + 30, top + 4, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def svg_stack(*charts: str) -> str:
    """Return charts of one or two lines, one below the other."""
    placed = (chart.replace("<svg ", f'<svg y="{idx * _HEIGHT}" ', 1) for idx, chart in enumerate(charts))
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {len(charts) * _HEIGHT}">'
    return "\n".join([begin, *placed, "</svg>"]) + "\n"


def _axis(
    values: Sequence[float], is_log: bool, begin: float, end: float
) -> tuple[Callable[[float], float], list[float]]:
    """Return where a value lies between two positions, and the values to mark."""
    lowest, highest = min(values), max(values)
    if is_log:
        if lowest <= 0:
            raise ValueError(f"value={lowest}: a logarithmic axis takes numbers above 0")
        marks = _log_marks(lowest, highest)
        low, high = math.log(min(marks[0], lowest)), math.log(max(marks[-1], highest))
        return lambda value: begin + (end - begin) * (math.log(value) - low) / (high - low), marks
    marks = _linear_marks(min(0.0, lowest), highest)
    low, high = marks[0], marks[-1]
    return lambda value: begin + (end - begin) * (value - low) / (high - low), marks


def _linear_marks(lowest: float, highest: float) -> list[float]:
    """Return some round values, from at or below the lowest to at or above the highest."""
    rough = ((highest - lowest) or 1.0) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first = math.floor(lowest / step)
    return [step * number for number in range(first, max(math.ceil(highest / step), first + 1) + 1)]


def _log_marks(lowest: float, highest: float) -> list[float]:
    """Return powers of ten around the values; of two where they span less than two powers of ten."""
    base = 10.0 if highest / lowest >= 100 else 2.0
    first, last = (math.log(value, base) for value in (lowest, highest))
    exponents = range(math.floor(first + 1e-9), math.ceil(last - 1e-9) + 1)
    return [base**exponent for exponent in ([*exponents, exponents[-1] + 1] if len(exponents) == 1 else exponents)]


def short_number(value: float) -> str:
    """Return a short form: 1.5k, 10M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _line(places: Sequence[tuple[float, float]], colour: str) -> list[str]:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shown = places if len(places) <= _MOST_DOTS else []
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in shown]
    return [f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _rule(x: float, y: float, to_x: float, to_y: float, colour: str, width: int = 1) -> str:
    places = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {places} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place}{turn} style="{_STYLE};{style}">{escape(text)}</text>'
