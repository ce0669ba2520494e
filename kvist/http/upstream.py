"""One connection to a worker carries one exchange at a time and says of a failure whether the worker saw the request.

The protocol reads ahead of its consumer by a bounded number of bytes, then stops reading; the worker feels that.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Literal, cast

from kvist.http.deadline import Deadline
from kvist.http.errors import (
    MalformedHttpError,
    StaleConnectionError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from kvist.http.limits import UpstreamLimits
from kvist.http.response import ResponseHead, ResponseParser


class UpstreamConnection(asyncio.Protocol):
    """A connection to `worker`; between exchanges any byte or end of stream from there makes it unusable."""

    def __init__(
        self,
        worker: str,
        limits: UpstreamLimits,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[str, "UpstreamConnection"], None],
    ) -> None:
        self._worker = worker
        self._on_lost = on_lost
        self._limits = limits
        self._loop = loop
        self._deadline = Deadline(loop, self._expired)
        self._parser: ResponseParser | None = None
        self._pieces: list[bytes] = []
        self._num_unread_bytes = 0
        self._is_reading_paused = False
        self._is_reused = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            self._transport.abort()
            return
        try:
            piece = parser.feed(data)
        except MalformedHttpError as error:
            self._fail(UpstreamProtocolError(self._worker, str(error)))
            return
        if piece:
            self._pieces.append(piece)
            self._num_unread_bytes += len(piece)
            if self._num_unread_bytes > self._limits.read_buffer_bytes and not self._is_reading_paused:
                self._is_reading_paused = True
                self._transport.pause_reading()
        if parser.is_complete and not parser.leaves_connection_clean:
            self._transport.abort()
        if piece or parser.head is not None:
            self._wake()

    def eof_received(self) -> None:
        if self._parser is not None:
            self._parser.feed_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        parser = self._parser
        if parser is not None and not parser.is_complete and self._error is None:
            reason = f"closed the connection ({exc or 'end of stream'})"
            self._error = UpstreamClosedError(self._worker, reason, has_response_head=parser.head is not None)
        self._wake()
        self._on_lost(self._worker, self)

    # One exchange.

    def send(self, method: str, message: bytes) -> None:
        """Sends a whole request; raises StaleConnectionError if the connection ended before a byte of it was sent."""
        self._deadline.clear()
        if self._transport.is_closing() or (self._is_reused and self._poll.poll(0)):
            self._transport.abort()
            raise StaleConnectionError(self._worker, "closed its end of an unused connection")
        self._parser = ResponseParser(self._limits, method)
        self._transport.write(message)
        if self._transport.is_closing():  # asyncio closes it at once when the first send of a write fails
            raise StaleConnectionError(self._worker, "refused the first byte")

    async def read_head(self) -> ResponseHead:
        """Waits for the response head; raises UpstreamError."""
        assert self._parser is not None
        while (head := self._parser.head) is None:
            await self._wait("first_byte", self._limits.first_byte_timeout_s)
        return head

    async def read_body(self) -> bytes | None:
        """Whatever of the body has arrived, at least a byte, or None at its end; raises UpstreamError."""
        assert self._parser is not None
        while not self._pieces:
            if self._parser.is_complete:
                return None
            await self._wait("idle", self._limits.idle_timeout_s)
        pieces, self._pieces = self._pieces, []
        self._num_unread_bytes = 0
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def is_reusable(self) -> bool:
        """Whether the exchange ended as both sides understand it, so that another can follow."""
        return (
            self._parser is not None
            and self._parser.leaves_connection_clean
            and not self._pieces
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
        )

    def park(self, timeout_s: float) -> None:
        """Rests in the pool; closes itself after `timeout_s`."""
        self._parser = None
        self._is_reused = True
        self._deadline.set("pooled", timeout_s)

    def abort(self) -> None:
        """Closes at once, so that the worker stops working on a request nobody waits for."""
        self._deadline.close()
        self._transport.abort()

    # Waiting.

    async def _wait(self, phase: Literal["first_byte", "idle"], timeout_s: float) -> None:
        """Until something changes; the worker's time runs only while somebody waits for it."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._deadline.set(phase, timeout_s)
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._deadline.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        self._error = error
        self._transport.abort()
        self._wake()

    def _expired(self, phase: str) -> None:
        if phase == "first_byte":
            self._fail(UpstreamTimeoutError(self._worker, "first_byte", self._limits.first_byte_timeout_s))
        elif phase == "idle":
            self._fail(UpstreamTimeoutError(self._worker, "idle", self._limits.idle_timeout_s))
        else:
            self._transport.abort()
