"""How long requests take, in histograms on /metrics; the same times, one request at a time, are told as spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Histogram

from kvist.engine.request import RequestTimes
from kvist.engine.server.intake import Job
from kvist.engine.server.spans import WorkerSpans
from kvist.tracing import Span

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Timings:
    """Takes note of every sequence when its request has ended, however far it came."""

    def __init__(self, registry: CollectorRegistry, spans: WorkerSpans | None) -> None:
        self._spans = spans
        histogram = partial(Histogram, registry=registry, buckets=_BUCKETS_S)
        self._queue = histogram("kvist_engine_queue_seconds", "From a sequence's arrival to its first step or fetch.")
        self._fetch = histogram("kvist_engine_fetch_seconds", "To fetch a prompt from the worker that computed it.")
        self._prefill = histogram("kvist_engine_prefill_seconds", "From a sequence's first step to its first token.")
        self._first_token = histogram("kvist_engine_time_to_first_token_seconds", "From arrival to the first token.")
        self._decode = histogram("kvist_engine_decode_seconds", "From the first token of several to the last.")
        self._whole = histogram("kvist_engine_request_seconds", "From a sequence's arrival to its last token.")

    @contextmanager
    def noting(self, span: Span, job: Job, times: Mapping[str, RequestTimes]) -> Iterator[None]:
        """Note the request's sequences, by the engine's names, at the end of the block."""
        try:
            yield
        finally:
            for each in times.values():
                self._observe(each)
            if self._spans is not None:
                self._spans.tell(span, job, times)

    def _observe(self, times: RequestTimes) -> None:
        began_s = times.scheduled_s if times.fetching_s is None else times.fetching_s
        if began_s is not None:
            self._queue.observe(began_s - times.queued_s)
        if times.fetching_s is not None and times.fetched_s is not None and times.fetch_error is None:
            self._fetch.observe(times.fetched_s - times.fetching_s)
        if times.first_token_s is None:
            return
        self._first_token.observe(times.first_token_s - times.queued_s)
        if times.scheduled_s is not None:
            self._prefill.observe(times.first_token_s - times.scheduled_s)
        if times.ended_s is not None and times.finish_reason != "abort":
            self._whole.observe(times.ended_s - times.queued_s)
            if times.num_output_tokens > 1:
                self._decode.observe(times.ended_s - times.first_token_s)
