"""Server and pool together: bytes go through unchanged, at once, with back-pressure; nothing outlives its client."""

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvist.http import Handler, HttpServer, UpstreamPool

Serve = Callable[..., Awaitable[HttpServer]]
Connect = Callable[[HttpServer], Awaitable[Any]]
StartWorker = Callable[..., Awaitable[Any]]
MakePool = Callable[..., Awaitable[UpstreamPool]]
ForwardTo = Callable[[UpstreamPool, str], Handler]
NextRequest = Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, bytes]]]
Until = Callable[[Callable[[], object]], Awaitable[None]]

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def proxy(serve: Serve, make_pool: MakePool, worker: StartWorker, forward_to: ForwardTo) -> Any:
    """Return a coroutine function that starts a worker with a script and a proxy before it."""

    async def start(script: Any, **limits: Any) -> tuple[HttpServer, UpstreamPool, Any]:
        pool, made = await make_pool(), await worker(script)
        return await serve(forward_to(pool, made.url), **limits), pool, made

    return start


def framed(payload: bytes, framing: str, cut: random.Random) -> bytes:
    """`payload` as a response in one of the three framings, chunks cut anywhere."""
    if framing == "length":
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload)
    if framing == "until close":
        return b"HTTP/1.1 200 OK\r\n\r\n" + payload
    wire, start = STREAM_HEAD, 0
    while start < len(payload):
        chunk = payload[start : start + cut.choice([1, 2, 50, 5000])]
        wire += b"%x\r\n%b\r\n" % (len(chunk), chunk)
        start += len(chunk)
    return wire + b"0\r\nX-Sum: dropped\r\n\r\n"


@pytest.mark.parametrize("framing", ["length", "chunked", "until close"])
@pytest.mark.parametrize("client_version", ["1.0", "1.1"])
async def test_a_body_goes_through_unchanged_however_it_is_framed_and_split(
    proxy: Any, connect: Connect, next_request: NextRequest, framing: str, client_version: str
) -> None:
    cut = random.Random(framing + client_version)
    payload = cut.randbytes(100_000)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        wire, start = framed(payload, framing, cut), 0
        while start < len(wire):
            end = start + cut.choice([1, 7, 300, 20_000])
            writer.write(wire[start:end])
            await writer.drain()
            start = end

    server, _, _ = await proxy(script)
    client = await connect(server)
    client.send(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % client_version.encode())
    answer = await client.answer()
    assert answer.body == payload
    assert "x-sum" not in answer.headers


async def test_each_byte_reaches_the_client_before_the_worker_sends_the_next(
    proxy: Any, connect: Connect, next_request: NextRequest
) -> None:
    step = asyncio.Semaphore(0)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        for piece in (STREAM_HEAD, b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"):
            writer.write(piece)
            await step.acquire()

    server, _, _ = await proxy(script)
    client = await connect(server)
    client.send(GET)
    assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    for expected in (b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"):
        step.release()
        assert await client.read_until(expected) == expected


async def test_a_request_body_goes_through_unchanged(proxy: Any, connect: Connect, next_request: NextRequest) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await next_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    server, _, made = await proxy(script)
    client = await connect(server)
    payload = random.Random(0).randbytes(300_000)
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload))
    assert (await client.answer()).body == payload
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload))
    assert (await client.answer()).body == payload
    assert made.num_connections == 1


async def test_a_client_that_reads_slowly_slows_the_worker_and_memory_stays_bounded(
    proxy: Any, connect: Connect, next_request: NextRequest, until: Until
) -> None:
    num_chunks, chunk = 600, b"10000\r\n" + b"x" * 65536 + b"\r\n"
    num_sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await next_request(reader)
        writer.write(STREAM_HEAD)
        for _ in range(num_chunks):
            writer.write(chunk)
            await writer.drain()
            num_sent += 1
        writer.write(b"0\r\n\r\n")

    server, pool, _ = await proxy(script)
    client = await connect(server)
    client.writer.transport.pause_reading()
    client.send(GET)
    await until(lambda: any(each.connections for each in pool._workers.values()))
    (upstream,) = next(iter(pool._workers.values())).connections
    await until(lambda: upstream._exchange.is_paused)
    (connection,) = server.connections
    assert num_sent < num_chunks
    assert connection._transport.get_write_buffer_size() <= 65536 + 2 * (65536 + 256 * 1024)
    client.writer.transport.resume_reading()
    assert len((await client.answer()).body) == num_chunks * 65536


@pytest.mark.parametrize("sent", [b"", STREAM_HEAD + b"1\r\na\r\n"], ids=["before the head", "within the body"])
async def test_a_client_that_leaves_closes_the_connection_to_the_worker(
    proxy: Any, connect: Connect, next_request: NextRequest, sent: bytes
) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(sent)
        asked.set()
        try:
            await reader.read()
        finally:
            ended.set()

    server, pool, _ = await proxy(script)
    client = await connect(server)
    client.send(GET)
    await asked.wait()
    await client.close()
    async with asyncio.timeout(60):
        await ended.wait()
    assert not any(each.connections for each in pool._workers.values())


async def test_a_worker_that_dies_within_a_stream_leaves_it_visibly_incomplete(
    proxy: Any, connect: Connect, next_request: NextRequest
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(STREAM_HEAD + b"5\r\nhello\r\n")
        await writer.drain()
        writer.transport.abort()

    server, _, _ = await proxy(script)
    client = await connect(server)
    client.send(GET)
    assert not (await client.read_to_end()).endswith(b"0\r\n\r\n")


async def test_a_client_of_http10_sees_it_as_well_though_the_end_is_all_that_ends_its_answer(
    proxy: Any, connect: Connect, next_request: NextRequest
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(STREAM_HEAD + b"5\r\nhello\r\n")

    server, _, _ = await proxy(script)
    client = await connect(server)
    client.send(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await client.reader.read()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
async def test_httpx_gets_through_with_every_method(proxy: Any, next_request: NextRequest, method: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await next_request(reader)
            answer = b"" if head.startswith(b"HEAD") else head.split(b" ")[0] + body
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(method + "body"), answer))

    server, _, made = await proxy(script)
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(2):
            response = await client.request(method, f"http://127.0.0.1:{server.port}/x", content=b"body")
            assert response.status_code == 200
            assert response.content == (b"" if method == "HEAD" else method.encode() + b"body")
    assert made.num_connections == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-d", "body"], b"body"),
        (["-d", "body", "--http1.0"], b"body"),
        (["-d", "body", "-H", "Transfer-Encoding: chunked"], b"body"),
        (["-d", "body", "-H", "Expect: 100-continue"], b"body"),
        (["-d", "x" * 2_000_000], b"x" * 2_000_000),
    ],
    ids=["post", "http/1.0", "chunked", "expect", "large"],
)
async def test_curl_gets_through(
    proxy: Any, next_request: NextRequest, options: list[str], expected: bytes, tmp_path: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await next_request(reader)
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        await writer.drain()

    server, _, _ = await proxy(script)
    body_file = tmp_path / "body"
    body_file.write_text(options[1])
    url = f"http://127.0.0.1:{server.port}/"
    arguments = ["curl", "-sS", "--max-time", "10", "--data-binary", f"@{body_file}", *options[2:], url]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert output == expected
