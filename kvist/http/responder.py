"""One request gets one response, framed by us: what the handler gives as body is what the client reads as body.

A `content-length` that the handler states is kept and enforced; without one the framing is chunked for HTTP/1.1 and
until-close for HTTP/1.0. Responses to HEAD, and 204 and 304, have no body, whatever is written.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvist.errors import InvalidValueError
from kvist.http.fields import Headers, content_length, render_head, status_line
from kvist.http.limits import KIB
from kvist.http.request import Request

if TYPE_CHECKING:
    from kvist.http.server import ServerConnection

_CONNECTION_FIELDS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"trailer", b"upgrade"})
_NO_CONTENT, _NOT_MODIFIED = 204, 304
_MAX_PIECE_BYTES = 64 * KIB
"""The most that `write` sends before it waits: a client has `write_timeout_s` for so much, not for any body."""

Framing = Literal["length", "chunked", "until_close", "none"]


@dataclass(slots=True, eq=False)
class Responder:
    """Sends exactly one response; until `has_started` is True the client has seen nothing, and another may be begun."""

    _connection: "ServerConnection"
    _request: Request
    keep_alive: bool
    own_headers: Headers = field(default_factory=list)  # added to those of the response, whatever it is
    has_started: bool = False
    is_finished: bool = False
    status: int | None = None
    _framing: Framing = "none"
    _head: bytes | None = None  # rendered, to go out with the first piece of the body
    _num_missing: int = 0

    def start(self, status: int, headers: Headers) -> None:
        """Begins the response; names must be lower-case. The head leaves with the first piece or at `flush`.

        Raises ValueError for a header that frames or keeps the connection (those are ours) or that holds CR, LF or NUL.
        """
        if self.has_started:
            raise RuntimeError("the response has already started")
        self._head = self._render(status, [*headers, *self.own_headers] if self.own_headers else headers)
        self.has_started = True
        self.status = status
        del self._request  # with its body: a long answer needs no memory for it
        self._connection.on_response_start()

    def flush(self) -> None:
        """Sends the head if it was not sent with a piece of the body."""
        if self._head is not None:
            self._send(b"")

    def send(self, chunk: bytes) -> None:
        """Sends a piece of the body; it is dropped if the client is gone.

        Raises ValueError for more bytes than the stated length.
        """
        if not self.has_started or self.is_finished:
            raise RuntimeError("send() belongs between start() and end()")
        if chunk and self._framing != "none":
            if self._framing == "chunked":
                chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
            elif self._framing == "length":
                if len(chunk) > self._num_missing:
                    raise ValueError(f"{len(chunk)} bytes where content-length leaves {self._num_missing}")
                self._num_missing -= len(chunk)
            self._send(chunk)

    def end(self) -> None:
        """Ends the response; raises ValueError if the body is shorter than the stated length."""
        if not self.has_started or self.is_finished:
            raise RuntimeError("end() belongs once behind start()")
        if self._num_missing:
            raise ValueError(f"the body ended {self._num_missing} bytes short of its content-length")
        self.is_finished = True
        if self._framing == "chunked":
            self._send(b"0\r\n\r\n")
        self.flush()
        self._connection.on_response_end()

    def answer(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Sends a whole response at once, with its length."""
        others = [field for field in headers if field[0] != b"content-length"]
        self.start(status, [*others, (b"content-length", b"%d" % len(body))])
        self.send(body)
        self.end()

    @property
    def ends_with_connection(self) -> bool:
        """Whether the client would mistake the connection's end for the end of the unfinished response."""
        return self._framing == "until_close" and not self.is_finished

    def break_off(self) -> None:
        """Ends an incomplete response behind what was sent of it, which the client gets before it notices.

        A client of HTTP/1.0 has only what was sent to notice by.
        """
        self.keep_alive, self.is_finished = False, True
        self.flush()
        self._connection.on_response_end()

    def cut(self) -> None:
        """Ends an incomplete response by closing the connection, so that the client notices."""
        self._connection.cut()
        self.is_finished = True

    async def write(self, chunk: bytes) -> None:
        """As `send`, for coroutines: waits while the client's buffer is over its high-water mark.

        Raises ClientDisconnectedError once the client is gone.
        """
        for start in range(0, len(chunk) or 1, _MAX_PIECE_BYTES):
            self.send(chunk[start : start + _MAX_PIECE_BYTES])
            await self._connection.drained()

    def _render(self, status: int, headers: Headers) -> bytes:
        """Chooses the framing and renders the head."""
        fields: Headers = []
        length: int | None = None
        for name, value in headers:
            if name == b"content-length":
                length = content_length(value)
                if status == _NO_CONTENT:
                    continue
            elif name in _CONNECTION_FIELDS:
                raise InvalidValueError("headers", name, "none that frames or keeps the connection")
            fields.append((name, value))
        self._choose_framing(status, length)
        if self._framing == "chunked":
            fields.append((b"transfer-encoding", b"chunked"))
        if not self.keep_alive:
            fields.append((b"connection", b"close"))
        elif self._request.http_version == "1.0":
            fields.append((b"connection", b"keep-alive"))
        return render_head(status_line(status), fields)

    def _choose_framing(self, status: int, length: int | None) -> None:
        if not 200 <= status <= 599:
            raise InvalidValueError("status", status, "200 to 599, a final one")
        self._num_missing = 0
        if self._request.method == "HEAD" or status in (_NO_CONTENT, _NOT_MODIFIED):
            self._framing = "none"
        elif length is not None:
            self._framing = "length"
            self._num_missing = length
        elif self._request.http_version == "1.1":
            self._framing = "chunked"
        else:
            self._framing = "until_close"
            self.keep_alive = False

    def _send(self, data: bytes) -> None:
        if self._head is not None:
            data, self._head = self._head + data, None
        self._connection.send(data)
