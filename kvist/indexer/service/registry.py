"""Which instances feed which index, and which endpoints may: one index a namespace, dropped with its last instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError, KvistError
from kvist.events.transports import Endpoint, public_url
from kvist.indexer import Indexer
from kvist.indexer.source import Source
from kvist.networks import is_in_networks
from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)

MAX_NAMESPACES = 256
"""Each costs 0.2 MB before its first block."""
MAX_STREAMS = 8192
"""Over all namespaces; each costs a socket and a task."""


class ApiError(KvistError):
    """An error answer: its status, and a message that tells the client what to change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.message})


def stream_name(instance_id: int, dp_rank: int) -> str:
    """Return the index's name for the worker behind one stream of an instance."""
    return f"{instance_id}:{dp_rank}"


def parse_stream_name(name: str) -> tuple[int, int] | None:
    """Return instance and rank of a name of `stream_name`, None for anything else."""
    instance_id, _, dp_rank = name.partition(":")
    return (int(instance_id), int(dp_rank)) if instance_id.isdecimal() and dp_rank.isdecimal() else None


@dataclass(frozen=True, slots=True)
class EndpointRules:
    """The operator's rules for endpoints that are registered over HTTP."""

    allowed_networks: tuple[str, ...] = ()
    """Networks where endpoints must be; with none, anywhere."""
    has_replay: bool = True
    """Whether the replay port of a stream that names none is the one after the stream's."""

    def url(self, endpoint: str, replay_endpoint: str | None = None) -> str:
        """Return the URL to follow for what was registered; raises ApiError (400, 403)."""
        try:
            parsed = Endpoint.parse(endpoint)
            url = self.with_replay(endpoint, replay_endpoint)
        except InvalidValueError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from None
        if parsed.scheme not in ("tcp", "ipc") and parsed.broker is None:
            expected = "tcp://host:port, ipc:///path or a broker's URL"
            raise ApiError(HTTPStatus.BAD_REQUEST, f"endpoint: got {endpoint!r}, expected {expected}")
        if parsed.broker is not None and parsed.broker.names_files:
            got, expected = public_url(endpoint), "a URL without files of this host; --workers may name them"
            raise ApiError(HTTPStatus.FORBIDDEN, f"endpoint: got {got!r}, expected {expected}")
        if self.allowed_networks and not self._is_allowed(parsed):
            networks = ", ".join(self.allowed_networks)
            got = public_url(endpoint)
            raise ApiError(HTTPStatus.FORBIDDEN, f"endpoint: got {got!r}, expected an address in {networks}")
        return url

    def with_replay(self, endpoint: str, replay_endpoint: str | None = None) -> str:
        """Return the URL with its replay port; raises InvalidValueError for one on another host than the stream."""
        options = endpoint.partition("?")[2]
        if replay_endpoint is not None:
            option = f"replay_port={_replay_port(endpoint, replay_endpoint)}"
        elif self.has_replay or "replay_port=" in options or not endpoint.startswith("tcp://"):
            return endpoint
        else:
            option = "replay_port=none"
        return f"{endpoint}{'&' if options else '?'}{option}"

    def _is_allowed(self, endpoint: Endpoint) -> bool:
        if endpoint.broker is not None:
            return all(is_in_networks(host.name, self.allowed_networks) for host in endpoint.broker.hosts)
        host = urlsplit(endpoint.address).hostname or ""
        return endpoint.scheme == "tcp" and not endpoint.is_bound and is_in_networks(host, self.allowed_networks)


def _replay_port(endpoint: str, replay_endpoint: str) -> str:
    host, _, _ = endpoint.partition("?")[0].rpartition(":")
    replay_host, _, port = Endpoint.parse(replay_endpoint).address.rpartition(":")
    if replay_host not in (host, "tcp://*"):
        raise InvalidValueError("replay_endpoint", replay_endpoint, f"a port on the stream's own host, {host}:port")
    return port


class Namespace(NamedTuple):
    """A model in a routing group, which has an index of its own."""

    model_name: str
    group: str

    def __str__(self) -> str:
        return f"model={self.model_name} routing_group={self.group}"


class Stream(NamedTuple):
    """A stream as it was registered, and the URL it is followed at."""

    endpoint: str
    url: str


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A namespace's index, and each stream that feeds it, by instance and rank."""

    namespace: Namespace
    block_size: int
    index: RadixIndex
    indexer: Indexer
    instances: dict[int, dict[int, Stream]] = field(default_factory=dict)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def stream(self, name: str) -> Stream | None:
        """Return the stream with this name in the index, None if there is none."""
        parsed = parse_stream_name(name)
        return None if parsed is None else self.instances.get(parsed[0], {}).get(parsed[1])

    def endpoint_of(self, source: Source) -> str:
        stream = self.stream(source.worker)
        return source.url if stream is None else stream.endpoint


