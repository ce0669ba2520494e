"""Connections to workers are kept and reused; a request is sent at most once to a worker that may have seen it.

    async with UpstreamPool() as pool:
        async with pool.exchange("http://10.0.0.7:8000", "POST", "/v1/completions", headers, body) as response:
            async for piece in response.body(): ...

Leaving the inner block before the body's end, cancellation included, closes the connection: the worker sees it at once.
"""

import asyncio
import functools
import re
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

from kvist.errors import InvalidValueError
from kvist.http.errors import ConnectError, StaleConnectionError
from kvist.http.fields import HOP_BY_HOP, Headers, end_to_end, render_head
from kvist.http.limits import UpstreamLimits
from kvist.http.upstream import UpstreamConnection

_BASE_URL = re.compile(
    r"(?P<scheme>https?)://(?P<authority>(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?)"
    r"(?P<path>(?:/[A-Za-z0-9._~%-]*)*)",
)
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts since the pool was made, but for the two that say what is now."""

    num_idle: int
    num_active: int
    num_connected: int
    num_reused: int
    num_stale: int
    """Pooled connections found closed by the worker when they were needed."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a worker's base URL leads."""

    host: str
    port: int
    is_tls: bool
    host_header: bytes
    path_prefix: str


@functools.lru_cache(maxsize=4096)
def _parse_base_url(base_url: str) -> _Origin:
    """Checks a worker's base URL once; raises InvalidValueError."""
    match = _BASE_URL.fullmatch(base_url)
    if match is None:
        raise InvalidValueError("base_url", base_url, "http(s)://host[:port][/prefix]")
    is_tls = match["scheme"] == "https"
    return _Origin(
        host=match["host"].strip("[]"),
        port=int(match["port"] or (443 if is_tls else 80)),
        is_tls=is_tls,
        host_header=match["authority"].encode("ascii"),
        path_prefix=match["path"].rstrip("/"),
    )


@dataclass(slots=True, eq=False)
class UpstreamResponse:
    """A worker's response: status and end-to-end headers now, the body as it comes."""

    _connection: UpstreamConnection
    status: int
    headers: Headers

    async def body(self) -> AsyncIterator[bytes]:
        """The worker's bytes, unchanged and in order, in pieces of any size above 0; raises UpstreamError."""
        while (piece := await self._connection.read_body()) is not None:
            yield piece


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its response, as an async context manager."""

    _pool: "UpstreamPool"
    _base_url: str
    _method: str
    _message: bytes
    _connection: UpstreamConnection | None = None

    async def __aenter__(self) -> UpstreamResponse:
        connection = await self._pool._send(self._base_url, self._method, self._message)
        self._message = b""
        try:
            head = await connection.read_head()
        except BaseException:
            self._pool._release(self._base_url, connection)
            raise
        self._connection = connection
        return UpstreamResponse(connection, head.status, head.headers)

    async def __aexit__(self, *_: object) -> None:
        assert self._connection is not None
        self._pool._release(self._base_url, self._connection)


class UpstreamPool:
    """Opens, keeps and reuses connections to workers; as many are active at a time as the caller runs exchanges."""

    def __init__(self, limits: UpstreamLimits | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits or UpstreamLimits()
        self._tls = tls
        self._idle: dict[str, dict[UpstreamConnection, None]] = {}  # by worker; last in, first out
        self._active: set[UpstreamConnection] = set()
        self._num_connected = 0
        self._num_reused = 0
        self._num_stale = 0

    def exchange(
        self,
        base_url: str,
        method: str,
        target: str,
        headers: Headers,
        body: bytes = b"",
        *,
        forwarded_for: str | None = None,
    ) -> Exchange:
        """Sends a request to a worker: `async with` yields its response once the head is there.

        `target` is in origin form and comes behind the path of `base_url`. Hop-by-hop headers, `host`, `expect` and
        `content-length` are replaced by our own; `forwarded_for` is appended to `x-forwarded-for`.

        Entering raises ConnectError (nothing was sent: any worker may be tried), UpstreamTimeoutError,
        UpstreamClosedError or UpstreamProtocolError (the worker may have acted on the request).
        """
        origin = _parse_base_url(base_url)
        fields = [(b"host", origin.host_header), *end_to_end(headers, _NOT_FORWARDED)]
        if forwarded_for is not None:
            earlier = [value for name, value in fields if name == b"x-forwarded-for"]
            fields = [field for field in fields if field[0] != b"x-forwarded-for"]
            fields.append((b"x-forwarded-for", b", ".join([*earlier, forwarded_for.encode("ascii")])))
        if body or method in _METHODS_WITH_BODY:
            fields.append((b"content-length", b"%d" % len(body)))
        start_line = f"{method} {origin.path_prefix}{target} HTTP/1.1".encode("ascii")
        return Exchange(self, base_url, method, render_head(start_line, fields) + body)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            sum(map(len, self._idle.values())),
            len(self._active),
            self._num_connected,
            self._num_reused,
            self._num_stale,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes every connection, active ones included."""
        for connection in [*self._active, *(c for connections in self._idle.values() for c in connections)]:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn

    async def _send(self, base_url: str, method: str, message: bytes) -> UpstreamConnection:
        """Sends on a pooled connection if one is alive, else on a new one; the request leaves here at most once."""
        idle = self._idle.get(base_url, {})
        while idle:
            connection, _ = idle.popitem()
            try:
                connection.send(method, message)
            except StaleConnectionError:
                self._num_stale += 1
                continue
            self._num_reused += 1
            self._active.add(connection)
            return connection
        connection = await self._connect(base_url)
        try:
            connection.send(method, message)
        except StaleConnectionError as error:
            raise ConnectError(base_url, "closed the connection as soon as it was open") from error
        self._active.add(connection)
        return connection

    async def _connect(self, base_url: str) -> UpstreamConnection:
        origin = _parse_base_url(base_url)
        loop = asyncio.get_running_loop()
        tls = (self._tls or ssl.create_default_context()) if origin.is_tls else None
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(base_url, self._limits, loop, self._forget),
                    origin.host,
                    origin.port,
                    ssl=tls,
                )
        except TimeoutError as error:
            raise ConnectError(base_url, f"no connection within {self._limits.connect_timeout_s:g} s") from error
        except OSError as error:
            raise ConnectError(base_url, f"cannot connect: {error}") from error
        self._num_connected += 1
        return connection

    def _release(self, base_url: str, connection: UpstreamConnection) -> None:
        """Keeps the connection if its exchange ended cleanly and there is room; else closes it."""
        self._active.discard(connection)
        idle = self._idle.setdefault(base_url, {})
        if connection.is_reusable and len(idle) < self._limits.max_idle_connections:
            idle[connection] = None
            connection.park(self._limits.pooled_timeout_s)
        else:
            connection.abort()

    def _forget(self, base_url: str, connection: UpstreamConnection) -> None:
        """A connection is closed: nothing of it stays, nor of a worker with no connection left."""
        idle = self._idle.get(base_url, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(base_url, None)
