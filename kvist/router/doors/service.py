"""A running router: everything built from one configuration, started and ended together.

    async with RouterService(RouterConfig(worker_urls=(...))) as service:
        ...  # serves on service.url

The server listens once each worker was asked, and stops first, in this order (`docs/operating.md`):

    drain       `/readiness` fails for `drain_delay_s`; requests are still taken
    close       nothing is listened to any more; what runs goes on for `shutdown_timeout_s`
    shut down   what still runs is ended: a stream by an event that says why, where it can be

The index joins when it is compiled; until then requests are routed by load.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
from prometheus_client.core import Metric

from kvist.http import (
    HttpLimits,
    HttpServer,
    Producer,
    Request,
    Responder,
    UpstreamError,
    UpstreamPool,
    default_max_connections,
)
from kvist.metrics_page import server_metrics
from kvist.openai.errors import RequestError, error_body
from kvist.router.access_log import AccessLog
from kvist.router.attempts import worker_failure
from kvist.router.config import RouterConfig
from kvist.router.doors.auth import (
    METRICS_PATH,
    MODELS_PATH,
    OPEN_PATHS,
    check_client_request,
    cors_headers,
    is_administrator,
    methods_of,
    plain_path,
    preflight_headers,
    require_administrator,
)
from kvist.router.doors.explain import explain_plan
from kvist.router.doors.journal import Journal
from kvist.router.doors.keeper import Answer, FleetKnowledge, Keeper, json_answer, question_of, show
from kvist.router.doors.live import STATE_PATH
from kvist.router.doors.page import EVENTS_PATH, UI_PATH, show_file, stream
from kvist.router.doors.tls import Certificates
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.replicas import num_replicas
from kvist.router.forward import Forwarder, forwarded_headers
from kvist.router.metrics import PREFIX, RouterMetrics
from kvist.router.prompts import COMPLETION_PATH
from kvist.router.recording import Beginning, RequestRecorder
from kvist.router.reserved import check_request_id
from kvist.router.routing import Prefix
from kvist.router.tenants.keys import Keys
from kvist.router.tenants.tenant import DEFAULT
from kvist.tracing import open_tracing

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

logger = logging.getLogger(__name__)

TRACES_CLOSE_TIMEOUT_S = 0.5

USAGE_PATH = "/usage"
ADMIN_PATHS = frozenset({"/workers", "/get_loads", "/route", "/regret", STATE_PATH})
WORKER_HEADER = b"x-kvist-worker"
"""Names the worker that an administrator's request to an endpoint of a worker is for."""


OpenKnowledge: TypeAlias = Callable[
    [UpstreamPool, RouterMetrics, Callable[[], Iterator[Metric | None]]], AbstractAsyncContextManager[FleetKnowledge]
]
"""Opens what is known of the fleet, for a router that has this pool and these metrics."""


