"""The counters of a bundled worker's publisher and transfers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.publisher import KvEventPublisher
from kvist.transfer.ranks import RankedTransfers


class PublisherCollector(Collector):
    """The statistics of a `KvEventPublisher`, under names that begin with `kvist_publisher_`."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        now = self._publisher.statistics()
        streams = now.ranks.values()
        malformed = "Events of wrong types, for which the rank was cleared."
        for name, text, value in (
            ("events_passed", "Events of the published window group.", sum(each.num_passed for each in streams)),
            ("events_filtered", "Events of other window groups, left out.", sum(each.num_filtered for each in streams)),
            ("events_malformed", malformed, sum(each.num_malformed for each in streams)),
            ("events_lost", "Events lost because the publisher lagged.", now.num_lost_events),
            ("batches_dropped", "Batches not sent as the outbox was full; replays have them.", now.num_dropped_batches),
            ("messages_sent", "Messages handed to the transport.", now.num_sent_messages),
            ("sent_bytes", "Bytes handed to the transport.", now.num_sent_bytes),
            ("snapshots", "Snapshots made for subscribers.", now.num_snapshots),
        ):
            yield CounterMetricFamily(f"kvist_publisher_{name}", text, value)
        text = "Batches the transport has not taken."
        yield GaugeMetricFamily("kvist_publisher_batches_waiting", text, now.num_waiting_batches)


class TransferCollector(Collector):
    """The statistics of all ranks' transfers, under names that begin with `kvist_transfer_`."""

    def __init__(self, transfers: RankedTransfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        now = self._transfers.statistics()
        bounce = now.bounce
        for name, text, value in (
            ("sent_bytes", "Bytes written into other workers' memory.", now.bytes_written),
            ("sent_descriptors", "Contiguous writes into other workers' memory.", now.num_fragments_written),
            ("bounced_bytes", "Bytes sent through a bounce region.", bounce.bytes_sent),
            ("bounced_descriptors", "Pieces gathered into a bounce region.", bounce.num_fragments_sent),
            ("received_bytes", "Bytes that other workers wrote here.", now.bytes_received),
            ("write_seconds", "Total time of writes.", now.write_seconds),
            ("refused_greetings", "Requests refused for another block layout.", now.num_refused_greetings),
            ("malformed", "Malformed messages, which are ignored.", now.num_malformed),
        ):
            yield CounterMetricFamily(f"kvist_transfer_{name}", text, value)
        for name, text, value in (
            ("bounce_used_bytes", "Bytes in use of both bounce regions.", bounce.used_bytes),
            ("bounce_quarantined_bytes", "Bytes in bounce regions open to late writes.", bounce.quarantined_bytes),
            ("writing", "Writes in progress, each from one rank to another.", now.num_writing),
            ("quarantined_bytes", "Bytes of failed fetches open to late writes.", now.quarantined_bytes),
        ):
            yield GaugeMetricFamily(f"kvist_transfer_{name}", text, value)
