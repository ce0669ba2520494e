"""Scripted workers over real sockets, and a router in front of them."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.indexer.compilation import compile_all
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService
from kvist.router.fleet.board import LoadBoard, board_bytes
from kvist.router.fleet.load import LoadTracker
from kvist.router.processes.front import make_part
from kvist.router.processes.keeper import KeeperProcess
from kvist.router.processes.supervisor import Part


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Routers of this process need not wait for their index."""
    compile_all()


@pytest.fixture(autouse=True)
def _checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers have asked each of their workers once before they listen, however busy the machine is."""
    monkeypatch.setattr("kvist.router.fleet.membership.FIRST_CHECKS_S", 180.0)


@dataclass
class Received:
    """A request as a worker saw it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes, *, status: int = 200, content_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def completion(cached_tokens: int | None = None, prompt_tokens: int = 100) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return json.dumps({"id": "c", "choices": [{"text": "hi"}], "usage": usage}).encode()


@dataclass
class ScriptedWorker:
    """Answers what it is told to; `answer` replaces the answer to everything but health and identity."""

    models: list[dict[str, Any]] | None = field(default_factory=lambda: [{"id": "m", "object": "model"}])
    server_info: dict[str, Any] | None = None
    metrics: str | None = None
    version: dict[str, Any] | None = None
    event_sources: dict[str, Any] | None = None
    health_status: int = 200
    cached_tokens: int | None = None
    answer: Answer | None = None
    received: list[Received] = field(default_factory=list)
    health_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, health checks wait."""
    port: int = 0
    num_disconnects: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[Any] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self.health_gate.set()
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Received]:
        return [received for received in self.received if received.method == "POST"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is not None and not self._server.is_serving():  # accepted just before it was killed
            writer.transport.abort()
            return
        self._writers.add(writer)
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while True:
                received = await self._read(reader)
                self.received.append(received)
                await self._reply(received, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_disconnects += 1
        except asyncio.CancelledError:
            pass  # by `__aexit__`; asyncio's stream server would report it as an error
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Received:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.strip().split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        while headers.get("transfer-encoding") == "chunked":
            size = int(await reader.readuntil(b"\r\n"), 16)
            body += (await reader.readexactly(size + 2))[:-2]
            if size == 0:
                break
        return Received(method, target, headers, body)

    async def _reply(self, received: Received, writer: asyncio.StreamWriter) -> None:
        if received.target == "/health":
            await self.health_gate.wait()
            writer.write(response(b"", status=self.health_status))
        elif received.target in (
            told := {
                "/server_info": self.server_info,
                "/version": self.version,
                "/kv_event_sources": self.event_sources,
            }
        ):
            known = told[received.target] is not None
            writer.write(response(json.dumps(told[received.target]).encode(), status=200 if known else 404))
        elif received.target == "/metrics":
            known = self.metrics is not None
            writer.write(response((self.metrics or "").encode(), status=200 if known else 404))
        elif received.target == "/v1/models":
            known = self.models is not None
            writer.write(response(json.dumps({"data": self.models}).encode(), status=200 if known else 404))
        elif self.answer is not None:
            await self.answer(received, writer)
        else:
            writer.write(response(completion(self.cached_tokens)))


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds, at most three minutes."""
    async with asyncio.timeout(180):
        while not await condition():  # noqa: ASYNC110 - what is waited for is behind a socket
            await asyncio.sleep(0.005)


class _ReadsErrors(httpx.AsyncHTTPTransport):
    """Reads streams as clients do that know events: up to one that says why the stream is cut behind it."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _UpToError(response)
        return response


class _UpToError(httpx.AsyncByteStream):
    """Notes in the response's extensions that it was `broken_off`."""

    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream, self._extensions = response.stream, response.extensions

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = b""
        try:
            async for piece in self._stream:
                body += piece
                yield piece
        except httpx.RemoteProtocolError:
            if not body.endswith(b"\n\n") or b'"error"' not in body.split(b"\n\n")[-2]:
                raise
            self._extensions["broken_off"] = True

    async def aclose(self) -> None:
        await self._stream.aclose()


