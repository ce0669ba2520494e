"""A publisher's counters for Prometheus; where a publisher lives in another process's page, it is added to it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.publisher import KvEventPublisher


class PublisherCollector(Collector):
    """What a `KvEventPublisher` did, under names that begin with `kvist_publisher_`."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        statistics = self._publisher.statistics()
        streams = statistics.ranks.values()
        num_passed = sum(stream.filter.num_passed for stream in streams)
        num_filtered = sum(stream.filter.num_filtered for stream in streams)
        yield _counter("events_passed", "Events of the published window group.", num_passed)
        yield _counter("events_filtered", "Events of other window groups, left out.", num_filtered)
        num_malformed = sum(stream.num_malformed for stream in streams)
        yield _counter("events_malformed", "Events of wrong types, for which the rank was cleared.", num_malformed)
        yield _counter("events_lost", "Events lost because the publisher lagged.", statistics.num_lost_events)
        yield _counter("batches_dropped", "Batches left to replay.", statistics.num_dropped_batches)
        yield _counter("messages_sent", "Messages handed to the transport.", statistics.num_sent_messages)
        yield _counter("sent_bytes", "Their bytes.", statistics.num_sent_bytes)
        yield _counter("snapshots", "Snapshots made for subscribers.", statistics.num_snapshots)
        yield GaugeMetricFamily(
            "kvist_publisher_batches_waiting", "Batches the transport has not taken.", statistics.num_waiting_batches
        )


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvist_publisher_{name}", text, value)
