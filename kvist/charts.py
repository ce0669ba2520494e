"""Line charts as SVG documents, drawn by matplotlib, which the extra `charts` brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import NamedTuple

Points = Sequence[tuple[float, float]]

_WIDTH_INCHES, _HEIGHT_INCHES = 7.2, 4.2
_MOST_DOTS = 50
_COLOURS = ("#1f5fa8", "#a3540e", "#356b1f", "#7c3aa8")
_DASHES = ((), (6, 3), (2, 3), (8, 3, 2, 3))
"""The line styles of the live page."""


class Chart(NamedTuple):
    """Named lines; a linear axis begins at zero."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    log_x: bool = True
    log_y: bool = False


def svg_document(*charts: Chart) -> str:
    """Return the charts, one below the other, as an SVG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    svg = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvist", "text.parse_math": False}):
        figure = Figure((_WIDTH_INCHES, _HEIGHT_INCHES * len(charts)), layout="constrained")
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False).flat, charts, strict=True):
            for idx, (name, points) in enumerate(chart.series.items()):
                marker = "o" if len(points) <= _MOST_DOTS else ""
                colour, dash = _COLOURS[idx % 4], (0, _DASHES[(idx + idx // 4) % 4])
                line = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4}
                axes.plot(*zip(*points, strict=True), label=name, **line)
            axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
            axes.set(**{"xscale": "log"} if chart.log_x else {"xlim": (0, None)})
            highest = max(y for points in chart.series.values() for _, y in points)
            axes.set(**{"yscale": "log"} if chart.log_y else {"ylim": (0, 1.05 * highest or None)})
            for axis, is_log in ((axes.xaxis, chart.log_x), (axes.yaxis, chart.log_y)):
                if is_log:
                    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:,.12g}")
                axis.set_minor_formatter(NullFormatter())
            axes.legend(fontsize="small")
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return text[text.index("<svg") :]
