"""Requests on one connection: keep-alive, pipelining, slow clients, clients that leave, handlers that fail."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvist.http import ClientDisconnectedError, Handler, HttpServer, Request, Responder

Serve = Callable[..., Awaitable[HttpServer]]
Connect = Callable[[HttpServer], Awaitable[Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_a_connection_serves_one_request_after_another(serve: Serve, connect: Connect, echo: Handler) -> None:
    client = await connect(await serve(echo))
    for i in range(3):
        client.send(b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi" % i)
        answer = await client.answer()
        assert (answer.status, answer.body, answer.is_closing) == (200, b"POST /%d hi" % i, False)


async def test_pipelined_requests_are_handled_one_at_a_time_and_answered_in_order(
    serve: Serve, connect: Connect
) -> None:
    running: set[str] = set()

    async def handler(request: Request, responder: Responder) -> None:
        assert not running
        running.add(request.path)
        await asyncio.sleep(0)
        running.remove(request.path)
        responder.answer(200, [], request.path.encode())

    client = await connect(await serve(handler))
    client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % i for i in range(20)))
    assert [(await client.answer()).body for _ in range(20)] == [b"/%d" % i for i in range(20)]


async def test_reading_pauses_while_a_client_pipelines_more_than_it_may(
    serve: Serve, connect: Connect, until: Until
) -> None:
    release = asyncio.Event()

    async def handler(_: Request, responder: Responder) -> None:
        await release.wait()
        responder.answer(200, [])

    server = await serve(handler, max_pipelined_bytes=1000)
    client = await connect(server)
    num_requests = 200_000
    client.send(GET * num_requests)
    await until(lambda: server.statistics().num_requests)
    (connection,) = server.connections
    await until(lambda: not connection._transport.is_reading())
    assert connection._parser.num_buffered_bytes <= 1000 + 2 * 256 * 1024
    release.set()
    for _ in range(1000):
        assert (await client.answer()).status == 200


async def test_reading_pauses_while_a_client_reads_no_answers_and_goes_on_when_it_does(
    serve: Serve, connect: Connect, until: Until
) -> None:
    def handler(_: Request, responder: Responder) -> None:
        responder.answer(200, [], bytes(16 << 20))  # more than the system takes

    server = await serve(handler, max_pipelined_bytes=1000)
    client = await connect(server)
    client.writer.transport.pause_reading()
    client.send(GET)
    await until(lambda: server.statistics().num_requests)
    client.send(GET * 100_000)
    (connection,) = server.connections
    await until(lambda: not connection._transport.is_reading())
    assert connection._parser.num_buffered_bytes <= 1000 + 2 * 256 * 1024
    client.writer.transport.resume_reading()
    for _ in range(3):
        assert len((await client.answer()).body) == 16 << 20


@pytest.mark.parametrize(
    ("request_bytes", "is_closing", "connection"),
    [
        (b"GET / HTTP/1.0\r\nHost: a\r\n\r\n", True, "close"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n", False, "keep-alive"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", True, "close"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\n", True, "close"),
        (GET, False, None),
    ],
    ids=["1.0", "1.0 keep-alive", "1.1 close", "1.1 close in a list", "1.1"],
)
async def test_the_connection_is_kept_as_the_client_asked(
    serve: Serve, connect: Connect, echo: Handler, request_bytes: bytes, is_closing: bool, connection: str | None
) -> None:
    client = await connect(await serve(echo))
    client.send(request_bytes)
    answer = await client.answer()
    assert answer.headers.get("connection") == connection
    if is_closing:
        assert await client.read_to_end() == b""
    else:
        client.send(request_bytes)
        assert (await client.answer()).status == 200


async def test_100_continue_is_sent_before_the_body_is_read(serve: Serve, connect: Connect, echo: Handler) -> None:
    client = await connect(await serve(echo))
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"h")
    client.send(b"i")
    assert (await client.answer()).body == b"POST / hi"


async def test_100_continue_is_not_sent_when_the_body_is_there(serve: Serve, connect: Connect, echo: Handler) -> None:
    client = await connect(await serve(echo))
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nhi")
    assert (await client.read_until(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_an_absolute_target_for_this_host_is_read_as_a_path(
    serve: Serve, connect: Connect, echo: Handler
) -> None:
    client = await connect(await serve(echo))
    client.send(b"GET http://A:80?x=1 HTTP/1.1\r\nHost: a:80\r\n\r\n")
    assert (await client.answer()).body == b"GET /?x=1 "


# Slow clients.

SLOW = {
    "nothing at all": (b"", {"idle_timeout_s": 0.05}, None),
    "half a head": (b"GET / HTTP/1.1\r\nHos", {"header_timeout_s": 0.05}, "header_timeout"),
    "no body": (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", {"body_timeout_s": 0.05}, "body_timeout"),
    "half a chunk": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhi",
        {"body_timeout_s": 0.05},
        "body_timeout",
    ),
    "no body after 100": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
        {"body_timeout_s": 0.05},
        "body_timeout",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "limits", "code"), SLOW.values(), ids=SLOW.keys())
async def test_a_client_that_sends_too_slowly_is_told_408_and_closed(
    serve: Serve, connect: Connect, echo: Handler, sent: bytes, limits: dict[str, float], code: str | None
) -> None:
    server = await serve(echo, linger_timeout_s=0.05, **limits)
    client = await connect(server)
    client.send(sent)
    if code is not None:
        answer = await client.answer()
        assert answer.status == 408
        assert json.loads(answer.body)["error"]["code"] == code
    assert await client.read_to_end() == b""
    assert server.statistics().num_timeouts >= 1


async def test_a_head_that_trickles_in_does_not_move_its_deadline(
    serve: Serve, connect: Connect, echo: Handler
) -> None:
    server = await serve(echo, header_timeout_s=0.1, linger_timeout_s=0.05)
    client = await connect(server)

    async def trickle() -> None:
        for byte in b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000:
            client.send(bytes([byte]))
            await asyncio.sleep(0.01)

    trickling = asyncio.create_task(trickle())
    assert (await client.answer()).status == 408
    trickling.cancel()


async def test_a_kept_connection_is_closed_when_idle(
    serve: Serve, connect: Connect, echo: Handler, pass_time: Callable[[float], None]
) -> None:
    client = await connect(await serve(echo, idle_timeout_s=3600))
    client.send(GET)
    assert (await client.answer()).status == 200
    pass_time(3600)
    assert await client.read_to_end() == b""


async def test_a_client_that_does_not_read_makes_write_wait_and_is_cut_off(
    serve: Serve, connect: Connect, until: Until
) -> None:
    num_written = 0
    ended: list[str] = []

    async def handler(_: Request, responder: Responder) -> None:
        nonlocal num_written
        responder.start(200, [])
        try:
            while True:
                await responder.write(b"x" * 65536)
                num_written += 65536
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    server = await serve(handler, write_buffer_bytes=65536, write_timeout_s=0.1)
    client = await connect(server)
    client.writer.transport.pause_reading()
    client.send(GET)
    await until(lambda: ended)
    assert num_written < 32 * 1024 * 1024, "only the kernel's buffers and the high-water mark may hold it"
    await until(lambda: server.statistics().num_connections == 0)
    assert server.statistics().num_timeouts == 1


async def test_an_answer_that_is_never_read_does_not_hold_the_connection(
    serve: Serve, connect: Connect, until: Until
) -> None:
    async def handler(_: Request, responder: Responder) -> None:
        responder.answer(200, [], b"x" * 16 * 1024 * 1024)

    server = await serve(handler, write_timeout_s=0.05, linger_timeout_s=0.05)
    client = await connect(server)
    client.writer.transport.pause_reading()
    client.send(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
    await until(lambda: server.statistics().num_requests)
    await until(lambda: server.statistics().num_connections == 0)


# Clients that leave.


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_a_client_that_leaves_cancels_the_handler(serve: Serve, connect: Connect, until: Until, how: str) -> None:
    started, ended = asyncio.Event(), []

    async def handler(_: Request, responder: Responder) -> None:
        responder.start(200, [])
        await responder.write(b"x")
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(ClientDisconnectedError):
                await responder.write(b"y")
            ended.append("cancelled")
            raise

    server = await serve(handler)
    client = await connect(server)
    client.send(GET)
    await started.wait()
    if how == "half-close":
        client.writer.write_eof()
    elif how == "close":
        client.writer.close()
    else:
        client.writer.transport.abort()
    await until(lambda: ended)
    await until(lambda: server.statistics().num_connections == 0)
    assert server.statistics().num_disconnects == 1
    assert server.statistics().num_handler_failures == 0


async def test_a_client_that_leaves_with_its_response_does_not_cancel_what_the_handler_still_does(
    serve: Serve, connect: Connect, until: Until
) -> None:
    answered, release, ended = asyncio.Event(), asyncio.Event(), []

    async def handler(_: Request, responder: Responder) -> None:
        responder.answer(200, [])
        answered.set()
        await release.wait()
        ended.append("in peace")

    server = await serve(handler)
    client = await connect(server)
    client.send(GET)
    await answered.wait()
    await client.close()
    await until(lambda: server.statistics().num_connections == 0)
    release.set()
    await until(lambda: ended)
    assert server.statistics().num_disconnects == 0


# Handlers that fail.


async def test_a_handler_that_raises_before_it_answers_is_logged_and_answered_500(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(_: Request, __: Responder) -> None:
        raise LookupError("no such thing")

    server = await serve(handler)
    client = await connect(server)
    with caplog.at_level(logging.ERROR):
        client.send(GET)
        answer = await client.answer()
    assert answer.status == 500
    assert "no such thing" not in answer.body.decode()
    assert "no such thing" in caplog.text
    assert server.statistics().num_handler_failures == 1


async def test_a_handler_that_returns_without_an_answer_is_answered_500(serve: Serve, connect: Connect) -> None:
    async def handler(_: Request, __: Responder) -> None:
        return

    client = await connect(await serve(handler))
    client.send(GET)
    assert (await client.answer()).status == 500


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"10")]], ids=["chunked", "length"])
async def test_a_handler_that_fails_within_its_answer_leaves_it_visibly_incomplete(
    serve: Serve, connect: Connect, headers: list[tuple[bytes, bytes]]
) -> None:
    async def handler(_: Request, responder: Responder) -> None:
        responder.start(200, headers)
        await responder.write(b"half")
        raise LookupError

    client = await connect(await serve(handler))
    client.send(GET)
    data = await client.read_to_end()
    assert not data.endswith(b"0\r\n\r\n")


# Limits over all connections.


class Work:
    """Answers `/health` at once, and anything else when it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = asyncio.Event()

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.path != "/health":
            self.num_begun += 1
            await self.may_end.wait()
        responder.answer(200, [], b"done")