class Registry(ComposedContext):
    """Keeps the namespaces; use it as `async with Registry(...) as registry`, from one event loop."""

    def __init__(
        self, new_indexer: Callable[..., Indexer] = Indexer, *, max_blocks: int | None = None, is_held: bool = False
    ) -> None:
        """Feed each index with an indexer of `new_indexer`, and cap it at `max_blocks`.

        With `is_held`, streams are subscribed to, but not read until `release`.
        """
        self._new_indexer, self._max_blocks, self._is_held = new_indexer, max_blocks, is_held
        self._members: dict[Namespace, Member] = {}
        self._tasks = BackgroundTasks()
        self._registering = asyncio.Lock()

    async def _open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self._tasks)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def are_all_connected(self) -> bool:
        return all(member.indexer.are_all_connected for member in self)

    def release(self) -> None:
        """Begin to read the streams."""
        self._is_held = False
        for member in self:
            member.indexer.release()

    def find(self, namespace: Namespace) -> Member | None:
        return self._members.get(namespace)

    def get(self, namespace: Namespace) -> Member:
        """Return the namespace's member; raises ApiError (404) when no instance has registered for it."""
        member = self.find(namespace)
        if member is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"no indexer for {namespace}")
        return member

    async def register(
        self, namespace: Namespace, block_size: int, instance_id: int, dp_rank: int, stream: Stream
    ) -> None:
        """Follow a stream; raises ApiError (409) for one that is followed, or that does not fit its namespace."""
        async with self._registering:
            self._check_new(namespace, block_size, instance_id, dp_rank)
            member = self._members.get(namespace)
            if member is None:
                member = self._members[namespace] = await self._open_index(namespace, block_size)
            member.indexer.add_source(stream_name(instance_id, dp_rank), stream.url, rank=dp_rank)
            member.instances.setdefault(instance_id, {})[dp_rank] = stream
        _logger.info(
            "registered %s instance_id=%d dp_rank=%d url=%s", namespace, instance_id, dp_rank, public_url(stream.url)
        )

    def unregister(self, namespace: Namespace, instance_id: int, dp_rank: int | None) -> None:
        """Stop following an instance, or one rank of it, and drop its blocks; raises ApiError (404)."""
        known = self._namespace_of(instance_id)
        if known is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"instance {instance_id} not found")
        if known != namespace:
            raise ApiError(HTTPStatus.NOT_FOUND, f"instance {instance_id} is registered for {known}")
        member = self._members[namespace]
        streams = member.instances[instance_id]
        if dp_rank is not None and dp_rank not in streams:
            raise ApiError(HTTPStatus.NOT_FOUND, f"instance {instance_id} has no dp_rank {dp_rank}")
        for rank in [*streams] if dp_rank is None else [dp_rank]:
            member.indexer.remove_source(stream_name(instance_id, rank))
            del streams[rank]
        if not streams:
            del member.instances[instance_id]
        if not member.instances:
            del self._members[namespace]
            member.closed.set()
        _logger.info("unregistered %s instance_id=%d dp_rank=%s", namespace, instance_id, dp_rank)

    def _namespace_of(self, instance_id: int) -> Namespace | None:
        return next((member.namespace for member in self if instance_id in member.instances), None)

    def _check_new(self, namespace: Namespace, block_size: int, instance_id: int, dp_rank: int) -> None:
        known = self._namespace_of(instance_id)
        if known not in (None, namespace):
            raise ApiError(HTTPStatus.CONFLICT, f"instance {instance_id} is already registered for {known}")
        if sum(len(streams) for member in self for streams in member.instances.values()) >= MAX_STREAMS:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_STREAMS} streams are followed, and no more")
        member = self._members.get(namespace)
        if member is None:
            if len(self._members) >= MAX_NAMESPACES:
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_NAMESPACES} namespaces are kept, and no more")
            return
        if block_size != member.block_size:
            sizes = f"existing={member.block_size}, requested={block_size}"
            raise ApiError(HTTPStatus.CONFLICT, f"block_size mismatch for {namespace}: {sizes}")
        if dp_rank in member.instances.get(instance_id, {}):
            raise ApiError(HTTPStatus.CONFLICT, f"instance {instance_id} dp_rank {dp_rank} already registered")

    async def _open_index(self, namespace: Namespace, block_size: int) -> Member:
        opened: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        running = self._tasks.create_task(self._run(namespace, block_size, opened), name=f"kvist-index {namespace}")
        try:
            return await opened
        except BaseException:  # cancelled, and nobody else knows of it
            running.cancel()
            raise

    async def _run(self, namespace: Namespace, block_size: int, opened: asyncio.Future[Member]) -> None:
        """Keep one namespace from its first instance to its last."""
        index = RadixIndex(max_blocks=self._max_blocks)
        async with self._new_indexer(index, block_size=block_size, is_held=self._is_held) as indexer:
            member = Member(namespace, block_size, index, indexer)
            opened.set_result(member)
            await member.closed.wait()
