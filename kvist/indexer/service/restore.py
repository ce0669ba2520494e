"""Starting from a peer, or from saved state: subscribe to the same streams, load the blocks, resume the streams.

docs/index-service.md says what makes it exact ("Starting from a peer").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import public_url
from kvist.events.types import Rank
from kvist.http import UpstreamError, UpstreamLimits, UpstreamPool
from kvist.indexer.dumps.dumper import Namespaced
from kvist.indexer.dumps.format import NamespaceHead, StreamState
from kvist.indexer.dumps.takeover import Takeover
from kvist.indexer.service.registry import ApiError, EndpointRules, Namespace, Registry, Stream, parse_stream_name
from kvist.indexer.source import Source

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
"""How long to wait for connections before the dump is requested; a stream connected later needs a replay as proof."""
BUSY_TIMEOUT_S = 60.0
"""How long to retry with a peer that is sending a dump to another client."""
MAX_WORKERS_BYTES = 64 << 20
_LIMITS = UpstreamLimits(first_byte_timeout_s=10.0, idle_timeout_s=30.0)
_BUSY_WAIT_S = 1.0


class Registrations:
    """Registers the streams of another service, or of an earlier process, and resumes them."""

    def __init__(self, registry: Registry, rules: EndpointRules) -> None:
        self._registry = registry
        self._rules = rules

    async def register(
        self, namespace: Namespace, block_size: int, instance_id: int, dp_rank: int, endpoint: str, url: str
    ) -> None:
        """Register a stream unless it is registered already; a stream that may not be followed here is logged."""
        try:
            stream = Stream(endpoint, self._rules.url(url))
            await self._registry.register(namespace, block_size, instance_id, dp_rank, stream)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                _logger.warning("stream not restored: %s instance_id=%d", error, instance_id)

    async def register_all(self, head: NamespaceHead) -> None:
        """Register the streams of a namespace, except those that need a login, which is not in a dump."""
        namespace = Namespace(head.model_name, head.group)
        for state in head.streams:
            name = parse_stream_name(state.worker)
            if name is None or state.has_login:
                if self._find_stream(namespace, state) is None:
                    _logger.warning("stream not restored: its login is not saved worker=%s", state.worker)
                continue
            await self.register(namespace, state.block_size, *name, state.endpoint, state.url)

    def find(self, head: NamespaceHead) -> Namespaced | None:
        """Return the namespace's index, if it is followed and has blocks of that size."""
        member = self._registry.find(Namespace(head.model_name, head.group))
        sizes = {state.block_size for state in head.streams}
        if member is None or not sizes <= {member.block_size}:
            expected = "none" if member is None else member.block_size
            text = "not restored: other block size, or not followed model=%s block_sizes=%s expected=%s"
            _logger.warning(text, head.model_name, sorted(sizes), expected)
            return None
        return member

    def resume(self, into: Namespaced, state: StreamState) -> Source | None:
        """Resume a stream that is followed at the same endpoint."""
        stream = self._find_stream(Namespace(*into.namespace), state)
        if stream is None or state.progress is None or public_url(stream.endpoint) != state.endpoint:
            return None
        return into.indexer.resume(state.worker, state.progress)

    def _find_stream(self, namespace: Namespace, state: StreamState) -> Stream | None:
        member = self._registry.find(namespace)
        return None if member is None else member.stream(state.worker)


class _Listener(msgspec.Struct):
    endpoint: str
    url: str


class _Instance(msgspec.Struct):
    """The fields used of an entry of the peer's `GET /workers`."""

    instance_id: int
    model_name: str
    routing_group: str
    block_size: int
    listeners: dict[Rank, _Listener]


class Restorer:
    """Fills a registry whose streams are held from the first peer that answers."""

    def __init__(self, registry: Registry, rules: EndpointRules, key: str | None) -> None:
        """`key` is this service's own key: its peers have the same one."""
        self._registry = registry
        self._registrations = Registrations(registry, rules)
        self._headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    async def restore(self, peers: Sequence[str]) -> bool:
        """Load the first peer's dump that is whole; return whether there is one. If not, nothing stays loaded."""
        async with UpstreamPool(_LIMITS) as pool:
            for peer in peers:
                try:
                    await self._register_streams_of(pool, peer)
                    await self._load_dump(pool, peer)
                except (UpstreamError, MalformedMessageError) as error:
                    _logger.warning("peer not used: %s peer=%s", error, peer)
                else:
                    return True
        _logger.warning("no peer could be used, starting with an empty index peers=%s", list(peers))
        return False

    async def _register_streams_of(self, pool: UpstreamPool, peer: str) -> None:
        """Register the peer's instances that are not registered here, and wait until they are connected."""
        body = b"".join([piece async for piece in self._get(pool, peer, "/workers", MAX_WORKERS_BYTES)])
        try:
            instances = msgspec.json.decode(body, type=list[_Instance])
        except DECODE_ERRORS as error:
            raise MalformedMessageError(f"{peer}/workers", str(error)) from None
        for instance in instances:
            namespace, number = Namespace(instance.model_name, instance.routing_group), instance.instance_id
            for dp_rank, listener in instance.listeners.items():
                await self._registrations.register(
                    namespace, instance.block_size, number, dp_rank, listener.endpoint, listener.url
                )
        give_up_s = asyncio.get_running_loop().time() + CONNECT_TIMEOUT_S
        while not self._registry.are_all_connected and asyncio.get_running_loop().time() < give_up_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # sockets tell how often they connected, not when
        for member in self._registry:
            member.indexer.record_connects()

    async def _load_dump(self, pool: UpstreamPool, peer: str) -> None:
        takeover = Takeover(self._registrations, peer)
        async with aclosing(self._get(pool, peer, "/dump")) as pieces:
            await takeover.read(pieces)
        _logger.info("restored peer=%s streams=%d", peer, len(takeover.sources))

    async def _get(
        self, pool: UpstreamPool, peer: str, path: str, max_bytes: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body of a page; raises UpstreamError for any status but 200, after waiting for a busy peer."""
        give_up_s = asyncio.get_running_loop().time() + BUSY_TIMEOUT_S
        while True:
            async with pool.exchange(peer.rstrip("/"), "GET", path, self._headers) as response:
                if response.status == HTTPStatus.OK:
                    num_bytes = 0
                    async for piece in response.body():
                        num_bytes += len(piece)
                        if max_bytes is not None and num_bytes > max_bytes:
                            raise MalformedMessageError(f"{peer}{path}", f"more than {max_bytes} bytes")
                        yield piece
                    return
                # A peer that is joining itself is not waited for: it may be waiting for this service.
                is_busy = response.status == HTTPStatus.SERVICE_UNAVAILABLE and path == "/dump"
                if not is_busy or asyncio.get_running_loop().time() > give_up_s:
                    raise UpstreamError(peer, f"GET {path} answered {response.status}")
            await asyncio.sleep(_BUSY_WAIT_S)