HEALTH = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"
POST_WITH_A_BODY = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 5\r\n\r\n"


async def test_clients_that_only_hold_connections_make_room_for_others_the_idlest_first(
    serve: Serve, connect: Connect, echo: Handler, until: Until
) -> None:
    server = await serve(echo, max_connections=3)
    silent, trickling, served = [await connect(server) for _ in range(3)]
    trickling.send(b"GET / HT")
    for _ in range(2):
        served.send(GET)
        assert (await served.answer()).status == 200
    for closed in (silent, trickling):
        newcomer = await connect(server)
        newcomer.send(GET)
        assert (await newcomer.answer()).status == 200
        assert await closed.read_to_end() == b""
    served.send(GET)
    assert (await served.answer()).status == 200
    await until(lambda: server.statistics().num_connections == 3)
    assert server.statistics().num_evicted == 2


async def test_requests_under_way_are_never_cut_for_a_newcomer_who_is_told_503_and_health_is_answered(
    serve: Serve, connect: Connect, until: Until
) -> None:
    work = Work()
    server = await serve(work, max_connections=2, max_guests=1, linger_timeout_s=5)
    busy, uploading = [await connect(server) for _ in range(2)]
    busy.send(GET)
    uploading.send(POST_WITH_A_BODY + b"1234")
    await until(lambda: work.num_begun == 1)
    for request in (GET, POST_WITH_A_BODY):
        newcomer = await connect(server)
        newcomer.send(request)
        answer = await newcomer.answer()
        assert (answer.status, answer.is_closing) == (503, True)
        assert json.loads(answer.body)["error"]["code"] == "overloaded"
    silent = [await connect(server) for _ in range(5)]
    for _ in range(3):
        probe = await connect(server)
        probe.send(HEALTH)
        answer = await probe.answer()
        assert (answer.status, answer.is_closing) == (200, True)
    for client in silent:
        assert await client.read_to_end() == b""
    uploading.send(b"5")
    work.may_end.set()
    for client in (busy, uploading):
        assert (await client.answer()).status == 200


