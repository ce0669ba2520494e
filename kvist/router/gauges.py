"""What is true now, read when Prometheus asks: load, states, how well each cache is known, the index.

All is summed up by worker or stream: how many ranks a stream names does not show in how much there is to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist.events.session import SourceState
from kvist.events.transports.answers import BUDGET
from kvist.router.fleet import Fleet
from kvist.router.health import CircuitState
from kvist.router.index import FleetIndex
from kvist.router.load import LoadTracker
from kvist.router.routing import Routing
from kvist.router.worker import WorkerState


@dataclass(frozen=True, slots=True, eq=False)
class Gauges:
    """Reads the running router's values as Prometheus metrics."""

    fleet: Fleet
    load: LoadTracker
    routing: Routing
    index: FleetIndex | None
    now_s: Callable[[], float]

    def collect(self) -> Iterator[Metric | None]:
        """Yield every metric, and None where there may be a pause; states are 1 for the one that holds, else 0."""
        yield from self._states()
        yield from self._loads()
        if self.index is not None:
            yield from self._ranks(self.index)
            yield from self._sources(self.index)
            state = self.index.state_statistics()
            if state is not None:
                yield from state.metrics()
            if self.index.radix is not None:
                statistics = self.index.radix.statistics()
                yield GaugeMetricFamily("kvist_index_blocks", "Distinct blocks in the index", statistics.num_blocks)
                yield GaugeMetricFamily("kvist_index_bytes", "Memory of the index", statistics.size_bytes)

    def _states(self) -> Iterator[Metric | None]:
        states = GaugeMetricFamily("kvist_router_worker_state", "Whether a worker is so", labels=["worker", "state"])
        circuits = GaugeMetricFamily(
            "kvist_router_circuit_state", "Whether a worker's circuit is so", labels=["worker", "state"]
        )
        roles = GaugeMetricFamily("kvist_router_worker_role", "What a worker is there for", labels=["worker", "role"])
        for worker in self.fleet.workers:
            roles.add_metric([worker.url, worker.role.value], 1)
            for state in WorkerState:
                states.add_metric([worker.url, state.value], worker.state is state)
            for circuit in CircuitState:
                circuits.add_metric([worker.url, circuit.value], worker.breaker.state is circuit)
            yield None
        yield from (states, circuits, roles)

    def _loads(self) -> Iterator[Metric | None]:
        labels = ["worker"]
        running = GaugeMetricFamily("kvist_router_running_requests", "Requests not ended yet", labels=labels)
        prefill = GaugeMetricFamily("kvist_router_prefill_tokens", "Uncached tokens not yet answered", labels=labels)
        decode = GaugeMetricFamily("kvist_router_decode_blocks", "Blocks of running requests", labels=labels)
        now_s = self.now_s()
        for worker in self.fleet.workers:
            loads = [self.load.load(rank.target, now_s) for rank in self.routing.ranks(worker)]
            running.add_metric([worker.url], sum(load.running_requests for load in loads))
            prefill.add_metric([worker.url], sum(load.prefill_tokens for load in loads))
            decode.add_metric([worker.url], sum(load.decode_blocks for load in loads))
            yield None
        yield from (running, prefill, decode)

    def _ranks(self, index: FleetIndex) -> Iterator[Metric | None]:
        ranks = GaugeMetricFamily(
            "kvist_router_ranks", "Ranks by how well their cache is known", labels=["worker", "state"]
        )
        blocks = GaugeMetricFamily("kvist_router_worker_blocks", "Blocks that its ranks hold", labels=["worker"])
        for worker in self.fleet.workers:
            statuses = index.ranks(worker.url)
            for state in SourceState:
                ranks.add_metric([worker.url, state.value], sum(status.state is state for status in statuses))
            blocks.add_metric([worker.url], sum(status.num_blocks for status in statuses))
            yield None
        yield from (ranks, blocks)

    def _sources(self, index: FleetIndex) -> Iterator[Metric | None]:
        labels = ["worker", "source"]
        ages = GaugeMetricFamily("kvist_router_event_age_seconds", "Since a stream's last event", labels=labels)
        counters = {
            "gaps": CounterMetricFamily("kvist_router_event_gaps", "Losses seen in a stream", labels=labels),
            "restarts": CounterMetricFamily("kvist_router_event_restarts", "Epochs after the first", labels=labels),
            "refused": CounterMetricFamily("kvist_router_event_batches_refused", "Batches of no use", labels=labels),
            "malformed": CounterMetricFamily("kvist_router_event_malformed", "Messages not understood", labels=labels),
            "ranks": CounterMetricFamily(
                "kvist_router_event_ranks_refused", "Batches of ranks beyond those it may name", labels=labels
            ),
        }
        for source in index.every_source():
            names = [source.worker, source.url]
            if source.last_event_age_s is not None:
                ages.add_metric(names, source.last_event_age_s)
            counters["gaps"].add_metric(names, source.num_gaps)
            counters["restarts"].add_metric(names, source.num_restarts)
            counters["refused"].add_metric(names, source.num_refused_batches)
            counters["malformed"].add_metric(names, source.num_malformed)
            counters["ranks"].add_metric(names, source.num_refused_ranks)
            yield None
        yield from (ages, *counters.values())
        yield CounterMetricFamily(
            "kvist_router_event_answers_refused",
            "Answers of any stream given up because all that came in took too much memory",
            BUDGET.num_refused,
        )
