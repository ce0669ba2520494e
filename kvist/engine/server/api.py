"""The engine's endpoints, straight on `kvist.http`, and its metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric

from kvist import __version__
from kvist.engine.async_engine import AsyncEngine, EngineOverloadedError, EngineStoppedError
from kvist.engine.core import PromptTooLongError
from kvist.engine.server.answers import ChatShape, CompletionShape, Heading, Shape, collect, stream_events
from kvist.engine.server.intake import Intake, Job
from kvist.engine.server.other_apis import MessagesShape, ResponsesShape
from kvist.engine.server.spans import Timings, begin_span
from kvist.engine.server.structured import GrammarCompiler
from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL
from kvist.http import Headers, Request, Responder
from kvist.metrics_page import MetricsPage, counters, gauges
from kvist.openai.errors import RequestError, error_body, error_headers
from kvist.openai.tokenization import ChatTokenizer
from kvist.tracing import Span

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths that need no API key: they reveal the worker's state alone."""
_MODELS_PATH = "/v1/models"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")

ReadJob: TypeAlias = Callable[[bytes], Awaitable[Job]]
MakeShape: TypeAlias = Callable[[Heading, ChatTokenizer, Job], Shape]
MakeMetrics: TypeAlias = Callable[[], Iterable[Metric]]


def engine_metrics(engine: AsyncEngine) -> Iterator[Metric]:
    """Yield the counts of `EngineStatistics`, under names that begin with `kvist_engine_`."""
    statistics = engine.statistics()
    scheduler, kv_cache, handoffs = statistics.scheduler, statistics.kv_cache, statistics.handoffs
    yield from gauges(
        "kvist_engine",
        ("requests_running", "Sequences that hold KV blocks.", scheduler.num_running),
        ("requests_waiting", "Sequences queued for their first or next admission.", scheduler.num_waiting),
        ("prompts_held", "Prompts whose blocks wait to be fetched.", handoffs.num_held),
        ("requests_receiving", "Requests whose blocks are being fetched.", scheduler.num_receiving),
        ("fetches_abandoned", "Fetches whose blocks may still be written to.", handoffs.num_abandoned),
    )
    yield from counters(
        "kvist_engine",
        ("preemptions", "Preempted sequences, which start over.", scheduler.num_preemptions),
        ("output_tokens", "Tokens generated.", statistics.num_output_tokens),
        ("failed_steps", "Steps that failed and ended their requests.", statistics.num_failed_steps),
        ("refused", "Requests refused because too many were open.", engine.num_refused),
        ("admitted_tokens", "Tokens of admitted sequences.", kv_cache.num_queried_tokens),
        ("cached_tokens", "Prompt tokens served by the prefix cache.", kv_cache.num_hit_tokens),
        ("prompts_offered", "Prompts held for another worker.", handoffs.num_offered),
        ("prompts_sent", "Offered prompts that another worker has fetched.", handoffs.num_sent),
        ("prompts_given_up", "Offered prompts that nobody has fetched.", handoffs.num_given_up),
        ("prompts_fetched", "Prompts fetched from another worker.", handoffs.num_fetched),
        ("fetches_failed", "Prompts that could not be fetched.", handoffs.num_failed),
        ("fallbacks", "Prompts computed here as they could not be fetched.", handoffs.num_fallbacks),
    )
    for state, text in (
        ("used", "KV blocks that sequences hold."),
        ("scratch", "KV blocks shared in a step by blocks that leave the window."),
        ("free", "KV blocks that no sequence holds, cached or not."),
        ("cached", "KV blocks in the prefix cache, held or not."),
    ):
        blocks = GaugeMetricFamily(f"kvist_engine_kv_blocks_{state}", text, labels=["group", "window"])
        for pool in kv_cache.pools:
            labels = [str(pool.group_id), "full" if pool.window is FULL else str(pool.window)]
            blocks.add_metric(labels, getattr(pool, f"num_{state}"))
        yield blocks


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

    `kv_cache_dtype` also identifies the cache's scales.
    """

    names: tuple[str, ...]
    path: str
    kv_cache_dtype: str
    kv_events_endpoint: str | None = None
    transfers: ServedTransfers | None = None
    tensor_parallel_size: int = 1


@dataclass(slots=True)
class _Call:
    """A request's body, its responder, and its span, which ends before the client sees the end of the answer."""

    body: bytes
    responder: Responder
    span: Span

    def start(self, status: int, headers: Headers) -> None:
        self.span.set(dict, {"http.response.status_code": status})
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.span.fail(f"answered {status}")
        self.responder.start(status, headers)

    def end(self) -> None:
        self.span.stop()
        self.responder.end()

    def send(self, body: bytes, status: int = HTTPStatus.OK, headers: Headers | None = None) -> None:
        self.start(status, [*(headers or [_JSON]), (b"content-length", b"%d" % len(body))])
        self.responder.send(body)
        self.end()

    def send_json(self, value: object) -> None:
        self.send(msgspec.json.encode(value))