async def test_a_newcomer_without_a_place_that_asks_for_nothing_is_told_503(
    serve: Serve, connect: Connect, until: Until
) -> None:
    work = Work()
    server = await serve(work, max_connections=1, guest_timeout_s=0.01)
    busy = await connect(server)
    busy.send(GET)
    await until(lambda: work.num_begun == 1)
    assert (await (await connect(server)).answer()).status == 503


async def test_a_client_that_has_not_read_its_answer_is_not_taken_for_idle(
    serve: Serve, connect: Connect, until: Until
) -> None:
    async def answer_at_length(_: Request, responder: Responder) -> None:
        responder.answer(200, [], b"x" * 32 * 1024 * 1024)

    server = await serve(answer_at_length, max_connections=1, write_buffer_bytes=64 * 1024 * 1024)
    slow = await connect(server)
    slow.send(GET)
    await until(lambda: server.statistics().num_requests == 1)
    newcomer = await connect(server)
    newcomer.send(GET)
    assert (await newcomer.answer()).status == 503
    assert len((await slow.answer()).body) == 32 * 1024 * 1024


async def test_one_address_has_no_more_than_its_share_if_there_is_one(
    serve: Serve, connect: Connect, until: Until
) -> None:
    work = Work()
    server = await serve(work, max_connections=8, max_connections_per_peer=2)
    busy = [await connect(server) for _ in range(2)]
    for client in busy:
        client.send(GET)
    await until(lambda: work.num_begun == 2)
    third = await connect(server)
    third.send(GET)
    assert (await third.answer()).status == 503
    await third.close()
    work.may_end.set()
    for client in busy:
        assert (await client.answer()).status == 200
        await client.close()
    await until(lambda: server.statistics().num_connections == 0)
    again = await connect(server)
    again.send(GET)
    assert (await again.answer()).status == 200


