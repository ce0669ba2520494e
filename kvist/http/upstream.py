"""One connection to a worker carries one exchange at a time and says of a failure whether the worker saw the request.

Whatever the worker's socket brings is handed on in the callback that read it; a receiver that cannot take more pauses
the reading, and the worker feels that.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Protocol, cast

from kvist.http.deadline import Deadline, LoopClock
from kvist.http.errors import (
    MalformedHttpError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from kvist.http.fields import Headers
from kvist.http.limits import UpstreamLimits
from kvist.http.response import ResponseParser


class ResponseReceiver(Protocol):
    """Who is told of one exchange: the head, then the body as it comes, its end; or a failure in place of the rest.

    Nothing comes before `send` has returned, nor after the end, the failure, or `Exchange.close`.
    """

    def on_head(self, status: int, headers: Headers) -> None:
        """Takes the status and the end-to-end headers of the response."""

    def on_data(self, piece: bytes) -> None:
        """Takes the next bytes of its body, at least one, unchanged and in order."""

    def on_end(self) -> None:
        """The response is whole."""

    def on_failure(self, error: UpstreamError) -> None:
        """The rest will not come."""


class Exchange:
    """One request to a worker and its response, until that has ended or nobody wants it any more."""

    __slots__ = ("connection", "is_paused", "message", "method", "receiver")

    def __init__(self, method: str, message: bytes, receiver: ResponseReceiver) -> None:
        """`message` is the whole request as it goes over the wire."""
        self.method = method
        self.message = message
        self.receiver: ResponseReceiver | None = receiver
        self.connection: UpstreamConnection | None = None
        self.is_paused = False

    def pause(self) -> None:
        """Reads no more of the response for now; time in which the worker is not read does not count against it."""
        self.is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Goes on reading."""
        self.is_paused = False
        if self.connection is not None:
            self.connection.resume()

    def close(self) -> None:
        """Ends it at once, so that the worker stops working on a request nobody waits for. Idempotent."""
        self.receiver = None
        if self.connection is not None:
            self.connection.abort()


class UpstreamConnection(asyncio.Protocol):
    """A connection to `worker`; between exchanges any byte or end of stream from there makes it unusable."""

    def __init__(
        self,
        worker: str,
        limits: UpstreamLimits,
        clock: LoopClock,
        on_free: "Callable[[UpstreamConnection], None]",
        on_lost: "Callable[[UpstreamConnection], None]",
    ) -> None:
        """`on_free`: another exchange may follow; `on_lost`: none will."""
        self.worker = worker
        self.is_reused = False
        self.heard_s: float | None = None
        """When the last byte came, by the clock."""
        self._clock = clock
        self._limits = limits
        self._deadline = Deadline(clock, self._on_expired)
        self._on_free = on_free
        self._on_lost = on_lost
        self._exchange: Exchange | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.receiver is None:
            self._transport.abort()
            return
        self.heard_s = self._clock.now_s()
        parser, had_head = self._parser, self._parser.head is not None
        try:
            piece = parser.feed(data)
        except MalformedHttpError as error:
            self._fail(UpstreamProtocolError(self.worker, str(error)))
            return
        if parser.head is not None and not had_head:
            exchange.receiver.on_head(parser.head.status, parser.head.headers)
        if piece and exchange.receiver is not None:
            exchange.receiver.on_data(piece)
        if exchange.receiver is None:
            return
        if parser.is_complete:
            self._complete()
        elif parser.head is not None and not exchange.is_paused:
            self._deadline.set("idle", self._limits.idle_timeout_s)

    def eof_received(self) -> None:
        if self._exchange is not None:
            self._parser.feed_eof()
            if self._parser.is_complete:
                self._complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        if self._exchange is not None:
            reason = f"closed the connection ({exc or 'end of stream'})"
            self._fail(UpstreamClosedError(self.worker, reason, has_response_head=self._parser.head is not None))
        self._on_lost(self)

    # What the exchange and the pool call.

    def begin(self, exchange: Exchange) -> bool:
        """Sends the request and returns True; False, and nothing was sent, if the worker has closed the connection."""
        self._deadline.clear()
        if self._transport.is_closing() or (self.is_reused and self._poll.poll(0)):
            self._transport.abort()
            return False
        self._transport.write(exchange.message)
        if self._transport.is_closing():  # asyncio closes it at once when the first send of a write fails
            return False
        self._parser = ResponseParser(self._limits, exchange.method)
        self._exchange, exchange.connection = exchange, self
        if exchange.is_paused:
            self.pause()
        else:
            self._deadline.set("first_byte", self._limits.first_byte_timeout_s)
        return True

    def pause(self) -> None:
        """Reads nothing until `resume`."""
        self._transport.pause_reading()
        self._deadline.clear()

    def resume(self) -> None:
        """Reads again."""
        self._transport.resume_reading()
        if self._parser.head is None:
            self._deadline.set("first_byte", self._limits.first_byte_timeout_s)
        else:
            self._deadline.set("idle", self._limits.idle_timeout_s)

    def rest(self) -> None:
        """Waits in the pool for its next exchange, not longer than workers keep connections that are not used."""
        self.is_reused = True
        self._deadline.set("pooled", self._limits.pooled_timeout_s)

    def abort(self) -> None:
        """Closes at once."""
        self._deadline.close()
        self._transport.abort()

    # The end of an exchange.

    def _complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.connection = None
        receiver, exchange.receiver = exchange.receiver, None
        self._deadline.clear()
        if exchange.is_paused:
            self._transport.resume_reading()
        # A worker that answered before it had read the request leaves the rest of that in the buffer.
        is_clean = self._parser.leaves_connection_clean and self._transport.get_write_buffer_size() == 0
        if is_clean and not self._transport.is_closing():
            self._on_free(self)
        else:
            self._transport.abort()
        if receiver is not None:
            receiver.on_end()

    def _fail(self, error: UpstreamError) -> None:
        exchange, self._exchange = self._exchange, None
        self._transport.abort()
        assert exchange is not None
        exchange.connection = None
        receiver, exchange.receiver = exchange.receiver, None
        if receiver is not None:
            receiver.on_failure(error)

    def _on_expired(self, phase: str) -> None:
        if self._exchange is None:
            self._transport.abort()
        elif phase == "first_byte":
            self._fail(UpstreamTimeoutError(self.worker, "first_byte", self._limits.first_byte_timeout_s))
        else:
            self._fail(UpstreamTimeoutError(self.worker, "idle", self._limits.idle_timeout_s))
