"""The listening side: `async with HttpServer(handler, ...)` serves until the block ends, then lets requests finish."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Self

from kvist.http.connection import Handler, ServerConnection, ServerState
from kvist.http.deadline import LoopClock
from kvist.http.limits import HttpLimits

_BACKLOG = 1 << 16
"""Connections that the system holds until they are accepted, as many as it may (`net.core.somaxconn`)."""
_ACCEPTED_AT_ONCE = 32
"""In one turn of the loop; and asyncio logs as many lines a second while there are no descriptors left."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Counts since the server started, but for the two that say what is now."""

    num_connections: int
    """Open now."""
    num_body_bytes_held: int
    """Request bodies in memory now."""
    num_requests: int
    num_refused: int
    """Answered by the server itself: malformed, over a limit, too slow, overloaded."""
    num_timeouts: int
    num_disconnects: int
    """Clients that left before their response ended."""
    num_handler_failures: int
    num_evicted: int
    """Idle connections closed because others needed their place."""
    late_s: float
    """All that the event loop was late by."""


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
    ) -> None:
        """Let other processes listen on the same port if it `is_shared`: each gets some of the connections."""
        self._is_shared = is_shared
        self._host = host
        self._port = port
        self._tls = tls
        self._limits = limits or HttpLimits()
        self._handler = handler
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The bound port, also where 0 was asked for."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def statistics(self) -> ServerStatistics:
        state = self._state
        return ServerStatistics(
            num_connections=len(state.connections),
            num_body_bytes_held=state.num_body_bytes_held,
            num_requests=state.num_requests,
            num_refused=state.num_refused,
            num_timeouts=state.num_timeouts,
            num_disconnects=state.num_disconnects,
            num_handler_failures=state.num_handler_failures,
            num_evicted=state.num_evicted,
            late_s=state.clock.late_s,
        )

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._clock = LoopClock(loop)
        self._clock.__enter__()
        self._state = ServerState(self._handler, self._limits, self._clock)
        self._server = await loop.create_server(
            lambda: ServerConnection(self._state),
            self._host,
            self._port,
            ssl=self._tls,
            reuse_port=self._is_shared,
            backlog=_ACCEPTED_AT_ONCE,
            ssl_handshake_timeout=None if self._tls is None else self._limits.header_timeout_s,
            start_serving=False,
        )
        try:
            await self._server.start_serving()
        except BaseException:  # cancelled, with sockets that nobody else would close
            self._server.close()
            raise
        for listening in self._server.sockets:
            with listening.dup() as socket:
                socket.listen(_BACKLOG)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops listening, lets running requests go on for `close_timeout_s`, or not if an error ends it; ends them."""
        assert self._server is not None
        self._server.close()
        self._state.is_closing = True
        connections = list(self._state.connections)
        for connection in connections:
            connection.close_when_idle()
        try:
            if kind is None:
                await _wait_lost(connections, self._limits.close_timeout_s)
        finally:
            for connection in connections:
                connection.shut_down()
            try:
                await _wait_lost(connections, self._limits.linger_timeout_s)
            finally:
                tasks = [task for c in connections if (task := c.abort()) is not None]
                await asyncio.gather(*tasks, *(c.lost for c in connections), return_exceptions=True)
                self._clock.__exit__()


async def _wait_lost(connections: list[ServerConnection], timeout_s: float) -> None:
    if connections:
        await asyncio.wait([connection.lost for connection in connections], timeout=timeout_s)
