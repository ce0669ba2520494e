"""A server, raw clients that send any bytes and read responses with h11, and raw workers that answer any bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest

from kvist.http import (
    Handler,
    Headers,
    HttpLimits,
    HttpServer,
    Request,
    Responder,
    UpstreamError,
    UpstreamLimits,
    UpstreamPool,
)

READ_TIMEOUT_S = 60.0


@dataclass
class Answer:
    """What an independent parser (h11) makes of a response."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_closing: bool


@dataclass
class RawClient:
    """Sends bytes as they are."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    unread: bytes = b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read_until(self, ending: bytes) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT_S):
            data = self.unread + await self.reader.readuntil(ending)
        self.unread = b""
        return data

    async def read_to_end(self) -> bytes:
        """Everything until the server closes; a reset counts as an end."""
        data = self.unread
        async with asyncio.timeout(READ_TIMEOUT_S):
            with suppress(ConnectionResetError):
                while piece := await self.reader.read(65536):
                    data += piece
        self.unread = b""
        return data

    async def answer(self, method: str = "GET") -> Answer:
        """Reads one response; the bytes behind it are kept for the next."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "test")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(self.unread) if self.unread else None
        head, pieces = None, []
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    parser.receive_data(await self.reader.read(65536))
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    pieces.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    break
        assert head is not None
        self.unread = parser.trailing_data[0]
        headers = {name.decode(): value.decode() for name, value in head.headers}
        return Answer(head.status_code, headers, b"".join(pieces), parser.their_state is h11.MUST_CLOSE)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass
class Worker:
    """A raw upstream: each connection runs `script(reader, writer)`."""

    url: str
    num_connections: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Whatever a test opens, closed in reverse order."""
    async with AsyncExitStack() as exits:
        yield exits


@pytest.fixture
def serve(stack: AsyncExitStack) -> Callable[..., Awaitable[HttpServer]]:
    """Return a coroutine function that starts a server: `await serve(handler, idle_timeout_s=0.05)`."""

    async def start(handler: Handler, **limits: Any) -> HttpServer:
        limits = {"close_timeout_s": 0.2} | limits
        return await stack.enter_async_context(HttpServer(handler, limits=HttpLimits(**limits)))

    return start


@pytest.fixture
def connect(stack: AsyncExitStack) -> Callable[[HttpServer], Awaitable[RawClient]]:
    """Return a coroutine function that opens a raw connection to a server."""

    async def start(server: HttpServer) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", server.port))
        stack.push_async_callback(client.close)
        return client

    return start


@pytest.fixture
def worker(stack: AsyncExitStack) -> Callable[[Script], Awaitable[Worker]]:
    """Return a coroutine function that starts a raw worker."""

    async def start(script: Script) -> Worker:
        made = Worker("")

        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            made.num_connections += 1
            made.tasks.append(asyncio.current_task())  # type: ignore[arg-type]
            try:
                await script(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        async def stop() -> None:
            server.close()
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)

        stack.push_async_callback(stop)
        return made

    return start


@pytest.fixture
def answering(worker: Callable[[Script], Awaitable[Worker]]) -> Callable[..., Awaitable[Worker]]:
    """Return a coroutine function that starts a worker giving each request the same bytes, then closing or not."""

    async def start(response: bytes, *, then_close: bool = False) -> Worker:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await read_request(reader)
                writer.write(response)
                await writer.drain()
                if then_close:
                    return

        return await worker(script)

    return start


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and body of a request with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return head, await reader.readexactly(int(line.split(b":")[1]))
    return head, b""


@pytest.fixture
def next_request() -> Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, bytes]]]:
    """Return `read_request`, for workers with a script of their own."""
    return read_request


@pytest.fixture
def make_pool(stack: AsyncExitStack) -> Callable[..., Awaitable[UpstreamPool]]:
    """Return a coroutine function that opens a pool: `await make_pool(first_byte_timeout_s=0.05)`."""

    async def start(**limits: Any) -> UpstreamPool:
        return await stack.enter_async_context(UpstreamPool(UpstreamLimits(**limits)))

    return start


@pytest.fixture
def echo() -> Handler:
    """A handler that answers with what it was asked."""

    async def handler(request: Request, responder: Responder) -> None:
        responder.answer(200, [], f"{request.method} {request.target} ".encode() + request.body)

    return handler


class Relay:
    """Passes a worker's response on in the callbacks that bring it."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder
        self.exchange: Any = None

    def on_head(self, status: int, headers: Headers) -> None:
        self.responder.start(status, headers)
        self.responder.flush()

    def on_data(self, piece: bytes) -> None:
        self.responder.send(piece)

    def on_end(self) -> None:
        self.responder.end()

    def on_failure(self, error: UpstreamError) -> None:
        if self.responder.has_started:
            self.responder.cut()
        else:
            self.responder.answer(502, [], str(error).encode())

    def pause(self) -> None:
        self.exchange.pause()

    def resume(self) -> None:
        self.exchange.resume()

    def stop(self) -> None:
        self.exchange.close()

    def shut_down(self) -> None:
        self.exchange.close()
        self.responder.cut()


@pytest.fixture(params=["callbacks", "coroutine"])
def forward_to(request: pytest.FixtureRequest) -> Callable[[UpstreamPool, str], Handler]:
    """Return a function that makes a handler forwarding everything to one worker."""

    def make(pool: UpstreamPool, url: str) -> Handler:
        def relay(request: Request, responder: Responder) -> Relay:
            relay = Relay(responder)
            relay.exchange = pool.send(relay, url, request.method, request.target, request.headers, request.body)
            return relay

        async def handler(request: Request, responder: Responder) -> None:
            exchange = pool.exchange(url, request.method, request.target, request.headers, request.body)
            async with exchange as response:
                responder.start(response.status, response.headers)
                responder.flush()
                async for piece in response.body():
                    await responder.write(piece)
                responder.end()

        return relay if request.param == "callbacks" else handler

    return make