async def test_bodies_held_by_all_connections_are_bounded_and_given_back(
    serve: Serve, connect: Connect, until: Until
) -> None:
    release = asyncio.Event()

    async def handler(_: Request, responder: Responder) -> None:
        await release.wait()
        responder.answer(200, [])

    server = await serve(handler, max_buffered_body_bytes=150, linger_timeout_s=0.05)
    first, second = await connect(server), await connect(server)
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
    first.send(post + b"x" * 100)
    await until(lambda: server.statistics().num_body_bytes_held == 100)
    second.send(post + b"x" * 60)
    assert (await second.answer()).status == 503
    assert server.statistics().num_body_bytes_held == 100
    release.set()
    assert (await first.answer()).status == 200
    await until(lambda: server.statistics().num_body_bytes_held == 0)


async def test_a_body_is_not_held_while_a_long_answer_is_sent(serve: Serve, connect: Connect) -> None:
    may_end = asyncio.Event()

    async def handler(_: Request, responder: Responder) -> None:
        responder.start(200, [])
        await responder.write(b"begun")
        await may_end.wait()
        responder.end()

    server = await serve(handler, max_buffered_body_bytes=150)
    clients = [await connect(server) for _ in range(3)]
    for client in clients:
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n" + b"x" * 100)
        await client.reader.readuntil(b"begun")
        assert server.statistics().num_body_bytes_held == 0
    may_end.set()
