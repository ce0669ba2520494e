"""The listening side: `async with HttpServer(handler, ...)` serves until the block ends, then lets requests finish.

A client's requests are handled one after the other, and a slow client costs little. A connection is a small state
machine on callbacks: bytes go to the parser; a whole request goes to the handler; the response's end starts the next
request. Only a handler that is a coroutine has a task, and only that ever waits.
"""

import asyncio
import logging
import socket
import ssl
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

from kvist.http.deadline import Deadline, LoopClock
from kvist.http.errors import ClientDisconnectedError, RequestRefusedError, UpstreamError
from kvist.http.fields import render_head, status_line
from kvist.http.limits import HttpLimits
from kvist.http.request import Request, RequestParser
from kvist.http.responder import Responder

logger = logging.getLogger(__name__)


class Producer(Protocol):
    """Sends a response by callbacks; the server calls these methods until the response has ended."""

    def pause(self) -> None:
        """The client does not read fast enough: send no more for now."""

    def resume(self) -> None:
        """The client has read nearly all: send more."""

    def stop(self) -> None:
        """The client has left: nothing that is sent now reaches it."""

    def shut_down(self) -> None:
        """The server is closing: end the response now, whole or cut."""


Handler = Callable[[Request, Responder], Coroutine[Any, Any, None] | Producer | None]
"""Answers a request: at once (None), by callbacks, or as a coroutine, in a task that ends if the client leaves."""

MAX_ANSWERS_IN_A_ROW = 16
"""Pipelined requests of one client that are answered before others get a turn."""
HEALTH_PATH = "/health"
"""Answered even if there are too many connections: a busy service must not be taken for dead."""
MAX_EVICTION_CANDIDATES = 8
"""Idle connections examined to find one whose client has read its last answer."""
READ_BYTES = 256 * 1024
"""The most that is read at once. The buffer is one for all connections: nothing stays in it."""

_BACKLOG = 1 << 16
"""Connections that the system holds until they are accepted, as many as it may (`net.core.somaxconn`)."""
_ACCEPTED_AT_ONCE = 32
"""In one turn of the loop; and asyncio logs as many lines a second while there are no descriptors left."""

_RESET = struct.pack("ii", 1, 0)
"""A connection that lingers for 0 s ends by a reset, and not as one whose bytes are all there."""

_NO_PLACE = RequestRefusedError(503, "overloaded", "too many connections; try again")


@dataclass(slots=True)
class ServerStatistics:
    """Counts since the server started, and two values as of now."""

    num_connections: int = 0
    """Open now."""
    num_body_bytes_held: int = 0
    """Request bodies in memory now."""
    num_requests: int = 0
    num_refused: int = 0
    """Answered by the server itself: malformed, over a limit, too slow, overloaded."""
    num_timeouts: int = 0
    num_disconnects: int = 0
    """Clients that left before their response ended."""
    num_handler_failures: int = 0
    num_evicted: int = 0
    """Idle connections closed because others needed their place."""
    late_s: float = 0.0
    """All that the event loop was late by."""


