"""Records how long each stage of a request takes: as spans, and for all requests in histograms on /metrics.

Spans and attributes have OpenTelemetry's names if it defines them, else vLLM's:

    POST /v1/completions        the request, until its last byte is sent
    ├─ queue                    until its first step, or until its blocks are reserved
    ├─ fetch                    of a prompt that another worker computed
    │  ├─ transfer              until every rank that holds it has written its part
    │  └─ scatter               out of the bounce region
    ├─ prefill                  until the first token
    ├─ decode                   the other tokens
    └─ hold                     of a prompt for another worker, from its offer on
       └─ write                 of computed blocks into that worker's memory, for each of its ranks

With several choices or prompts, every sequence has its own spans.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.engine.request import RequestTimes
from kvist.engine.server.intake import Job
from kvist.openai.requests import RemoteDecode, RemotePrefill
from kvist.tracing import NO_SPAN, Attributes, Span
from kvist.transfer.commands import FetchTimes, HoldTimes, TransferTimes, WriteTimes

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_SCOPE_KEY = "kvist.span"
_MAX_KEPT = 1024
_MAX_SEQUENCES = 16
"""The most sequences of one request that have spans; those after them have none."""

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_T = TypeVar("_T")


def span_of(scope: Scope) -> Span:
    span: Span = scope.get(_SCOPE_KEY, NO_SPAN)
    return span


@dataclass(slots=True)
class _Hold:
    """A held prompt: its request's span, its writes and its times, which arrive in any order."""

    span: Span | None = None
    writes: list[WriteTimes] = field(default_factory=list)
    times: HoldTimes | None = None


