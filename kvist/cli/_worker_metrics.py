"""The counters of a bundled worker's publisher and transfers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.publisher import KvEventPublisher
from kvist.transfer.ranks import RankedTransfers


class PublisherCollector(Collector):
    """What a `KvEventPublisher` did, under names that begin with `kvist_publisher_`."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        now = self._publisher.statistics()
        streams = now.ranks.values()
        num_passed = sum(stream.num_passed for stream in streams)
        num_filtered = sum(stream.num_filtered for stream in streams)
        num_malformed = sum(stream.num_malformed for stream in streams)
        yield _counter("publisher_events_passed", "Events of the published window group.", num_passed)
        yield _counter("publisher_events_filtered", "Events of other window groups, left out.", num_filtered)
        yield _counter(
            "publisher_events_malformed", "Events of wrong types, for which the rank was cleared.", num_malformed
        )
        yield _counter("publisher_events_lost", "Events lost because the publisher lagged.", now.num_lost_events)
        yield _counter("publisher_batches_dropped", "Batches left to replay.", now.num_dropped_batches)
        yield _counter("publisher_messages_sent", "Messages handed to the transport.", now.num_sent_messages)
        yield _counter("publisher_sent_bytes", "Their bytes.", now.num_sent_bytes)
        yield _counter("publisher_snapshots", "Snapshots made for subscribers.", now.num_snapshots)
        yield _gauge("publisher_batches_waiting", "Batches the transport has not taken.", now.num_waiting_batches)


class TransferCollector(Collector):
    """What all ranks of a worker did, under names that begin with `kvist_transfer_`."""

    def __init__(self, transfers: RankedTransfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        now = self._transfers.statistics()
        agent, bounce, num_refused = now.agent, now.bounce, now.num_refused_greetings
        yield _counter("transfer_sent_bytes", "Bytes written into other workers' memory.", agent.bytes_written)
        yield _counter("transfer_sent_descriptors", "Pieces they were written in.", agent.num_fragments_written)
        yield _counter("transfer_bounced_bytes", "Those of them that went through a bounce region.", bounce.bytes_sent)
        yield _counter("transfer_bounced_descriptors", "Pieces that were gathered for that.", bounce.num_fragments_sent)
        yield _counter("transfer_received_bytes", "Bytes that other workers wrote here.", now.bytes_received)
        yield _counter("transfer_write_seconds", "Seconds that writes took, summed.", now.write_seconds)
        yield _counter("transfer_fetch_seconds", "Seconds from asking for a prompt to having it.", now.fetch_seconds)
        yield _counter("transfer_refused_greetings", "Requests of workers whose blocks are not like ours.", num_refused)
        yield _counter("transfer_malformed", "Messages that were ignored.", now.num_malformed)
        yield _gauge("transfer_bounce_used_bytes", "Bytes in use of both regions.", bounce.used_bytes)
        yield _gauge(
            "transfer_bounce_quarantined_bytes", "Those that may be written to late.", bounce.quarantined_bytes
        )
        yield _gauge("transfer_writing", "Writes under way, each from one rank to one.", now.num_writing)
        yield _gauge(
            "transfer_quarantined_bytes",
            "Bytes of failed fetches that may be written to.",
            now.quarantined_bytes,
        )


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvist_{name}", text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvist_{name}", text, value)
