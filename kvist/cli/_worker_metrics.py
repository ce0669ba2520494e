"""The counters of a bundled worker's publisher and transfers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvist.metrics_page import counters, gauges
from kvist.publisher import KvEventPublisher
from kvist.transfer.ranks import RankedTransfers


def publisher_metrics(publisher: KvEventPublisher) -> Iterator[Metric]:
    """Yield the statistics of a publisher, under names that begin with `kvist_publisher_`."""
    now = publisher.statistics()
    streams = now.ranks.values()
    malformed = "Events of wrong types, for which the rank was cleared."
    yield from counters(
        "kvist_publisher",
        ("events_passed", "Events of the published window group.", sum(each.num_passed for each in streams)),
        ("events_filtered", "Events of other window groups, left out.", sum(each.num_filtered for each in streams)),
        ("events_malformed", malformed, sum(each.num_malformed for each in streams)),
        ("events_lost", "Events lost because the publisher lagged.", now.num_lost_events),
        ("batches_dropped", "Batches not sent as the outbox was full; replays have them.", now.num_dropped_batches),
        ("messages_sent", "Messages handed to the transport.", now.num_sent_messages),
        ("sent_bytes", "Bytes handed to the transport.", now.num_sent_bytes),
        ("snapshots", "Snapshots made for subscribers.", now.num_snapshots),
    )
    text = "Batches the transport has not taken."
    yield from gauges("kvist_publisher", ("batches_waiting", text, now.num_waiting_batches))


def transfer_metrics(transfers: RankedTransfers) -> Iterator[Metric]:
    """Yield the statistics of all ranks' transfers, under names that begin with `kvist_transfer_`."""
    now = transfers.statistics()
    bounce = now.bounce
    yield from counters(
        "kvist_transfer",
        ("sent_bytes", "Bytes written into other workers' memory.", now.bytes_written),
        ("sent_descriptors", "Contiguous writes into other workers' memory.", now.num_fragments_written),
        ("bounced_bytes", "Bytes sent through a bounce region.", bounce.bytes_sent),
        ("bounced_descriptors", "Pieces gathered into a bounce region.", bounce.num_fragments_sent),
        ("received_bytes", "Bytes that other workers wrote here.", now.bytes_received),
        ("write_seconds", "Total time of writes.", now.write_seconds),
        ("refused_greetings", "Requests refused for another block layout.", now.num_refused_greetings),
        ("malformed", "Malformed messages, which are ignored.", now.num_malformed),
    )
    yield from gauges(
        "kvist_transfer",
        ("bounce_used_bytes", "Bytes in use of both bounce regions.", bounce.used_bytes),
        ("bounce_quarantined_bytes", "Bytes in bounce regions open to late writes.", bounce.quarantined_bytes),
        ("writing", "Writes in progress, each from one rank to another.", now.num_writing),
        ("quarantined_bytes", "Bytes of failed fetches open to late writes.", now.quarantined_bytes),
    )
