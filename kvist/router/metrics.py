"""The router's Prometheus metrics, in a registry of their own.

What happens to requests is counted as it happens; what is true now (load, states, the index) is read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

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
    ("gaps", "num_gaps", "Losses seen in a stream"),
    ("restarts", "num_restarts", "Epochs after the first"),
    ("batches_refused", "num_refused_batches", "Batches of no use"),
    ("malformed", "num_malformed", "Messages not understood"),
    ("ranks_refused", "num_refused_ranks", "Batches of ranks beyond those it may name"),
)
_LOADS = {
    "running_requests": "Requests not ended yet",
    "prefill_tokens": "Uncached tokens not yet answered",
    "decode_blocks": "Blocks of running requests",
}


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """What requests for a model count in at one worker, looked up once: `labels` takes a lock and formats each time."""

    prompt_tokens: Counter
    overlap_tokens: Counter
    output_tokens: Counter
    first_byte_time: Histogram
    request_time: Histogram
    token_time: Histogram

    def dispatched(self, decision: Decision) -> None:
        """Count the tokens of a request that goes to its worker."""
        self.prompt_tokens.inc(decision.prompt.num_tokens)
        self.overlap_tokens.inc(decision.overlap_tokens)

    def answered(self, total_s: float, first_byte_s: float, num_tokens: int, *, is_stream: bool) -> None:
        """Observe a whole answer; a stream's tokens after the first came evenly, as far as is known."""
        self.request_time.observe(total_s)
        self.output_tokens.inc(num_tokens)
        if is_stream and num_tokens > 1:
            self.token_time.observe((total_s - first_byte_s) / (num_tokens - 1))


