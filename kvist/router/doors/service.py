"""A running router: builds everything from one configuration, starts it and stops it.

    async with RouterService(RouterConfig(worker_urls=(...))) as service:
        ...  # serves on service.url

The server starts to listen when each worker was asked once. It is the first to stop (`docs/operating.md`):

    drain       `/readiness` fails for `drain_delay_s`; requests are still accepted
    close       it no longer listens; running requests have `shutdown_timeout_s` to end
    shut down   requests that still run are ended; a stream, if possible, by an event that says why

Until the index is compiled, requests are routed by load.
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
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from prometheus_client.core import Metric

from kvist.contexts import ComposedContext
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
from kvist.openai.errors import RequestError, error_body, error_headers
from kvist.router.access_log import AccessLog
from kvist.router.attempts import forwarded_headers, worker_failure
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
from kvist.router.doors.keeper import Answer, FleetKeeper, Keeper, json_answer, question_of, send_answer
from kvist.router.doors.live import STATE_PATH
from kvist.router.doors.page import EVENTS_PATH, UI_PATH, show_file, stream
from kvist.router.doors.tls import Certificates
from kvist.router.forward import Forwarder
from kvist.router.metrics import PREFIX, RouterMetrics
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
"""The header that names the worker of an administrator's request to an endpoint of workers."""
FLEET_PATHS = frozenset({"/flush_cache", "/reset_prefix_cache", "/start_profile", "/stop_profile"})
"""Endpoints of workers that all of them are asked at if no worker is named, as load generators name none."""
MAX_SHOWN_BYTES = 4096
"""Of what each of them says."""


OpenKeeper: TypeAlias = Callable[
    [UpstreamPool, RouterMetrics, Callable[[], Iterator[Metric | None]]], AbstractAsyncContextManager[FleetKeeper]
]
"""Makes a router's keeper, from its pool, its metrics and a function that yields its gauges."""


