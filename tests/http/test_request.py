"""Requests are read one way or refused; h11 and llhttp read the same."""

import itertools

import h11
import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvist.http.errors import RequestRefusedError
from kvist.http.fields import Headers, end_to_end
from kvist.http.limits import HttpLimits
from kvist.http.request import Request, RequestParser

LIMITS = HttpLimits(max_request_line_bytes=200, max_header_bytes=1000, max_headers=20, max_body_bytes=1000)

METHODS_OF_LLHTTP = {"GET", "HEAD", "POST", "PUT", "OPTIONS"}
Reading = tuple[str, str, list[tuple[bytes, bytes]], bytes]


def parse_all(pieces: list[bytes]) -> tuple[list[Request], RequestRefusedError | None]:
    """Every request up to one after which the connection closes, or to a refusal."""
    parser = RequestParser(LIMITS, None)
    requests: list[Request] = []
    for piece in pieces:
        parser.feed(piece)
        try:
            while request := parser.next_request():
                requests.append(request)
                if not request.is_keep_alive or request.http_version == "1.0":
                    return requests, None
        except RequestRefusedError as refusal:
            return requests, refusal
    return requests, None


def ours(pieces: list[bytes]) -> list[Reading]:
    return [(r.method, r.target, comparable(r.headers), r.body) for r in parse_all(pieces)[0]]


def comparable(headers: Headers) -> Headers:
    """As h11 reports them: the transfer coding in lower case."""
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in headers]


def h11s(pieces: list[bytes]) -> list[Reading]:
    """What h11 reads from the same bytes."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    readings: list[Reading] = []
    for piece in pieces:
        if not piece:
            continue
        connection.receive_data(piece)
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                return readings
            if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                break
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                readings.append((head.method.decode(), head.target.decode("latin-1"), list(head.headers), body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return readings
                connection.start_next_cycle()
    return readings


class Llhttp:
    """What llhttp reads from the same bytes."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self.target, self.headers, self.body = b"", [], b""
        self.is_in_head = True

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:
            self.headers.extend(comparable([(name.lower(), value.strip(b" \t"))]))

    def on_headers_complete(self) -> None:
        self.is_in_head = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        method = self.parser.get_method().decode()
        self.readings.append((method, self.target.decode("latin-1"), self.headers, self.body))


def llhttps(pieces: list[bytes]) -> list[Reading]:
    oracle = Llhttp()
    try:
        for piece in pieces:
            oracle.parser.feed_data(piece)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        pass
    return oracle.readings


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def assert_oracles_agree(pieces: list[bytes]) -> None:
    readings = ours(pieces)
    assert readings == ours([b"".join(pieces)]), "the split changed the reading"
    assert readings == h11s(pieces)[: len(readings)]
    known = list(itertools.takewhile(lambda reading: reading[0] in METHODS_OF_LLHTTP, readings))
    assert known == llhttps(pieces)[: len(known)]


VALID = {
    "a get": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a query and many headers": b"GET /a%20b?c=d&e HTTP/1.1\r\nHost: a:80\r\nX-Y:\t z \r\nX-E:\r\nx-y: \xff\r\n\r\n",
    "a body with length": b"POST /v1 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    "a leading zero in the length": b"POST /v1 HTTP/1.1\r\nHost: a\r\nContent-Length: 005\r\n\r\nhello",
    "chunks": b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n3\r\n0\r\n\r\n0\r\n\r\n",
    "chunks with extensions and trailers": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"05;a=b\r\nhello\r\n0;last\r\nX: y\r\nZ: \r\n\r\n"
    ),
    "two in one go": b"POST /1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhiGET /2 HTTP/1.1\r\nHost: b\r\n\r\n",
    "http/1.0 with a host": b"GET /old HTTP/1.0\r\nHost: a\r\n\r\n",
    "an ipv6 host": b"GET / HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n",
    "options of the server": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "an upgrade nobody knows": b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: tls/1.3\r\n\r\n",
}


@pytest.mark.parametrize("data", VALID.values(), ids=VALID.keys())
def test_a_valid_request_reads_the_same_here_and_elsewhere_however_it_is_split(data: bytes) -> None:
    requests, refusal = parse_all([data])
    assert requests
    assert refusal is None
    assert_oracles_agree([bytes([byte]) for byte in data])
    for cut in range(len(data)):
        assert_oracles_agree([data[:cut], data[cut:]])


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_who_offers_another_protocol_asks_in_this_one(protocol: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol
    (request,), refusal = parse_all([head + b"\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"])
    assert refusal is None
    assert end_to_end(request.headers) == [(b"host", b"a")]


PIECES = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b"\0", b"\x0b", b"\x7f", b"\xff", b":", b",", b";", b"0\r\n\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: b\r\n", b"chunked",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.0",
    b"HTTP/1.1", b"HTTP/2.0", b"+5", b"-1", b"0x5", b"5, 5", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"1", b"f", b"#",
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """One or two valid requests with a few bytes deleted, and a few of the usual suspects put in."""
    data = b"".join(draw(st.lists(st.sampled_from(list(VALID.values())), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        num_deleted = draw(st.integers(0, 3))
        data = data[:start] + draw(st.sampled_from([b"", *PIECES])) + data[start + num_deleted :]
    return data


LINE_END = st.sampled_from([b"\r\n"] * 20 + [b"\n", b"\r", b" \r\n", b"\r\n ", b"\r\n\r\n"])
FIELD = st.one_of(
    st.sampled_from([b"Host: a", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Connection: keep-alive, x"]),
    st.builds(b"%b:%b".__mod__, st.tuples(st.from_regex(rb"[!-~]{1,4}", fullmatch=True), st.binary(max_size=4))),
    st.sampled_from([piece.strip(b"\r\n") for piece in PIECES]),
)  # fmt: skip


@st.composite
def assembled(draw: st.DrawFn) -> bytes:
    """A request put together from parts of which any may be wrong."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"get", b"G(T", b""]))
    target = draw(st.one_of(st.just(b"/"), st.binary(max_size=4).map(b"/".__add__), st.just(b"*")))
    version = draw(st.sampled_from([b"HTTP/1.1"] * 5 + [b"HTTP/1.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.10"]))
    lines = [method + b" " + target + b" " + version, *draw(st.lists(FIELD, max_size=5))]
    head = b"".join(line + draw(LINE_END) for line in lines)
    body = draw(
        st.sampled_from([b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", b"3\nabc\n0\n\n", b"0\r\nA: b\n\n", b"0\r\n\r\nGET"])
    )
    return head + b"\r\n" + body


CUTS = st.lists(st.integers(0, 400), max_size=6)


@settings(max_examples=600, deadline=None)
@given(data=mutated(), cuts=CUTS)
@example(data=b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\n\n", cuts=[])
def test_whatever_is_accepted_of_a_mutated_request_h11_and_llhttp_read_the_same(data: bytes, cuts: list[int]) -> None:
    assert_oracles_agree(split(data, cuts))


@settings(max_examples=600, deadline=None)
@given(data=assembled(), cuts=CUTS)
def test_whatever_is_accepted_of_an_assembled_request_h11_and_llhttp_read_the_same(
    data: bytes, cuts: list[int]
) -> None:
    assert_oracles_agree(split(data, cuts))