class RouterMetrics:
    """Counts what happens to requests; a worker that is removed takes its series along."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace=PREFIX, registry=self.registry)
        gauge = partial(Gauge, namespace=PREFIX, registry=self.registry)
        histogram = partial(Histogram, namespace=PREFIX, registry=self.registry)
        times = partial(histogram, buckets=_TTFT_BUCKETS_S)
        at = ["worker", "model"]
        text = "Requests sent to workers; status 0: the worker failed, 499: nobody waits any more"
        self._requests = counter("requests", text, ["worker", "status", "policy"])
        self.request = cache(self._requests.labels)
        text = (
            "Requests by how much of their prompts could be read: tokens, partly or load only, and what was in the way"
        )
        self.reading = cache(counter("readings", text, ["api", "outcome", "obstacle"]).labels)
        text = "Requests routed by load, as the index was being written to whenever it was looked at"
        self.unmatched = counter("unmatched", text)
        self.refusals = counter("refusals", "Requests the router answered itself", ["status"])
        self.retries = counter("retries", "Requests sent on to another worker", ["worker"])
        self.handovers = counter("disaggregated", "Requests answered by a decode worker with another's prefill")
        self.prefill_time = times("prefill_seconds", "Of a prompt computed for another worker")
        text = "From asking a decode worker to go on to the first byte of its answer"
        self.transfer_time = times("transfer_seconds", text)
        text = "Requests that one worker did all of, though there are others"
        self.locals = counter("local_prefills", text, ["reason"])
        text = "Prefills or transfers that came to nothing"
        self.fallbacks = counter("disaggregation_fallbacks", text, ["reason"])
        text = "Prefixes that a worker was to fetch from another, by what came of it"
        self.pulls = counter("pulls", text, ["outcome"])
        self.pulled_tokens = counter("pulled_tokens", "Prompt tokens that were fetched instead of computed")
        text = "Prompts that prefill workers were told nobody will fetch, by whether they held them"
        self.releases = counter("releases", text, ["outcome"])
        text = "Answers to requests that had a partial worker report its cached blocks again, by what they showed"
        self.full_reports = counter("full_reports", text, ["worker", "report"])
        text = "Partial ranks that are asked for full reports no more, by why"
        self.healed = counter("healed", text, ["worker", "reason"])
        text = "Blocks that partial ranks said they had cached and the index had not, each counted once a rank"
        self.healing_hits = gauge("healing_hits", text, ["worker"])
        text = "A number that changes whenever such a block is new"
        self.healing_digest = gauge("healing_digest", text, ["worker"])
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens routed", at)
        self._overlap_tokens = counter("overlap_tokens", "Prompt tokens predicted to be cached", at)
        text = "Tokens of whole answers: as the worker says or, of a stream where it does not, its events"
        self._output_tokens = counter("output_tokens", text, at)
        text = "How far the predicted cached tokens of a request were over or under those its worker reported"
        sizes = partial(histogram, buckets=_ERROR_BUCKETS_TOKENS)
        self._overlap_error = sizes("overlap_error_tokens", text, ["worker", "sign"])
        self._error = cache(self._overlap_error.labels)
        self.queue_time = times("queue_seconds", "That requests waited for a worker with room, if they did", ["model"])
        text = "From a request's arrival to the first byte of its answer's body"
        self._ttft = times("time_to_first_byte_seconds", text, at)
        text = "From a request's arrival to the end of its answer, where that is whole and a 200"
        self._request_time = histogram("request_seconds", text, ["model"], buckets=_REQUEST_BUCKETS_S)
        text = "Between two tokens of such an answer, if it is a stream: their mean"
        self._token_time = histogram("inter_token_seconds", text, ["model"], buckets=_TOKEN_BUCKETS_S)
        self.series_of = cache(self._series_of)

    def reported(self, decision: Decision, usage: ReportedUsage) -> None:
        """Compare what was predicted with what the worker says it found in its cache."""
        if usage.cached_tokens is None or not decision.prompt.is_tokenized:
            return
        error_tokens = decision.overlap_tokens - usage.cached_tokens
        sign = "exact" if error_tokens == 0 else "over" if error_tokens > 0 else "under"
        self._error(decision.chosen.target.worker, sign).observe(abs(error_tokens))

    def forget(self, worker: str) -> None:
        """Drop every series of a removed worker."""
        for series in (self.request, self._error, self.series_of):
            series.cache_clear()
        tokens = (self._prompt_tokens, self._overlap_tokens, self._output_tokens)
        healing = (self.full_reports, self.healed, self.healing_hits, self.healing_digest)
        for metric in (*tokens, *healing, self._requests, self.retries, self._overlap_error, self._ttft):
            metric.remove_by_labels({"worker": worker})

    def _series_of(self, worker: str, model: str) -> ModelSeries:
        """Return what requests for the model count in at the worker; models are those that workers serve, and one."""
        return ModelSeries(
            self._prompt_tokens.labels(worker, model),
            self._overlap_tokens.labels(worker, model),
            self._output_tokens.labels(worker, model),
            self._ttft.labels(worker, model),
            self._request_time.labels(model),
            self._token_time.labels(model),
        )


@dataclass(frozen=True, slots=True, eq=False)
class FleetGauges:
    """Reads what is true now of workers: load, states, how well each cache is known, the index.

    All is summed up by worker or stream: how many ranks a stream names does not show in how much there is to read.
    """

    fleet: Fleet
    load: LoadTracker
    index: FleetIndex | None
    replicas: Replicas | None
    now_s: Callable[[], float]

    def collect(self) -> Iterator[Metric | None]:
        """Yield every metric, and None where there may be a pause; states are 1 for the one that holds, else 0."""
        yield from self._workers()
        if self.replicas is not None:
            yield GaugeMetricFamily("kvist_router_replicas", "Other routers that are heard", len(self.replicas))
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

    def _workers(self) -> Iterator[Metric | None]:
        states = gauge_of("worker_state", "Whether a worker is so", "worker", "state")
        circuits = gauge_of("circuit_state", "Whether a worker's circuit is so", "worker", "state")
        text = "Whether a worker makes of chats the tokens that the router makes of them"
        renderings = gauge_of("worker_rendering", text, "worker", "state")
        roles = gauge_of("worker_role", "What a worker is there for", "worker", "role")
        loads = {name: gauge_of(name, text, "worker") for name, text in _LOADS.items()}
        now_s = self.now_s()
        for worker in self.fleet.workers:
            rendering = None if worker.rendering is None else worker.rendering.state
            told = ((states, worker.state), (circuits, worker.breaker.state), (renderings, rendering))
            for gauge, state in told:
                for each in () if state is None else type(state):
                    gauge.add_metric([worker.url, each.value], each is state)
            roles.add_metric([worker.url, worker.role.value], 1)
            of_ranks = [self.load.load(rank.target, now_s) for rank in self.fleet.ranks(worker)]
            for name, gauge in loads.items():
                gauge.add_metric([worker.url], sum(getattr(load, name) for load in of_ranks))
            yield None
        yield from (states, circuits, roles, renderings, *loads.values())

    def _ranks(self, index: FleetIndex) -> Iterator[Metric | None]:
        ranks = gauge_of("ranks", "Ranks by how well their cache is known", "worker", "state")
        blocks = gauge_of("worker_blocks", "Blocks that its ranks hold", "worker")
        for worker in self.fleet.workers:
            statuses = index.ranks(worker.url)
            for state in (*SourceState, APPROXIMATE):
                ranks.add_metric([worker.url, state], sum(status.known_as == state for status in statuses))
            blocks.add_metric([worker.url], sum(status.num_blocks for status in statuses))
            yield None
        yield from (ranks, blocks)

    def _sources(self, index: FleetIndex) -> Iterator[Metric | None]:
        ages = gauge_of("event_age_seconds", "Since a stream's last event", "worker", "source")
        counters = {
            attribute: CounterMetricFamily(f"{PREFIX}_event_{name}", text, labels=["worker", "source"])
            for name, attribute, text in _EVENT_COUNTERS
        }
        for source in index.every_source():
            names = [source.worker, source.url]
            if source.last_event_age_s is not None:
                ages.add_metric(names, source.last_event_age_s)
            for attribute, counter in counters.items():
                counter.add_metric(names, getattr(source, attribute))
            yield None
        yield from (ages, *counters.values())
        text = "Answers of any stream given up because all that came in took too much memory"
        yield CounterMetricFamily(f"{PREFIX}_event_answers_refused", text, BUDGET.num_refused)


def gauge_of(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Return one of the router's gauges, to be filled."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
