"""A worker's bytes become a response only if they have one reading; a byte too many ends the connection's reuse.

No I/O here: one `ResponseParser` reads one response, whatever interim (1xx) responses precede it.
"""

import re

import msgspec

from kvist.http.body import Body, ChunkedBody, LengthBody, UntilCloseBody
from kvist.http.errors import MalformedHttpError
from kvist.http.fields import Headers, content_length, end_to_end, list_members, parse_fields, pick
from kvist.http.limits import UpstreamLimits

_STATUS_LINE = re.compile(rb"HTTP/(1\.[01]) ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*+)?")

_CONTROL_FIELDS = frozenset({b"content-length", b"transfer-encoding", b"connection"})


class ResponseHead(msgspec.Struct, frozen=True):
    """Status and end-to-end headers; `content-length` is kept, so that the response can be passed on with it."""

    status: int
    headers: Headers


class ResponseParser:
    """Reads one response to a request of `method`; raises MalformedHttpError on anything ambiguous."""

    __slots__ = ("_body", "_buffer", "_is_persistent", "_limits", "_method", "_num_informational", "head")

    def __init__(self, limits: UpstreamLimits, method: str) -> None:
        self._limits = limits
        self._method = method
        self._buffer = b""
        self._body: Body | None = None
        self._num_informational = 0
        self._is_persistent = False
        self.head: ResponseHead | None = None

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
        """The worker closed the connection: ends a body that lasts until then."""
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
        self.head = ResponseHead(status, end_to_end(headers))
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
