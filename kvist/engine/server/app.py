"""The engine's routes and metrics, as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvist import __version__
from kvist.engine.async_engine import AsyncEngine, EngineOverloadedError, EngineStoppedError, Generation
from kvist.engine.core import PromptTooLongError
from kvist.engine.server.answers import ChatShape, CompletionShape, Heading, Shape, collect, stream_events
from kvist.engine.server.intake import Intake, Job, read_body
from kvist.engine.server.other_apis import MessagesShape, ResponsesShape
from kvist.engine.server.spans import Timings, span_of, trace_requests
from kvist.engine.server.structured import GrammarCompiler
from kvist.errors import InvalidValueError, KvistError
from kvist.events.engine_events import FULL
from kvist.openai.errors import RequestError, error_body
from kvist.openai.tokenization import ChatTokenizer

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths that need no API key: they reveal the worker's state alone."""
ReadJob = Callable[[bytes], Awaitable[Job]]
MakeShape = Callable[[Heading, ChatTokenizer, Job], Shape]


class EngineCollector(Collector):
    """Exports the counts of `EngineStatistics` as metrics, under names that begin with `kvist_engine_`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        statistics = self._engine.statistics()
        scheduler, kv_cache = statistics.scheduler, statistics.kv_cache
        yield _gauge("requests_running", "Sequences that hold KV blocks.", scheduler.num_running)
        yield _gauge("requests_waiting", "Sequences queued for their first or next admission.", scheduler.num_waiting)
        yield _counter("preemptions", "Preempted sequences, which start over.", scheduler.num_preemptions)
        yield _counter("output_tokens", "Tokens generated.", statistics.num_output_tokens)
        yield _counter("failed_steps", "Steps that failed and ended their requests.", statistics.num_failed_steps)
        yield _counter("refused", "Requests refused because too many were open.", self._engine.num_refused)
        yield _counter("admitted_tokens", "Tokens of admitted sequences.", kv_cache.num_queried_tokens)
        yield _counter("cached_tokens", "Prompt tokens served by the prefix cache.", kv_cache.num_hit_tokens)
        used = _blocks("used", "KV blocks that sequences hold.")
        scratch = _blocks("scratch", "KV blocks shared in a step by blocks that leave the window.")
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
        yield _counter("prompts_sent", "Offered prompts that another worker has fetched.", handoffs.num_sent)
        yield _counter("prompts_given_up", "Offered prompts that nobody has fetched.", handoffs.num_given_up)
        yield _counter("prompts_fetched", "Prompts fetched from another worker.", handoffs.num_fetched)
        yield _counter("fetches_failed", "Prompts that could not be fetched.", handoffs.num_failed)
        yield _counter("fallbacks", "Prompts computed here as they could not be fetched.", handoffs.num_fallbacks)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvist_engine_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvist_engine_{name}", text, value)


def _blocks(state: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvist_engine_kv_blocks_{state}", text, labels=["group", "window"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTransfers:
    """What the server reports of KV transfers: the role that routers use this worker for, and its ranks' endpoints."""

    role: str
    endpoints: tuple[str, ...]
    agent: str
    is_alive: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the server reports about itself. Answers have the first of the names; requests may use any.

    `max_total_num_tokens` is the capacity of the prefix cache; `kv_cache_dtype` also identifies the cache's scales.
    """

    names: tuple[str, ...]
    path: str
    block_size: int
    max_model_len: int
    max_total_num_tokens: int
    kv_cache_dtype: str
    kv_events_endpoint: str | None = None
    transfers: ServedTransfers | None = None
    tensor_parallel_size: int = 1


def create_app(
    engine: AsyncEngine,
    tokenizer: ChatTokenizer,
    model: ServedModel,
    *,
    collectors: Iterable[Collector] = (),
    tracing: Tracing | None = None,
    api_key: str | None = None,
) -> ASGIApp:
    """Return the application over a running engine; `collectors` add metrics to /metrics, `tracing` traces requests.

    With an `api_key`, every path but `OPEN_PATHS` requires it as a bearer token.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)  # with the process's start time, which shows restarts
    for collector in (EngineCollector(engine), *collectors):
        registry.register(collector)
    limits = engine.limits
    grammars = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
    intake = Intake(tokenizer, model.names, model.max_model_len, grammars)
    server = _Server(engine, intake, model, registry, Timings(registry), int(time.time()))
    answers: dict[str, tuple[ReadJob, MakeShape, str]] = {
        "/v1/chat/completions": (intake.read_chat, ChatShape, "chatcmpl"),
        "/v1/completions": (intake.read_completion, CompletionShape, "cmpl"),
        "/v1/messages": (intake.read_messages, MessagesShape, "msg"),
        "/v1/responses": (intake.read_response, ResponsesShape, "resp"),
    }
    app = Starlette(
        routes=[
            *(Route(path, partial(server.answer, *how), methods=["POST"]) for path, how in answers.items()),
            Route("/v1/messages/count_tokens", server.count_tokens, methods=["POST"]),
            Route("/tokenize", server.tokenize, methods=["POST"]),
            Route("/detokenize", server.detokenize, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
            Route("/server_info", server.server_info),
            Route("/flush_cache", server.flush_cache, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((KvistError, HTTPException, ClientDisconnect, Exception), _on_error),
    )
    if api_key is not None:
        app.add_middleware(_KeyCheck, key=api_key)
    return app if tracing is None else trace_requests(app, tracing, model.names[0])


class _KeyCheck:
    """Refuses requests without the key, which it compares in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["path"] not in OPEN_PATHS:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._expected):
                message = "authorization: expected the bearer token of --api-key"
                answer = _error_response(RequestError(401, message, code="invalid_api_key"))
        await answer(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Server:
    _engine: AsyncEngine
    _intake: Intake
    _model: ServedModel
    _registry: CollectorRegistry
    _timings: Timings
    _created: int

    async def answer(self, read_job: ReadJob, make_shape: MakeShape, prefix: str, request: Request) -> Response:
        body = await read_body(request)
        tokenizer = self._intake.tokenizer
        job = await read_job(body)
        self._engine.check_room(len(job.prompts) * job.params.n)  # first: a short body can ask for millions
        generation = self._engine.generate(job.sequences(tokenizer))
        transfers = self._model.transfers
        endpoints = () if transfers is None else transfers.endpoints
        answer_id = f"{prefix}-{job.options.request_id or uuid.uuid4().hex}"
        heading = Heading(answer_id, int(time.time()), self._model.names[0], endpoints)
        shape = make_shape(heading, tokenizer, job)
        recording = self._timings.recording(span_of(request.scope), job, generation.times)
        if job.is_stream:
            return _EventStream(generation, recording, stream_events(generation, job, shape))
        with recording:
            async with generation, asyncio.TaskGroup() as group:
                watcher = group.create_task(_cancel_on_disconnect(request, generation), name="watch for disconnect")
                answer = await collect(generation, job, shape)
                watcher.cancel()
        if await request.is_disconnected():  # after the last output: nobody will fetch what is held
            for times in generation.times.values():
                if times.remote_request_id is not None:
                    await self._engine.withdraw(times.remote_request_id)
        if isinstance(answer, RequestError):
            raise answer
        return _json(answer)

    async def tokenize(self, request: Request) -> Response:
        """Answer in vLLM's format: a router compares the tokens with its own of the same chat."""
        body = await read_body(request)
        tokens, token_strs = await self._intake.read_tokenize(body)
        limit = self._model.max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": token_strs})

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request)
        return _json({"input_tokens": await self._intake.count_tokens(body)})

    async def detokenize(self, request: Request) -> Response:
        return _json({"prompt": self._intake.read_detokenize(await read_body(request))})

    async def models(self, _: Request) -> Response:
        return _json({"data": [self._model_body(name) for name in self._model.names], "object": "list"})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._intake.check_model(name)
        return _json(self._model_body(name))

    def _model_body(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "created": self._created,
            "owned_by": "kvist",
            "root": self._model.path,
            "max_model_len": self._model.max_model_len,
            "object": "model",
        }

    async def health(self, _: Request) -> Response:
        if not self._engine.is_alive:
            raise EngineStoppedError
        if self._model.transfers is not None and not self._model.transfers.is_alive():
            raise RequestError(503, "transfers have stopped", code="unavailable")
        return _json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def server_info(self, _: Request) -> Response:
        endpoint, transfers = self._model.kv_events_endpoint, self._model.transfers
        return _json(
            {
                "engine": "kvist",
                "version": __version__,
                "model": self._model.names[0],
                "model_path": self._model.path,
                "block_size": self._model.block_size,
                "max_model_len": self._model.max_model_len,
                "max_total_num_tokens": self._model.max_total_num_tokens,
                "kv_cache_dtype": self._model.kv_cache_dtype,
                "tensor_parallel_size": self._model.tensor_parallel_size,
                "data_parallel_size": 1,
                "kv_events": None if endpoint is None else {"endpoint": endpoint},
                "role": "both" if transfers is None else transfers.role,
                "kv_transfer": None
                if transfers is None
                else {
                    "endpoints": transfers.endpoints,
                    "agent": transfers.agent,
                    "tokens_per_s": self._engine.statistics().handoffs.tokens_per_s,
                },
            }
        )

    async def flush_cache(self, _: Request) -> Response:
        await self._engine.flush_cache()
        return _json({"status": "ok"})


class _EventStream(StreamingResponse):
    """A stream that ends its generation when it ends, also if the client disconnects before the first event.

    The status is sent with the first event, so that an error before that has a status of its own.
    """

    def __init__(
        self, generation: Generation, recording: AbstractContextManager[None], events: AsyncIterator[bytes]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._generation = generation
        self._recording = recording

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._recording:
            async with self._generation:
                await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Wait for the first event, then send the headers and all events."""
        events = aiter(self.body_iterator)
        first = await anext(events)

        async def all_events() -> AsyncIterator[bytes | memoryview | str]:
            yield first
            async for event in events:
                yield event

        self.body_iterator = all_events()
        await super().stream_response(send)


async def _cancel_on_disconnect(request: Request, generation: Generation) -> None:
    """Cancel the generation when the client disconnects; the body was read before, so no other message can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


async def _on_error(_: Request, error: Exception) -> Response:
    return _error_response(_as_request_error(error))


def _error_response(error: RequestError) -> Response:
    return Response(error_body(error), error.status, media_type="application/json")


def _as_request_error(error: Exception) -> RequestError:
    match error:
        case RequestError():
            return error
        case InvalidValueError():
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
            return RequestError(400, str(error), param=error.field, code=code)
        case EngineOverloadedError() | EngineStoppedError():
            return RequestError(503, str(error), code="unavailable")
        case HTTPException():
            return RequestError(error.status_code, error.detail)
        case ClientDisconnect():
            return RequestError(499, "the client went away")
        case _:  # Starlette logs it after this answer
            return RequestError(500, "internal error")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
