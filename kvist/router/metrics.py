"""The router's Prometheus metrics, in a registry of their own.

What happens to requests is counted as it happens; what is true now (load, states, the index) is read at each scrape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvist.router.policy import Decision
from kvist.router.usage import ReportedUsage

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ERROR_BUCKETS_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class _WorkerSeries:
    """What each request of one worker counts in, looked up once: `labels` takes a lock and formats each time."""

    prompt_tokens: Counter
    overlap_tokens: Counter
    ttft: Histogram
    requests: dict[tuple[int, str], Counter] = field(default_factory=dict)
    """By status and policy."""


class RouterMetrics:
    """Counts what happens to requests; a worker that is removed takes its series along."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._series: dict[str, _WorkerSeries] = {}
        self._requests = counter(
            "kvist_router_requests",
            "Requests sent to workers; status 0: the worker failed, 499: the client left",
            ["worker", "status", "policy"],
        )
        self._refusals = counter("kvist_router_refusals", "Requests the router answered itself", ["status"])
        self._retries = counter("kvist_router_retries", "Requests sent on to another worker", ["worker"])
        self._handovers = counter(
            "kvist_router_disaggregated", "Requests answered by a decode worker with another's prefill"
        )
        self._prefill_time = histogram(
            "kvist_router_prefill_seconds", "Of a prompt computed for another worker", buckets=_TTFT_BUCKETS_S
        )
        self._transfer_time = histogram(
            "kvist_router_transfer_seconds",
            "From asking a decode worker to go on to the first byte of its answer",
            buckets=_TTFT_BUCKETS_S,
        )
        self._locals = counter(
            "kvist_router_local_prefills", "Requests that one worker did all of, though there are others", ["reason"]
        )
        self._fallbacks = counter(
            "kvist_router_disaggregation_fallbacks", "Prefills or transfers that came to nothing", ["reason"]
        )
        self._releases = counter(
            "kvist_router_releases",
            "Prompts that prefill workers were told nobody will fetch, by whether they held them",
            ["outcome"],
        )
        self._full_reports = counter(
            "kvist_router_full_reports",
            "Answers to requests that had a partial worker report its cached blocks again, by what they showed",
            ["worker", "report"],
        )
        self._healed = counter(
            "kvist_router_healed", "Partial ranks that are asked for full reports no more, by why", ["worker", "reason"]
        )
        self._hits = gauge(
            "kvist_router_healing_hits",
            "Blocks that partial ranks said they had cached and the index had not, each counted once a rank",
            ["worker"],
        )
        self._hit_digest = gauge(
            "kvist_router_healing_digest", "A number that changes whenever such a block is new", ["worker"]
        )
        self._prompt_tokens = counter("kvist_router_prompt_tokens", "Prompt tokens routed", ["worker"])
        self._overlap_tokens = counter(
            "kvist_router_overlap_tokens", "Prompt tokens predicted to be cached", ["worker"]
        )
        self._overlap_error = histogram(
            "kvist_router_overlap_error_tokens",
            "How far the predicted cached tokens of a request were over or under those its worker reported",
            ["worker", "sign"],
            buckets=_ERROR_BUCKETS_TOKENS,
        )
        self._ttft = histogram(
            "kvist_router_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer's body",
            ["worker"],
            buckets=_TTFT_BUCKETS_S,
        )

    def ended(self, decision: Decision, status: int) -> None:
        """Count the end of what was dispatched."""
        worker, policy = decision.chosen.target.worker, decision.policy
        requests = self._series_of(worker).requests
        if (status, policy) not in requests:
            requests[status, policy] = self._requests.labels(worker, str(status), policy)
        requests[status, policy].inc()

    def refused(self, status: int) -> None:
        """Count an answer of the router's own."""
        self._refusals.labels(str(status)).inc()

    def retried(self, worker: str) -> None:
        """Count a request that this worker failed and another gets."""
        self._retries.labels(worker).inc()

    def handed_over(self, prefill_s: float, transfer_s: float) -> None:
        """Count an answer that began with another worker's prefill."""
        self._handovers.inc()
        self._prefill_time.observe(prefill_s)
        self._transfer_time.observe(transfer_s)

    def kept_local(self, reason: str) -> None:
        """Count a request that is not handed over from the start."""
        self._locals.labels(reason).inc()

    def fell_back(self, reason: str) -> None:
        """Count a prefill or transfer that failed before the client had a byte."""
        self._fallbacks.labels(reason).inc()

    def released(self, outcome: str) -> None:
        """Count a prompt that nobody fetches: released, unknown to its worker, failed or dropped."""
        self._releases.labels(outcome).inc()

    def full_report(self, worker: str, report: str, digest: int, num_hits: int) -> None:
        """Count an answer to a request for a full report, and show the digest of all that were lacking so far."""
        self._full_reports.labels(worker, report).inc()
        self._hits.labels(worker).set(num_hits)
        self._hit_digest.labels(worker).set(digest)

    def healed(self, worker: str, reason: str) -> None:
        """Count a rank that is asked for full reports no more."""
        self._healed.labels(worker, reason).inc()

    def dispatched(self, decision: Decision) -> None:
        """Count the tokens of a request that goes to its worker."""
        series = self._series_of(decision.chosen.target.worker)
        series.prompt_tokens.inc(decision.prompt.num_tokens)
        series.overlap_tokens.inc(decision.overlap_tokens)

    def first_byte(self, decision: Decision, seconds: float) -> None:
        """Observe how long the client waited."""
        self._series_of(decision.chosen.target.worker).ttft.observe(seconds)

    def reported(self, decision: Decision, usage: ReportedUsage) -> None:
        """Compare what was predicted with what the worker says it found in its cache."""
        if usage.cached_tokens is None or not decision.prompt.is_tokenized:
            return
        error_tokens = decision.overlap_tokens - usage.cached_tokens
        sign = "exact" if error_tokens == 0 else "over" if error_tokens > 0 else "under"
        self._overlap_error.labels(decision.chosen.target.worker, sign).observe(abs(error_tokens))

    def forget(self, worker: str) -> None:
        """Drop every series of a removed worker."""
        self._series.pop(worker, None)
        counters = (self._requests, self._retries, self._full_reports, self._prompt_tokens, self._overlap_tokens)
        for metric in (*counters, self._healed, self._hits, self._hit_digest):
            metric.remove_by_labels({"worker": worker})
        for histogram in (self._overlap_error, self._ttft):
            histogram.remove_by_labels({"worker": worker})

    def _series_of(self, worker: str) -> _WorkerSeries:
        series = self._series.get(worker)
        if series is None:
            series = self._series[worker] = _WorkerSeries(
                self._prompt_tokens.labels(worker), self._overlap_tokens.labels(worker), self._ttft.labels(worker)
            )
        return series
