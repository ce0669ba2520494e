"""Connections to workers, kept and reused. A request is never sent again to a worker that may have seen it.

    async with UpstreamPool() as pool:
        exchange = pool.send(receiver, "http://10.0.0.7:8000", "POST", "/v1/completions", headers, body)
        ...  # receiver.on_head, on_data, on_end and on_failure are called as the response comes

`UpstreamPool.exchange` is the same for coroutines.
"""

import asyncio
import errno
import math
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.http.deadline import LoopClock
from kvist.http.errors import ConnectError, UpstreamError
from kvist.http.fields import HOP_BY_HOP, Headers, end_to_end, render_head
from kvist.http.limits import UpstreamLimits
from kvist.http.upstream import Exchange, ResponseReceiver, UpstreamConnection
from kvist.names import Name

_BASE_URL = re.compile(
    r"(?P<scheme>https?)://(?P<authority>"
    r"(?P<host>[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?)"
    r"(?P<path>(?:/[A-Za-z0-9._~%-]*)*)"
)
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_OUR_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that keep us from connecting to any worker."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The parts of a worker's base URL."""

    host: str
    port: int
    is_tls: bool
    host_header: bytes
    path_prefix: str


def parse_base_url(base_url: str, name: str = "base_url") -> Origin:
    """Checks a worker's base URL, which errors call `name`; raises InvalidValueError."""
    match = _BASE_URL.fullmatch(base_url)
    is_tls = match is not None and match["scheme"] == "https"
    port = 0 if match is None else int(match["port"] or (443 if is_tls else 80))
    if match is None or not 0 < port < 1 << 16:
        raise InvalidValueError(name, base_url, "http(s)://host[:port][/prefix]")
    return Origin(
        host=match["host"].strip("[]"),
        port=port,
        is_tls=is_tls,
        host_header=match["authority"].encode("ascii"),
        path_prefix=match["path"].rstrip("/"),
    )


class PooledWorker:
    """The connections to one worker, and the exchanges that wait for one, the oldest first."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.origin = base_url, parse_base_url(base_url)
        self.name = Name(self.origin.host)
        self.connections: set[UpstreamConnection] = set()
        self.idle: dict[UpstreamConnection, None] = {}  # last in, first out
        self.waiting: deque[Exchange] = deque()
        self.num_connecting = 0
        self.last_byte_s = -math.inf
        """When the last byte came, by the pool's clock."""