class RouterService(ComposedContext):
    """A router that serves while its context is open, and then stops as explained above; at once after an error."""

    def __init__(
        self,
        config: RouterConfig,
        started_s: float | None = None,
        open_keeper: OpenKeeper | None = None,
        recording: Beginning | None = None,
    ) -> None:
        """`started_s` is when the process started, by the monotonic clock, if the caller knows.

        By default the router has a keeper of its own. With `open_keeper`, which connects to a keeper process, it is one
        of several processes, which share the port and the `recording`.
        """
        self._config, self._recording = config, recording or Beginning()
        self._started_s = time.monotonic() if started_s is None else started_s
        self._server: HttpServer | None = None
        self._is_draining = False
        self._forwarder: Forwarder
        self._certificates, self._keys = Certificates(config), Keys(config)
        self._open_keeper, self._is_shared = open_keeper or self._own_keeper, open_keeper is not None
        # Unlike a UUID for each request, a random prefix and a count cost next to nothing.
        self._request_id_prefix = secrets.token_hex(10).encode()
        self._request_numbers = itertools.count()

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._config.url_at(self._server.port)

    def reload(self, config: RouterConfig) -> None:
        """Apply the settings that may change while the router runs, and log those that need a restart.

        Certificates are read from their files again. Raises InvalidValueError, and changes no setting, if that fails.
        """
        self._certificates.renew()
        self._config = self._config.changed_to(config)
        self._keys.reconfigure(self._config)
        self.keeper.reconfigure(self._config)
        self._forwarder.config = self._config

    async def _open(self, exits: AsyncExitStack) -> None:
        config = self._config
        self._metrics = RouterMetrics()
        await exits.enter_async_context(self._keys)
        pool = self._pool = await exits.enter_async_context(self._certificates.worker_pool())
        keeper = self.keeper = await exits.enter_async_context(self._open_keeper(pool, self._metrics, self._gauges))
        self.fleet = keeper.fleet
        self._metrics.has_worker = lambda url: self.fleet.get(url) is not None
        self.fleet.on_removed = lambda _: self._metrics.forget_removed()
        self._access_log = recorder = None
        if config.access_log is not None:
            self._access_log = AccessLog(config.access_log, config.access_log_sample)
            exits.push_async_callback(asyncio.to_thread, self._access_log.close)
        if config.record_requests is not None:
            recorder = RequestRecorder(config.record_requests, config.record_max_bytes, self._recording)
            exits.push_async_callback(asyncio.to_thread, recorder.close)
        self._forwarder = Forwarder(
            config,
            keeper,
            pool,
            self._metrics,
            self._keys.resolve_tenant,
            self._refuse,
            keeper.on_routed,
            Journal(keeper.models, keeper.on_journal_entry, shows_prompts=config.show_prompts).record,
            self._open_tracing(exits),
            self._access_log,
            recorder,
        )
        keeper.connect(self._forwarder.reader.conversations, self._forwarder.admission)
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
        keeper.load.set_listening()
        exits.push_async_exit(self._drain)
        logger.info(
            "listening url=%s policy=%s start_s=%.2f", self.url, config.policy, time.monotonic() - self._started_s
        )

    async def _drain(self, kind: type[BaseException] | None, *_: object) -> None:
        """Fail `/readiness` for a while, so that load balancers go elsewhere before the router stops to listen."""
        self._is_draining = True
        if kind is None:
            logger.info("draining delay_s=%g", self._config.drain_delay_s)
            await asyncio.sleep(self._config.drain_delay_s)

    def _own_keeper(
        self, pool: UpstreamPool, metrics: RouterMetrics, gauges: Callable[[], Iterator[Metric | None]]
    ) -> Keeper:
        return Keeper(self._config, pool, self._started_s, registry=metrics.registry, gauges=gauges)

    def _gauges(self) -> Iterator[Metric | None]:
        if self._server is not None:  # a keeper process may ask before it is there
            yield from self._forwarder.gauges()
            yield from server_metrics(PREFIX, self._server.statistics())

    def _open_tracing(self, exits: AsyncExitStack) -> Tracing | None:
        endpoint = self._config.otlp_traces_endpoint
        if endpoint is None:
            return None
        tracing = open_tracing(endpoint, "kvist-router", f"{self._config.host}:{self._config.port}")
        exits.push_async_callback(asyncio.to_thread, tracing.close, TRACES_CLOSE_TIMEOUT_S)
        return tracing

    def _handle(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None] | Producer | None:
        """Handle any request; answer with an OpenAI error if it cannot be served."""
        given_id = request.header(b"x-request-id")
        request_id = given_id or self._new_request_id()
        try:
            if given_id:
                check_request_id("x-request-id", given_id.decode("latin-1"))
            work = self._dispatch(request, responder, request_id)
        except RequestError as error:
            if error.param == "x-request-id":
                request_id = self._new_request_id()
            self._reject(request, responder, error, request_id)
            return None
        return self._guarded(work, request, responder, request_id) if isinstance(work, Coroutine) else work

    async def _guarded(
        self, work: Coroutine[Any, Any, None], request: Request, responder: Responder, request_id: bytes
    ) -> None:
        """Finish asynchronous work on a request; answer with an OpenAI error if it raises one."""
        try:
            await work
        except RequestError as error:
            self._reject(request, responder, error, request_id)

    def _reject(self, request: Request, responder: Responder, error: RequestError, request_id: bytes) -> None:
        self._refuse(responder, error, request_id)
        if self._access_log is not None:
            self._access_log.write(request, request_id, error.status, error.message)

    def _refuse(self, responder: Responder, error: RequestError, request_id: bytes) -> None:
        self._metrics.counts["refusals", str(error.status)] += 1
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id), *error_headers(error)]
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
            return stream(request, responder, self.keeper.answer, partial(self._check_watcher, request))
        if path == UI_PATH or path.startswith(UI_PATH + "/"):
            show_file(request, responder)
            return None
        if methods_of(path) is None:
            require_administrator(request, config.admin_key)
            if path in FLEET_PATHS and request.header(WORKER_HEADER) is None:
                return self._pass_to_all(request, responder, request_id)
            return self._pass_to_worker(request, self._named_worker(request), responder, request_id)
        if config.cors_origins:
            responder.own_headers = cors_headers(request, config.cors_origins)
            if (headers := preflight_headers(request)) is not None:
                responder.answer(HTTPStatus.NO_CONTENT, headers)
                return None
        tenant = self._keys.tenant_of(request)
        check_client_request(request)
        if path.startswith(MODELS_PATH):
            return self._show_models(request, responder)
        is_admin = is_administrator(request, config.admin_key)
        return self._forwarder.forward(request, responder, request_id, tenant, is_administrator=is_admin)

    async def _show_usage(self, request: Request, responder: Responder) -> None:
        """Answer a tenant with its own usage, an administrator with that of all tenants."""
        name = None
        if not is_administrator(request, self._config.admin_key):
            tenant = await self._keys.resolve_tenant(request)
            if tenant is DEFAULT:
                require_administrator(request, self._config.admin_key)
            name = tenant.name
        await self._answer_operator(request, responder, name)

    def _check_watcher(self, request: Request) -> None:
        """Raise RequestError unless the request may receive the events of the live page now."""
        require_administrator(request, self._config.admin_key)
        if self._is_draining:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the router is shutting down", code="shutting_down")

    async def _answer_operator(self, request: Request, responder: Responder, tenant: str | None = None) -> None:
        if (request.method, request.path) == ("POST", "/route"):
            answer = await self._explain_route(request.body)
        else:
            answer = await self.keeper.answer(question_of(request, self._config, self._is_draining, tenant))
        send_answer(answer, responder)

    async def _explain_route(self, body: bytes) -> Answer:
        """Return where a request with this body would go, without sending it."""
        routing, admission = self._forwarder.routing, self._forwarder.admission
        parsed = await self._forwarder.reader.read(None, body)
        full = admission.full_workers(parsed.model, ())
        plan = routing.plan(parsed, routing.match(parsed) or Prefix(), full=full)
        explained = explain_plan(plan, parsed, self.keeper.load)
        is_queued = admission.would_wait(parsed.model) or plan.computed_by.chosen.target.worker in full
        return json_answer(explained | {"queued": is_queued})

    def _named_worker(self, request: Request) -> str:
        """Return the URL of the worker that an administrator's request is for."""
        named = request.header(WORKER_HEADER)
        if named is None:
            message = (
                f"{request.method} {request.path} is no endpoint of the router; x-kvist-worker would name a worker"
            )
            raise RequestError(HTTPStatus.NOT_FOUND, message, param="x-kvist-worker", code="endpoint_not_found")
        url = named.decode("latin-1").rstrip("/")
        if self.fleet.get(url) is None:
            message = f"x-kvist-worker: got {url!r:.200}, expected the URL of a known worker"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="x-kvist-worker")
        return url

    async def _pass_to_worker(self, request: Request, url: str, responder: Responder, request_id: bytes) -> None:
        """Forward a request to a worker and its answer to the client, both unchanged."""
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

    async def _pass_to_all(self, request: Request, responder: Responder, request_id: bytes) -> None:
        """Forward a request to all workers that may get requests again; answer with what each says.

        The status is the highest of theirs, or 503 if there are none.
        """
        urls = [worker.url for worker in self.fleet.workers if not worker.is_draining]
        if not urls:
            message = f"{request.method} {request.path}: there is no worker to ask"
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="no_healthy_worker")

        async def ask(url: str) -> dict[str, Any]:
            headers, said = forwarded_headers(request, self._config, url, request_id), b""
            try:
                async with self._pool.exchange(url, request.method, request.target, headers, request.body) as response:
                    async for piece in response.body():
                        said = (said + piece)[:MAX_SHOWN_BYTES]
                    return {"url": url, "status": response.status, "body": said.decode(errors="replace")}
            except UpstreamError as error:
                failure = worker_failure(error)
                return {"url": url, "status": failure.status, "body": failure.message}

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(url), name="kvist-ask-worker") for url in urls]
        shown = [each.result() for each in asked]
        send_answer(json_answer({"workers": shown}, max(each["status"] for each in shown)), responder)

    def _new_request_id(self) -> bytes:
        """Return 32 hex digits that are unique among all requests of all routers."""
        return b"%b%012x" % (self._request_id_prefix, next(self._request_numbers))

    async def _show_models(self, request: Request, responder: Responder) -> None:
        """Answer with the model that the path names, or with the list of all that the tenant may use."""
        tenant, model_id = await self._keys.resolve_tenant(request), request.path.removeprefix(MODELS_PATH).lstrip("/")
        entries = [entry for entry in self.keeper.models.entries(tenant.models) if model_id in ("", entry["id"])]
        if model_id and not entries:
            message = f"model: got {model_id!r:.200}, expected one that is served"
            raise RequestError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        body = entries[0] if model_id else {"object": "list", "data": entries}
        responder.answer(HTTPStatus.OK, [(b"content-type", b"application/json")], msgspec.json.encode(body))
