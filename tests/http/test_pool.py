"""The pool reuses what is alive, sends a request at most once, and says of a failure what the worker may have seen."""

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.http import (
    ConnectError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamPool,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from kvist.http.fields import Headers

MakePool = Callable[..., Awaitable[UpstreamPool]]
StartWorker = Callable[..., Awaitable[Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]
NextRequest = Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, bytes]]]

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Told:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.ended = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.events.append((status, headers))

    def on_data(self, piece: bytes) -> None:
        self.events.append(piece)

    def on_end(self) -> None:
        self.events.append("end")
        self.ended.set()

    def on_failure(self, error: UpstreamError) -> None:
        self.events.append(error)
        self.ended.set()


def num_idle(pool: UpstreamPool) -> int:
    return sum(len(worker.idle) for worker in pool._workers.values())


def num_active(pool: UpstreamPool) -> int:
    return sum(len(worker.connections) for worker in pool._workers.values()) - num_idle(pool)


async def ask(pool: UpstreamPool, url: str, method: str = "POST", body: bytes = b"{}") -> tuple[int, bytes]:
    async with pool.exchange(url, method, "/", [], body) as response:
        return response.status, b"".join([piece async for piece in response.body()])


async def test_a_connection_is_reused_once_its_response_has_ended(make_pool: MakePool, answering: StartWorker) -> None:
    pool, worker = await make_pool(), await answering(HELLO)
    for _ in range(3):
        assert await ask(pool, worker.url) == (200, b"hello")
    assert worker.num_connections == 1
    assert num_idle(pool) == 1


async def test_each_running_exchange_has_its_own_connection(make_pool: MakePool, answering: StartWorker) -> None:
    pool, worker = await make_pool(max_idle_connections=2), await answering(HELLO)
    await asyncio.gather(*[ask(pool, worker.url) for _ in range(5)])
    assert worker.num_connections == 5
    assert num_idle(pool) == 2


async def test_the_request_is_framed_anew(make_pool: MakePool, worker: StartWorker, next_request: NextRequest) -> None:
    requests: list[tuple[bytes, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await next_request(reader))
        writer.write(HELLO)

    pool, made = await make_pool(), await worker(script)
    headers: Headers = [
        (b"host", b"public.example"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"99"),
        (b"expect", b"100-continue"),
        (b"connection", b"x-private"),
        (b"x-private", b"1"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"authorization", b"Bearer k"),
    ]
    url = made.url + "/prefix/"
    told = Told()
    pool.send(told, url, "POST", "/v1?a=b", headers, b"body", forwarded_for="10.0.0.2")
    await told.ended.wait()
    assert told.events == [(200, [(b"content-length", b"5")]), b"hello", "end"]
    host = made.url.removeprefix("http://").encode()
    assert requests == [
        (
            b"POST /prefix/v1?a=b HTTP/1.1\r\nhost: " + host + b"\r\nauthorization: Bearer k\r\n"
            b"x-forwarded-for: 10.0.0.1, 10.0.0.2\r\ncontent-length: 4\r\n\r\n",
            b"body",
        ),
    ]


@pytest.mark.parametrize(
    "url",
    ["", "a:80", "ftp://a", "http://", "http://u@a", "http://a?b", "http://a#b", "http://a b", "http://a\r\nX: y", "http://ä",
     "http://a..b", "http://.a", "http://" + "a" * 64, "http://a:0", "http://a:65536", "http://a:99999"],
)  # fmt: skip
async def test_a_base_url_that_is_none_is_refused_by_name(make_pool: MakePool, url: str) -> None:
    pool = await make_pool()
    with pytest.raises(InvalidValueError, match="base_url"):
        pool.send(Told(), url, "GET", "/", [])


async def test_a_target_that_would_split_the_request_is_refused(make_pool: MakePool) -> None:
    pool = await make_pool()
    with pytest.raises(ValueError, match="CR, LF"):
        pool.send(Told(), "http://127.0.0.1:1", "GET", "/ HTTP/1.1\r\nX: y", [])


# What failed, and whether the worker may have seen the request.


async def test_a_worker_that_is_not_there_is_a_connect_error(make_pool: MakePool, free_port: Callable[[], int]) -> None:
    pool, url = await make_pool(), f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectError) as error:
        await ask(pool, url)
    assert error.value.worker == url


