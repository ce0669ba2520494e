"""The counters of a worker's transfers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.transfer.ranked_service import RankedTransfers


class TransferCollector(Collector):
    """What all ranks of a worker did, under names that begin with `kvist_transfer_`."""

    def __init__(self, transfers: RankedTransfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        statistics = self._transfers.statistics()
        sender, receiver, agent = statistics.sender, statistics.receiver, statistics.agent
        bounce = statistics.bounce
        yield _counter("sent", "Prompts that another worker has fetched.", sender.num_fetched)
        yield _counter("given_up", "Prompts that were held and not fetched.", sender.num_given_up)
        yield _counter("received", "Prompts fetched.", receiver.num_completed)
        yield _counter("failed", "Prompts that could not be fetched.", receiver.num_failed)
        yield _counter("sent_bytes", "Bytes written into other workers' memory.", agent.bytes_written)
        yield _counter("sent_descriptors", "Pieces they were written in.", agent.num_fragments_written)
        yield _counter("bounced_bytes", "Those of them that went through a bounce region.", bounce.bytes_sent)
        yield _counter("bounced_descriptors", "Pieces that were gathered for that.", bounce.num_fragments_sent)
        yield _gauge("bounce_used_bytes", "Bytes in use of both regions.", bounce.receive_bytes + bounce.send_bytes)
        yield _gauge("bounce_quarantined_bytes", "Those that may be written to late.", bounce.quarantined_bytes)
        yield _counter("received_bytes", "Bytes that other workers wrote here.", statistics.bytes_received)
        yield _counter("write_seconds", "Seconds that writes took, summed.", statistics.write_seconds)
        yield _counter("fetch_seconds", "Seconds from asking for a prompt to having it.", statistics.fetch_seconds)
        yield _counter("refused_greetings", "Workers whose blocks are not like ours.", statistics.num_refused_greetings)
        yield _counter("malformed", "Messages that were ignored.", statistics.num_malformed)
        yield _gauge("held", "Prompts that wait to be fetched.", sender.num_held)
        yield _gauge("writing", "Writes under way, each from one rank to one.", sender.num_writing)
        yield _gauge("active", "Fetches under way.", receiver.num_active)
        yield _gauge(
            "quarantined_bytes", "Bytes of failed fetches that may be written to.", statistics.quarantined_bytes
        )


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvist_transfer_{name}", text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvist_transfer_{name}", text, value)
