"""A worker's response is read one way or refused; what h11 would not take is not passed on."""

import random

import h11
import pytest

from kvist.http.errors import MalformedHttpError
from kvist.http.limits import UpstreamLimits
from kvist.http.upstream import ResponseParser

LIMITS = UpstreamLimits(max_header_bytes=1000, max_headers=10, max_informational_responses=2)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

Reading = tuple[int, bytes]


def read(pieces: list[bytes], method: str = "GET") -> tuple[ResponseParser, bytes]:
    """The parser after all pieces and the end of the stream, and the payload."""
    parser = ResponseParser(LIMITS, method)
    payload = b"".join([parser.feed(piece) for piece in pieces])
    parser.feed_eof()
    return parser, payload


def ours(pieces: list[bytes], method: str = "GET") -> Reading | None:
    try:
        parser, payload = read(pieces, method)
    except MalformedHttpError:
        return None
    return (parser.head[0], payload) if parser.head and parser.is_complete else None


def h11s(pieces: list[bytes], method: str = "GET") -> Reading | None:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    status, payload = 0, b""
    try:
        for piece in [*filter(None, pieces), b""]:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    payload += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return status, payload
                elif isinstance(event, h11.ConnectionClosed):
                    return None
    except h11.RemoteProtocolError:
        pass
    return None


VALID = {
    "a length": (OK + b"Content-Length: 5\r\n\r\nhello", b"hello", True),
    "chunks": (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello", True),
    "chunks and trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX: y\r\n\r\n", b"hello", True),
    "no length": (OK + b"X: y\r\n\r\nhello", b"hello", False),
    "no headers": (OK + b"\r\nhello", b"hello", False),
    "connection close": (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
    "http/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
    "http/1.0 kept": (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 5\r\n\r\nhello", b"hello", True),
    "no reason": (b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", b"", True),
    "no space either": (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b"", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "304 with a length": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", True),
    "after a 100 and a 103": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + OK
        + b"Content-Length: 1\r\n\r\nx",
        b"x",
        True,
    ),
    "a byte too many": (OK + b"Content-Length: 5\r\n\r\nhello!", b"hello", False),
    "a second response nobody asked for": ((OK + b"Content-Length: 1\r\n\r\nx") * 2, b"x", False),
}


@pytest.mark.parametrize(("wire", "payload", "is_clean"), VALID.values(), ids=VALID.keys())
def test_a_valid_response_is_read_however_it_is_split_and_as_h11_reads_it(
    wire: bytes, payload: bytes, is_clean: bool
) -> None:
    for pieces in ([wire], [bytes([byte]) for byte in wire]):
        parser, read_payload = read(pieces)
        assert read_payload == payload
        assert parser.is_complete
        assert parser.leaves_connection_clean == is_clean
        assert ours(pieces) == h11s(pieces)


def test_a_response_to_head_has_no_body_but_keeps_its_length() -> None:
    parser, payload = read([OK + b"Content-Length: 5\r\n\r\n"], "HEAD")
    assert payload == b""
    assert parser.leaves_connection_clean
    assert parser.head is not None
    assert parser.head[1] == [(b"content-length", b"5")]


@pytest.mark.parametrize("wire", [CHUNKED + b"5\r\nhel", OK + b"Content-Length: 5\r\n\r\nhel", OK[:-2], CHUNKED])
def test_a_response_cut_short_is_not_complete(wire: bytes) -> None:
    parser, _ = read([wire])
    assert not parser.is_complete


MALFORMED = {
    "length and chunked": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "a length with a plus": OK + b"Content-Length: +5\r\n\r\nhello",
    "another coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked on http/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": OK + b"X: a\r\n b\r\n\r\n",
    "a bare lf": OK + b"X: a\nY: b\r\n\r\n",
    "a nul": OK + b"X: a\0\r\n\r\n",
    "a space before the colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "not http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "http/2": b"HTTP/2 200 OK\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "a status of 600": b"HTTP/1.1 600 OK\r\n\r\n",
    "a switch nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    "interim responses without end": b"HTTP/1.1 102 Processing\r\n\r\n" * 3,
    "a head without end": OK + b"X: y\r\n" * 400,
    "too many headers": OK + b"X: y\r\n" * 11 + b"\r\n",
    "a bad chunk size": CHUNKED + b"zz\r\n",
    "an overlong chunk": CHUNKED + b"2\r\nabc\r\n",
}


@pytest.mark.parametrize("wire", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_response_is_refused(wire: bytes) -> None:
    with pytest.raises(MalformedHttpError):
        read([wire])


PIECES = [
    b"\r\n", b"\n", b"\r", b" ", b"\0", b":", b"0\r\n\r\n", b"Content-Length: 5\r\n", b"Content-Length: 4\r\n", b"x",
    b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0", b"Connection: close\r\n", b"1", b"HTTP/1.1 100 Continue\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_accepted_of_a_mutated_response_h11_reads_the_same(seed: int) -> None:
    rng, num_accepted = random.Random(seed), 0
    for _ in range(400):
        wire = rng.choice([wire for wire, _, _ in VALID.values()])
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            start = rng.randrange(len(wire) + 1)
            wire = wire[:start] + rng.choice([b"", *PIECES]) + wire[start + rng.randrange(4) :]
        method = rng.choice(["GET", "GET", "HEAD"])
        cuts = sorted(rng.randrange(len(wire) + 1) for _ in range(rng.randrange(5)))
        pieces = [wire[start:end] for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
        reading = ours(pieces, method)
        assert reading == ours([wire], method)
        if reading is not None:
            num_accepted += 1
            assert reading == h11s(pieces, method)
    assert num_accepted > 120
