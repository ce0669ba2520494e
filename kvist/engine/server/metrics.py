"""The engine's Prometheus metrics, read from its statistics when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist.engine.async_engine import AsyncEngine
from kvist.events.engine_events import FULL


class EngineCollector(Collector):
    """Everything `EngineStatistics` counts, under names that begin with `kvist_engine_`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        statistics = self._engine.statistics()
        scheduler, kv_cache = statistics.scheduler, statistics.kv_cache
        yield _gauge("requests_running", "Sequences that hold KV blocks.", scheduler.num_running)
        yield _gauge("requests_waiting", "Sequences queued for their first or next admission.", scheduler.num_waiting)
        yield _counter("preemptions", "Sequences that gave their blocks back to start over.", scheduler.num_preemptions)
        yield _counter("output_tokens", "Tokens generated.", statistics.num_output_tokens)
        yield _counter("failed_steps", "Steps that ended their requests with an error.", statistics.num_failed_steps)
        yield _counter("refused", "Requests refused because too many were open.", self._engine.num_refused)
        yield _counter("admitted_tokens", "Tokens of admitted sequences.", kv_cache.num_queried_tokens)
        yield _counter("cached_tokens", "Those of them that the prefix cache served.", kv_cache.num_hit_tokens)
        used = _blocks("used", "KV blocks that sequences hold.")
        scratch = _blocks("scratch", "Those of them that hold, for a step, blocks which slide out of the window in it.")
        free = _blocks("free", "KV blocks that no sequence holds, cached or not.")
        cached = _blocks("cached", "KV blocks in the prefix cache, held or not.")
        for pool in kv_cache.pools:
            labels = [str(pool.group_id), "full" if pool.window is FULL else str(pool.window)]
            used.add_metric(labels, pool.num_used)
            scratch.add_metric(labels, pool.num_scratch)
            free.add_metric(labels, pool.num_free)
            cached.add_metric(labels, pool.num_cached)
        yield from (used, scratch, free, cached)
        handoffs = statistics.handoffs
        yield _gauge("prompts_held", "Prompts whose blocks wait to be fetched.", handoffs.num_held)
        yield _gauge("requests_receiving", "Requests whose blocks are being fetched.", handoffs.num_receiving)
        yield _gauge("fetches_abandoned", "Fetches whose blocks may still be written to.", handoffs.num_abandoned)
        yield _counter("prompts_offered", "Prompts held for another worker.", handoffs.num_offered)
        yield _counter("prompts_fetched", "Prompts fetched from another worker.", handoffs.num_fetched)
        yield _counter("fetches_failed", "Prompts that could not be fetched.", handoffs.num_failed)
        yield _counter("fallbacks", "Those of them that were computed here instead.", handoffs.num_fallbacks)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvist_engine_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvist_engine_{name}", text, value)


def _blocks(state: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvist_engine_kv_blocks_{state}", text, labels=["group", "window"])