Endpoint: TypeAlias = Callable[[_Call], Coroutine[Any, Any, None]]


class Api:
    """Answers every request to a running engine; `handle` is the handler of an `HttpServer`."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: ChatTokenizer,
        model: ServedModel,
        *,
        metrics: Iterable[MakeMetrics] = (),
        tracing: Tracing | None = None,
        api_key: str | None = None,
    ) -> None:
        """Serve `model`; `metrics` make more of them for /metrics, and `tracing` traces requests.

        With an `api_key`, every path but `OPEN_PATHS` requires it, as `Request.client_key`.
        """
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # with the process's start time, which shows restarts
        limits = engine.limits
        grammars = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self._engine = engine
        self._model = model
        self._tracing = tracing
        self._api_key = None if api_key is None else api_key.encode()
        self._created = int(time.time())
        self._intake = intake = Intake(tokenizer, model.names, limits.max_model_len, grammars)
        self._timings = Timings(registry)
        makers: list[MakeMetrics] = [partial(engine_metrics, engine), *metrics]
        self._page = MetricsPage(lambda: chain.from_iterable(make() for make in makers), registry)
        self._routes: dict[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", partial(self._answer, intake.read_chat, ChatShape, "chatcmpl")),
            "/v1/completions": ("POST", partial(self._answer, intake.read_completion, CompletionShape, "cmpl")),
            "/v1/messages": ("POST", partial(self._answer, intake.read_messages, MessagesShape, "msg")),
            "/v1/responses": ("POST", partial(self._answer, intake.read_response, ResponsesShape, "resp")),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/flush_cache": ("POST", self._flush_cache),
            _MODELS_PATH: ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/server_info": ("GET", self._server_info),
        }

    async def handle(self, request: Request, responder: Responder) -> None:
        span = begin_span(self._tracing, request, self._model.names[0])
        call = _Call(request.body, responder, span)
        try:
            endpoint = self._endpoint(request)
            del request  # a long answer needs no memory for its body
            await endpoint(call)
        except Exception as error:
            refusal = _refusal(error)
            if refusal is None or responder.has_started:
                span.fail(type(error).__name__)
                raise
            call.send(error_body(refusal), refusal.status, [_JSON, *error_headers(refusal)])
        finally:
            span.end()  # if the client has left, as one that ended early

    def _endpoint(self, request: Request) -> Endpoint:
        """Return what answers a request; raises RequestError for one without the key, and for unknown ones."""
        path = unquote(request.path)
        given = request.client_key or b""
        if self._api_key is not None and path not in OPEN_PATHS and not compare_digest(given, self._api_key):
            message = "authorization: expected the bearer token of --api-key, or x-api-key"
            raise RequestError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        method, endpoint = self._routes.get(path, ("", None))
        if path.startswith(f"{_MODELS_PATH}/"):
            method, endpoint = "GET", partial(self._describe_model, path.removeprefix(f"{_MODELS_PATH}/"))
        if endpoint is None:
            raise RequestError(HTTPStatus.NOT_FOUND, "Not Found")
        if request.method not in (method, *(("HEAD",) if method == "GET" else ())):
            raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, "Method Not Allowed", allowed_methods=(method,))
        return endpoint

    async def _answer(self, read_job: ReadJob, make_shape: MakeShape, prefix: str, call: _Call) -> None:
        job = await read_job(call.body)
        call.body = b""
        self._engine.check_room(len(job.prompts) * job.params.n)  # first: a short body can ask for millions
        tokenizer, transfers = self._intake.tokenizer, self._model.transfers
        generation = self._engine.generate(job.sequences(tokenizer))
        endpoints = () if transfers is None else transfers.endpoints
        answer_id = f"{prefix}-{job.options.request_id or uuid.uuid4().hex}"
        shape = make_shape(Heading(answer_id, int(time.time()), self._model.names[0], endpoints), tokenizer, job)
        with self._timings.recording(call.span, job, generation.times):
            async with generation:
                if job.is_stream:
                    async for event in stream_events(generation, job, shape):
                        if not call.responder.has_started:  # with the first event, as an error before has its status
                            call.start(HTTPStatus.OK, [_EVENTS])
                        await call.responder.write(event)
                else:
                    body = msgspec.json.encode(await collect(generation, job, shape))
                    call.start(HTTPStatus.OK, [_JSON, (b"content-length", b"%d" % len(body))])
                    await call.responder.write(body)
            call.end()

    async def _tokenize(self, call: _Call) -> None:
        """Answer in vLLM's format: a router compares the tokens with its own of the same chat."""
        tokens, token_strs = await self._intake.read_tokenize(call.body)
        limit = self._engine.limits.max_model_len
        call.send_json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": token_strs})

    async def _count_tokens(self, call: _Call) -> None:
        call.send_json({"input_tokens": await self._intake.count_tokens(call.body)})

    async def _detokenize(self, call: _Call) -> None:
        call.send_json({"prompt": self._intake.read_detokenize(call.body)})

    async def _models(self, call: _Call) -> None:
        call.send_json({"data": [self._model_body(name) for name in self._model.names], "object": "list"})

    async def _describe_model(self, name: str, call: _Call) -> None:
        self._intake.check_model(name)
        call.send_json(self._model_body(name))

    def _model_body(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "created": self._created,
            "owned_by": "kvist",
            "root": self._model.path,
            "max_model_len": self._engine.limits.max_model_len,
            "object": "model",
        }

    async def _health(self, call: _Call) -> None:
        if not self._engine.is_alive:
            raise EngineStoppedError
        if self._model.transfers is not None and not self._model.transfers.is_alive():
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "transfers have stopped", code="unavailable")
        call.send_json({"status": "ok"})

    async def _metrics(self, call: _Call) -> None:
        call.send(await self._page.text(), headers=[(b"content-type", CONTENT_TYPE_LATEST.encode())])

    async def _server_info(self, call: _Call) -> None:
        engine, model, transfers = self._engine, self._model, self._model.transfers
        kv_transfer = None
        if transfers is not None:
            tokens_per_s = engine.statistics().handoffs.tokens_per_s
            kv_transfer = {"endpoints": transfers.endpoints, "agent": transfers.agent, "tokens_per_s": tokens_per_s}
        call.send_json(
            {
                "engine": "kvist",
                "version": __version__,
                "model": model.names[0],
                "model_path": model.path,
                "block_size": engine.block_size,
                "max_model_len": engine.limits.max_model_len,
                "max_total_num_tokens": engine.cache_size_tokens,
                "kv_cache_dtype": model.kv_cache_dtype,
                "tensor_parallel_size": model.tensor_parallel_size,
                "data_parallel_size": 1,
                "kv_events": None if model.kv_events_endpoint is None else {"endpoint": model.kv_events_endpoint},
                "role": "both" if transfers is None else transfers.role,
                "kv_transfer": kv_transfer,
            }
        )

    async def _flush_cache(self, call: _Call) -> None:
        await self._engine.flush_cache()
        call.send_json({"status": "ok"})


def _refusal(error: Exception) -> RequestError | None:
    """Return what a client is told of an error; None for a defect."""
    match error:
        case RequestError():
            return error
        case InvalidValueError():
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
            return RequestError(HTTPStatus.BAD_REQUEST, str(error), param=error.field, code=code)
        case EngineOverloadedError() | EngineStoppedError():
            return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="unavailable")
    return None
