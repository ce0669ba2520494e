"""Client bytes become a request only if RFC 9112 allows exactly one reading of them; otherwise they are refused.

No I/O here: `RequestParser` is fed bytes and yields whole requests one after the other, or raises
`RequestRefusedError`, after which the connection cannot be trusted and must be closed.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from kvist.http.body import Body, ChunkedBody, LengthBody
from kvist.http.errors import MalformedHttpError, RequestRefusedError
from kvist.http.fields import BARE_LINE_END, TOKEN, Headers, content_length, list_members, parse_fields, pick
from kvist.http.limits import HttpLimits
from kvist.networks import is_loopback

HttpVersion = Literal["1.0", "1.1"]
Phase = Literal["idle", "header", "body"]
_Control = Mapping[bytes, list[bytes]]

_PCT = rb"%[0-9A-Fa-f]{2}"
_REQUEST_LINE = re.compile(rb"(" + TOKEN + rb"++) ([\x21-\x7e]++) HTTP/([0-9]\.[0-9])")
_ORIGIN_FORM = re.compile(rb"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|" + _PCT + rb")*+")
_ABSOLUTE_FORM = re.compile(rb"(?i:https?)://([^/?@]++)(.*+)")
_HOST = re.compile(rb"(?:(?:[A-Za-z0-9\-._~!$&'()*+,;=]|" + _PCT + rb")++|\[[0-9A-Fa-f:.]++\])(?::[0-9]{0,5}+)?")
_HOPELESS_HEAD = re.compile(rb"\0|\A\r\n|" + BARE_LINE_END.pattern)
"""What makes a head invalid whatever bytes follow: refused at once instead of after the header timeout."""

_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})


class Request(msgspec.Struct, frozen=True, dict=True):
    """A whole request; `target` is in origin form (or `*`), ASCII, still percent-encoded."""

    method: str
    target: str
    headers: Headers
    body: bytes
    client: tuple[str, int] | None
    http_version: HttpVersion = "1.1"
    is_keep_alive: bool = True
    """Whether the client will read another response on this connection."""

    @cached_property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: bytes) -> bytes | None:
        """The first value of the lower-case `name`."""
        for other, value in self.headers:  # a third of the time of a generator
            if other == name:
                return value
        return None

    @property
    def bearer_token(self) -> bytes | None:
        """The token of the Authorization header."""
        scheme, _, given = (self.header(b"authorization") or b"").partition(b" ")
        return given.strip() if scheme.lower() == b"bearer" else None

    @property
    def client_key(self) -> bytes | None:
        """The bearer token or, without an Authorization header, `x-api-key`: so do Anthropic's clients send theirs."""
        return self.header(b"x-api-key") if self.header(b"authorization") is None else self.bearer_token

    def has_bearer_token(self, key: str) -> bool:
        """Whether the bearer token is this key; takes the same time for every wrong one."""
        return hmac.compare_digest(self.bearer_token or b"", key.encode())

    def is_direct_from_loopback(self) -> bool:
        """Whether the client is on this machine and meant to reach it.

        A proxy on this machine also connects from loopback, and so does a browser in which a foreign page's host name
        was made to resolve to 127.0.0.1: forwarded requests and other Host names do not count.
        """
        if self.client is None or not is_loopback(self.client[0]):
            return False
        host = (self.header(b"host") or b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        is_local_name = name == "localhost" or is_loopback(name.strip("[]"))
        return is_local_name and _FORWARDED.isdisjoint([name for name, _ in self.headers])


_CONTROL_FIELDS = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"})
"""The fields that decide about the message itself."""


@dataclass(slots=True, eq=False)
class RequestParser:
    """Parses only requests that have one reading; holds the current request and the bytes behind it."""

    _limits: HttpLimits
    _client: tuple[str, int] | None
    _buffer: bytes = b""
    _scanned: int = 0
    _head: Request | None = None  # without its body
    _body: Body | None = None
    _payload: bytearray = field(default_factory=bytearray)
    _awaits_continue: bool = False

    @property
    def phase(self) -> Phase:
        """What the next byte belongs to."""
        if self._body is not None:
            return "body"
        return "header" if self._buffer else "idle"

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes received but not parsed yet."""
        return len(self._buffer)

    @property
    def num_body_bytes(self) -> int:
        """Payload held for the unfinished request."""
        return len(self._payload)

    def pop_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before sending its body; True once a request."""
        awaits, self._awaits_continue = self._awaits_continue, False
        return awaits

    def feed(self, data: bytes | memoryview) -> None:
        """Adds a copy of received bytes; nothing is parsed yet."""
        self._buffer = self._buffer + data if self._buffer else bytes(data)

    def next_request(self) -> Request | None:
        """The next whole request, or None until more bytes come; raises RequestRefusedError."""
        try:
            if self._head is None and not (self._buffer and self._read_head()):
                return None
            return self._read_body()
        except MalformedHttpError as error:
            raise RequestRefusedError(400, "malformed_request", str(error)) from error

    def _read_head(self) -> bool:
        buffer, limits = self._buffer, self._limits
        end = buffer.find(b"\r\n\r\n", max(0, self._scanned - 3))
        line_end = buffer.find(b"\r\n", 0, limits.max_request_line_bytes + 2)
        if line_end < 0 and len(buffer) > limits.max_request_line_bytes:
            reason = f"the request line exceeds {limits.max_request_line_bytes} bytes"
            raise RequestRefusedError(414, "uri_too_long", reason)
        if line_end >= 0 and (end if end >= 0 else len(buffer)) - line_end > limits.max_header_bytes:
            raise RequestRefusedError(431, "headers_too_large", f"the headers exceed {limits.max_header_bytes} bytes")
        if end < 0:
            if _HOPELESS_HEAD.search(buffer, max(0, self._scanned - 1)):
                raise MalformedHttpError("the head holds NUL, a bare CR or a bare LF, or starts with an empty line")
            self._scanned = len(buffer)
            return False
        self._scanned = 0
        head, length, expects_continue = self._parse_head(buffer[:line_end], buffer[line_end + 2 : end + 2])
        if length is not None:
            self._check_size(length)
        self._head = head
        self._buffer = buffer[end + 4 :]
        self._body = ChunkedBody() if length is None else LengthBody(length)
        self._awaits_continue = expects_continue and not self._body.is_complete and not self._buffer
        return True

    def _parse_head(self, request_line: bytes, block: bytes) -> tuple[Request, int | None, bool]:
        """Return a request, the length of its body, None for a chunked one, and whether it waits to send that."""
        match = _REQUEST_LINE.fullmatch(request_line)
        if match is None:
            raise MalformedHttpError("the request line is not 'METHOD target HTTP/1.1'")
        method, target, version = match.groups()
        _require_http1(version)
        if method == b"CONNECT":
            raise RequestRefusedError(501, "not_implemented", "CONNECT is not implemented")
        if block.count(b"\n") > self._limits.max_headers:
            raise RequestRefusedError(431, "too_many_headers", f"more than {self._limits.max_headers} header lines")
        headers = parse_fields(block)
        control = pick(headers, _CONTROL_FIELDS)
        is_http11 = version == b"1.1"
        target = _origin_form(method, target, _single_host(control[b"host"], is_http11=is_http11))
        options = list_members(control[b"connection"])
        length = _length(control, is_http11=is_http11)
        request = Request(
            method.decode(),
            target.decode(),
            headers,
            b"",
            self._client,
            "1.1" if is_http11 else "1.0",
            is_keep_alive=b"close" not in options and (is_http11 or b"keep-alive" in options),
        )
        return request, length, is_http11 and bool(control[b"expect"])

    def _read_body(self) -> Request | None:
        head, body = self._head, self._body
        assert head is not None
        assert body is not None
        if not body.is_complete:
            self._payload += body.feed(self._buffer)
            self._buffer = body.excess
            self._check_size(len(self._payload))
            if not body.is_complete:
                return None
        payload, self._payload = bytes(self._payload), bytearray()
        self._head, self._body, self._awaits_continue = None, None, False
        return msgspec.structs.replace(head, body=payload)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._limits.max_body_bytes:
            raise RequestRefusedError(413, "body_too_large", f"the body exceeds {self._limits.max_body_bytes} bytes")


def _length(control: _Control, *, is_http11: bool) -> int | None:
    """The length of the body, None for a chunked one."""
    for value in control[b"expect"]:
        if value.lower() != b"100-continue":
            raise RequestRefusedError(417, "expectation_failed", "the only expectation met is 100-continue")
    if control[b"transfer-encoding"]:
        if control[b"content-length"]:
            raise MalformedHttpError("both content-length and transfer-encoding")
        if not is_http11:
            raise MalformedHttpError("transfer-encoding in an HTTP/1.0 request")
        if len(control[b"transfer-encoding"]) > 1 or control[b"transfer-encoding"][0].lower() != b"chunked":
            raise RequestRefusedError(501, "not_implemented", "the only transfer coding implemented is chunked")
        return None
    if len(control[b"content-length"]) > 1:
        raise MalformedHttpError("more than one content-length")
    return content_length(control[b"content-length"][0]) if control[b"content-length"] else 0


def _require_http1(version: bytes) -> None:
    if version in (b"1.1", b"1.0"):
        return
    if version == b"2.0":
        raise RequestRefusedError(501, "not_implemented", "HTTP/2 is not implemented; use HTTP/1.1")
    raise RequestRefusedError(505, "http_version_not_supported", "the HTTP versions supported are 1.1 and 1.0")


def _single_host(hosts: list[bytes], *, is_http11: bool) -> bytes:
    """The one Host; b"" where HTTP/1.0 leaves it out, as health checks do: no absolute target names that."""
    if not hosts and not is_http11:
        return b""
    if len(hosts) != 1:
        raise MalformedHttpError(f"{len(hosts)} host headers where one is required")
    if not _HOST.fullmatch(hosts[0]):
        raise MalformedHttpError("the host header is not a host with an optional port")
    return hosts[0]


def _origin_form(method: bytes, target: bytes, host: bytes) -> bytes:
    """`target` as path and query; an absolute one must name the host the Host header names."""
    if target == b"*" and method == b"OPTIONS":
        return target
    if not target.startswith(b"/") and (absolute := _ABSOLUTE_FORM.fullmatch(target)):
        authority, target = absolute.groups()
        if authority.lower() != host.lower():
            raise MalformedHttpError("the authority of the target differs from the host header")
        if not target.startswith(b"/"):
            target = b"/" + target
    if not _ORIGIN_FORM.fullmatch(target):
        raise MalformedHttpError("the target is not an absolute path with an optional query")
    return target
