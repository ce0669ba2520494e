"""The server stops as it promises: idle connections at once, running requests within their time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvist.http import Handler, HttpLimits, HttpServer, Request, Responder

Connect = Callable[[HttpServer], Awaitable[Any]]
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


async def test_a_running_request_is_answered_before_the_server_has_closed(connect: Connect) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def handler(_: Request, responder: Responder) -> None:
        started.set()
        await release.wait()
        await responder.send_response(200, [], b"done")

    async with HttpServer(handler) as server:
        client = await connect(server)
        client.send(GET)
        await started.wait()
        asyncio.get_running_loop().call_later(0.02, release.set)
    assert (await client.answer()).body == b"done"
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