class ServerConnection(asyncio.BufferedProtocol):
    """Serves one client until it leaves, misbehaves, is too slow, or the server closes."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.clock.loop
        self._deadline = Deadline(server.clock, self._on_deadline)
        self._responder: Responder | None = None  # of the request that is being answered
        self._task: asyncio.Task[None] | None = None  # of the handler, or of `_yield_turn`
        self._producer: Producer | None = None
        self._num_body_bytes_held = 0
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_advancing = False
        self._is_discarding = False
        self._is_guest = False
        self.lost = self._loop.create_future()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self._parser = RequestParser(self._limits, peer[:2] if isinstance(peer, tuple) else None)
        self._is_guest = not self._server.admit(self, peer[0] if isinstance(peer, tuple) else None)
        if self._server.is_closing:
            self._transport.abort()
        else:
            self._deadline.set("idle", self._limits.guest_timeout_s if self._is_guest else self._limits.idle_timeout_s)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._server.read_buffer

    def buffer_updated(self, num_bytes: int) -> None:
        if self._is_discarding:
            return
        self._parser.feed(self._server.read_buffer[:num_bytes])
        if not self._is_busy and self._can_write.is_set():
            self._advance()
        elif self._parser.num_buffered_bytes > self._limits.max_pipelined_bytes:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """A client that closes its sending side counts as gone, as for nginx; the transport closes itself."""
        self._cancel_handler()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._deadline.close()
        self._server.remove(self)
        self._count_body(0)
        self._cancel_handler()
        self._producer = None
        if self._task is None:
            self._responder = None  # which refers to this connection
        self.resume_writing()
        self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._deadline.set("write", self._limits.write_timeout_s)
        if self._producer is not None:
            self._producer.pause()

    def resume_writing(self) -> None:
        self._can_write.set()
        if self._deadline.phase == "write":
            self._deadline.clear()
        if self._producer is not None:
            self._producer.resume()
        elif not self._is_busy:
            self._transport.resume_reading()
            self._advance()

    # What the responder calls.

    def send(self, data: bytes) -> None:
        """Sends, or drops the data if the connection is closing, in which case `drained` raises."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        """Returns at once while the write buffer is under its high-water mark; raises once the client is gone."""
        while not self._can_write.is_set():
            await self._can_write.wait()
        if self._transport.is_closing():
            raise ClientDisconnectedError("the client closed the connection")

    def on_response_start(self) -> None:
        """Counts the request's body no more: who still needs it has it."""
        self._count_body(0)

    def on_response_end(self) -> None:
        """Continues with the next request, if the response was a producer's: other handlers first have to return."""
        if self._producer is not None:
            self._producer = None
            self._on_answered()

    def cut(self) -> None:
        """Closes at once, so that the client notices that its response is not whole."""
        if self._responder is not None and self._responder.ends_with_connection:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    # What the server calls.

    @property
    def has_unsent(self) -> bool:
        return self._transport.get_write_buffer_size() > 0

    def close_when_idle(self) -> None:
        """Closes now, or after the running request, whose response says so if its head was not sent yet."""
        if self._responder is not None:
            self._responder.keep_alive = False
        elif not self._is_busy and not self._is_discarding:
            self._close()

    def shut_down(self) -> None:
        """Ends the running request; a producer may still send the end of its response."""
        if self._producer is not None:
            self._producer.shut_down()
        elif self._task is not None:
            self.abort()

    def abort(self) -> "asyncio.Task[None] | None":
        """Closes at once and cancels a running handler, whose task is returned."""
        self.cut()
        if self._task is not None:
            self._task.cancel()
        return self._task

    # From request to request.

    @property
    def _is_busy(self) -> bool:
        return self._responder is not None or self._task is not None

    def _advance(self) -> None:
        """Starts the next request if it is whole and the client reads; else waits for the rest of it."""
        if self._is_advancing:  # called by a response that ended at once: the loop below continues
            return
        self._is_advancing = True
        try:
            self._start_requests()
        finally:
            self._is_advancing = False

    def _start_requests(self) -> None:
        num_answered = 0
        while not (self._is_busy or self._is_discarding or self._transport.is_closing()) and self._can_write.is_set():
            try:
                request = self._parser.next_request()
                self._count_body(self._parser.num_body_bytes if request is None else len(request.body))
            except RequestRefusedError as refusal:
                self._refuse(refusal)
                return
            if request is None:
                self._await_bytes()
                return
            self._deadline.clear()
            self._server.idle.pop(self, None)
            if self._is_guest and request.path != HEALTH_PATH:
                self._refuse(_NO_PLACE)
                return
            self._server.counts.num_requests += 1
            keep_alive = request.is_keep_alive and not self._server.is_closing and not self._is_guest
            self._handle(request, Responder(self, request, keep_alive=keep_alive))
            num_answered += 1
            if num_answered == MAX_ANSWERS_IN_A_ROW and not self._is_busy:
                self._run(self._yield_turn())

    def _handle(self, request: Request, responder: Responder) -> None:
        """Calls the handler; an error in it, whatever it is, ends this request alone."""
        self._responder = responder
        try:
            work = self._server.handler(request, responder)
        except Exception as error:  # noqa: BLE001
            self._on_handler_done(error)
            return
        if isinstance(work, Coroutine):
            self._run(work)
        elif work is None or responder.is_finished:
            self._on_handler_done(None)
        else:
            self._producer = work
            if not self._can_write.is_set():
                work.pause()

    async def _yield_turn(self) -> None:
        """Lets other connections run, and waits until the client reads."""
        await asyncio.sleep(0)
        await self.drained()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work in a task, and continues when that is done."""
        self._task = self._loop.create_task(work, name="kvist-http-request")
        self._task.add_done_callback(self._on_task_done)

    def _await_bytes(self) -> None:
        """Sets the deadline for the rest of the request."""
        phase = self._parser.phase
        if self._is_guest:  # its one deadline was set when it connected
            if phase == "body":
                self._refuse(_NO_PLACE)
            return
        if phase == "body":
            self._server.idle.pop(self, None)
        else:
            self._server.idle.setdefault(self)  # keeps its place in the order: a head that trickles in is no request
        if self._parser.pop_continue():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if phase != self._deadline.phase:
            self._deadline.set(phase, getattr(self._limits, f"{phase}_timeout_s"))

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            self._on_handler_done(task.exception())
        elif self._transport.is_closing():
            self._on_answered()
        else:
            self.cut()

    def _on_handler_done(self, error: BaseException | None) -> None:
        """The handler has returned or failed; if its response is not finished, it failed as well."""
        responder = self._responder
        if self._transport.is_closing():
            if error is not None:
                self._log_failure(error)
        elif responder is not None and (error is not None or not responder.is_finished):
            self._log_failure(error)
            self._count_body(0)
            if responder.has_started:  # the client is to notice
                self.cut()
            else:
                self._responder = None
                self._answer_and_close(RequestRefusedError(500, "internal_error", "the service failed on this request"))
            return
        self._on_answered()

    def _on_answered(self) -> None:
        """Releases what belongs to the answered request, then continues with the next one or closes."""
        responder, self._responder = self._responder, None
        self._count_body(0)
        if self._transport.is_closing():
            return
        if (responder is None or responder.keep_alive) and not self._server.is_closing:
            self._transport.resume_reading()
            self._advance()
        elif self._parser.num_buffered_bytes:
            self._linger()
        else:
            self._close()

    def _log_failure(self, error: BaseException | None) -> None:
        if isinstance(error, ClientDisconnectedError | UpstreamError):  # a peer's failure, which handlers report
            return
        self._server.counts.num_handler_failures += 1
        logger.error("request handler failed reason=%s", error or "response not finished", exc_info=error)

    def _cancel_handler(self) -> None:
        """Stops the handler, because the client has left; one whose response is finished may end by itself."""
        if self._responder is None or self._responder.is_finished:
            return
        if self._producer is not None:
            self._server.counts.num_disconnects += 1
            producer, self._producer = self._producer, None
            producer.stop()
        elif self._task is not None and not self._task.cancelling():
            self._server.counts.num_disconnects += 1
            self._task.cancel()

    # The end of a connection.

    def _refuse(self, refusal: RequestRefusedError) -> None:
        self._server.counts.num_refused += 1
        self._count_body(0)
        self._answer_and_close(refusal)

    def _answer_and_close(self, refusal: RequestRefusedError) -> None:
        body = refusal.body()
        length = b"%d" % len(body)
        fields = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        self._transport.write(render_head(status_line(refusal.status), fields) + body)
        self._linger()

    def _linger(self) -> None:
        """Ends our side and discards input for a moment: closing with unread input could cost the client the answer."""
        self._is_discarding = True
        if not self._is_guest:
            self._server.idle.setdefault(self)
        if not self._transport.can_write_eof():
            self._close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._bound_close()

    def _close(self) -> None:
        """Closes once everything was sent; a client that does not read is cut off."""
        if not self._transport.is_closing():
            self._bound_close()
            self._transport.close()

    def _bound_close(self) -> None:
        self._deadline.set("close", self._limits.write_timeout_s if self.has_unsent else self._limits.linger_timeout_s)

    def _on_deadline(self, phase: str) -> None:
        self._server.counts.num_timeouts += phase != "close"
        if phase == "idle" and self._is_guest:
            self._refuse(_NO_PLACE)
        elif phase == "idle":
            self._close()
        elif phase in ("header", "body"):
            self._refuse(RequestRefusedError(408, f"{phase}_timeout", f"the request's {phase} came too slowly"))
        else:
            self.cut()

    # Memory held by request bodies, over all connections.

    def _count_body(self, num_bytes: int) -> None:
        """Counts the bytes of this connection's request body; raises RequestRefusedError if that is too much in all."""
        self._server.counts.num_body_bytes_held += num_bytes - self._num_body_bytes_held
        self._num_body_bytes_held = num_bytes
        if num_bytes and self._server.counts.num_body_bytes_held > self._limits.max_buffered_body_bytes:
            raise RequestRefusedError(503, "overloaded", "too many request bodies are held; try again")


