"""The server starts and stops as it promises: within its descriptors, running requests within their time."""

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from kvist.http import Handler, HttpLimits, HttpServer, Request, Responder, default_max_connections

Connect = Callable[[HttpServer], Awaitable[Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_an_idle_connection_is_closed_when_the_server_closes(connect: Connect, echo: Handler) -> None:
    async with HttpServer(echo) as server:
        client = await connect(server)
        client.send(GET)
        assert (await client.answer()).status == 200
        port = server.port
    assert await client.read_to_end() == b""
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_server_that_cannot_listen_leaves_no_timer_in_the_loop(echo: Handler) -> None:
    loop: Any = asyncio.get_running_loop()
    async with HttpServer(echo) as server:
        num_timers = sum(not timer.cancelled() for timer in loop._scheduled)
        with pytest.raises(OSError, match="in use"):
            await HttpServer(echo, port=server.port).__aenter__()
        assert sum(not timer.cancelled() for timer in loop._scheduled) == num_timers


async def test_a_running_request_is_answered_before_the_server_has_closed(connect: Connect) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def handler(_: Request, responder: Responder) -> None:
        started.set()
        await release.wait()
        responder.answer(200, [], b"done")

    async with HttpServer(handler) as server:
        client = await connect(server)
        client.send(GET)
        await started.wait()
        asyncio.get_running_loop().call_later(0.02, release.set)
    answer = await client.answer()
    assert (answer.body, answer.headers["connection"]) == (b"done", "close")
    assert await client.read_to_end() == b""


async def test_a_request_that_outlasts_the_close_timeout_is_cancelled(connect: Connect) -> None:
    started, ended = asyncio.Event(), []

    async def handler(_: Request, __: Responder) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async with HttpServer(handler, limits=HttpLimits(close_timeout_s=0.02)) as server:
        client = await connect(server)
        client.send(GET)
        await started.wait()
    assert ended == ["cancelled"]
    assert server.statistics().num_connections == 0


async def test_closing_can_itself_be_cancelled_and_still_cuts_connections_off(connect: Connect) -> None:
    started, ended = asyncio.Event(), []

    async def handler(_: Request, __: Responder) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def run() -> None:
        async with HttpServer(handler, limits=HttpLimits(close_timeout_s=60)) as server:
            client = await connect(server)
            client.send(GET)
            await started.wait()

    running = asyncio.create_task(run())
    await started.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["cancelled"]


class Streaming:
    """A response that ends with last words."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder
        responder.start(200, [])
        responder.send(b"first words")

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop(self) -> None: ...

    def shut_down(self) -> None:
        self.responder.send(b", last words")
        self.responder.end()


async def test_a_response_that_outlasts_the_close_timeout_ends_as_its_producer_says(connect: Connect) -> None:
    async with HttpServer(lambda _, to: Streaming(to), limits=HttpLimits(close_timeout_s=0.02)) as server:
        client = await connect(server)
        client.send(GET)
        client.unread = await client.read_until(b"first words")
    assert (await client.answer()).body == b"first words, last words"
    assert await client.read_to_end() == b""


async def test_a_server_whose_block_fails_waits_for_nobody(connect: Connect) -> None:
    server = HttpServer(lambda _, to: Streaming(to), limits=HttpLimits(close_timeout_s=10_000))
    await server.__aenter__()
    client = await connect(server)
    client.send(GET)
    client.unread = await client.read_until(b"first words")
    await server.__aexit__(ZeroDivisionError)
    assert (await client.answer()).body == b"first words, last words"


async def test_a_client_that_reads_nothing_does_not_hold_the_end_up(connect: Connect) -> None:
    def handler(_: Request, responder: Responder) -> Streaming:
        streaming = Streaming(responder)
        responder.send(bytes(64 << 20))
        return streaming

    limits = HttpLimits(close_timeout_s=0.02, linger_timeout_s=0.02)
    async with HttpServer(handler, limits=limits) as server:
        client = await connect(server)
        client.send(GET)
        client.unread = await client.read_until(b"first words")
    assert server.statistics().num_connections == 0


async def test_without_descriptors_connections_wait_and_the_log_is_not_flooded(
    echo: Handler, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async with HttpServer(echo) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            await until(lambda: caplog.records)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        num_lines = len(caplog.records)
        assert all("out of system resource" in record.message for record in caplog.records)
        for client in clients:
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
        assert num_lines <= 33  # of 100: asyncio tries as often as connections may wait, from 3.14 on once more


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        (1024, 4096, 4096, 2048),
        (1024, 1024, None, 512),
        (1024, resource.RLIM_INFINITY, 1 << 20, 1 << 16),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1 << 16),
        (1024, 1 << 30, 1 << 20, 1 << 16),
    ],
)
def test_half_of_the_descriptors_there_may_be_are_for_clients(monkeypatch, soft, hard, raised, allowed) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert default_max_connections() == allowed
    assert asked == ([] if raised is None else [(raised, hard)])


async def test_a_start_that_is_cancelled_leaves_no_socket_behind(echo: Handler, free_port: Callable[[], int]) -> None:
    """Whatever was bound by then: the port can be bound again, at each step of the start."""
    port = free_port()
    for num_steps in range(8):
        starting = asyncio.create_task(HttpServer(echo, port=port).__aenter__())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            server = await starting
            await server.__aexit__(None)
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
