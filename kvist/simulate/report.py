"""The results of simulations: a table, sentences, and both with charts as one HTML file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import median
from typing import Any, TypeAlias

from kvist.charts import Chart, svg_document

Rows: TypeAlias = Sequence[dict[str, Any]]
"""A row: the `load`, the number of `workers`, the `fleet`'s name, the `policy`, and in `runs` each seed's outcome."""

COLUMNS = {
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p50_s": "p50",
    "ttft_p99_s": "p99",
    "itl_p99_s": "ITL p99, s",
    "end_to_end_p99_s": "E2E p99, s",
    "cached": "cached",
    "pooled_cache_share": "of pooled cache",
    "load_after_hits": "load after hits",
}

NEAR_COLLAPSE = 0.9
"""The share of the fleet's time that a policy leaves to compute. Above it waits double with each few percent (chats,
agents and the public trace, eight workers, 2026-11-23), and beyond 1 they grow for as long as requests come."""


def table(rows: Rows) -> list[list[str]]:
    """Return a header, and for each row the medians over seeds, with the lowest and highest values."""
    lines = [["load", "fleet", "policy", *COLUMNS.values()]]
    for row in rows:
        cells = [str(row["load"]), row["fleet"], row["policy"]]
        for name in COLUMNS:
            values = [each[name] for each in row["runs"]]
            middle, low, high = map(_formatter(name), (median(values), min(values), max(values)))
            cells.append(middle if len(values) == 1 else f"{middle} ({low} to {high})")
        lines.append(cells)
    return lines


def changes(rows: Rows) -> Iterator[str]:
    """Yield a sentence for each changed fleet: how its figures differ from the row before it, of the fleet as it is."""
    before: dict[str, Any] = {}
    for row in rows:
        if row["fleet"] == str(row["workers"]):
            before = row
        elif row["workers"] is not None:
            figures = []
            for name, text in (
                ("ttft_mean_s", "mean TTFT {} s"),
                ("ttft_p99_s", "p99 {} s"),
                ("pooled_cache_share", "{} of a pooled cache's hits"),
            ):
                values = (median(run[name] for run in each["runs"]) for each in (before, row))
                figures.append(text.format(" -> ".join(map(_formatter(name), values))))
            where = f"{row['policy']}, load {row['load']}, {row['fleet']} instead of {before['fleet']} workers"
            yield f"{where}: {', '.join(figures)}"


def warnings(rows: Rows) -> Iterator[str]:
    """Yield a sentence for each row whose policy is near collapse."""
    for row in rows:
        left = median(each["load_after_hits"] for each in row["runs"])
        if left >= NEAR_COLLAPSE:
            state = "collapses" if left >= 1 else "is near collapse"
            where = f"{row['policy']}, load {row['load']}, {row['fleet']} workers"
            yield f"{where}: {state}, with {left:.1%} of the fleet's capacity left to compute"


CHARTS = {
    "ttft_mean_s": ("mean time to first token", "seconds"),
    "ttft_p99_s": ("p99 of time to first token", "seconds"),
    "itl_p99_s": ("p99 of inter-token latency", "seconds"),
    "cached": ("found in caches", "share of prompt tokens"),
    "regret_s": ("regret: what a pooled cache would have saved", "seconds of computing per request"),
    "load_after_hits": ("load after hits", "share of the fleet's capacity"),
}
STYLE = """body{font-family:sans-serif;margin:1.5em}svg{width:100%;max-width:45em;height:auto;vertical-align:top}
div{overflow-x:auto}table{border-collapse:collapse}
td{padding:.2em .7em;white-space:nowrap;border-bottom:1px solid #8884}
tr:first-child{font-weight:bold}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}svg{filter:invert(.93) hue-rotate(180deg)}}
@media(min-width:80em){svg{width:48%}}"""


def html_report(title: str, rows: Rows) -> str:
    """Return one self-contained page: a chart of each figure over loads, or else over fleet sizes, and the table."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>kvist simulate: {escape(title)}</h1>",
    ]
    parts += [f"<p>{escape(line)}</p>" for line in (*changes(rows), *warnings(rows))]
    over = "load" if len({row["load"] for row in rows}) > 1 else "workers"
    is_plain = over == "workers" or len({row["fleet"] for row in rows}) == 1
    for name, (text, unit) in CHARTS.items():
        lines: defaultdict[str, dict[float, float]] = defaultdict(dict)
        beside: defaultdict[str, dict[float, float]] = defaultdict(dict)
        for row in rows:
            if row[over] is None:  # no fleet was large enough
                continue
            fleet = "" if is_plain and row["fleet"] == str(row["workers"]) else f", {row['fleet']} workers"
            lines[row["policy"] + fleet][row[over]] = median(run[name] for run in row["runs"])
            if name == "cached":
                found = (run["cached"] / run["pooled_cache_share"] for run in row["runs"] if run["pooled_cache_share"])
                beside[f"pooled cache{fleet}"][row[over]] = median([*found] or [0.0])
            if name == "load_after_hits":
                beside["near collapse"][row[over]] = NEAR_COLLAPSE
            if name == "regret_s":
                elsewhere = median(run["regret_held_elsewhere_s"] for run in row["runs"])
                beside[f"{row['policy']}{fleet}: held by another worker"][row[over]] = elsewhere
        if lines:
            points = {line: list(values.items()) for line, values in (lines | beside).items()}
            is_log = {"log_x": over == "workers", "log_y": name.startswith("ttft")}
            parts.append(svg_document(Chart(text, over, unit, points, **is_log)))
    cells = ("<tr>" + "".join(f"<td>{escape(cell)}" for cell in line) for line in table(rows))
    return "\n".join([*parts, "<div><table>", *cells, "</table></div>"]) + "\n"


def _formatter(name: str) -> Callable[[float], str]:
    return ("{:.1%}" if name in ("cached", "pooled_cache_share", "load_after_hits") else "{:.3g}").format
