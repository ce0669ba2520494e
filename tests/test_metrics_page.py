"""A page of metrics is read in slices, rendered off the event loop, and shared by those who ask for it together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from kvist import metrics_page
from kvist.metrics_page import MetricsPage


class Values:
    """A value that changes whenever it is read, and notes the threads that render it."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.rendered_in: set[int] = set()
        self.begun = asyncio.Event()

    def collect(self) -> Iterator[Metric | None]:
        self.num_reads += 1
        self.begun.set()
        yield None
        metric = GaugeMetricFamily("value", "Times that it was read", self.num_reads)
        metric.samples = Samples(metric.samples, self.rendered_in)
        yield metric


class Samples(list[Sample]):
    """Notes the threads that look at it."""

    def __init__(self, samples: list[Sample], rendered_in: set[int]) -> None:
        super().__init__(samples)
        self._rendered_in = rendered_in

    def __iter__(self) -> Iterator[Sample]:
        self._rendered_in.add(threading.get_ident())
        return super().__iter__()


async def test_a_page_is_rendered_in_another_thread_than_the_event_loops():
    values = Values()
    assert b"value 1.0" in await MetricsPage(values.collect, CollectorRegistry()).text()
    assert values.rendered_in
    assert threading.get_ident() not in values.rendered_in


async def test_a_scrape_never_sees_what_was_read_before_it_came():
    page = MetricsPage(Values().collect, CollectorRegistry())
    assert b"value 1.0" in await page.text()
    assert b"value 2.0" in await page.text()


async def test_scrapes_that_come_while_a_page_is_made_share_the_next_one():
    values = Values()
    page = MetricsPage(values.collect, CollectorRegistry())
    first = asyncio.create_task(page.text())
    await values.begun.wait()
    assert len({await first, *await asyncio.gather(*(page.text() for _ in range(50)))}) == 2
    assert values.num_reads == 2


async def test_a_scrape_that_is_given_up_leaves_others_a_page_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_page, "SLICE_S", 0.0)  # else it may end before it is given up
    values = Values()
    page = MetricsPage(values.collect, CollectorRegistry())
    given_up = asyncio.create_task(page.text())
    waiting = asyncio.create_task(page.text())
    await values.begun.wait()
    given_up.cancel()
    assert b"value 2.0" in await waiting


async def test_others_have_a_turn_between_two_slices_of_reading(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_page, "SLICE_S", 0.0)
    seen: list[int] = []

    def collect() -> Iterator[Metric | None]:
        for number in range(3):
            asyncio.get_running_loop().call_soon(seen.append, number)
            yield None
            assert len(seen) == number + 1

    await MetricsPage(collect, CollectorRegistry()).text()
