"""How keeping an index on disk goes, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist.indexer.dumps.keeper import StateStatistics


def state_metrics(statistics: StateStatistics) -> Iterator[Metric]:
    """Yield what became of the streams that were loaded, and how saving goes."""
    streams = GaugeMetricFamily(
        "kvist_state_streams", "Streams loaded from disk by what became of them", labels=["fate"]
    )
    for fate in ("loaded", "proven", "cleared", "waiting", "dropped"):
        streams.add_metric([fate], getattr(statistics, f"num_{fate}"))
    yield streams
    yield CounterMetricFamily("kvist_state_saves", "Times that the index was saved", statistics.num_saves)
    yield CounterMetricFamily("kvist_state_save_failures", "Saves that failed", statistics.num_failures)
    if statistics.age_s is not None:
        yield GaugeMetricFamily("kvist_state_age_seconds", "Since the last save", statistics.age_s)
    if statistics.size_bytes is not None:
        yield GaugeMetricFamily("kvist_state_bytes", "Size of the last save", statistics.size_bytes)
