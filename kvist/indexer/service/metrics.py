"""The service's Prometheus page: requests are counted as they happen, everything else is read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist.events.session import SourceState
from kvist.events.transports.received import BUDGET
from kvist.http import ServerStatistics
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.service.registry import Registry
from kvist.metrics_page import server_metrics

_LATENCY_BOUNDS_S = tuple(100e-6 * 2**step for step in range(16))

SOURCE_COUNTERS = {
    "batches": "Messages applied",
    "events": "Events applied",
    "gaps": "Gaps in the sequence numbers of a stream",
    "replays": "Replays of lost messages received",
    "snapshots": "Replays that began with a snapshot",
    "recovered": "Messages recovered by a replay",
    "cleared": "Times that a stream's blocks were dropped because events were lost",
    "diverged": "Heartbeats whose digest differs from the index",
    "restarts": "Restarts of a stream's publisher",
    "duplicates": "Duplicate messages",
    "malformed": "Malformed messages",
    "unknown_events": "Events of a kind that is not indexed",
    "refused_batches": "Batches refused for their block size",
    "refused_events": "Stored events refused as their parent is not held",
    "refused_ranks": "Batches refused for a rank beyond --data-parallel-size",
}
"""Counters of `SourceStatistics`, there with the prefix `num_`, and their descriptions."""


class RequestCounters:
    """Counts each request by endpoint and status, and its time by endpoint."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = Counter("kvist_index_requests", "Requests answered", ["endpoint", "status"], registry=self.registry)
        seconds = Histogram(
            "kvist_index_request_seconds",
            "Time from a whole request to its answer",
            ["endpoint"],
            buckets=_LATENCY_BOUNDS_S,
            registry=self.registry,
        )
        self._requests, self._seconds = cache(requests.labels), cache(seconds.labels)  # `labels` takes a lock

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests(endpoint, status).inc()
        self._seconds(endpoint).observe(seconds)


def collect(
    registry: Registry, server: Callable[[], ServerStatistics], keeper: StateKeeper | None
) -> Iterator[Metric | None]:
    """Yield the running service's metrics, and None wherever others may have a turn."""
    yield from server_metrics("kvist_index", server())
    yield from _index_metrics(registry)
    yield from _stream_metrics(registry)
    if keeper is not None:
        yield from keeper.statistics().metrics()


def _index_metrics(registry: Registry) -> Iterator[Metric | None]:
    labels = ["model", "routing_group"]
    gauges = {
        "num_blocks": GaugeMetricFamily("kvist_index_blocks", "Distinct blocks", labels=labels),
        "num_held": GaugeMetricFamily("kvist_index_residencies", "Blocks by rank and tier", labels=labels),
        "num_ranks": GaugeMetricFamily("kvist_index_ranks", "Ranks that hold blocks", labels=labels),
        "size_bytes": GaugeMetricFamily("kvist_index_bytes", "Memory of the index", labels=labels),
    }
    evicted = CounterMetricFamily(
        "kvist_index_evicted_blocks", "Blocks evicted to stay below --max-blocks", labels=labels
    )
    for member in [*registry]:
        statistics = member.index.statistics()
        for name, gauge in gauges.items():
            gauge.add_metric([*member.namespace], getattr(statistics, name))
        evicted.add_metric([*member.namespace], statistics.num_evicted)
        yield None
    yield from (*gauges.values(), evicted)


def _stream_metrics(registry: Registry) -> Iterator[Metric | None]:
    labels = ["model", "instance", "dp_rank"]
    sources = ((member, source) for member in [*registry] for source in member.indexer.each_statistics())
    states = GaugeMetricFamily("kvist_index_stream_ranks", "Ranks of a stream by state", labels=[*labels, "state"])
    ages = GaugeMetricFamily("kvist_index_stream_age_seconds", "Time since a stream's last event", labels=labels)
    lags = GaugeMetricFamily("kvist_index_stream_lag_seconds", "Age of the last message when applied", labels=labels)
    counters = {
        name: CounterMetricFamily(f"kvist_index_stream_{name}", text, labels=labels)
        for name, text in SOURCE_COUNTERS.items()
    }
    for member, source in sources:
        names = [member.namespace.model_name, *source.worker.split(":")]
        for state in SourceState:
            states.add_metric([*names, state.value], sum(each is state for each in source.states.values()))
        if source.last_event_age_s is not None:
            ages.add_metric(names, source.last_event_age_s)
        if source.lag_s is not None:
            lags.add_metric(names, source.lag_s)
        for name, counter in counters.items():
            counter.add_metric(names, getattr(source, f"num_{name}"))
        yield None
    yield from (states, ages, lags, *counters.values())
    text = "Replay answers dropped to bound memory, of all streams"
    yield CounterMetricFamily("kvist_index_answers_refused", text, BUDGET.num_refused)
