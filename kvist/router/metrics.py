"""The router's Prometheus metrics, in a registry of their own.

Events of requests are counted as they happen; the current state (load, workers, the index) is read at each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvist.events.session import SourceState
from kvist.events.transports.received import BUDGET
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.replicas import Replicas
from kvist.router.index import APPROXIMATE, FleetIndex
from kvist.router.policy.decision import Decision
from kvist.router.usage import ReportedUsage

PREFIX = "kvist_router"
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_BUCKETS_S = (*_TTFT_BUCKETS_S, 120.0, 300.0, 600.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_ERROR_BUCKETS_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384)
_EVENT_COUNTERS = (
    ("gaps", "num_gaps", "Gaps in the sequence numbers of a stream"),
    ("restarts", "num_restarts", "Restarts of a stream's publisher"),
    ("batches_refused", "num_refused_batches", "Batches refused for their block size"),
    ("malformed", "num_malformed", "Malformed messages"),
    ("ranks_refused", "num_refused_ranks", "Batches refused for a rank beyond --data-parallel-size"),
)
_LOADS = {
    "running_requests": "Running requests",
    "prefill_tokens": "Uncached prompt tokens of requests without a first token",
}


_COUNTERS = {
    "requests worker status policy": "Requests sent to workers; status 0: the worker failed, 499: the client left",
    "readings api outcome obstacle": (
        "Requests by how much of their prompts was tokenised: tokens, partly or load (none), and why not"
    ),
    "unmatched": "Requests routed by load, as the index was being written to at each try to read it",
    "refusals status": "Requests the router refused itself",
    "retries worker": "Requests retried, by the worker that failed",
    "disaggregated": "Requests prefilled by one worker and decoded by another",
    "local_prefills reason": "Requests prefilled by the answering worker although there are prefill workers",
    "disaggregation_fallbacks reason": "Prefills or transfers that failed",
    "pulls outcome": "Fetches of a prefix from another worker",
    "pulled_tokens": "Prompt tokens fetched instead of computed",
    "full_reports worker report": "Full reports of cached blocks by partial ranks, by what they showed",
    "healed worker reason": "Partial ranks that are no longer asked for full reports",
    "prompt_tokens worker model": "Prompt tokens routed",
    "overlap_tokens worker model": "Prompt tokens predicted to be cached",
    "output_tokens worker model": (
        "Output tokens of complete answers: as reported or, if a stream has no usage, its events"
    ),
}
"""The text of each, by its name and its labels."""
_HISTOGRAMS = {
    "prefill_seconds": (_TTFT_BUCKETS_S, "Time to compute a prompt for another worker"),
    "transfer_seconds": (_TTFT_BUCKETS_S, "From sending a request to a decode worker to the first byte of its answer"),
    "overlap_error_tokens worker sign": (
        _ERROR_BUCKETS_TOKENS,
        "Difference between predicted and reported cached tokens of a request",
    ),
    "queue_seconds model": (_TTFT_BUCKETS_S, "Time that queued requests waited for a worker"),
    "time_to_first_byte_seconds worker model": (
        _TTFT_BUCKETS_S,
        "From a request's arrival to the first byte of its answer's body",
    ),
    "request_seconds model": (
        _REQUEST_BUCKETS_S,
        "From a request's arrival to the end of its complete answer of status 200",
    ),
    "inter_token_seconds model": (_TOKEN_BUCKETS_S, "Mean time between tokens of such an answer, if streamed"),
}
_LABELS = {name: labels for name, *labels in map(str.split, (*_COUNTERS, *_HISTOGRAMS))}
_BOUNDS = {name.split()[0]: bounds for name, (bounds, _) in _HISTOGRAMS.items()}


class RouterMetrics(Collector):
    """Counts events of requests; the series of workers that were removed are dropped.

    Counts are plain numbers, by name and labels: those of the library take a lock and four calls each.
    """

    def __init__(self) -> None:
        self.has_worker: Callable[[str], bool] = lambda _: True
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self.counts = Counter[tuple[str, ...]]({(name,): 0 for name in _COUNTERS if " " not in name})
        self._observed: dict[tuple[str, ...], list[float]] = {
            (name,): [0.0] * (len(_BOUNDS[name]) + 2) for name in _HISTOGRAMS if " " not in name
        }

    def observe(self, value: float, *name_and_labels: str) -> None:
        bounds, observed = _BOUNDS[name_and_labels[0]], self._observed.get(name_and_labels)
        if observed is None:
            observed = self._observed[name_and_labels] = [0.0] * (len(bounds) + 2)
        observed[bisect_left(bounds, value)] += 1
        observed[-1] += value

    def reported(self, decision: Decision, usage: ReportedUsage) -> None:
        """Record how far the predicted cached tokens were from those that the worker reports."""
        if usage.cached_tokens is None or not decision.prompt.is_exact:
            return
        error_tokens = decision.overlap_tokens - usage.cached_tokens
        sign = "exact" if error_tokens == 0 else "over" if error_tokens > 0 else "under"
        self.observe(abs(error_tokens), "overlap_error_tokens", decision.chosen.target.worker, sign)

    def forget_removed(self) -> None:
        for series in (self.counts, self._observed):
            for key in [*series]:
                if "worker" in _LABELS[key[0]] and not self.has_worker(key[1]):
                    series.pop(key, None)  # another thread may have done so

    def collect(self) -> Iterator[Metric]:
        """Yield the counts, in any thread."""
        self.forget_removed()  # those whose last answers ended later may have been counted again
        counters = {
            name: CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
            for (name, *labels), text in ((key.split(), text) for key, text in _COUNTERS.items())
        }
        for (name, *labels), count in list(self.counts.items()):
            counters[name].add_metric(labels, count)
        histograms = {
            name: HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
            for (name, *labels), text in ((key.split(), text) for key, (_, text) in _HISTOGRAMS.items())
        }
        for (name, *labels), (*counts, total) in list(self._observed.items()):
            bounds = [*map(floatToGoString, _BOUNDS[name]), "+Inf"]
            histograms[name].add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)
        yield from (*counters.values(), *histograms.values())


def fleet_metrics(
    fleet: Fleet, load: LoadTracker, index: FleetIndex | None, replicas: Replicas | None
) -> Iterator[Metric | None]:
    """Yield the current state of workers: load, states, how well each cache is known, the index.

    Yield None where there may be a pause. All is summed up by worker or stream, so that the size of the page does not
    depend on how many ranks a stream names. A state is 1 if it is the worker's, else 0.
    """
    yield from _worker_gauges(fleet, load)
    if replicas is not None:
        yield GaugeMetricFamily("kvist_router_replicas", "Other routers whose load is known", len(replicas))
    if index is not None:
        yield from _rank_gauges(fleet, index)
        yield from _source_gauges(index)
        state = index.state_statistics()
        if state is not None:
            yield from state.metrics()
        if index.radix is not None:
            statistics = index.radix.statistics()
            yield GaugeMetricFamily("kvist_index_blocks", "Distinct blocks in the index", statistics.num_blocks)
            yield GaugeMetricFamily("kvist_index_bytes", "Memory of the index", statistics.size_bytes)


def _worker_gauges(fleet: Fleet, load: LoadTracker) -> Iterator[Metric | None]:
    states = gauge_of("worker_state", "1 for the state that a worker is in", "worker", "state")
    circuits = gauge_of("circuit_state", "1 for the state that a worker's circuit is in", "worker", "state")
    text = "1 for how a worker's tokens of chats compare with the router's"
    renderings = gauge_of("worker_rendering", text, "worker", "state")
    roles = gauge_of("worker_role", "1 for a worker's role", "worker", "role")
    loads = {name: gauge_of(name, text, "worker") for name, text in _LOADS.items()}
    for worker in fleet.workers:
        rendering = None if worker.rendering is None else worker.rendering.state
        for gauge, state in ((states, worker.state), (circuits, worker.breaker.state), (renderings, rendering)):
            for each in () if state is None else type(state):
                gauge.add_metric([worker.url, each.value], each is state)
        roles.add_metric([worker.url, worker.role.value], 1)
        of_ranks = [load.load(rank.target) for rank in fleet.ranks(worker)]
        for name, gauge in loads.items():
            gauge.add_metric([worker.url], sum(getattr(each, name) for each in of_ranks))
        yield None
    yield from (states, circuits, roles, renderings, *loads.values())


def _rank_gauges(fleet: Fleet, index: FleetIndex) -> Iterator[Metric | None]:
    ranks = gauge_of("ranks", "Ranks by how well their cache is known", "worker", "state")
    blocks = gauge_of("worker_blocks", "Blocks in a worker's cache", "worker")
    for worker in fleet.workers:
        statuses = index.ranks(worker.url)
        for state in (*SourceState, APPROXIMATE):
            ranks.add_metric([worker.url, state], sum(status.display_state == state for status in statuses))
        blocks.add_metric([worker.url], sum(status.num_blocks for status in statuses))
        yield None
    yield from (ranks, blocks)


def _source_gauges(index: FleetIndex) -> Iterator[Metric | None]:
    ages = gauge_of("event_age_seconds", "Time since a stream's last event", "worker", "source")
    counters = {
        attribute: CounterMetricFamily(f"{PREFIX}_event_{name}", text, labels=["worker", "source"])
        for name, attribute, text in _EVENT_COUNTERS
    }
    for source in index.source_statistics():
        names = [source.worker, source.url]
        if source.last_event_age_s is not None:
            ages.add_metric(names, source.last_event_age_s)
        for attribute, counter in counters.items():
            counter.add_metric(names, getattr(source, attribute))
        yield None
    yield from (ages, *counters.values())
    text = "Replay answers dropped to bound memory, of all streams"
    yield CounterMetricFamily(f"{PREFIX}_event_answers_refused", text, BUDGET.num_refused)


def gauge_of(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
