"""Answers that are known at once: no task, and otherwise like any other."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvist.http import Answer, HttpLimits, HttpServer

TEXT = b"text/plain"


def request(target: bytes = b"/", *, body: bytes = b"", extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST %b HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (target, version, extra, len(body))
    return head + body


class Served:
    """A server whose quick handler answers `/quick` with what it was sent, and leaves the rest to the handler."""

    def __init__(self) -> None:
        self.num_slow = 0

    def quick(self, asked) -> Answer | None:
        return Answer(200, TEXT, b"quick:" + asked.body) if asked.path == "/quick" else None

    async def slow(self, asked, responder) -> None:
        self.num_slow += 1
        await responder.send_response(200, [(b"content-type", TEXT)], b"slow:" + asked.body)


@pytest.fixture
def served():
    return Served()


@pytest.fixture
async def server(served):
    async with HttpServer(served.slow, quick_handler=served.quick) as server:
        yield server


async def exchange(server, data: bytes, num_answers: int) -> list[tuple[bytes, bytes]]:
    """Send bytes, and return the heads and bodies of so many answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    answers = []
    async with asyncio.timeout(20):
        for _ in range(num_answers):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            answers.append((head, await reader.readexactly(length)))
    writer.close()
    return answers


async def test_a_quick_answer_and_a_slow_one_share_a_connection_in_order(server, served):
    data = request(b"/quick", body=b"1") + request(b"/slow", body=b"2") + request(b"/quick", body=b"3")
    assert [body for _, body in await exchange(server, data, 3)] == [b"quick:1", b"slow:2", b"quick:3"]
    assert served.num_slow == 1


async def test_many_pipelined_requests_are_all_answered_in_order(server):
    bodies = [b"%d" % number for number in range(200)]
    data = b"".join(request(b"/quick", body=body) for body in bodies)
    assert [body for _, body in await exchange(server, data, 200)] == [b"quick:" + body for body in bodies]


async def test_a_client_that_pipelines_leaves_turns_to_others(server):
    turns = []

    async def others() -> None:
        while len(turns) < 1000:
            turns.append(server.statistics().num_requests)
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await exchange(server, request(b"/quick") * 200, 200)
    task.cancel()
    steps = [later - earlier for earlier, later in itertools.pairwise(turns)]
    assert max(steps) <= 16


@pytest.mark.parametrize(
    ("version", "extra", "says"),
    [
        (b"1.1", b"", b""),
        (b"1.1", b"connection: close\r\n", b"connection: close"),
        (b"1.0", b"connection: keep-alive\r\n", b"connection: keep-alive"),
        (b"1.0", b"", b"connection: close"),
    ],
)
async def test_a_quick_answer_says_whether_the_connection_stays(server, version, extra, says):
    ((head, body),) = await exchange(server, request(b"/quick", extra=extra, version=version), 1)
    assert says in head
    assert body == b"quick:"


async def test_a_large_body_in_small_pieces_arrives_whole(server):
    body = bytes(range(256)) * 4096
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = request(b"/quick", body=body)
    for start in range(0, len(data), 100_003):
        writer.write(data[start : start + 100_003])
        await writer.drain()
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(body) + 6) == b"quick:" + body
    writer.close()


async def test_a_client_that_does_not_read_is_not_answered_on_and_on(served):
    limits = HttpLimits(write_buffer_bytes=1024, max_body_bytes=1 << 20, write_timeout_s=0.2)
    async with HttpServer(served.slow, quick_handler=served.quick, limits=limits) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(b"/quick", body=bytes(1 << 20)) * 64)
        async with asyncio.timeout(20):
            while server.statistics().num_timeouts == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert server.statistics().num_requests < 64
        writer.close()
