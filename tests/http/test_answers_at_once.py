"""Handlers that answer at once: no task, and otherwise like any other."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from kvist.http import HttpLimits, HttpServer

TEXT = b"text/plain"


def request(target: bytes = b"/", *, body: bytes = b"", extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST %b HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (target, version, extra, len(body))
    return head + body


class Served:
    """Two endpoints that answer at once with what they were sent, and one that takes a task."""

    def __init__(self) -> None:
        self.num_slow = 0
        self.quick_body: bytes | None = None

    def __call__(self, asked, responder):
        if asked.method == "POST" and asked.path == "/quick":
            return responder.answer(200, [(b"content-type", TEXT)], self.quick_body or b"quick:" + asked.body)
        if asked.method == "POST" and asked.path == "/other":
            return responder.answer(404, [(b"content-type", TEXT)], b"other:" + asked.body)
        return self.slow(asked, responder)

    async def slow(self, asked, responder) -> None:
        self.num_slow += 1
        responder.answer(200, [(b"content-type", TEXT)], b"slow:" + asked.body)


@pytest.fixture
def served():
    return Served()


@pytest.fixture
async def server(served):
    async with HttpServer(served) as server:
        yield server


async def exchange(server, data: bytes, num_answers: int) -> list[tuple[bytes, bytes]]:
    """Send bytes, and return the heads and bodies of so many answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    answers = []
    async with asyncio.timeout(60):
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


async def test_only_posts_to_its_very_path_are_answered_at_once(server):
    get = b"GET /quick HTTP/1.1\r\nhost: x\r\n\r\n"
    data = get + request(b"/quick/", body=b"1") + request(b"/quick?a=b", body=b"2") + request(b"/QUICK", body=b"3")
    bodies = [body for _, body in await exchange(server, data, 4)]
    assert bodies == [b"slow:", b"slow:1", b"quick:2", b"slow:3"]


async def test_requests_of_every_kind_take_turns_on_a_connection_and_are_never_taken_for_each_other(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    rng = random.Random(1)
    long_field = b"x: " + b"y" * 3000 + b"\r\n"
    targets = {b"/quick": b"quick:", b"/other": b"other:", b"/slow": b"slow:", b"/quick?x": b"quick:"}
    extras = [b"", b"a: b\r\n", b"content-type: text/plain\r\n", long_field]
    target, extra = b"/quick", b""
    for _ in range(1500):
        if rng.random() < 0.4:
            target, extra = rng.choice([*targets]), rng.choice(extras)
        body = b"z" * rng.choice([0, 1, 9, 10, 99, 100, 5000])
        data = request(target, body=body, extra=extra)
        cut = rng.choice([0, 0, 0, rng.randrange(len(data)), len(data) - 1])
        for piece in filter(None, (data[:cut], data[cut:])):
            writer.write(piece)
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404" if target == b"/other" else b"HTTP/1.1 200")
        expected = targets[target] + body
        assert b"content-length: %d\r\n" % len(expected) in head
        assert await reader.readexactly(len(expected)) == expected
    assert server.statistics().num_requests == 1500
    assert server.statistics().num_body_bytes_held == 0
    writer.close()


async def test_a_repeated_request_is_answered_however_it_is_cut(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = request(b"/quick", body=b"0123456789")
    for cut in range(len(data)):
        for piece in filter(None, (data[:cut], data[cut:])):
            writer.write(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        assert (await reader.readuntil(b"quick:0123456789")).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_a_repeated_request_that_is_too_large_is_refused(served):
    async with HttpServer(served, limits=HttpLimits(max_body_bytes=10)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for size, status in ((10, b"200"), (10, b"200"), (11, b"413")):
            writer.write(request(b"/quick", body=b"x" * size))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 %b" % status)
            if status == b"200":
                await reader.readexactly(size + 6)
        assert await reader.read() != b""
        writer.close()


async def test_an_idle_client_is_closed_behind_repeated_requests_too(served, pass_time):
    limits = HttpLimits(idle_timeout_s=3600)
    async with HttpServer(served, limits=limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(3):
            writer.write(request(b"/quick", body=b"x"))
            await reader.readuntil(b"quick:x")
        pass_time(3600)
        assert await reader.read() == b""
        assert server.statistics().num_timeouts == 1
        writer.close()


async def test_a_client_that_reads_no_answers_to_repeated_requests_is_not_answered_on_and_on(served):
    served.quick_body = bytes(1 << 20)
    limits = HttpLimits(write_buffer_bytes=1024, write_timeout_s=0.2, linger_timeout_s=0.1)
    async with HttpServer(served, limits=limits) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.transport.pause_reading()
        async with asyncio.timeout(60):
            while server.statistics().num_timeouts == 0:
                if server.statistics().num_requests < 64:
                    writer.write(request(b"/quick", body=b"x"))
                await asyncio.sleep(0.01)
        assert server.statistics().num_requests < 64
        writer.close()


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


@pytest.mark.parametrize(
    ("version", "extra", "says"),
    [(b"1.1", b"", b""), (b"1.0", b"connection: keep-alive\r\n", b"connection: keep-alive")],
)
async def test_every_answer_says_so_and_not_only_the_first(server, version, extra, says):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(3):
        writer.write(request(b"/quick", extra=extra, version=version))
        head, _, _ = (await reader.readuntil(b"quick:")).partition(b"\r\n\r\n")
        assert head.count(b"\r\n") == 2 + bool(says)
        assert says in head
    writer.close()


async def test_a_body_that_looks_like_a_repeated_request_is_a_body(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    inner = request(b"/quick", body=b"inner")
    outer = request(b"/quick", body=inner)
    for first in (inner, b""):
        writer.write(first + outer[: -len(inner)])
        if first:
            await reader.readuntil(b"quick:inner")
        for _ in range(5):
            await asyncio.sleep(0)
        writer.write(inner)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(6 + len(inner)) == b"quick:" + inner
    writer.close()


async def test_each_repeated_request_moves_the_idle_deadline_on(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    deadlines = []
    for _ in range(3):
        writer.write(request(b"/quick"))
        await reader.readuntil(b"quick:")
        (connection,) = server.connections
        assert connection._deadline.phase == "idle"
        deadlines.append(connection._deadline._when_s + server.clock.late_s)  # the clock stood still so long
    assert deadlines == sorted(set(deadlines))
    writer.close()


async def test_a_large_body_in_small_pieces_arrives_whole(server):
    body = bytes(range(256)) * 4096
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = request(b"/quick", body=body)
    for start in range(0, len(data), 100_003):
        writer.write(data[start : start + 100_003])
        await writer.drain()
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(body) + 6) == b"quick:" + body
    writer.close()


async def test_a_client_that_does_not_read_is_not_answered_on_and_on(served):
    limits = HttpLimits(write_buffer_bytes=1024, max_body_bytes=1 << 20, write_timeout_s=0.2)
    async with HttpServer(served, limits=limits) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(b"/quick", body=bytes(1 << 20)) * 64)
        async with asyncio.timeout(60):
            while server.statistics().num_timeouts == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert server.statistics().num_requests < 64
        writer.close()