@dataclass
class RunningRouter:
    service: RouterService
    client: httpx.AsyncClient

    async def complete(self, prompt: object = "hello", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    async def workers(self) -> dict[str, dict[str, Any]]:
        answer = await self.client.get("/workers")
        return {worker["url"]: worker for worker in answer.json()["workers"]}

    def hold(self, url: str, tokens: list[int], tier: Tier = Tier.GPU) -> None:
        """Put blocks into the index as if the worker's stream had told of them."""
        self.service.keeper.index.radix.store(WorkerRank(url, 0), tier, None, block_hashes(tokens, 16))

    async def explain(self, tokens: list[int]) -> dict[str, Any]:
        return (await self.client.post("/route", json={"token_ids": tokens, "model": "m"})).json()

    async def until_overlap(self, url: str, tokens: list[int], num_blocks: int) -> None:
        """Wait until the index knows that many leading blocks on the worker's GPU."""

        async def is_so() -> bool:
            candidates = (await self.explain(tokens))["candidates"]
            return any(each["worker"] == url and each["overlap_blocks"]["gpu"] == num_blocks for each in candidates)

        await eventually(is_so)

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, as Prometheus reads them."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the condition holds."""
        await eventually(condition)

    async def until_state(self, url: str, state: str) -> None:
        async def is_so() -> bool:
            return (await self.workers()).get(url, {"state": "gone"})["state"] == state

        await eventually(is_so)

    async def until_sources(self, url: str, *endpoints: str) -> None:
        """Wait until the router follows exactly these streams for the worker."""

        async def is_so() -> bool:
            sources = (await self.workers())[url]["kv_events"]["sources"]
            return [source["url"] for source in sources] == list(endpoints)

        await eventually(is_so)

    async def until_ranks(self, url: str, num_ranks: int) -> None:
        """Wait until the router chooses among that many ranks of the worker."""

        async def is_so() -> bool:
            decided = await self.explain([1, 2])
            candidates = decided["candidates"] + decided.get("prefill", {"candidates": []})["candidates"]
            return sum(each["worker"] == url for each in candidates) == num_ranks

        await eventually(is_so)

    async def is_ready(self) -> bool:
        return all(worker["state"] == "healthy" for worker in (await self.workers()).values())


@asynccontextmanager
async def running_router(*urls: str, ready: bool = True, **values: Any) -> AsyncIterator[RunningRouter]:
    """A router on a free port, once every worker has been judged."""
    fast = {"health_interval_s": 0.05, "health_timeout_s": 10.0, "breaker_cooldown_s": 0.2, "drain_timeout_s": 2.0}
    fast |= {"port": 0, "shutdown_timeout_s": 10.0}  # a test that fails leaves requests behind
    config = RouterConfig(worker_urls=urls, **(fast | values))
    async with (
        RouterService(config) as service,
        httpx.AsyncClient(base_url=service.url, timeout=60, transport=_ReadsErrors()) as client,
    ):
        router = RunningRouter(service, client)
        if ready:
            await eventually(router.is_ready)
        yield router


@pytest.fixture
def fronts_of(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[list[RouterService]]]:
    """A keeper and fronts as processes have them, in this one: they share a board and an index, and tell by sockets."""

    @asynccontextmanager
    async def running(config: RouterConfig, number: int) -> AsyncIterator[list[RouterService]]:
        descriptor = os.memfd_create("board")
        os.ftruncate(descriptor, board_bytes(number))
        board = LoadBoard(mmap.mmap(descriptor, 0), num_fronts=number)
        async with AsyncExitStack() as exits:
            exits.callback(os.close, descriptor)
            await exits.enter_async_context(KeeperProcess(config, tmp_path, LoadTracker(board), 0.0))
            bells = tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(number))
            for bell in bells:
                exits.callback(os.close, bell)
            parts = [make_part(config, Part(n, str(tmp_path), descriptor, bells, 0), 0.0) for n in range(number)]
            yield [await exits.enter_async_context(part) for part in parts if isinstance(part, RouterService)]

    return running


@pytest.fixture
def worker(free_ports: Callable[[int], int]) -> type[ScriptedWorker]:
    class Worker(ScriptedWorker):
        """Keeps its port for when it starts again."""

        async def start(self) -> None:
            self.port = self.port or free_ports(1)
            await super().start()

    return Worker


@pytest.fixture
def router() -> Callable[..., AbstractAsyncContextManager[RunningRouter]]:
    return running_router


class Engine:
    """The cache of an engine that streams what it stores, in any number of ranks."""

    def __init__(
        self, worker: str, url: str = "tcp://127.0.0.1:0", num_ranks: int = 1, *, block_size: int = 16
    ) -> None:
        limits = PublisherLimits(heartbeat_s=0.1)
        self.block_size = block_size
        self.publisher = KvEventPublisher(url, worker=worker, block_size=block_size, num_ranks=num_ranks, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.publisher.close()

    @property
    def server_info(self) -> dict[str, Any]:
        """What the engine's worker answers to `GET /server_info`."""
        events = {"endpoint": self.publisher.endpoint}
        return {"engine": "kvist", "version": "0.1", "block_size": self.block_size, "kv_events": events}

    def store(self, tokens: list[int], rank: int = 0, tier: Tier = Tier.GPU) -> None:
        size = self.block_size
        num_blocks = len(tokens) // size
        names = [hash(tuple(tokens[: size * (idx + 1)])) for idx in range(num_blocks)]
        self.publisher.stored(names, tokens[: size * num_blocks], rank=rank, tier=tier)


@pytest.fixture
def engine() -> type[Engine]:
    return Engine


@pytest.fixture
def http_bytes() -> Any:
    """How a worker's answer looks on the wire."""

    class HttpBytes:
        response = staticmethod(response)
        chunk = staticmethod(chunk)
        completion = staticmethod(completion)
        event_stream_head = EVENT_STREAM_HEAD

    return HttpBytes
