"""Requests are read one way or refused; h11 and llhttp read the same."""

import itertools
import os
import random

import h11
import httptools
import pytest

from kvist.http.errors import RequestRefusedError
from kvist.http.fields import Headers, end_to_end
from kvist.http.limits import HttpLimits
from kvist.http.request import Request, RequestParser

LIMITS = HttpLimits(max_request_line_bytes=200, max_header_bytes=1000, max_headers=20, max_body_bytes=1000)

NUM_SEEDS = int(os.environ.get("KVIST_REQUEST_SEEDS", "8"))
FIRST_SEED = int(os.environ.get("KVIST_REQUEST_FIRST_SEED", "0"))
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


def origin_form(target: bytes) -> str:
    """As we report targets: without the authority, which the host header repeats."""
    return target.decode("latin-1").removeprefix("http://a")


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
                readings.append((head.method.decode(), origin_form(head.target), list(head.headers), body))
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
        self.readings.append((method, origin_form(self.target), self.headers, self.body))


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
    "http/1.0 without a host": b"OPTIONS / HTTP/1.0\r\n\r\n",  # HAProxy's health check
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


FIELDS = [
    b"Accept: */*", b"X-Empty:", b"x-y: \xff\t z ", b"Connection: keep-alive, x", b"Connection: Close", b"Upgrade: h2c",
    b"Expect: 100-continue", b"Cookie: a=b; c=d", b"Content-Type: application/json",
]  # fmt: skip


def a_request(rng: random.Random) -> bytes:
    """Return a valid request: any framing, chunks, extensions and trailers."""
    method = rng.choice([b"GET", b"POST", b"POST", b"PUT", b"HEAD", b"OPTIONS"])
    target = rng.choice([b"/", b"/v1/x?y=%20&z", b"/a//b;c", b"http://a/x", b"*" if method == b"OPTIONS" else b"/"])
    is_old = rng.randrange(10) == 0
    fields = [b"Host: a", *rng.sample(FIELDS, rng.randrange(4))]
    body, framing = rng.randbytes(rng.choice([0, 1, 9, 300])), rng.choice(["none", "length", "chunked", "chunked"])
    if framing == "length" or (is_old and framing == "chunked"):
        fields.append(b"%b: %d" % (rng.choice([b"Content-Length", b"content-length"]), len(body)))
    elif framing == "chunked":
        fields.append(b"Transfer-Encoding: " + rng.choice([b"chunked", b"Chunked"]))
        sizes = [rng.randint(1, 40) for _ in range(rng.randrange(6))]
        chunks = [
            b"%0*X%b\r\n%b\r\n" % (rng.choice([1, 4]), n, rng.choice([b"", b"", b";a=b"]), b"x" * n) for n in sizes
        ]
        body = b"".join(chunks) + rng.choice([b"0", b"000", b"0;l"]) + b"\r\n"
        body += rng.choice([b"", b"", b"X: y\r\n", b"X: y\r\nZ:\r\n"]) + b"\r\n"
    else:
        body = b""
    rng.shuffle(fields)
    line = b"%b %b HTTP/1.%d\r\n" % (method, target, not is_old)
    return line + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_whatever_is_accepted_of_random_requests_h11_and_llhttp_read_the_same(seed: int) -> None:
    """Of connections with some requests, of which half have bytes deleted, or the usual suspects put in."""
    rng, num_accepted, num_refused = random.Random(seed), 0, 0
    for _ in range(300):
        data = b"".join(a_request(rng) for _ in range(rng.randint(1, 3)))
        for _ in range(rng.choice([0, 0, 1, 2])):
            start, num_deleted = rng.randrange(len(data) + 1), rng.randrange(3)
            data = data[:start] + rng.choice([b"", *PIECES]) + data[start + num_deleted :]
        cuts = [rng.randrange(len(data) + 1) for _ in range(rng.randrange(7))]
        assert_oracles_agree(split(data, cuts))
        requests, refusal = parse_all([data])
        num_accepted += len(requests)
        num_refused += refusal is not None
    assert num_accepted > 200
    assert num_refused > 60
