"""The endpoints, straight on `kvist.http`: a query is read, matched and answered in one step of the event loop.

docs/index-service.md has them, and who may use which. Registering makes the service dial an endpoint, so that is for
administrators.

This module needs compiled code, so `service` imports it late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import msgspec
import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST

from kvist import __version__
from kvist.contexts import BackgroundTasks
from kvist.events import WorkerRank
from kvist.events.hashing import sequence_hashes
from kvist.events.transports import public_url
from kvist.http import Request, Responder, ServerStatistics
from kvist.indexer import Indexer, SourceStatistics
from kvist.indexer.compiled.hashing import block_hashes
from kvist.indexer.dumps.dumper import write_dump
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.memory import default_max_blocks
from kvist.indexer.service.bodies import (
    DEFAULT_GROUP,
    encode_answer,
    read_hash_query,
    read_query,
    read_register,
    read_unregister,
)
from kvist.indexer.service.config import IndexConfig
from kvist.indexer.service.metrics import SOURCE_COUNTERS, RequestCounters, collect
from kvist.indexer.service.registry import ApiError, EndpointRules, Member, Namespace, Registry, Stream, stream_name
from kvist.indexer.service.restore import Registrations, Restorer
from kvist.metrics_page import MetricsPage

Endpoint: TypeAlias = Callable[[Request, Responder], Coroutine[Any, Any, None]]

DUMP_TIMEOUT_S = 600.0
"""Limit of a dump: while it is under way, changed rows are kept twice, however slowly the client reads."""

_METHODS = dict.fromkeys(("/query", "/query_by_hash", "/register", "/unregister"), "POST") | dict.fromkeys(
    ("/workers", "/dump", "/health", "/readiness", "/metrics"), "GET"
)
_CLIENT_PATHS = frozenset({"/query", "/query_by_hash", "/workers"})
_JSON = (b"content-type", b"application/json")


class Api:
    """Answers every request."""

    def __init__(
        self,
        registry: Registry,
        rules: EndpointRules,
        counters: RequestCounters,
        metrics: MetricsPage,
        config: IndexConfig,
        dump_lock: asyncio.Lock,
        keeper: StateKeeper | None,
    ) -> None:
        self._registry = registry
        self._rules = rules
        self._counters = counters
        self._page = metrics
        self._api_key, self._admin_key = config.api_key, config.admin_key
        self._dump_lock = dump_lock
        self._keeper = keeper
        self.cold_start_s = 0.0
        """Seconds from the start until the index joined; set when it has."""
        self._queries: dict[str, Callable[[bytes], bytes]] = {
            "/query": self._query,
            "/query_by_hash": self._query_by_hash,
        }
        self._routes: dict[str, Endpoint] = {
            "/register": self._register,
            "/unregister": self._unregister,
            "/workers": self._workers,
            "/dump": self._dump,
            "/health": self._health,
            "/readiness": self._readiness,
            "/metrics": self._metrics,
        }

    def _may_query(self, request: Request) -> bool:
        """Return whether the request has the API key or the administrators' key, if a key is needed."""
        if self._api_key is None:
            return True
        keys = (key for key in (self._api_key, self._admin_key) if key is not None)
        return any(request.has_bearer_token(key) for key in keys)

    def handle(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None] | None:
        """Answer a query at once; return a coroutine that answers any other request."""
        query = self._queries.get(request.path)
        if query is None or request.method != "POST" or not self._may_query(request):
            return self._handle(request, responder)
        with self._counted(request, responder):
            responder.answer(HTTPStatus.OK, [_JSON], query(request.body))
        return None

    async def _handle(self, request: Request, responder: Responder) -> None:
        with self._counted(request, responder):
            await self._route(request)(request, responder)

    @contextmanager
    def _counted(self, request: Request, responder: Responder) -> Iterator[None]:
        """Count a request that is answered within, or else here with `{"error": …}`, for an ApiError."""
        started_s, path = perf_counter(), request.path
        try:
            yield
        except ApiError as error:
            headers = [_JSON]
            if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
                headers.append((b"allow", _METHODS[path].encode()))
            elif error.status == HTTPStatus.UNAUTHORIZED:
                headers.append((b"www-authenticate", b"Bearer"))
            responder.answer(error.status, headers, error.body())
        self._counters.count(path if path in _METHODS else "other", responder.status or 0, perf_counter() - started_s)

    def _route(self, request: Request) -> Endpoint:
        path = request.path
        method = _METHODS.get(path)
        if method is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"{request.method} {path}: no such endpoint")
        if request.method != method and not (request.method == "HEAD" and method == "GET"):
            raise ApiError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} {path}: expected {method}")
        if path in _CLIENT_PATHS and not self._may_query(request):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the API key")
        return self._routes[path]

    def _query(self, body: bytes) -> bytes:
        query, token_ids = read_query(body)
        member = self._registry.get(query.namespace)
        hashes_of = partial(
            block_hashes, block_size=member.block_size, lora_name=query.lora_name, cache_salt=query.cache_salt
        )
        hashes = hashes_of(token_ids)
        # The last token of a prompt is always computed, but a hit may depend on the block that it fills.
        num_usable = max(0, len(token_ids) - 1) // member.block_size if query.whole_prompt else len(hashes)
        matches = [member.index.match(hashes, num_usable)]
        # Engines with EAGLE hash one token more per block: match all blocks only if some engine holds the first one.
        if len(member.index.match(hashes_of(token_ids[: member.block_size + 1], is_eagle=True))):
            matches.append(member.index.match(hashes_of(token_ids, is_eagle=True)))
        return encode_answer(matches, member.block_size, member.indexer.resyncing)

    def _query_by_hash(self, body: bytes) -> bytes:
        query, local_hashes = read_hash_query(body)
        member = self._registry.get(query.namespace)
        matches = [member.index.match(np.array(sequence_hashes(local_hashes), np.uint64))]
        return encode_answer(matches, member.block_size, member.indexer.resyncing)

    async def _register(self, request: Request, responder: Responder) -> None:
        self._require_administrator(request)
        _require_json(request)
        body = read_register(request.body)
        stream = Stream(body.endpoint, self._rules.url(body.endpoint, body.replay_endpoint))
        await self._registry.register(body.namespace, body.block_size, body.instance_id, body.dp_rank, stream)
        _send_json(responder, {"status": "ok"}, HTTPStatus.CREATED)

    async def _unregister(self, request: Request, responder: Responder) -> None:
        self._require_administrator(request)
        _require_json(request)
        body = read_unregister(request.body)
        self._registry.unregister(body.namespace, body.instance_id, body.dp_rank)
        _send_json(responder, {"status": "ok"})

    async def _workers(self, request: Request, responder: Responder) -> None:
        (model, *_) = parse_qs(request.query).get("model_name", [None])
        members = [each for each in self._registry if model in (None, each.namespace.model_name)]
        _send_json(responder, [instance for member in members for instance in _instances(member)])

    async def _dump(self, request: Request, responder: Responder) -> None:
        self._require_administrator(request)
        await send_dump(self._dump_lock, self._registry, responder)

    async def _health(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        health: dict[str, Any] = {"status": "ok", "version": __version__, "cold_start_s": round(self.cold_start_s, 3)}
        if self._keeper is not None:
            health["state"] = self._keeper.statistics().described()
        _send_json(responder, health)

    async def _readiness(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        _send_json(responder, {"ready": True, "index": "ready"})

    async def _metrics(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        responder.answer(HTTPStatus.OK, headers, await self._page.text())

    def _require_administrator(self, request: Request) -> None:
        if self._admin_key is None:
            if not request.is_direct_from_loopback():
                raise ApiError(HTTPStatus.FORBIDDEN, "administration is on loopback only, or with --admin-key")
        elif not request.has_bearer_token(self._admin_key):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "authorization: expected 'Bearer' and the admin key")


async def send_dump(dump_lock: asyncio.Lock, members: Iterable[Member], responder: Responder) -> None:
    """Send every index as of one moment, at the client's pace; raises ApiError (503) while another dump is sent."""
    if dump_lock.locked():
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "another dump is under way; try again")
    async with asyncio.timeout(DUMP_TIMEOUT_S), dump_lock:
        responder.start(HTTPStatus.OK, [(b"content-type", b"application/octet-stream")])
        await write_dump(members, responder.write)
        responder.end()


def _send_json(responder: Responder, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
    responder.answer(status, [_JSON], msgspec.json.encode(value))


def _require_json(request: Request) -> None:
    """Refuse other content types: a page in a browser can post those to loopback without being allowed to."""
    content_type = (request.header(b"content-type") or b"").partition(b";")[0].strip()
    if content_type.lower() != b"application/json":
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type: expected application/json")


def _instances(member: Member) -> Iterator[dict[str, Any]]:
    """Yield every instance as Dynamo's API has it, and how well its blocks are known."""
    sources = {source.worker: source for source in member.indexer.statistics()}
    for instance_id, streams in member.instances.items():
        listeners = {
            str(rank): _listener(member, stream, sources[stream_name(instance_id, rank)])
            for rank, stream in streams.items()
        }
        has_failed = any(listener["status"] == "failed" for listener in listeners.values())
        yield {
            "instance_id": instance_id,
            "source": "zmq",
            "status": "failed" if has_failed else "active",
            "model_name": member.namespace.model_name,
            "routing_group": member.namespace.group,
            "block_size": member.block_size,
            "endpoints": {str(rank): public_url(stream.endpoint) for rank, stream in streams.items()},
            "listeners": listeners,
        }


def _listener(member: Member, stream: Stream, source: SourceStatistics) -> dict[str, Any]:
    """Return one stream; `ranks` are those its events name, usually only the one registered."""
    listener: dict[str, Any] = {
        "endpoint": public_url(stream.endpoint),
        "url": public_url(stream.url),
        "status": "active" if source.failure is None else "failed",
    }
    if source.failure is not None:
        listener["last_error"] = source.failure
    listener["ranks"] = {
        str(rank): {"state": state, "num_blocks": member.index.digest(WorkerRank(source.worker, rank)).num_blocks}
        for rank, state in sorted(source.states.items())
    }
    listener["overlap_is_upper_bound"] = source.has_upper_bounds
    listener["lag_s"] = source.lag_s
    listener["last_event_age_s"] = source.last_event_age_s
    listener["counters"] = {f"num_{name}": getattr(source, f"num_{name}") for name in SOURCE_COUNTERS}
    return listener


@asynccontextmanager
async def open_api(config: IndexConfig, server: Callable[[], ServerStatistics]) -> AsyncIterator[Api]:
    """Open the API on indexes that follow the configured streams, once they are restored, until the context ends."""
    rules = EndpointRules(config.allow_endpoints, config.replay)
    new_indexer = partial(Indexer, num_ranks=config.data_parallel_size, has_full_reports=config.full_reports)
    is_held = bool(config.peers) or config.state_dir is not None
    registry = Registry(new_indexer, max_blocks=config.max_blocks or default_max_blocks(), is_held=is_held)
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(registry)
        dump_lock = asyncio.Lock()
        keeper = None
        if config.state_dir is not None:
            folder, interval_s = Path(config.state_dir), config.state_interval_s
            keeper = StateKeeper(folder, "index", interval_s, lambda: registry, monotonic, dump_lock)
            tasks = await exits.enter_async_context(BackgroundTasks())
            exits.push_async_callback(keeper.stop)
        for worker in config.parsed_workers():
            assert config.block_size is not None
            namespace = Namespace(config.model_name, DEFAULT_GROUP)
            stream = Stream(worker.endpoint, rules.with_replay(worker.endpoint))
            await registry.register(namespace, config.block_size, worker.instance_id, worker.dp_rank, stream)
        restorer = Restorer(registry, rules, config.admin_key or config.api_key)
        is_restored = bool(config.peers) and await restorer.restore(config.peers)
        if keeper is not None:
            if not is_restored:
                registrations = Registrations(registry, rules)
                await keeper.load(registrations, registrations.register_all)
            keeper.start(tasks)
        registry.release()
        counters = RequestCounters()
        page = MetricsPage(partial(collect, registry, server, keeper), counters.registry)
        yield Api(registry, rules, counters, page, config, dump_lock, keeper)
