"""A Prometheus page that costs the event loop little, however large it is and however often it is scraped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from time import monotonic
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.http import ServerStatistics

SLICE_S = 0.0005
"""How long values are read before other tasks on the loop get a turn."""
PAUSE = 4
"""The pause between two pages, in multiples of the time the last one took: scrapes take a fifth of a core at most."""


Row: TypeAlias = tuple[str, str, float]
"""A metric without labels: its name behind a prefix, its description, and its value."""


def counters(prefix: str, *rows: Row) -> Iterator[Metric]:
    return (CounterMetricFamily(f"{prefix}_{name}", text, value) for name, text, value in rows)


def gauges(prefix: str, *rows: Row) -> Iterator[Metric]:
    return (GaugeMetricFamily(f"{prefix}_{name}", text, value) for name, text, value in rows)


def server_metrics(prefix: str, server: ServerStatistics) -> Iterator[Metric]:
    """Yield the metrics of an HTTP server's clients, and of the event loop it runs on."""
    yield from gauges(prefix, ("connections", "Open client connections", server.num_connections))
    yield from counters(
        prefix,
        ("http_refused", "Requests refused before they were read", server.num_refused),
        ("http_evicted", "Idle clients that made room", server.num_evicted),
        ("http_timeouts", "Clients that were too slow", server.num_timeouts),
        ("http_failures", "Requests that the service failed on", server.num_handler_failures),
        ("loop_late_seconds", "All that the event loop was late by", server.late_s),
    )


class MetricsPage:
    """Reads values on the event loop, a slice at a time, and renders them in a thread, one page at a time."""

    def __init__(
        self,
        collect: Callable[[], Iterator[Metric | None]],
        registry: CollectorRegistry | Collector,
        refresh: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0),
    ) -> None:
        """Show what `collect` yields, which may be interrupted at each None, and `registry`, read in the thread.

        Before each page `refresh` updates them.
        """
        self._collect, self._registry, self._refresh = collect, registry, refresh
        self._lock = asyncio.Lock()
        self._page, self._read_at_s = b"", -math.inf
        self._not_before_s = 0.0

    async def text(self) -> bytes:
        """Return the page, with no value older than this call; calls while one is rendered share the next one."""
        called_at_s = monotonic()
        async with self._lock:
            if self._read_at_s <= called_at_s:
                await asyncio.sleep(self._not_before_s - monotonic())
                read_at_s = monotonic()
                await self._refresh()
                began_s = monotonic()
                self._page = await asyncio.to_thread(self._render, await self._read())
                self._read_at_s, now_s = read_at_s, monotonic()
                self._not_before_s = now_s + PAUSE * (now_s - began_s)
            return self._page

    async def _read(self) -> list[Metric]:
        metrics = []
        ends_at_s = monotonic() + SLICE_S
        for metric in self._collect():
            if metric is not None:
                metrics.append(metric)
            if monotonic() >= ends_at_s:
                await asyncio.sleep(0)
                ends_at_s = monotonic() + SLICE_S
        return metrics

    def _render(self, metrics: list[Metric]) -> bytes:
        return generate_latest(_Metrics([*metrics, *self._registry.collect()]))


class _Metrics(list[Metric], Collector):
    """Metrics in the form that `generate_latest` takes."""

    def collect(self) -> list[Metric]:
        return self
