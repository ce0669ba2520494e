"""Live blocks and event rate over time: as text for a terminal, or as a small SVG file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from kvist.replay.timeline import Span

_BARS = " ▁▂▃▄▅▆▇█"
_ROWS = 6
_WIDTH, _PANEL_HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 720, 150, 84, 700, 40, 56
_COLOURS = ("#0b62a4", "#c8540a")


def terminal_plot(spans: Sequence[Span], width: int = 72) -> str:
    """Return two bar charts of `width` columns, one above the other, with the time below."""
    if not spans:
        return ""
    duration_s = _duration_s(spans)
    live = _resampled(spans, width, lambda part: max(span.num_live for span in part))
    rate = _resampled(spans, width, lambda part: sum(span.events_per_s for span in part) / len(part))
    lines = [*_chart("live blocks", live), *_chart("events a second", rate)]
    end = f"{duration_s:.4g} s"
    return "\n".join([*lines, " " * 9 + "0" + end.rjust(len(live) - 1), ""])


def svg_plot(spans: Sequence[Span], title: str) -> str:
    """Return an SVG document with both curves."""
    height = _TOP + 2 * (_PANEL_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(_WIDTH / 2, 22, title, "middle", "font-weight:bold"),
        *_panel(_TOP, "live blocks", [span.num_live for span in spans], spans, _COLOURS[0]),
        *_panel(_TOP + _PANEL_HEIGHT + _GAP, "events a second", [s.events_per_s for s in spans], spans, _COLOURS[1]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def short_number(value: float) -> str:
    """Return a number in few characters: 950, 1.5k, 10M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _duration_s(spans: Sequence[Span]) -> float:
    span_s = spans[1].start_s - spans[0].start_s if len(spans) > 1 else 0.0
    return spans[-1].start_s + span_s


def _resampled(spans: Sequence[Span], width: int, join: Callable[[Sequence[Span]], float]) -> list[float]:
    """Return one number a column; fewer columns where there are fewer spans."""
    num_columns = min(width, len(spans))
    bounds = [len(spans) * column // num_columns for column in range(num_columns + 1)]
    return [join(spans[start:end]) for start, end in pairwise(bounds)]


def _chart(name: str, values: Sequence[float]) -> list[str]:
    highest = max(values) or 1.0
    eighths = [math.ceil(value / highest * _ROWS * 8) for value in values]
    rows = []
    for row in reversed(range(_ROWS)):
        label = short_number(highest) if row == _ROWS - 1 else "0" if row == 0 else ""
        rows.append(f"{label:>7} |" + "".join(_BARS[min(8, max(0, eighth - row * 8))] for eighth in eighths))
    return [f"{'':9}{name}", *rows]


def _panel(top: float, name: str, values: Sequence[float], spans: Sequence[Span], colour: str) -> list[str]:
    bottom = top + _PANEL_HEIGHT
    highest = max(values, default=0.0) or 1.0
    duration_s = (_duration_s(spans) if spans else 0.0) or 1.0
    corners = " ".join(
        f"{_LEFT + (_RIGHT - _LEFT) * span.start_s / duration_s:.1f},{bottom - _PANEL_HEIGHT * value / highest:.1f}"
        for span, value in zip(spans, values, strict=True)
    )
    return [
        _text(_LEFT, top - 6, name, "start"),
        *(_mark(bottom - _PANEL_HEIGHT * share, short_number(highest * share)) for share in (0.0, 0.5, 1.0)),
        f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        _text(_LEFT, bottom + 18, "0", "middle"),
        _text(_RIGHT, bottom + 18, f"{duration_s:.4g} s", "middle"),
    ]


def _mark(y: float, label: str) -> str:
    rule = f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
    return rule + _text(_LEFT - 8, y + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    look = f"font-family:sans-serif;font-size:12px;fill:#222;{style}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{look}">{escape(text)}</text>'
