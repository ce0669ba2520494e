"""Records how long each stage of a request takes: as spans, and for all requests in histograms on /metrics.

Attributes have OpenTelemetry's names if it defines them. The spans:

    POST /v1/completions        the request, until its last byte is sent
    ├─ queue                    until its first step, or until its blocks are reserved
    ├─ fetch                    of a prompt that another worker computed
    ├─ prefill                  until the first token
    └─ decode                   the other tokens

With several choices or prompts, every sequence has its own spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.engine.request import RequestTimes
from kvist.engine.server.intake import Job
from kvist.openai.requests import RemoteDecode, RemotePrefill
from kvist.tracing import NO_SPAN, Attributes, Span

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_SCOPE_KEY = "kvist.span"
_MAX_SEQUENCES = 16
"""The most sequences of one request that have spans; those after them have none."""

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def span_of(scope: Scope) -> Span:
    span: Span = scope.get(_SCOPE_KEY, NO_SPAN)
    return span


def trace_requests(app: ASGIApp, tracing: Tracing, model_name: str) -> ASGIApp:
    """Return the application with a span around each request for an answer."""

    async def traced(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
            await app(scope, receive, send)
            return
        attributes = _request_attributes(scope, model_name)
        with tracing.request(f"POST {scope['path']}", scope["headers"], attributes) as span:

            async def send_and_record(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(dict, {"http.response.status_code": message["status"]})
                    if message["status"] >= 500:
                        span.fail(f"answered {message['status']}")
                elif message["type"] == "http.response.body" and not message.get("more_body"):
                    span.stop()  # before the client sees the end
                await send(message)

            await app({**scope, _SCOPE_KEY: span}, receive, send_and_record)

    return traced


class Timings:
    """Observes the times of every sequence when its request has ended, also of aborted ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, registry=registry, buckets=_BUCKETS_S)
        self._queue = histogram("kvist_engine_queue_seconds", "From a sequence's arrival to its first step or fetch.")
        self._fetch = histogram("kvist_engine_fetch_seconds", "To fetch a prompt from the worker that computed it.")
        self._prefill = histogram("kvist_engine_prefill_seconds", "From a sequence's first step to its first token.")
        self._first_token = histogram("kvist_engine_time_to_first_token_seconds", "From arrival to the first token.")
        self._decode = histogram("kvist_engine_decode_seconds", "From the first token of several to the last.")
        self._whole = histogram("kvist_engine_request_seconds", "From a sequence's arrival to its last token.")

    @contextmanager
    def recording(self, span: Span, job: Job, times: Mapping[str, RequestTimes]) -> Iterator[None]:
        """Record the times and spans of the request's sequences, by request id, at the end of the block."""
        try:
            yield
        finally:
            for each in times.values():
                self._observe(each)
            if span.is_recorded:
                _record_request(span, job, list(times.values()))

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


def _record_request(span: Span, job: Job, sequences: list[RequestTimes]) -> None:
    """Record the spans of a request's sequences, all of which have ended."""
    span.set(_job_attributes, job, sequences)
    if any(each.finish_reason in (None, "abort") for each in sequences):
        span.fail("ended early")
    now_s = time.monotonic()
    for index, each in enumerate(sequences[:_MAX_SEQUENCES]):
        choice = {"kvist.choice": index} if len(sequences) > 1 else {}
        _record_sequence(span, each, len(job.prompts[index // job.params.n]), now_s, choice)


def _record_sequence(span: Span, times: RequestTimes, num_prompt_tokens: int, now_s: float, more: Attributes) -> None:
    """Record a span for each stage that a sequence has begun, until the next stage or its end."""
    ended_s = now_s if times.ended_s is None else times.ended_s
    begun = [at_s for at_s in (times.fetching_s, times.scheduled_s, ended_s) if at_s is not None]
    span.record("queue", times.queued_s, begun[0], more)
    if times.fetching_s is not None:
        fetched_s = ended_s if times.fetched_s is None else times.fetched_s
        span.record("fetch", times.fetching_s, fetched_s, more, times.fetch_error)
    first_token_s = ended_s if times.first_token_s is None else times.first_token_s
    if times.scheduled_s is not None:
        tokens = {"kvist.prompt_tokens": num_prompt_tokens, "kvist.cached_tokens": times.num_cached_tokens}
        span.record("prefill", times.scheduled_s, first_token_s, {**more, **tokens})
    if first_token_s < ended_s and times.num_output_tokens != 1:
        tokens = {"gen_ai.usage.output_tokens": times.num_output_tokens}
        span.record("decode", first_token_s, ended_s, {**more, **tokens})


def _request_attributes(scope: Scope, model_name: str) -> Attributes:
    request_id = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), None)
    path = scope["path"]
    return {
        "http.request.method": "POST",
        "url.path": path,
        "gen_ai.operation.name": _OPERATIONS[path],
        "gen_ai.request.model": model_name,
        "kvist.request_id": request_id,
    }


def _job_attributes(job: Job, times: list[RequestTimes]) -> Attributes:
    """Return the numbers of tokens of all sequences."""
    handoff = {RemoteDecode: "prefill", RemotePrefill: "decode", type(None): None}[type(job.handoff)]
    have_ended = all(each.ended_s is not None for each in times)
    num_cached_tokens = sum(each.num_cached_tokens for each in times[:: job.params.n])
    return {
        "gen_ai.request.max_tokens": job.params.token_limit,
        "gen_ai.request.stream": job.is_stream,
        "gen_ai.request.choice.count": job.params.n if job.params.n > 1 else None,
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(each.num_output_tokens for each in times) if have_ended else None,
        "gen_ai.usage.cache_read.input_tokens": num_cached_tokens if have_ended else None,
        "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in times],
        "kvist.handoff": handoff,
    }
