"""`kvist top`: a router's fleet in a terminal, from the live page's state and the counters of `/metrics`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvist.cli._client import add_admin_key, ask_router, reading
from kvist.cli._terminal import display, make_table, printable
from kvist.cli.why import LOSSES, loss_row, percent
from kvist.errors import InvalidValueError, KvistError

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "show a router's fleet in the terminal: workers, rates, lost cache hits and problems"

_TIMEOUT_S = 5.0
_NUM_SAMPLES = 10
"""Rates and times are those since so many updates ago."""
_MAX_LINES = 5
"""Of lost hits, and of problems."""
_COLUMN_GAP = 2
_TTFT = "kvist_router_time_to_first_byte_seconds_bucket"
_TOKENS = ("kvist_router_prompt_tokens_total", "kvist_router_output_tokens_total")
_COLUMNS = ("worker", "state", "reqs", "prefill", "cache", "hits", "reported", "events", "tok/s", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="URL", help="a router, as http://host:port")
    add(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="seconds between updates, 0.1 to 60 (default %(default)s)",
    )
    add_admin_key(parser)


def run(args: argparse.Namespace) -> int:
    """Show the fleet until Ctrl-C or SIGTERM; where there is no terminal once. Return 0."""
    if not 0.1 <= args.interval <= 60:
        raise InvalidValueError("--interval", args.interval, "seconds from 0.1 to 60")
    with reading(args.source):
        _show(_Fleet(args.source, args.admin_key), args.interval)
    return 0


def _show(fleet: _Fleet, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    fleet.update()
    if not console.is_terminal:
        time.sleep(interval_s)
        fleet.update()
        display(fleet.render(sys.maxsize, sys.maxsize))
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts it in the background has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(fleet.render(console.width, console.height), refresh=True)
            time.sleep(interval_s)
            try:
                fleet.update()
            except (KvistError, OSError) as error:
                fleet.problem = f"out of date: {error}"


class _Fleet:
    """The state of a router's fleet."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url, key
        self._state: dict[str, Any] = {}
        self._samples: deque[tuple[float, Counter[str]]] = deque(maxlen=_NUM_SAMPLES)
        self.problem = ""

    def update(self) -> None:
        """Ask the router; raises KvistError or OSError, with nothing updated."""
        state = json.loads(ask_router(self._url, "/ui/state?view=regret", self._key, _TIMEOUT_S))
        counts = _parse_counts(ask_router(self._url, "/metrics", self._key, _TIMEOUT_S).decode())
        counts["requests"] = state["fleet"]["dispatched"]
        self._state, self.problem = state, ""
        if self._samples and any(counts[name] < number for name, number in self._samples[-1][1].items()):
            self._samples.clear()  # the router was restarted, or a worker has left with its series
        self._samples.append((time.monotonic(), counts))

    def render(self, width: int, height: int) -> RenderableType:
        """Return what fits a screen of this size: the first columns, with a line for each worker, loss and problem."""
        from rich.console import Group
        from rich.text import Text

        fleet, regret = self._state["fleet"], self._state["regret"]
        problems = [each for each in fleet["problems"] if each["until"] is None][:_MAX_LINES]
        lost = [loss_row(loss, regret["total"]["prompt_tokens"]) for loss in regret["losses"][:_MAX_LINES]]
        room = max(1, height - 12 - len(problems) - len(lost))
        workers = sorted(
            self._state["workers"], key=lambda one: (one["shown"]["state"][0] == "healthy", -one["running_requests"])
        )
        is_well = fleet["ready"] and not self.problem
        head = Text(f"{self._url} ", "bold").append("ready" if is_well else "not ready", "green" if is_well else "red")
        head.append(f"  index {fleet['index'] or 'none'}, Ctrl-C ends", "dim")
        if why := self.problem or fleet["reason"]:
            head.append(f"\n{printable(why)}", "red")
        columns = [*zip(_COLUMNS, *(_row(worker) for worker in workers[:room]), strict=True)]
        ends = accumulate(max(map(len, column)) + _COLUMN_GAP for column in columns)
        names, *rows = zip(*columns[: max(1, sum(end <= width + _COLUMN_GAP for end in ends))], strict=True)
        parts: list[RenderableType] = [head, Text(self._rates(fleet)), Text(), make_table(names, rows, breaks=False)]
        if len(workers) > room:
            parts.append(Text(f"and {len(workers) - room:,} more", "dim"))
        if lost:
            parts += [Text(), make_table(LOSSES, lost, breaks=False)]
        for each in problems:
            text = f"{each['where']} {each['what']}: {each['why']} ({each['page']})"
            parts.append(Text(printable(text), "red" if each["is_bad"] else "yellow"))
        return Group(*parts)

    def _rates(self, fleet: dict[str, Any]) -> str:
        (began_s, before), (ended_s, after) = self._samples[0], self._samples[-1]
        seconds, grown = max(1e-9, ended_s - began_s), after - before
        prompts, answers = (grown[name] / seconds for name in _TOKENS)
        times = ", ".join(f"p{100 * part:.0f} {_quantile(grown, part)}" for part in (0.5, 0.99))
        return (
            f"{fleet['running']:,} running, {fleet['queued']:,} waiting, {grown['requests'] / seconds:,.1f} requests/s"
            f"; tokens/s: {prompts:,.0f} of prompts, {answers:,.0f} of answers; first byte: {times}"
        )


def _parse_counts(page: str) -> Counter[str]:
    """Return the sums over workers and models of token counters, by name, and of first-byte times, by bucket."""
    from prometheus_client.parser import text_string_to_metric_families

    counts = Counter[str]()
    lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith((_TTFT, *_TOKENS)))
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            counts[sample.labels.get("le", sample.name)] += int(sample.value)
    return counts


def _quantile(grown: Counter[str], part: float) -> str:
    """Return the quantile of the times to the first byte, as Prometheus estimates it from a histogram."""
    bounds = sorted((float(name), number) for name, number in grown.items() if name[0].isdigit() or name == "+Inf")
    low_s, below = 0.0, 0
    for bound_s, number in bounds:
        if (wanted := part * bounds[-1][1]) and number >= wanted:
            within_s = 0.0 if bound_s == float("inf") else (bound_s - low_s) * (wanted - below) / (number - below)
            return f"{low_s + within_s:.2f} s"
        low_s, below = bound_s, number
    return "–"


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    hits, max_requests, models = worker["hits"] or Counter(), worker["max_requests"], worker["models"]
    held = sum(rank["blocks"] for rank in worker["kv_events"]["ranks"]) * (worker["block_size"] or 0)
    speed = worker["prompt_tokens_per_s"]
    return (
        urlsplit(worker["url"]).netloc,
        worker["shown"]["state"][0],
        f"{worker['running_requests']:,}" + (f"/{max_requests:,}" if max_requests else ""),
        f"{worker['prefill_tokens']:,}",
        percent(held, worker["cache_size_tokens"] or 0),
        percent(hits["routed_tokens"], hits["prompt_tokens"]),
        percent(hits["reported_tokens"], hits["prompt_tokens_with_report"]),
        worker["shown"]["events"][0],
        "–" if speed is None else f"{speed:,.0f}",
        "any" if models is None else ", ".join(models),
    )
