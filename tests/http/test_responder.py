"""A response is framed for its request, sent once, and as long as it says."""

import asyncio
from typing import Any

import h11
import pytest

from kvist.http import Request, Responder
from kvist.http.fields import Headers


class Wire:
    """A client connection that keeps what is sent, and whose buffer a test may fill."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.has_room = asyncio.Event()
        self.has_room.set()

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def cut(self) -> None:
        self.sent.append(None)

    def on_response_start(self) -> None:
        """There is no body to count."""

    def on_response_end(self) -> None:
        """A coroutine's response; the connection learns of its end by the task's."""

    async def drained(self) -> None:
        await self.has_room.wait()


def respond_to(method: str = "GET", http_version: Any = "1.1", keep_alive: bool = True) -> tuple[Wire, Responder]:
    wire = Wire()
    request = Request(method, "/", [], b"", None, http_version, keep_alive)
    return wire, Responder(wire, request, keep_alive=keep_alive)


def read_back(wire: Wire, method: str) -> tuple[int, dict[str, str], bytes]:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(b"".join(wire.sent))
    parser.receive_data(b"")
    head, body = parser.next_event(), b""
    while isinstance(event := parser.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert parser.trailing_data[0] == b""
    return head.status_code, {name.decode(): value.decode() for name, value in head.headers}, body


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("status", [200, 204, 304, 404, 599])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"10")]], ids=["no length", "length"])
@pytest.mark.parametrize("http_version", ["1.0", "1.1"])
async def test_every_framing_is_read_back_by_h11(method: str, status: int, headers: Headers, http_version: str) -> None:
    wire, responder = respond_to(method, http_version)
    responder.start(status, headers)
    for _ in range(2):
        await responder.write(b"hello")
    responder.end()
    has_body = method == "GET" and status not in (204, 304)
    read_status, read_headers, body = read_back(wire, method)
    assert read_status == status
    assert body == (b"hellohello" if has_body else b"")
    assert ("transfer-encoding" in read_headers) == (has_body and not headers and http_version == "1.1")
    assert ("content-length" in read_headers) == (bool(headers) and status != 204)
    assert responder.is_finished


async def test_a_whole_response_goes_out_in_one_piece_with_its_length() -> None:
    wire, responder = respond_to()
    responder.answer(200, [(b"content-type", b"text/plain"), (b"content-length", b"999")], b"hello")
    assert wire.sent == [b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"]


async def test_the_head_goes_out_with_the_first_piece_or_when_it_is_flushed() -> None:
    wire, responder = respond_to()
    responder.start(200, [])
    await responder.write(b"x")
    assert len(wire.sent) == 1
    wire, responder = respond_to()
    responder.start(200, [])
    assert responder.has_started
    assert wire.sent == []
    responder.flush()
    responder.flush()
    assert len(wire.sent) == 1


async def test_an_empty_piece_does_not_end_a_chunked_body() -> None:
    wire, responder = respond_to()
    responder.start(200, [])
    await responder.write(b"")
    await responder.write(b"x")
    responder.end()
    assert read_back(wire, "GET")[2] == b"x"


async def test_a_response_that_is_refused_leaves_room_for_another() -> None:
    wire, responder = respond_to()
    refused: list[tuple[int, Headers]] = [
        (100, []),
        (99999, []),
        (200, [(b"transfer-encoding", b"chunked")]),
        (200, [(b"connection", b"upgrade")]),
        (200, [(b"x", b"a\r\nb: c")]),
        (200, [(b"content-length", b"-1")]),
        (200, [(b"content-length", b"9"), (b"x", b"a\0b")]),
    ]
    for status, headers in refused:
        with pytest.raises(ValueError, match=r"."):
            responder.start(status, headers)
        assert not responder.has_started
    responder.start(200, [])
    await responder.write(b"ok")
    responder.end()
    assert read_back(wire, "GET")[2] == b"ok"


async def test_a_body_longer_or_shorter_than_its_length_is_refused() -> None:
    _, responder = respond_to()
    responder.start(200, [(b"content-length", b"3")])
    with pytest.raises(ValueError, match="leaves 3"):
        await responder.write(b"four")
    await responder.write(b"no")
    with pytest.raises(ValueError, match="1 bytes short"):
        responder.end()
    assert not responder.is_finished


async def test_steps_out_of_order_are_refused() -> None:
    _, responder = respond_to()
    with pytest.raises(RuntimeError, match="send"):
        await responder.write(b"x")
    with pytest.raises(RuntimeError, match="end"):
        responder.end()
    responder.answer(200, [])
    with pytest.raises(RuntimeError, match="already started"):
        responder.start(200, [])
    with pytest.raises(RuntimeError, match="send"):
        await responder.write(b"x")


async def test_writing_waits_for_room_within_a_long_piece_too() -> None:
    wire, responder = respond_to()
    responder.start(200, [(b"content-length", b"1000000")])
    wire.has_room.clear()
    waiting = asyncio.create_task(responder.write(bytes(1_000_000)))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert sum(map(len, wire.sent)) < 100_000
    wire.has_room.set()
    await waiting
    responder.end()
    assert read_back(wire, "GET")[2] == bytes(1_000_000)


async def test_writing_waits_for_room_and_can_be_cancelled() -> None:
    wire, responder = respond_to()
    wire.has_room.clear()
    responder.start(200, [])
    waiting = asyncio.create_task(responder.write(b"x"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(wire.sent) == 1, "it waits behind what it has sent, not before"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
