"""What a client must not send is answered with an OpenAI error and a closed connection, and reaches no handler."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import pytest

from kvist.http import HttpServer, Request, Responder

HOST = b"Host: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HELLO = b"5\r\nhello\r\n0\r\n\r\n"


def get(fields: bytes = HOST, target: bytes = b"/", version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET " + target + b" " + version + b"\r\n" + fields + b"\r\n"


def post(fields: bytes, body: bytes = b"hello") -> bytes:
    return POST + fields + b"\r\n" + body


# Name: (bytes, status). The second table holds what h11 would let pass.
REFUSED_BY_H11_TOO = {
    "no host": (get(b"X: y\r\n"), 400),
    "two hosts": (get(HOST + b"Host: b\r\n"), 400),
    "two equal hosts": (get(HOST + HOST), 400),
    "two hosts on http/1.0": (b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n", 400),
    "two different lengths": (post(b"Content-Length: 5\r\nContent-Length: 6\r\n"), 400),
    "a length with a plus": (post(b"Content-Length: +5\r\n"), 400),
    "a negative length": (post(b"Content-Length: -1\r\n"), 400),
    "a hexadecimal length": (post(b"Content-Length: 0x5\r\n"), 400),
    "a list of different lengths": (post(b"Content-Length: 5, 6\r\n"), 400),
    "an empty length": (post(b"Content-Length:\r\n"), 400),
    "a length with a space inside": (post(b"Content-Length: 1 5\r\n"), 400),
    "a length with an underscore": (post(b"Content-Length: 1_0\r\n"), 400),
    "a length in other digits": (post("Content-Length: ٥\r\n".encode()), 400),
    "a length of forty digits": (post(b"Content-Length: " + b"9" * 40 + b"\r\n"), 400),
    "gzip then chunked": (post(b"Transfer-Encoding: gzip, chunked\r\n", HELLO), 501),
    "chunked twice": (post(b"Transfer-Encoding: chunked, chunked\r\n", HELLO), 501),
    "chunked on two lines": (post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", HELLO), 501),
    "chunked then identity": (post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", HELLO), 501),
    "identity coding": (post(b"Transfer-Encoding: identity\r\n"), 501),
    "a coding that looks like chunked": (post(b"Transfer-Encoding: xchunked\r\n", HELLO), 501),
    "a quoted coding": (post(b'Transfer-Encoding: "chunked"\r\n', HELLO), 501),
    "a coding with a parameter": (post(b"Transfer-Encoding: chunked;q=1\r\n", HELLO), 501),
    "an empty coding": (post(b"Transfer-Encoding:\r\n", HELLO), 501),
    "a space before the colon": (post(b"Content-Length : 5\r\n"), 400),
    "a tab before the colon": (post(b"Transfer-Encoding\t: chunked\r\n", HELLO), 400),
    "an empty header name": (get(HOST + b": x\r\n"), 400),
    "a header without a colon": (get(HOST + b"X\r\n"), 400),
    "a header name that is no token": (get(HOST + b"X(y): z\r\n"), 400),
    "a header name in latin-1": (get(HOST + b"X\xe4: z\r\n"), 400),
    "a nul in a value": (get(HOST + b"X: a\0b\r\n"), 400),
    "a bare cr in a value": (get(HOST + b"X: a\rb\r\n"), 400),
    "a first line folded": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "a method that is no token": (b"G@T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no method": (b" / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "two spaces before the target": (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a space in the target": (get(target=b"/a b"), 400),
    "a nul in the target": (get(target=b"/a\0"), 400),
    "no version": (b"GET /\r\nHost: a\r\n\r\n", 400),
    "http/0.9": (b"GET /\r\n\r\n", 400),
    "a lower-case version": (get(version=b"http/1.1"), 400),
    "a version with more digits": (get(version=b"HTTP/1.10"), 400),
    "a leading empty line": (b"\r\n" + get(), 400),
    "a chunk size with a sign": (CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n", 400),
    "a chunk size with 0x": (CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", 400),
    "a chunk size of seventeen digits": (CHUNKED + b"5".rjust(30, b"0") + b"\r\nhello\r\n0\r\n\r\n", 400),
    "a negative chunk size": (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", 400),
    "an empty chunk size": (CHUNKED + b"\r\nhello\r\n0\r\n\r\n", 400),
    "a chunk longer than its size": (CHUNKED + b"4\r\nhello\r\n0\r\n\r\n", 400),
    "a bare lf behind a chunk size": (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
    "a folded first trailer": (CHUNKED + b"0\r\n X: y\r\n\r\n", 400),
}  # fmt: skip

ACCEPTED_BY_H11 = {
    "the http/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 501),
    "bare lf everywhere": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "one bare lf": (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
    "a bare lf before the empty line": (b"GET / HTTP/1.1\r\nHost: a\n\r\n", 400),
    "a folded header": (get(HOST + b"X: a\r\n b\r\n"), 400),
    "a folded transfer-encoding": (post(b"Transfer-Encoding:\r\n chunked\r\n", HELLO), 400),
    "a control byte in a value": (get(HOST + b"X: a\x01b\r\n"), 400),
    "a del in a value": (get(HOST + b"X: a\x7fb\r\n"), 400),
    "length and chunked": (post(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", HELLO), 400),
    "chunked and length": (post(b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", HELLO), 400),
    "an absolute target but no host on http/1.0": (b"GET http://a/ HTTP/1.0\r\n\r\n", 400),
    "chunked on http/1.0": (b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + HELLO, 400),
    "two equal lengths": (post(b"Content-Length: 5\r\nContent-Length: 5\r\n"), 400),
    "a list of equal lengths": (post(b"Content-Length: 5, 5\r\n"), 400),
    "an empty host": (get(b"Host:\r\n"), 400),
    "a host with a path": (get(b"Host: a/b\r\n"), 400),
    "a host with userinfo": (get(b"Host: x@a\r\n"), 400),
    "a list of hosts": (get(b"Host: a, b\r\n"), 400),
    "a target without a slash": (get(target=b"a"), 400),
    "a target with a fragment": (get(target=b"/a#b"), 400),
    "a target with a backslash": (get(target=b"/a\\b"), 400),
    "a broken percent escape": (get(target=b"/a%2"), 400),
    "an asterisk for get": (get(target=b"*"), 400),
    "an absolute target for another host": (get(target=b"http://b/"), 400),
    "an absolute target with userinfo": (get(target=b"http://x@a/"), 400),
    "another scheme": (get(target=b"ftp://a/"), 400),
    "a version to come": (get(version=b"HTTP/1.2"), 505),
    "http/3": (get(version=b"HTTP/3.0"), 505),
    "connect": (b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", 501),
    "an unknown expectation": (post(b"Content-Length: 5\r\nExpect: 200-ok\r\n"), 417),
    "a space behind a chunk size": (CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n", 400),
    "a bare lf in the trailers": (CHUNKED + b"0\r\nX: y\n\n", 400),
    "a chunk size line that goes on": (CHUNKED + b"5;" + b"x" * 300 + b"\r\nhello\r\n0\r\n\r\n", 400),
    "extensions without end": (CHUNKED + (b"1;" + b"x" * 200 + b"\r\nh\r\n") * 30 + b"0\r\n\r\n", 400),
}  # fmt: skip

LIMITS = {"max_request_line_bytes": 200, "max_header_bytes": 1000, "max_headers": 20, "max_body_bytes": 100}
TOO_LARGE = {
    "a long request line": (get(target=b"/" + b"x" * 300), 414),
    "a request line without end": (b"GET /" + b"x" * 300, 414),
    "a long header": (get(HOST + b"X: " + b"y" * 2000 + b"\r\n"), 431),
    "headers without end": (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 400, 431),
    "too many headers": (get(HOST + b"X: y\r\n" * 20), 431),
    "a long body announced": (post(b"Content-Length: 101\r\n", b""), 413),
    "a long body announced with expect": (post(b"Content-Length: 101\r\nExpect: 100-continue\r\n", b""), 413),
    "a long body in chunks": (CHUNKED + b"65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n", 413),
    "a long body in small chunks": (CHUNKED + b"1\r\nx\r\n" * 101 + b"0\r\n\r\n", 413),
    "trailers without end": (CHUNKED + b"0\r\n" + b"X: y\r\n" * 2000, 400),
}  # fmt: skip
REFUSED = REFUSED_BY_H11_TOO | ACCEPTED_BY_H11 | TOO_LARGE


def h11_accepts(data: bytes) -> bool:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    try:
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        pass
    return False


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
async def test_is_refused_with_an_openai_error_and_a_closed_connection(
    data: bytes,
    status: int,
    serve: Callable[..., Awaitable[HttpServer]],
    connect: Callable[[HttpServer], Awaitable[Any]],
) -> None:
    handled: list[Request] = []

    async def handler(request: Request, _: Responder) -> None:
        handled.append(request)

    server = await serve(handler, linger_timeout_s=0.05, **LIMITS)
    client = await connect(server)
    client.send(data + get(target=b"/smuggled"))
    answer = await client.answer()
    assert answer.status == status
    assert answer.is_closing
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert await client.read_to_end() == b""
    assert handled == []
    assert server.statistics().num_refused == 1


@pytest.mark.parametrize(("data", "_status"), REFUSED_BY_H11_TOO.values(), ids=REFUSED_BY_H11_TOO.keys())
def test_h11_refuses_it_too(data: bytes, _status: int) -> None:
    assert not h11_accepts(data)


@pytest.mark.parametrize(("data", "_status"), ACCEPTED_BY_H11.values(), ids=ACCEPTED_BY_H11.keys())
def test_refusing_it_is_a_deliberate_difference_from_h11(data: bytes, _status: int) -> None:
    assert h11_accepts(data)
