"""One connection to a worker: it carries one exchange at a time, and a failure says if the worker saw the request.

A worker's bytes become a response only if they have one reading; a connection with bytes behind that is not reused.
Bytes are passed on in the callback that read them; a receiver that cannot take more pauses the reading, which makes the
worker wait.
"""

import asyncio
import re
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from kvist.http.body import Body, ChunkedBody, LengthBody, UntilCloseBody
from kvist.http.deadline import Deadline, LoopClock
from kvist.http.errors import (
    MalformedHttpError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from kvist.http.fields import Headers, content_length, end_to_end, list_members, parse_fields, pick
from kvist.http.limits import UpstreamLimits

if TYPE_CHECKING:
    from kvist.http.pool import PooledWorker

_STATUS_LINE = re.compile(rb"HTTP/(1\.[01]) ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*+)?")

_CONTROL_FIELDS = frozenset({b"content-length", b"transfer-encoding", b"connection"})


@dataclass(slots=True, eq=False)
class ResponseParser:
    """Reads one response to a request of `method`; raises MalformedHttpError on anything ambiguous."""

    _limits: UpstreamLimits
    _method: str
    head: tuple[int, Headers] | None = None
    """Status and end-to-end headers, with `content-length`, so that the response can be passed on with it."""
    _buffer: bytes = b""
    _body: Body | None = None
    _num_informational: int = 0
    _is_persistent: bool = False

    @property
    def is_complete(self) -> bool:
        return self._body is not None and self._body.is_complete

    @property
    def leaves_connection_clean(self) -> bool:
        """Whether the response ended, nothing followed it, and the worker keeps the connection open."""
        return self._body is not None and self._body.is_complete and self._is_persistent and not self._body.excess

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`; `head` is set before the first payload."""
        if self._body is None:
            self._buffer = self._buffer + data if self._buffer else data
            while self._body is None:
                if not self._read_head():
                    return b""
            data, self._buffer = self._buffer, b""
        if self._body.is_complete:
            self._body.excess += data
            return b""
        return self._body.feed(data)

    def feed_eof(self) -> None:
        """Ends a body that lasts until the worker closes the connection."""
        if isinstance(self._body, UntilCloseBody):
            self._body.is_complete = True

    def _read_head(self) -> bool:
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if (end if end >= 0 else len(buffer)) > self._limits.max_header_bytes:
            raise MalformedHttpError(f"the response head exceeds {self._limits.max_header_bytes} bytes")
        if end < 0:
            return False
        status_line, _, block = buffer[: end + 2].partition(b"\r\n")
        self._buffer = buffer[end + 4 :]
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise MalformedHttpError("the status line is not 'HTTP/1.1 status reason'")
        if block.count(b"\n") > self._limits.max_headers:
            raise MalformedHttpError(f"more than {self._limits.max_headers} header lines")
        headers = parse_fields(block)
        status = int(match[2])
        if status < 200:
            self._skip_informational(status)
            return True
        self._body = self._framing(status, headers, is_http11=match[1] == b"1.1")
        self.head = status, end_to_end(headers)
        return True

    def _skip_informational(self, status: int) -> None:
        self._num_informational += 1
        if status == 101:
            raise MalformedHttpError("status 101, though no upgrade was asked for")
        if self._num_informational > self._limits.max_informational_responses:
            raise MalformedHttpError(f"more than {self._limits.max_informational_responses} interim responses")

    def _framing(self, status: int, headers: Headers, *, is_http11: bool) -> Body:
        control = pick(headers, _CONTROL_FIELDS)
        lengths, codings = control[b"content-length"], control[b"transfer-encoding"]
        options = list_members(control[b"connection"])
        self._is_persistent = b"close" not in options and (is_http11 or b"keep-alive" in options)
        if len(lengths) > 1 or (lengths and codings):
            raise MalformedHttpError("more than one of content-length and transfer-encoding")
        length = content_length(lengths[0]) if lengths else None
        if codings and (len(codings) > 1 or codings[0].lower() != b"chunked" or not is_http11):
            raise MalformedHttpError("a transfer coding other than chunked, or one in HTTP/1.0")
        if self._method == "HEAD" or status in (204, 304):
            return LengthBody(0)
        if codings:
            return ChunkedBody()
        if length is not None:
            return LengthBody(length)
        self._is_persistent = False
        return UntilCloseBody()


class ResponseReceiver(Protocol):
    """Receives one response: the head, the body as it comes, its end; or a failure in place of the rest.

    Nothing is called before `send` has returned, nor after the end, the failure, or `Exchange.close`.
    """

    def on_head(self, status: int, headers: Headers) -> None:
        """Receives the status and the end-to-end headers of the response."""

    def on_data(self, piece: bytes) -> None:
        """Receives the next bytes of the body, at least one, unchanged and in order."""

    def on_end(self) -> None:
        """The response is whole."""

    def on_failure(self, error: UpstreamError) -> None:
        """The rest will not come."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request to a worker and its response, until that has ended or nobody wants it any more."""

    method: str
    message: bytes
    """The whole request as it goes over the wire, until it is sent."""
    receiver: ResponseReceiver | None
    connection: "UpstreamConnection | None" = None
    is_paused: bool = False

    def pause(self) -> None:
        """Stops reading the response for now; the worker's timeouts do not run meanwhile."""
        self.is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self.connection is not None:
            self.connection.resume()

    def close(self) -> None:
        """Ends the exchange at once, so that the worker stops working on a request nobody waits for. Idempotent."""
        self.receiver = None
        if self.connection is not None:
            self.connection.abort()


class UpstreamConnection(asyncio.Protocol):
    """A connection to a worker; between exchanges any byte or end of stream from there makes it unusable."""

    def __init__(
        self,
        worker: "PooledWorker",
        limits: UpstreamLimits,
        clock: LoopClock,
        on_free: "Callable[[UpstreamConnection], None]",
        on_lost: "Callable[[PooledWorker], None]",
    ) -> None:
        """`on_free`: another exchange may follow; `on_lost`: none will, and it is no longer one of the worker's."""
        self.worker = worker
        self.is_reused = False
        self._clock = clock
        self._limits = limits
        self._deadline = Deadline(clock, self._on_expired)
        self._on_free = on_free
        self._on_lost = on_lost
        self._exchange: Exchange | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.worker.connections.add(self)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.receiver is None:
            self._transport.abort()
            return
        self.worker.last_byte_s = self._clock.now_s()
        parser, had_head = self._parser, self._parser.head is not None
        try:
            piece = parser.feed(data)
        except MalformedHttpError as error:
            self._fail(UpstreamProtocolError(self.worker.base_url, str(error)))
            return
        if parser.head is not None and not had_head:
            exchange.receiver.on_head(*parser.head)
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
            self._fail(UpstreamClosedError(self.worker.base_url, f"closed the connection ({exc or 'end of stream'})"))
        self.worker.connections.discard(self)
        self.worker.idle.pop(self, None)
        self._on_lost(self.worker)

    # What the exchange and the pool call.

    def begin(self, exchange: Exchange) -> bool:
        """Sends the request and returns True; False, and nothing was sent, if the worker has closed the connection."""
        if self._transport.is_closing() or (self.is_reused and self._poll.poll(0)):
            self._transport.abort()
            return False
        self._transport.write(exchange.message)
        if self._transport.is_closing():  # asyncio closes it at once when the first send of a write fails
            return False
        self._parser = ResponseParser(self._limits, exchange.method)
        self._exchange, exchange.connection, exchange.message = exchange, self, b""
        if exchange.is_paused:
            self.pause()
        else:
            self._deadline.set("first_byte", self._limits.first_byte_timeout_s)
        return True

    def pause(self) -> None:
        self._transport.pause_reading()
        self._deadline.clear()

    def resume(self) -> None:
        self._transport.resume_reading()
        if self._parser.head is None:
            self._deadline.set("first_byte", self._limits.first_byte_timeout_s)
        else:
            self._deadline.set("idle", self._limits.idle_timeout_s)

    def keep_idle(self) -> None:
        """Waits in the pool for its next exchange, but not as long as workers keep unused connections."""
        self.is_reused = True
        self._deadline.set("pooled", self._limits.pooled_timeout_s)

    def abort(self) -> None:
        self._deadline.close()
        self._transport.abort()

    # The end of an exchange.

    def _complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.connection = None
        receiver, exchange.receiver = exchange.receiver, None
        if exchange.is_paused:
            self._transport.resume_reading()
        # If the worker answered before it had read the whole request, the rest of that is still in the buffer.
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
        else:
            limits = self._limits
            timeout_s = limits.first_byte_timeout_s if phase == "first_byte" else limits.idle_timeout_s
            self._fail(UpstreamTimeoutError(self.worker.base_url, f"{phase} timeout after {timeout_s:g} s"))
