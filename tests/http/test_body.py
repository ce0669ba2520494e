"""A body ends where its framing says, however the bytes are split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.http.body import (
    MAX_CHUNK_LINE_BYTES,
    MAX_TRAILER_BYTES,
    Body,
    ChunkedBody,
    LengthBody,
    UntilCloseBody,
)
from kvist.http.errors import MalformedHttpError

CUTS = st.lists(st.integers(0, 500), max_size=8)


def feed(body: Body, data: bytes, cuts: list[int]) -> bytes:
    """The payload of `data` fed in pieces; what follows the end is added to `excess`."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    payload = b""
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        if body.is_complete:
            body.excess += data[start:end]
        else:
            payload += body.feed(data[start:end])
    return payload


@given(chunks=st.lists(st.binary(min_size=1, max_size=40)), rest=st.binary(max_size=20), cuts=CUTS, data=st.data())
def test_a_chunked_body_gives_its_payload_and_the_bytes_behind_it(
    chunks: list[bytes], rest: bytes, cuts: list[int], data: st.DataObject
) -> None:
    extension = st.sampled_from([b"", b";a=b", b';q="x y"', b";a;b=c"])
    trailers = data.draw(st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nZ:\r\n"]))
    wire = b"".join(b"%X%b\r\n%b\r\n" % (len(chunk), data.draw(extension), chunk) for chunk in chunks)
    body = ChunkedBody()
    payload = feed(body, wire + b"000" + data.draw(extension) + b"\r\n" + trailers + b"\r\n" + rest, cuts)
    assert payload == b"".join(chunks)
    assert body.is_complete
    assert body.excess == rest


@given(payload=st.binary(max_size=40), rest=st.binary(max_size=20), cuts=CUTS)
def test_a_body_with_length_gives_that_many_bytes(payload: bytes, rest: bytes, cuts: list[int]) -> None:
    body = LengthBody(len(payload))
    assert feed(body, payload + rest, cuts) == payload
    assert body.is_complete
    assert body.excess == rest


def test_a_body_until_close_takes_everything() -> None:
    body = UntilCloseBody()
    assert feed(body, b"abc" * 10, [3, 7]) == b"abc" * 10
    assert not body.is_complete


@pytest.mark.parametrize(
    "wire",
    [
        b"g\r\n", b"\r\n", b"5", b" 5\r\n", b"5\n", b"5\r5", b"5;\0\r\n", b"5;\n\r\n", b"0x5\r\n", b"1" * 17 + b"\r\n",
        b"2\r\nabc\r\n", b"2\r\nab\n", b"2\r\nab\rc", b"0\r\nno colon\r\n\r\n", b"0\r\nX: y\n\r\n\r\n", b"0\r\n\n",
        b"0\r\nTransfer-Encoding: gzip\r\n\r\n", b"0\r\nContent-Length: 1\r\n\r\n", b"0\r\nHost: a\r\n\r\n",
        b"5;\r\n", b"5;a=\r\n", b"5;a b\r\n", b'5;a="\r\n"\r\n', b"5;;a\r\n",
        b"5;" + b"x" * MAX_CHUNK_LINE_BYTES, b"0\r\nX: " + b"y" * MAX_TRAILER_BYTES,
    ],
    ids=lambda wire: repr(wire[:12]),
)  # fmt: skip
def test_a_malformed_chunk_is_refused_or_waits_and_is_never_complete(wire: bytes) -> None:
    for pieces in ([wire], [bytes([byte]) for byte in wire]):
        body = ChunkedBody()
        try:
            for piece in pieces:
                body.feed(piece)
        except MalformedHttpError:
            continue
        assert not body.is_complete
        assert wire in (b"5", b"5\r5", b"2\r\nab\rc"[:-1]), "only a beginning may wait"


def test_what_waits_between_two_pieces_is_bounded_whatever_the_sizes_are() -> None:
    body = ChunkedBody()
    body.feed(b"FFFFFFFFFFFFFFFF\r\n")
    for _ in range(100):
        assert body.feed(b"x" * 1000) == b"x" * 1000
    assert body._tail == b""