async def test_every_address_of_a_worker_is_tried(
    make_pool: MakePool, answering: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, worker = await make_pool(), await answering(HELLO)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert await ask(pool, worker.url.replace("127.0.0.1", "worker.invalid")) == (200, b"hello")
    found.pop()
    with pytest.raises(ConnectError, match="cannot connect"):
        await ask(pool, worker.url.replace("127.0.0.1", "other.invalid"))


async def test_a_worker_that_does_not_answer_the_handshake_is_a_connect_error(
    make_pool: MakePool, worker: StartWorker
) -> None:
    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    pool, made = await make_pool(connect_timeout_s=0.05), await worker(script)
    with pytest.raises(ConnectError, match="no connection within"):
        await ask(pool, made.url.replace("http:", "https:"))


async def test_a_pooled_connection_the_worker_has_closed_is_replaced_before_anything_is_sent(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest
) -> None:
    requests: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while True:
            requests.append((await next_request(reader))[1])
            writer.write(HELLO)

    pool, made = await make_pool(), await worker(script)
    assert await ask(pool, made.url, body=b"1") == (200, b"hello")
    (connection,) = pool._workers[made.url].idle
    connection._transport.pause_reading()  # the end of the stream stays in the kernel, unseen by the loop
    writers[0].close()
    await writers[0].wait_closed()
    assert await ask(pool, made.url, body=b"2") == (200, b"hello")
    assert requests == [b"1", b"2"]
    assert len(writers) == 2


async def test_a_pooled_connection_leaves_the_pool_when_the_worker_closes_it(
    make_pool: MakePool, answering: StartWorker, until: Until
) -> None:
    pool, worker = await make_pool(), await answering(HELLO, then_close=True)
    assert await ask(pool, worker.url) == (200, b"hello")
    await until(lambda: num_idle(pool) == 0)
    assert worker.url not in pool._workers


async def test_a_worker_is_not_silent_that_spoke_over_a_connection_which_is_closed(
    make_pool: MakePool, worker: StartWorker, until: Until
) -> None:
    pool, requests = await make_pool(), 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        if requests == 1:
            await asyncio.Event().wait()
        writer.write(HELLO.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))

    started, told = await worker(script), Told()
    exchange = pool.send(told, started.url, "GET", "/", [])
    await until(lambda: requests == 1)
    assert pool.silent_s(started.url) == float("inf")
    await ask(pool, started.url, "GET", b"")
    await until(lambda: num_active(pool) == 1)
    assert pool.silent_s(started.url) < 60
    exchange.close()


async def test_a_pooled_connection_on_which_the_worker_speaks_unasked_is_closed(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest, until: Until
) -> None:
    speak = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(HELLO)
        await speak.wait()
        writer.write(HELLO)
        await reader.read()

    pool, made = await make_pool(), await worker(script)
    await ask(pool, made.url)
    assert num_idle(pool) == 1
    speak.set()
    await until(lambda: num_idle(pool) == 0)


async def test_a_pooled_connection_is_closed_after_its_time(
    make_pool: MakePool, answering: StartWorker, until: Until
) -> None:
    pool, worker = await make_pool(pooled_timeout_s=0.05), await answering(HELLO)
    await ask(pool, worker.url)
    await until(lambda: num_idle(pool) == 0)


async def test_a_reused_connection_closed_after_the_request_was_sent_is_not_retried(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest
) -> None:
    num_requests = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        await next_request(reader)
        writer.write(HELLO)
        await next_request(reader)
        num_requests += 1

    pool, made = await make_pool(), await worker(script)
    await ask(pool, made.url)
    with pytest.raises(UpstreamClosedError):
        await ask(pool, made.url)
    assert num_requests == 1
    assert made.num_connections == 1