class RouterService:
    """Serves from `async with` on until the block ends, and then as said above; at once if an error ends it."""

    def __init__(
        self,
        config: RouterConfig,
        started_s: float | None = None,
        knowledge: OpenKnowledge | None = None,
        recording: Beginning | None = None,
    ) -> None:
        """`started_s`, of the monotonic clock, is when the process began to load this, if the caller knows.

        What is known of the fleet comes from `knowledge`, by default from a keeper of its own. If it comes from
        elsewhere, this is one of several processes, which share the port, and the `recording`.
        """
        self._config, self._recording = config, recording or Beginning()
        self._started_s = time.monotonic() if started_s is None else started_s
        self._exits = AsyncExitStack()
        self._server: HttpServer | None = None
        self._is_draining = False
        self._forwarder: Forwarder
        self._certificates, self._keys = Certificates(config), Keys(config)
        self._knowledge, self._is_shared = knowledge or self._own_keeper, knowledge is not None
        # Unlike a UUID for each request, a random prefix and a count cost next to nothing.
        self._request_id_prefix = secrets.token_hex(10).encode()
        self._request_numbers = itertools.count()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            await self._start(exits)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain, stop listening, let requests end, release everything."""
        await self._exits.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        """Return where the router listens."""
        assert self._server is not None
        return self._config.url_at(self._server.port)

    def reload(self, config: RouterConfig) -> None:
        """Take over what of another configuration may change while the router runs; say what needs a restart.

        Certificates are read from their files again. Raises InvalidValueError, and no setting changes, if that fails.
        """
        renewed, changed, fixed = self._config.changed_to(config)
        self._certificates.renew(renewed)
        self._config = renewed
        self._keys.reconfigure(self._config)
        self.known.reconfigure(self._config)
        self._forwarder.config = self._config
        logger.info("settings reloaded changed=%s", ",".join(changed) or "nothing")
        if fixed:
            logger.warning("settings changed that need a restart fields=%s", ",".join(fixed))

    async def _start(self, exits: AsyncExitStack) -> None:
        config = self._config
        self._metrics = RouterMetrics()
        await exits.enter_async_context(self._keys)
        pool = self._pool = await exits.enter_async_context(self._certificates.worker_pool())
        known = self.known = await exits.enter_async_context(self._knowledge(pool, self._metrics, self._gauges))
        self.fleet = known.fleet
        self._metrics.has_worker = lambda url: self.fleet.get(url) is not None
        self._access_log = recorder = None
        if config.access_log is not None:
            self._access_log = AccessLog(config.access_log, config.access_log_sample)
            exits.push_async_callback(asyncio.to_thread, self._access_log.close)
        if config.record_requests is not None:
            recorder = RequestRecorder(config.record_requests, config.record_max_bytes, self._recording)
            exits.push_async_callback(asyncio.to_thread, recorder.close)
        self._forwarder = Forwarder(
            config,
            known,
            pool,
            self._metrics,
            self._keys.judge,
            self._refuse,
            known.on_routed,
            Journal(known.models, known.on_seen, shows_prompts=config.show_prompts).ended,
            self._open_tracing(exits),
            self._access_log,
            recorder,
        )
        known.connect(self._forwarder.reader.conversations, self._forwarder.admission)
        limits = HttpLimits(
            max_connections=config.max_connections or default_max_connections(),
            max_connections_per_peer=config.max_connections_per_peer,
            max_body_bytes=config.max_body_bytes,
            close_timeout_s=config.shutdown_timeout_s,
        )
        tls = self._certificates.for_clients()
        server = HttpServer(
            self._handle, host=config.host, port=config.port, limits=limits, tls=tls, is_shared=self._is_shared
        )
        self._server = await exits.enter_async_context(server)
        known.load.show_listening()
        exits.push_async_exit(self._drain)
        logger.info(
            "router serves url=%s policy=%s start_s=%.2f", self.url, config.policy, time.monotonic() - self._started_s
        )

    async def _drain(self, kind: type[BaseException] | None, *_: object) -> None:
        """Have whoever sends requests look elsewhere before they are taken no more."""
        self._is_draining = True
        if kind is None:
            logger.info("router drains delay_s=%g", self._config.drain_delay_s)
            await asyncio.sleep(self._config.drain_delay_s)

    def _own_keeper(
        self, pool: UpstreamPool, metrics: RouterMetrics, gauges: Callable[[], Iterator[Metric | None]]
    ) -> Keeper:
        load = LoadTracker(LoadBoard(num_replicas=num_replicas(self._config)))
        return Keeper(
            self._config,
            pool,
            load,
            self._started_s,
            registry=metrics.registry,
            gauges=gauges,
            on_removed=lambda _: metrics.forget_removed(),
        )

    def _gauges(self) -> Iterator[Metric | None]:
        if self._server is not None:  # the others of several processes ask this one as soon as it knows the fleet
            yield from self._forwarder.gauges()
            yield from server_metrics(PREFIX, self._server.statistics())

    def _open_tracing(self, exits: AsyncExitStack) -> Tracing | None:
        endpoint = self._config.otlp_traces_endpoint
        if endpoint is None:
            return None
        tracing = open_tracing(endpoint, "kvist-router", f"{self._config.host}:{self._config.port}")
        exits.push_async_callback(asyncio.to_thread, tracing.close, TRACES_CLOSE_TIMEOUT_S)
        self._metrics.registry.register(tracing)
        return tracing

    def _handle(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None] | Producer | None:
        """Answer any request, with an OpenAI error where it cannot be served."""
        given_id = request.header(b"x-request-id")
        request_id = given_id or self._new_request_id()
        try:
            if given_id:
                check_request_id("x-request-id", given_id.decode("latin-1"))
            work = self._dispatch(request, responder, request_id)
        except RequestError as error:
            if error.param == "x-request-id":
                request_id = self._new_request_id()
            self._turn_away(request, responder, error, request_id)
            return None
        return self._guarded(work, request, responder, request_id) if isinstance(work, Coroutine) else work

    async def _guarded(
        self, work: Coroutine[Any, Any, None], request: Request, responder: Responder, request_id: bytes
    ) -> None:
        """Answer with an OpenAI error, too, where work that waits finds that it cannot serve the request."""
        try:
            await work
        except RequestError as error:
            self._turn_away(request, responder, error, request_id)

    def _turn_away(self, request: Request, responder: Responder, error: RequestError, request_id: bytes) -> None:
        self._refuse(responder, error, request_id)
        if self._access_log is not None:
            self._access_log.write(request, request_id, error.status, error.message)

    def _refuse(self, responder: Responder, error: RequestError, request_id: bytes) -> None:
        self._metrics.counts["refusals", str(error.status)] += 1
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id)]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        if error.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        responder.answer(error.status, headers, error_body(error))

    def _dispatch(
        self, request: Request, responder: Responder, request_id: bytes
    ) -> Coroutine[Any, Any, None] | Producer | None:
        path = plain_path(request.path)
        if path != request.path:
            request = msgspec.structs.replace(request, target=path + request.target[len(request.path) :])
        config = self._config
        if path in OPEN_PATHS or path in ADMIN_PATHS:
            if path in ADMIN_PATHS or (path == METRICS_PATH and config.has_tenants):
                require_administrator(request, config.admin_key)
            return self._answer_operator(request, responder)
        if path == USAGE_PATH:
            return self._show_usage(request, responder)
        if path == EVENTS_PATH:
            self._check_watcher(request)
            return stream(request, responder, self.known.answer, partial(self._check_watcher, request))
        if path == UI_PATH or path.startswith(UI_PATH + "/"):
            show_file(request, responder)
            return None
        if methods_of(path) is None:
            require_administrator(request, config.admin_key)
            return self._pass_to_worker(request, self._named_worker(request), responder, request_id)
        if config.cors_origins:
            responder.own_headers = cors_headers(request, config.cors_origins)
            if (told := preflight_headers(request)) is not None:
                responder.answer(HTTPStatus.NO_CONTENT, told)
                return None
        tenant = self._keys.tenant_of(request)
        check_client_request(request)
        if path.startswith(MODELS_PATH):
            return self._show_models(request, responder)
        is_admin = is_administrator(request, config.admin_key)
        return self._forwarder.forward(request, responder, request_id, tenant, is_administrator=is_admin)

    async def _show_usage(self, request: Request, responder: Responder) -> None:
        """Tell a tenant what it has used, an administrator what all have."""
        name = None
        if not is_administrator(request, self._config.admin_key):
            tenant = await self._keys.judge(request)
            if tenant is DEFAULT:
                require_administrator(request, self._config.admin_key)
            name = tenant.name
        await self._answer_operator(request, responder, name)

    def _check_watcher(self, request: Request) -> None:
        """Raise RequestError unless the request may go on to be told what the page shows."""
        require_administrator(request, self._config.admin_key)
        if self._is_draining:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the router is shutting down", code="shutting_down")

    async def _answer_operator(self, request: Request, responder: Responder, tenant: str | None = None) -> None:
        if (request.method, request.path) == ("POST", "/route"):
            answer = await self._explain_route(request.body)
        else:
            answer = await self.known.answer(question_of(request, self._config, self._is_draining, tenant))
        show(answer, responder)

    async def _explain_route(self, body: bytes) -> Answer:
        """Return where a request with this body would go; nothing is sent."""
        routing, admission = self._forwarder.routing, self._forwarder.admission
        ask = await self._forwarder.reader.read(None, body)
        full = admission.full(ask.model, ())
        plan = routing.plan(COMPLETION_PATH, ask, routing.prefix(ask) or Prefix(), full=full)
        explained = explain_plan(plan, ask, self.known.load, time.monotonic())
        is_queued = admission.would_wait(ask.model) or plan.answer.chosen.target.worker in full
        return json_answer(explained | {"queued": is_queued})

    def _named_worker(self, request: Request) -> str:
        """Return the URL of the worker that an administrator's request is for."""
        url = (request.header(WORKER_HEADER) or b"").decode("latin-1").rstrip("/")
        if self.fleet.get(url) is None:
            expected = f"the URL of a known worker, as {request.method} {request.path} is no endpoint of the router"
            raise RequestError(
                HTTPStatus.BAD_REQUEST, f"x-kvist-worker: got {url!r:.200}, expected {expected}", param="x-kvist-worker"
            )
        return url

    async def _pass_to_worker(self, request: Request, url: str, responder: Responder, request_id: bytes) -> None:
        """Pass a request to a worker, and the answer back, both as they are."""
        forwarded = forwarded_headers(request, self._config, url, request_id)
        headers = [field for field in forwarded if field[0] != WORKER_HEADER]
        try:
            async with self._pool.exchange(url, request.method, request.target, headers, request.body) as response:
                responder.start(response.status, response.headers)
                responder.flush()
                async for piece in response.body():
                    await responder.write(piece)
            responder.end()
        except UpstreamError as error:
            if responder.has_started:
                raise
            self._refuse(responder, worker_failure(error), request_id)

    def _new_request_id(self) -> bytes:
        """Return 32 hex digits that no other request, of this router or another, has."""
        return b"%b%012x" % (self._request_id_prefix, next(self._request_numbers))

    async def _show_models(self, request: Request, responder: Responder) -> None:
        """Answer with the model that the path names, or else with a list, of those that the tenant may ask for."""
        tenant, model_id = await self._keys.judge(request), request.path.removeprefix(MODELS_PATH).lstrip("/")
        entries = [entry for entry in self.known.models.entries(tenant.models) if model_id in ("", entry["id"])]
        if model_id and not entries:
            message = f"model: got {model_id!r:.200}, expected one that is served"
            raise RequestError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        body = entries[0] if model_id else {"object": "list", "data": entries}
        responder.answer(HTTPStatus.OK, [(b"content-type", b"application/json")], msgspec.json.encode(body))