class UpstreamPool:
    """Opens, keeps and reuses connections to workers; each exchange has one of its own.

    An exchange without an idle connection waits for one that becomes free or is opened. At most `max_connecting` are
    being opened to a worker at a time: more do not fit in its backlog. When one cannot be opened, all exchanges fail
    that were waiting when the attempt began.
    """

    def __init__(self, limits: UpstreamLimits | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is for workers with https URLs; the default trusts what the system trusts."""
        self.clock: LoopClock
        """The clock of workers' timeouts, inside the context."""
        self._limits = limits or UpstreamLimits()
        self._tls = tls
        self._workers: dict[str, PooledWorker] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def send(
        self,
        receiver: ResponseReceiver,
        base_url: str,
        method: str,
        target: str,
        headers: Headers,
        body: bytes = b"",
        *,
        forwarded_for: str | None = None,
    ) -> Exchange:
        """Sends a request to a worker, at most once, and calls the receiver with the response.

        `target` is in origin form and is appended to the path of `base_url`. Hop-by-hop headers, `host`, `expect` and
        `content-length` are replaced by our own; `forwarded_for` is appended to `x-forwarded-for`.

        It fails with ConnectError (nothing was sent: any worker may be tried), UpstreamTimeoutError,
        UpstreamClosedError or UpstreamProtocolError (the worker may have acted on the request). Raises
        InvalidValueError for a URL that is none, ValueError for what would break out of its line.
        """
        worker = self._workers.get(base_url)
        if worker is None:
            worker = self._workers[base_url] = PooledWorker(base_url)
        origin = worker.origin
        fields = [(b"host", origin.host_header), *end_to_end(headers, _NOT_FORWARDED)]
        if forwarded_for is not None:
            earlier = [value for name, value in fields if name == b"x-forwarded-for"]
            fields = [field for field in fields if field[0] != b"x-forwarded-for"] if earlier else fields
            fields.append((b"x-forwarded-for", b", ".join([*earlier, forwarded_for.encode("ascii")])))
        if body or method in _METHODS_WITH_BODY:
            fields.append((b"content-length", b"%d" % len(body)))
        start_line = f"{method} {origin.path_prefix}{target} HTTP/1.1".encode("ascii")
        exchange = Exchange(method, render_head(start_line, fields) + body, receiver)
        while worker.idle:
            connection, _ = worker.idle.popitem()
            if connection.begin(exchange):
                return exchange
        worker.waiting.append(exchange)
        self._connect_more(worker)
        return exchange

    @asynccontextmanager
    async def exchange(
        self, base_url: str, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> AsyncIterator["UpstreamResponse"]:
        """As `send`, for coroutines: `async with` yields the response once its head is there; raises what fails.

        Leaving the block before the body's end, cancellation included, closes the connection.
        """
        response = UpstreamResponse(self._limits, f"{base_url}{target}")
        response._exchange = exchange = self.send(response, base_url, method, target, headers, body)
        try:
            await response._next()  # the head
            yield response
        finally:
            exchange.close()

    def silent_s(self, base_url: str) -> float:
        """Return for how long no byte has come from a worker, by the pool's clock; inf if none ever came."""
        worker = self._workers.get(base_url)
        return math.inf if worker is None else self.clock.now_s() - worker.last_byte_s

    async def __aenter__(self) -> Self:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.clock.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes every connection, active ones included."""
        self.clock.__exit__()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for worker in self._workers.values():
            _fail_all(worker.waiting, ConnectError(worker.base_url, "is asked no more, as the pool closes"))
            for connection in worker.connections:
                connection.abort()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn

    def _connect_more(self, worker: PooledWorker) -> None:
        """Opens a connection for each waiting exchange, up to `max_connecting`."""
        while worker.waiting and worker.waiting[0].receiver is None:
            worker.waiting.popleft()
        while worker.num_connecting < min(len(worker.waiting), self._limits.max_connecting):
            worker.num_connecting += 1
            task = self.clock.loop.create_task(self._connect(worker), name=f"kvist-connect {worker.base_url}")
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, worker: PooledWorker) -> None:
        base_url, waiting = worker.base_url, [*worker.waiting]
        timeout_s, error = self._limits.connect_timeout_s, None
        try:
            async with self.clock.timeout(timeout_s):
                connection = await self._open(worker)
        except TimeoutError:
            error = ConnectError(base_url, f"no connection within {timeout_s:g} s")
        except OSError as failure:
            error = ConnectError(base_url, f"cannot connect: {failure}", is_ours=failure.errno in _OUR_SHORTAGES)
        finally:
            worker.num_connecting -= 1
        if error is None:
            self._on_free(connection)
        else:
            _fail_all(waiting, error)
        self._connect_more(worker)
        self._forget_unused(worker)

    async def _open(self, worker: PooledWorker) -> UpstreamConnection:
        """Returns a connection to the first of the worker's addresses that accepts one; raises OSError."""
        origin = worker.origin
        if origin.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()  # one for all: it takes as long as a hundred requests
        failure = OSError(f"{origin.host} has no address")
        for address in await worker.name.addresses():
            try:
                _, connection = await self.clock.loop.create_connection(
                    lambda: UpstreamConnection(worker, self._limits, self.clock, self._on_free, self._forget_unused),
                    address,
                    origin.port,
                    ssl=self._tls if origin.is_tls else None,
                    server_hostname=origin.host if origin.is_tls else None,
                )
            except OSError as error:
                failure = error
            else:
                return connection
        try:
            raise failure
        finally:
            del failure  # whose traceback refers to this frame

    def _on_free(self, connection: UpstreamConnection) -> None:
        """Gives the connection to the exchange that has waited longest, or keeps it if there is room."""
        worker = connection.worker
        while worker.waiting:
            exchange = worker.waiting.popleft()
            if exchange.receiver is None:
                continue
            if not connection.begin(exchange):
                if connection.is_reused:
                    worker.waiting.appendleft(exchange)
                    self._connect_more(worker)
                else:
                    _fail_all([exchange], ConnectError(worker.base_url, "closed the connection as soon as it was open"))
            return
        if len(worker.idle) < self._limits.max_idle_connections:
            worker.idle[connection] = None
            connection.keep_idle()
        else:
            connection.abort()

    def _forget_unused(self, worker: PooledWorker) -> None:
        """Removes a worker without connections and waiting exchanges, which may be gone for good."""
        if not (worker.connections or worker.waiting or worker.num_connecting):
            self._workers.pop(worker.base_url, None)


def _fail_all(exchanges: Iterable[Exchange], error: UpstreamError) -> None:
    """Ends those of the exchanges that still wait for a connection."""
    for exchange in exchanges:
        receiver = exchange.receiver
        if receiver is not None and exchange.connection is None:
            exchange.receiver = None
            receiver.on_failure(error)


class UpstreamResponse:
    """A worker's response for a coroutine: status and end-to-end headers now, the body as it comes."""

    def __init__(self, limits: UpstreamLimits, url: str) -> None:
        self.status = 0
        self.headers: Headers = []
        self._limits, self._url = limits, url
        self._exchange: Exchange
        self._received: asyncio.Queue[bytes | UpstreamError | None] = asyncio.Queue()  # None is the body's end
        self._num_unread_bytes = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._received.put_nowait(b"")

    def on_data(self, piece: bytes) -> None:
        self._received.put_nowait(piece)
        self._num_unread_bytes += len(piece)
        if self._num_unread_bytes > self._limits.read_buffer_bytes and not self._exchange.is_paused:
            self._exchange.pause()

    def on_end(self) -> None:
        self._received.put_nowait(None)

    def on_failure(self, error: UpstreamError) -> None:
        self._received.put_nowait(error)

    async def body(self) -> AsyncIterator[bytes]:
        """The worker's bytes, unchanged and in order, in pieces of any size above 0; raises UpstreamError."""
        while (piece := await self._next()) is not None:
            yield piece

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body; raises UpstreamError, and MalformedMessageError if it has more bytes."""
        body = bytearray()
        async for piece in self.body():
            body += piece
            if len(body) > max_bytes:
                raise MalformedMessageError(self._url, f"more than {max_bytes} bytes")
        return bytes(body)

    async def _next(self) -> bytes | None:
        """Waits for the next piece, None at the end; raises what the exchange failed with."""
        piece = await self._received.get()
        if isinstance(piece, UpstreamError):
            raise piece
        self._num_unread_bytes -= len(piece or b"")
        if self._exchange.is_paused and not self._num_unread_bytes:
            self._exchange.resume()
        return piece
