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

from kvist.engine.request import RequestTimes
from kvist.engine.server.intake import Job
from kvist.http import Request
from kvist.openai.requests import RemoteDecode, RemotePrefill
from kvist.tracing import NO_SPAN, Attributes, Span

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_MAX_SEQUENCES = 16
"""The most sequences of one request that have spans; those after them have none."""

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def begin_span(tracing: Tracing | None, request: Request, model_name: str) -> Span:
    """Begin the span of a request for an answer; other requests are not traced."""
    if tracing is None or request.method != "POST" or request.path not in _OPERATIONS:
        return NO_SPAN
    request_id = request.header(b"x-request-id")
    attributes = {
        "http.request.method": "POST",
        "url.path": request.path,
        "gen_ai.operation.name": _OPERATIONS[request.path],
        "gen_ai.request.model": model_name,
        "kvist.request_id": None if request_id is None else request_id.decode("latin-1"),
    }
    return tracing.request(f"POST {request.path}", request.headers, attributes)


class Timings:
    """Observes the times of every sequence when its request has ended, also of aborted ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, registry=registry, buckets=_BUCKETS_S)
        self._stages = {
            "queue": histogram("kvist_engine_queue_seconds", "From a sequence's arrival to its first step or fetch."),
            "fetch": histogram("kvist_engine_fetch_seconds", "To fetch a prompt from the worker that computed it."),
            "prefill": histogram("kvist_engine_prefill_seconds", "From a sequence's first step to its first token."),
            "decode": histogram("kvist_engine_decode_seconds", "From the first token of several to the last."),
        }
        self._first_token = histogram("kvist_engine_time_to_first_token_seconds", "From arrival to the first token.")
        self._whole = histogram("kvist_engine_request_seconds", "From a sequence's arrival to its last token.")

    @contextmanager
    def recording(self, span: Span, job: Job, times: Mapping[str, RequestTimes]) -> Iterator[None]:
        """Record the times and spans of the request's sequences, by request id, at the end of the block."""
        try:
            yield
        finally:
            now_s = time.monotonic()
            for each in times.values():
                self._observe(each, now_s)
            if span.is_recorded:
                _record_request(span, job, list(times.values()), now_s)

    def _observe(self, times: RequestTimes, now_s: float) -> None:
        for name, began_s, ended_s, is_whole in _stages(times, now_s):
            if is_whole:
                self._stages[name].observe(ended_s - began_s)
        if times.first_token_s is not None:
            self._first_token.observe(times.first_token_s - times.queued_s)
            if times.ended_s is not None and times.finish_reason != "abort":
                self._whole.observe(times.ended_s - times.queued_s)


def _stages(times: RequestTimes, now_s: float) -> Iterator[tuple[str, float, float, bool]]:
    """Yield each stage that a sequence has begun: name, beginning, end, and whether it was not cut short there."""
    last_s = now_s if times.ended_s is None else times.ended_s
    fetching_s, scheduled_s, first_token_s = times.fetching_s, times.scheduled_s, times.first_token_s
    left_s = scheduled_s if fetching_s is None else fetching_s
    yield "queue", times.queued_s, last_s if left_s is None else left_s, left_s is not None
    if fetching_s is not None:
        is_fetched = times.fetched_s is not None and times.fetch_error is None
        yield "fetch", fetching_s, last_s if times.fetched_s is None else times.fetched_s, is_fetched
    if scheduled_s is not None:
        yield "prefill", scheduled_s, last_s if first_token_s is None else first_token_s, first_token_s is not None
    if first_token_s is not None and times.num_output_tokens != 1:
        yield "decode", first_token_s, last_s, times.num_output_tokens > 1 and times.finish_reason != "abort"


def _record_request(span: Span, job: Job, sequences: list[RequestTimes], now_s: float) -> None:
    """Record the spans of a request's sequences, all of which have ended."""
    span.set(_job_attributes, job, sequences)
    if any(each.finish_reason in (None, "abort") for each in sequences):
        span.fail("ended early")
    for index, each in enumerate(sequences[:_MAX_SEQUENCES]):
        choice: Attributes = {"kvist.choice": index} if len(sequences) > 1 else {}
        num_prompt_tokens = len(job.prompts[index // job.params.n])
        tokens: dict[str, Attributes] = {
            "prefill": {"kvist.prompt_tokens": num_prompt_tokens, "kvist.cached_tokens": each.num_cached_tokens},
            "decode": {"gen_ai.usage.output_tokens": each.num_output_tokens},
        }
        for name, began_s, ended_s, _ in _stages(each, now_s):
            error = each.fetch_error if name == "fetch" else None
            span.record(name, began_s, ended_s, {**choice, **tokens.get(name, {})}, error)


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
