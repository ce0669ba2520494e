"""A Prometheus page that costs the event loop little, however large it is and however many ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.http import ServerStatistics

SLICE_S = 0.0005
"""How long values are read before others on the loop get a turn."""
PAUSE = 4
"""Pages are not begun for so many times as the last one took: scrapes take a fifth of a core at most."""


def server_metrics(prefix: str, server: ServerStatistics) -> Iterator[Metric]:
    """Yield what a server says of its clients, and of the event loop it runs on."""
    yield GaugeMetricFamily(f"{prefix}_connections", "Open client connections", server.num_connections)
    for name, text, number in (
        ("http_refused", "Requests refused before they were read", server.num_refused),
        ("http_evicted", "Idle clients that made room", server.num_evicted),
        ("http_timeouts", "Clients that were too slow", server.num_timeouts),
        ("http_failures", "Requests that the service failed on", server.num_handler_failures),
        ("loop_late_seconds", "All that the event loop was late by", server.late_s),
    ):
        yield CounterMetricFamily(f"{prefix}_{name}", text, number)


class MetricsPage:
    """Reads values on the event loop, a slice at a time, and renders them in a thread, one page at a time."""

    def __init__(
        self, collect: Callable[[], Iterator[Metric | None]], registry: CollectorRegistry | Collector | None = None
    ) -> None:
        """Show what `collect` yields, which may pause at each None, and what `registry` has, read in the thread."""
        self._collect = collect
        self._registry = registry
        self._turn = asyncio.Lock()
        self._num_begun = self._number = 0
        self._may_begin_s = 0.0
        self._page = b""

    async def text(self) -> bytes:
        """Return the page, no value older than this call; who calls while one is rendered shares the next one."""
        num_begun = self._num_begun
        async with self._turn:
            if self._number <= num_begun:
                await asyncio.sleep(self._may_begin_s - monotonic())
                number = self._num_begun = self._num_begun + 1
                began_s = monotonic()
                self._page = await asyncio.to_thread(self._render, await self._read())
                self._number, now_s = number, monotonic()
                self._may_begin_s = now_s + PAUSE * (now_s - began_s)
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
        return generate_latest(_Metrics([*metrics, *(() if self._registry is None else self._registry.collect())]))


class _Metrics(list[Metric], Collector):
    """Metrics that were read."""

    def collect(self) -> list[Metric]:
        return self