class HttpServer:
    """Calls `handler(request, responder)` for each valid request; a coroutine's task is cancelled if the client leaves.

    A handler that raises, or returns without finishing its response, is logged and answered 500 if nothing was sent.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
        is_shared: bool = False,
        bound: socket.socket | None = None,
    ) -> None:
        """If the port `is_shared`, other processes may listen on it too, and each gets some of the connections.

        A `bound` socket takes the place of host and port; the server closes it.
        """
        self._where: dict[str, Any] = {"host": host, "port": port, "reuse_port": is_shared}
        if bound is not None:
            self._where = {"sock": bound}
        self._tls = tls
        self._listener: asyncio.Server
        # What connections share.
        self.handler = handler
        self.limits = limits or HttpLimits()
        self.clock: LoopClock
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.connections: dict[ServerConnection, str | None] = {}
        """All open connections, each with its peer's address."""
        self.idle: OrderedDict[ServerConnection, None] = OrderedDict()
        """Those with a place and without a request, the one idle for longest first."""
        self.guests: dict[ServerConnection, None] = {}
        """Those beyond the limits, without a place, the oldest first."""
        self.peers: Counter[str | None] = Counter()
        """How many connections each address has."""
        self.is_closing = False
        self.counts = ServerStatistics()

    @property
    def port(self) -> int:
        """The bound port, also where 0 was asked for."""
        return int(self._listener.sockets[0].getsockname()[1])

    def statistics(self) -> ServerStatistics:
        return replace(self.counts, num_connections=len(self.connections), late_s=self.clock.late_s)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.clock = LoopClock(loop)
        try:
            self._listener = await loop.create_server(
                lambda: ServerConnection(self),
                **self._where,
                ssl=self._tls,
                backlog=_ACCEPTED_AT_ONCE,
                ssl_handshake_timeout=None if self._tls is None else self.limits.header_timeout_s,
                start_serving=False,
            )
        except socket.gaierror as error:
            raise OSError(error.errno, f"{error.strerror}: {self._where['host']}") from None
        try:
            await self._listener.start_serving()
        except BaseException:  # cancelled, with sockets that nobody else would close
            self._listener.close()
            raise
        for listening in self._listener.sockets:
            with listening.dup() as sock:
                sock.listen(_BACKLOG)
        self.clock.__enter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops listening and ends running requests, after `close_timeout_s` unless an error ends the block."""
        self._listener.close()
        self.is_closing = True
        connections = list(self.connections)
        for connection in connections:
            connection.close_when_idle()
        try:
            if kind is None:
                await self._wait_lost(connections, self.limits.close_timeout_s)
        finally:
            for connection in connections:
                connection.shut_down()
            try:
                await self._wait_lost(connections, self.limits.linger_timeout_s)
            finally:
                tasks = [task for c in connections if (task := c.abort()) is not None]
                await asyncio.gather(*tasks, *(c.lost for c in connections), return_exceptions=True)
                self.clock.__exit__()

    async def _wait_lost(self, connections: list[ServerConnection], timeout_s: float) -> None:
        """Waits for the end of connections; a loop that was late has their answers still to send."""
        if connections:
            with suppress(TimeoutError):
                async with self.clock.timeout(timeout_s):
                    await asyncio.wait([connection.lost for connection in connections])

    # Which connections there may be.

    def admit(self, connection: ServerConnection, peer: str | None) -> bool:
        """Adds a connection and returns whether it has a place, maybe that of the idlest; else it is a guest."""
        limits, share = self.limits, self.limits.max_connections_per_peer
        self.connections[connection] = peer
        self.peers[peer] += 1
        num_places = len(self.connections) - 1 - len(self.guests)
        if (share is None or self.peers[peer] <= share) and (
            num_places < limits.max_connections or self._close_idlest()
        ):
            self.idle[connection] = None
            return True
        if len(self.guests) >= limits.max_guests:
            self._evict(next(iter(self.guests)))
        self.guests[connection] = None
        return False

    def remove(self, connection: ServerConnection) -> None:
        """Removes a connection, which gives its place to another; no-op if it was removed before."""
        if connection in self.connections:
            peer = self.connections.pop(connection)
            self.peers[peer] -= 1
            if not self.peers[peer]:
                del self.peers[peer]
        self.idle.pop(connection, None)
        self.guests.pop(connection, None)

    def _close_idlest(self) -> bool:
        """Closes the connection idle for longest whose client has read everything; returns whether there was one."""
        for _ in range(min(len(self.idle), MAX_EVICTION_CANDIDATES)):
            connection = next(iter(self.idle))
            if not connection.has_unsent:
                self._evict(connection)
                return True
            self.idle.move_to_end(connection)
        return False

    def _evict(self, connection: ServerConnection) -> None:
        self.counts.num_evicted += 1
        self.remove(connection)
        connection.abort()
