"""The endpoints, straight on `kvist.http`: a query is read, matched and answered in one step of the event loop.

    POST /register        follow a stream: {instance_id, endpoint, model_name, block_size, dp_rank?, replay_endpoint?}
    POST /unregister      forget an instance: {instance_id, model_name, dp_rank?}
    GET  /workers         every instance, how well its blocks are known, and what its streams did; ?model_name=…
    POST /query           who holds a prompt: {token_ids, model_name, lora_name?, cache_salt?}
    POST /query_by_hash   the same by the local hashes of its blocks: {block_hashes, model_name}
    GET  /dump            every index, for another service to start from
    GET  /readiness       200: before the index has joined, the service answers 503 in this module's place
    GET  /health          200 while the service serves; how what was loaded from disk fared, and how saving goes
    GET  /metrics         Prometheus text

Bodies may name a `routing_group`, "default" without one. Registering makes the service dial an endpoint, so that and
what hands out a whole index is for administrators (`--admin-key`, or loopback). Queries and the list of workers need
the API key or that of administrators, if `--api-key` is set; the last two above are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from kvist import __version__
from kvist.events.hashing import sequence_hashes
from kvist.http import Answer, QuickEndpoint, Request, Responder
from kvist.indexer.compiled.hashing import block_hashes
from kvist.indexer.dumps.dumper import Dumper
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.service.bodies import read_hash_query, read_query, read_register, read_unregister
from kvist.indexer.service.endpoints import EndpointRules
from kvist.indexer.service.errors import ApiError
from kvist.indexer.service.metrics import RequestCounters
from kvist.indexer.service.registry import Member, Namespace, Registry, Stream
from kvist.indexer.service.workers import describe_workers
from kvist.metrics_page import MetricsPage

Endpoint: TypeAlias = Callable[[Request, Responder], Coroutine[Any, Any, None]]

DUMP_TIMEOUT_S = 600.0
"""While a dump is under way, its index is kept twice: a client that never ends would cost that memory for ever."""

_METHODS = {
    "/query": "POST",
    "/query_by_hash": "POST",
    "/register": "POST",
    "/unregister": "POST",
    "/workers": "GET",
    "/dump": "GET",
    "/health": "GET",
    "/readiness": "GET",
    "/metrics": "GET",
}
_CLIENT_PATHS = frozenset({"/query", "/query_by_hash", "/workers"})
_JSON_TYPE = b"application/json"
_JSON = (b"content-type", _JSON_TYPE)
_DONE = b'{"status":"ok"}'


class Api:
    """Answers every request; `quick_endpoints` and `handle` are what an HttpServer calls."""

    def __init__(
        self,
        registry: Registry,
        rules: EndpointRules,
        counters: RequestCounters,
        metrics: MetricsPage,
        api_key: str | None,
        admin_key: str | None,
        dumper: Dumper,
        keeper: StateKeeper | None,
    ) -> None:
        self._registry = registry
        self._rules = rules
        self._counters = counters
        self._page = metrics
        self._api_key = api_key
        self._admin_key = admin_key
        self._dumper = dumper
        self._keeper = keeper
        self.cold_start_s = 0.0
        """Seconds until the index joined, known when it has."""
        self.quick_endpoints = {
            "/query": self._counted("/query", self._query),
            "/query_by_hash": self._counted("/query_by_hash", self._query_by_hash),
        }
        """What is answered at once, by path, to those who `may_query`."""
        self._routes: dict[str, Endpoint] = {
            "/register": self._register,
            "/unregister": self._unregister,
            "/workers": self._workers,
            "/dump": self._dump,
            "/health": self._health,
            "/readiness": self._readiness,
            "/metrics": self._metrics,
        }

    def may_query(self, request: Request) -> bool:
        """Return whether the request bears the API key or that of administrators, if a key is needed."""
        if self._api_key is None:
            return True
        return request.bears(self._api_key) or (self._admin_key is not None and request.bears(self._admin_key))

    def _counted(self, path: str, endpoint: Callable[[bytes], bytes]) -> QuickEndpoint:
        count = self._counters.count

        def answer(body: bytes) -> Answer:
            started_s = perf_counter()
            try:
                answer = Answer(200, _JSON_TYPE, endpoint(body))
            except ApiError as error:
                answer = Answer(error.status, _JSON_TYPE, error.body())
            count(path, answer.status, perf_counter() - started_s)
            return answer

        return answer

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer any other request, with `{"error": …}` where it cannot be done."""
        started_s = perf_counter()
        path = request.path
        try:
            await self._route(request, path)(request, responder)
        except ApiError as error:
            headers = [_JSON]
            if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
                headers.append((b"allow", _METHODS[path].encode()))
            elif error.status == HTTPStatus.UNAUTHORIZED:
                headers.append((b"www-authenticate", b"Bearer"))
            await responder.send_response(error.status, headers, error.body())
        self._counters.count(path if path in _METHODS else "other", responder.status or 0, perf_counter() - started_s)

    def _route(self, request: Request, path: str) -> Endpoint:
        method = _METHODS.get(path)
        if method is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"{request.method} {path}: no such endpoint")
        if request.method != method and not (request.method == "HEAD" and method == "GET"):
            raise ApiError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} {path}: expected {method}")
        if path in _CLIENT_PATHS and not self.may_query(request):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the API key")
        return self._routes[path]

    def _query(self, body: bytes) -> bytes:
        query = read_query(body)
        member = self._registry.get(query.model_name, query.group)
        hashes_of = partial(
            block_hashes, block_size=member.block_size, lora_name=query.lora_name, cache_salt=query.cache_salt
        )
        hashes, eagle_hashes = hashes_of(query.token_ids), None
        # Engines with EAGLE name blocks by one token more: a look at the first block tells whether any holds this one.
        if len(member.index.match(hashes_of(query.token_ids[: member.block_size + 1], is_eagle=True))):
            eagle_hashes = hashes_of(query.token_ids, is_eagle=True)
        return member.writer.answer(hashes, member.indexer.resyncing, eagle_hashes)

    def _query_by_hash(self, body: bytes) -> bytes:
        query = read_hash_query(body)
        member = self._registry.get(query.model_name, query.group)
        return member.writer.answer(sequence_hashes(query.local_hashes), member.indexer.resyncing)

    async def _register(self, request: Request, responder: Responder) -> None:
        self._require_administrator(request)
        _require_json(request)
        body = read_register(request.body)
        stream = Stream(body.endpoint, self._rules.url(body.endpoint, body.replay_endpoint))
        namespace = Namespace(body.model_name, body.group)
        await self._registry.register(namespace, body.block_size, body.instance_id, body.dp_rank, stream)
        await responder.send_response(HTTPStatus.CREATED, [_JSON], _DONE)

    async def _unregister(self, request: Request, responder: Responder) -> None:
        self._require_administrator(request)
        _require_json(request)
        body = read_unregister(request.body)
        self._registry.unregister(Namespace(body.model_name, body.group), body.instance_id, body.dp_rank)
        await responder.send_response(HTTPStatus.OK, [_JSON], _DONE)

    async def _workers(self, request: Request, responder: Responder) -> None:
        models = parse_qs(request.query).get("model_name", [None])
        workers = describe_workers(self._registry, models[0])
        await responder.send_response(HTTPStatus.OK, [_JSON], msgspec.json.encode(workers))

    async def _dump(self, request: Request, responder: Responder) -> None:
        self._require_administrator(request)
        await send_dump(self._dumper, self._registry, responder)

    async def _health(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        health: dict[str, Any] = {"status": "ok", "version": __version__, "cold_start_s": round(self.cold_start_s, 3)}
        if self._keeper is not None:
            health["state"] = self._keeper.statistics().described()
        await responder.send_response(HTTPStatus.OK, [_JSON], msgspec.json.encode(health))

    async def _readiness(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        page = {"ready": True, "index": "joined"}
        await responder.send_response(HTTPStatus.OK, [_JSON], msgspec.json.encode(page))

    async def _metrics(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        await responder.send_response(HTTPStatus.OK, headers, await self._page.text())

    def _require_administrator(self, request: Request) -> None:
        if self._admin_key is None:
            if not request.is_direct_from_loopback():
                raise ApiError(HTTPStatus.FORBIDDEN, "administration is on loopback only, or with --admin-key")
        elif not request.bears(self._admin_key):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the admin key")


async def send_dump(dumper: Dumper, members: Iterable[Member], responder: Responder) -> None:
    """Send every index as it is at one moment, at the client's pace; raises ApiError (503) while another is sent."""
    if dumper.is_busy:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "another dump is under way; try again")
    async with asyncio.timeout(DUMP_TIMEOUT_S):
        responder.start(HTTPStatus.OK, [(b"content-type", b"application/octet-stream")])
        await dumper.dump(members, responder.write)
        await responder.finish()


def _require_json(request: Request) -> None:
    """A page in a browser can post to loopback, but not with this content type unless it is allowed to."""
    content_type = (request.header(b"content-type") or b"").partition(b";")[0].strip()
    if content_type.lower() != b"application/json":
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type: expected application/json")