class WorkerSpans:
    """Records the spans of all requests on the event loop; reports on their transfers may come from any thread."""

    def __init__(self, tracing: Tracing, model_name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._tracing = tracing
        self._model_name = model_name
        self._loop = loop
        self._held: OrderedDict[str, _Hold] = OrderedDict()
        self._fetches: OrderedDict[str, FetchTimes] = OrderedDict()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a span around each request for an answer."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
                await app(scope, receive, send)
                return
            attributes = _request_attributes(scope, self._model_name)
            with self._tracing.request(f"POST {scope['path']}", scope["headers"], attributes) as span:

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

    def record(self, span: Span, job: Job, times: Mapping[str, RequestTimes]) -> None:
        """Record the spans of a request's sequences, all of which have ended."""
        fetches = [self._fetches.pop(request_id, None) for request_id in times]
        if not span.is_recorded:
            return
        sequences, now_s = list(times.values()), time.monotonic()
        span.set(_job_attributes, job, sequences)
        if any(each.finish_reason in (None, "abort") for each in sequences):
            span.fail("ended early")
        for index, (each, fetch) in enumerate(zip(sequences[:_MAX_SEQUENCES], fetches, strict=False)):
            choice = {"kvist.choice": index} if len(sequences) > 1 else {}
            _record_sequence(span, each, fetch, len(job.prompts[index // job.params.n]), now_s, choice)
            if each.remote_request_id is not None:
                self._hold(each.remote_request_id).span = span
                self._record_hold(each.remote_request_id)

    def on_transfer(self, times: TransferTimes) -> None:
        """Receive the times of a transfer, from any thread; they are recorded once its request has ended."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._apply_transfer, times)

    def _apply_transfer(self, times: TransferTimes) -> None:
        match times:
            case FetchTimes():
                _set_bounded(self._fetches, times.request_id, times)
            case WriteTimes(remote_request_id):
                self._hold(remote_request_id).writes.append(times)
            case HoldTimes(remote_request_id):
                self._hold(remote_request_id).times = times
                self._record_hold(remote_request_id)

    def _hold(self, remote_request_id: str) -> _Hold:
        if remote_request_id not in self._held:
            _set_bounded(self._held, remote_request_id, _Hold())
        return self._held[remote_request_id]

    def _record_hold(self, remote_request_id: str) -> None:
        """Record the spans of a held prompt and its writes, once the hold and the request have both ended."""
        held = self._held[remote_request_id]
        times = held.times
        if held.span is None or times is None:
            return
        del self._held[remote_request_id]
        facts: Attributes = {"kvist.remote_request_id": remote_request_id, "kvist.fetched": times.is_fetched}
        hold = held.span.record("hold", times.began_s, times.ended_s, facts)
        for write in held.writes:
            facts = {
                "kvist.bytes": write.num_bytes,
                "kvist.pieces": write.num_pieces,
                "kvist.bounced": write.is_bounced,
            }
            hold.record("write", write.began_s, write.ended_s, facts, write.error)


class Timings:
    """Observes the times of every sequence when its request has ended, also of aborted ones."""

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
    def recording(self, span: Span, job: Job, times: Mapping[str, RequestTimes]) -> Iterator[None]:
        """Record the times of the request's sequences, by the engine's request ids, at the end of the block."""
        try:
            yield
        finally:
            for each in times.values():
                self._observe(each)
            if self._spans is not None:
                self._spans.record(span, job, times)

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


def _record_sequence(
    span: Span, times: RequestTimes, fetch: FetchTimes | None, num_prompt_tokens: int, now_s: float, more: Attributes
) -> None:
    """Record a span for each stage that a sequence has begun, until the next stage or its end."""
    ended_s = now_s if times.ended_s is None else times.ended_s
    begun = [at_s for at_s in (times.fetching_s, times.scheduled_s, ended_s) if at_s is not None]
    span.record("queue", times.queued_s, begun[0], more)
    if times.fetching_s is not None:
        fetched_s = ended_s if times.fetched_s is None else times.fetched_s
        facts = {} if fetch is None else {"kvist.bytes": fetch.num_bytes, "kvist.senders": fetch.num_senders}
        step = span.record("fetch", times.fetching_s, fetched_s, {**more, **facts}, times.fetch_error)
        if fetch is not None:
            arrived_s = fetch.ended_s if fetch.arrived_s is None else fetch.arrived_s
            step.record("transfer", fetch.began_s, arrived_s, {})
            if arrived_s < fetch.ended_s:
                step.record("scatter", arrived_s, fetch.ended_s, {})
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
    """Return the numbers of tokens of all sequences, and the times of the first one."""
    handoff = {RemoteDecode: "prefill", RemotePrefill: "decode", type(None): None}[type(job.handoff)]
    first, have_ended = times[0], all(each.ended_s is not None for each in times)
    num_cached_tokens = sum(each.num_cached_tokens for each in times[:: job.params.n])
    return {
        "gen_ai.request.max_tokens": job.params.token_limit,
        "gen_ai.request.stream": job.is_stream,
        "gen_ai.request.choice.count": job.params.n if job.params.n > 1 else None,
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(each.num_output_tokens for each in times) if have_ended else None,
        "gen_ai.usage.cache_read.input_tokens": num_cached_tokens if have_ended else None,
        "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in times],
        "gen_ai.latency.time_in_queue": _seconds(first.queued_s, first.fetching_s or first.scheduled_s),
        "gen_ai.latency.time_to_first_token": _seconds(first.queued_s, first.first_token_s),
        "gen_ai.latency.time_in_model_prefill": _seconds(first.scheduled_s, first.first_token_s),
        "gen_ai.latency.time_in_model_decode": _seconds(first.first_token_s, first.ended_s),
        "gen_ai.latency.e2e": _seconds(first.queued_s, first.ended_s),
        "kvist.handoff": handoff,
    }


def _seconds(began_s: float | None, ended_s: float | None) -> float | None:
    return None if began_s is None or ended_s is None else ended_s - began_s


def _set_bounded(items: OrderedDict[str, _T], name: str, value: _T) -> None:
    items[name] = value
    if len(items) > _MAX_KEPT:
        items.popitem(last=False)