BROKEN = {
    "closed at once": b"",
    "closed within the head": b"HTTP/1.1 200 OK\r\nConte",
    "closed after the head": STREAM_HEAD,
    "closed within a chunk": STREAM_HEAD + b"5\r\nhel",
    "closed between chunks": STREAM_HEAD + b"5\r\nhello\r\n",
    "closed before the last crlf": STREAM_HEAD + b"5\r\nhello\r\n0\r\n",
    "closed within a length": HELLO[:-1],
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
async def test_a_worker_that_dies_within_its_response_is_a_closed_error(
    make_pool: MakePool, answering: StartWorker, sent: bytes
) -> None:
    pool, worker = await make_pool(), await answering(sent, then_close=True)
    with pytest.raises(UpstreamClosedError):
        await ask(pool, worker.url)
    assert num_active(pool) == 0


async def test_what_arrived_before_a_worker_died_is_delivered(make_pool: MakePool, answering: StartWorker) -> None:
    pool, worker = await make_pool(), await answering(STREAM_HEAD + b"5\r\nhello\r\n", then_close=True)
    pieces: list[bytes] = []

    async def collect() -> None:
        async with pool.exchange(worker.url, "GET", "/", []) as response:
            async for piece in response.body():
                pieces.append(piece)

    with pytest.raises(UpstreamClosedError):
        await collect()
    assert b"".join(pieces) == b"hello"


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", STREAM_HEAD + b"zz\r\n"], ids=["head", "body"])
async def test_a_malformed_response_is_a_protocol_error(
    make_pool: MakePool, answering: StartWorker, sent: bytes
) -> None:
    pool, worker = await make_pool(), await answering(sent)
    with pytest.raises(UpstreamProtocolError):
        await ask(pool, worker.url)
    assert num_idle(pool) == 0


@pytest.mark.parametrize(
    ("sent", "phase"), [(b"", "first_byte"), (b"HTTP/1.1 200", "first_byte"), (STREAM_HEAD, "idle")]
)
async def test_a_worker_that_is_silent_too_long_is_a_timeout(
    make_pool: MakePool, answering: StartWorker, sent: bytes, phase: str
) -> None:
    pool, worker = await make_pool(**{f"{phase}_timeout_s": 0.05}), await answering(sent)
    with pytest.raises(UpstreamTimeoutError, match=f"{phase} timeout after 0.05 s"):
        await ask(pool, worker.url)


EXCESS = {"length": HELLO + b"!", "chunked": STREAM_HEAD + b"5\r\nhello\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"}


@pytest.mark.parametrize("sent", EXCESS.values(), ids=EXCESS.keys())
async def test_bytes_behind_a_response_are_dropped_with_the_connection(
    make_pool: MakePool, answering: StartWorker, sent: bytes
) -> None:
    pool, worker = await make_pool(), await answering(sent)
    for num_connections in (1, 2):
        assert await ask(pool, worker.url) == (200, b"hello")
        assert num_idle(pool) == 0
        assert worker.num_connections == num_connections


async def test_a_body_that_ends_with_the_connection_is_delivered_whole(
    make_pool: MakePool, answering: StartWorker
) -> None:
    pool = await make_pool()
    worker = await answering(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000, then_close=True)
    assert await ask(pool, worker.url) == (200, b"x" * 100_000)
    assert num_idle(pool) == 0


async def test_a_response_to_head_has_no_body(make_pool: MakePool, answering: StartWorker) -> None:
    pool, worker = await make_pool(), await answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert await ask(pool, worker.url, "HEAD", b"") == (200, b"")
    assert num_idle(pool) == 1


async def test_an_answer_before_the_request_was_read_ends_the_connection(
    make_pool: MakePool, worker: StartWorker
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HELLO)
        await asyncio.Event().wait()

    pool, made = await make_pool(), await worker(script)
    assert await ask(pool, made.url, body=b"x" * 64 * 1024 * 1024) == (200, b"hello")
    assert num_idle(pool) == 0


# Cancellation: nobody waits, so the worker must know.


async def seen_by_worker(
    worker: StartWorker, next_request: NextRequest, sent: bytes
) -> tuple[Any, asyncio.Event, asyncio.Event]:
    """A worker that sends some bytes, and two events: it has got the request; it has seen the connection end."""
    asked, ended = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(sent)
        asked.set()
        try:
            await reader.read()
        finally:
            ended.set()

    return await worker(script), asked, ended


@pytest.mark.parametrize("sent", [b"", STREAM_HEAD, STREAM_HEAD + b"5\r\nhello\r\n"], ids=["head", "body", "more"])
async def test_cancelling_an_exchange_closes_its_connection_at_once(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest, sent: bytes
) -> None:
    pool = await make_pool()
    made, asked, ended = await seen_by_worker(worker, next_request, sent)
    asking = asyncio.create_task(ask(pool, made.url))
    await asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(60):
        await ended.wait()
    assert num_active(pool) == 0
    assert num_idle(pool) == 0


async def test_cancelling_while_connecting_leaves_nothing_open(make_pool: MakePool, worker: StartWorker) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(1)  # of a handshake that is never answered
        asked.set()
        await reader.read()
        ended.set()

    pool, made = await make_pool(), await worker(script)
    asking = asyncio.create_task(ask(pool, made.url.replace("http:", "https:")))
    await asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(60):
        await ended.wait()


async def test_leaving_a_response_unread_closes_its_connection(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest
) -> None:
    pool = await make_pool()
    made, _, ended = await seen_by_worker(worker, next_request, STREAM_HEAD)
    async with pool.exchange(made.url, "GET", "/", []) as response:
        assert response.status == 200
    async with asyncio.timeout(60):
        await ended.wait()


async def test_closing_the_pool_closes_running_exchanges(worker: StartWorker, next_request: NextRequest) -> None:
    made, asked, ended = await seen_by_worker(worker, next_request, b"")
    async with UpstreamPool() as pool:
        asking = asyncio.create_task(ask(pool, made.url))
        await asked.wait()
    with pytest.raises(UpstreamError):
        await asking
    async with asyncio.timeout(60):
        await ended.wait()


async def test_a_slow_consumer_makes_the_worker_wait(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest, until: Until
) -> None:
    num_sent = 0
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await next_request(reader)
        writer.write(STREAM_HEAD)
        for _ in range(600):
            writer.write(piece)
            await writer.drain()
            num_sent += 1
        writer.write(b"0\r\n\r\n")

    pool, made = await make_pool(), await worker(script)
    async with pool.exchange(made.url, "GET", "/", []) as response:
        await until(lambda: response._exchange.is_paused)
        assert response._num_unread_bytes <= 65536 + 256 * 1024
        assert num_sent < 600
        total = sum([len(piece) async for piece in response.body()])
    assert total == 600 * 65536
    assert num_idle(pool) == 1


async def test_requests_beyond_the_connections_being_opened_wait_for_one_that_is_free(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await next_request(reader)
            writer.write(HELLO)

    pool, made = await make_pool(max_connecting=2), await worker(script)
    told = [Told() for _ in range(100)]
    for each in told:
        pool.send(each, made.url, "GET", "/", [])
    most_at_once = 0
    while not all(each.ended.is_set() for each in told):
        most_at_once = max(most_at_once, pool._workers[made.url].num_connecting)
        await asyncio.sleep(0)
    assert most_at_once == 2
    assert all(each.events[1:] == [b"hello", "end"] for each in told)


async def test_a_worker_that_cannot_be_reached_fails_all_that_wait_and_asks_nobody_else_to(
    make_pool: MakePool, free_port: Callable[[], int]
) -> None:
    pool, url = await make_pool(max_connecting=1), f"http://127.0.0.1:{free_port()}"
    told = [Told() for _ in range(50)]
    exchanges = [pool.send(each, url, "GET", "/", []) for each in told]
    exchanges[7].close()
    await asyncio.gather(*(each.ended.wait() for each in told if each is not told[7]))
    assert all(
        isinstance(each.events[0], ConnectError) and len(each.events) == 1 for each in told if each is not told[7]
    )
    assert told[7].events == []
    assert not pool._workers


async def test_a_shortage_of_descriptors_is_not_the_workers_fault(
    make_pool: MakePool, answering: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, worker, told = await make_pool(), await answering(HELLO), Told()

    async def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "create_connection", fail)
        pool.send(told, worker.url, "GET", "/", [])
        await told.ended.wait()
    assert told.events[0].is_ours
    assert await ask(pool, worker.url) == (200, b"hello")


async def test_a_busy_loop_blames_no_worker(
    make_pool: MakePool, worker: StartWorker, next_request: NextRequest
) -> None:
    """Connecting, and the first byte, may take half a second: ten times that passes in a loop that does not run."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(HELLO)

    pool = await make_pool(connect_timeout_s=0.5, first_byte_timeout_s=0.5)
    made, told = await worker(script), Told()
    pool.send(told, made.url, "GET", "/", [])
    for _ in range(8):
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251
    await told.ended.wait()
    assert told.events[1:] == [b"hello", "end"]
