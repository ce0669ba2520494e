"""How many requests a second does one core forward?

Bound by the proxy's own Python: the upstream and the load generator are raw asyncio protocols that parse nothing, in
processes of their own. The figure to compare is requests per second of the *proxy's* CPU time, which other processes on
the machine move least; wall-clock throughput stands beside it. `direct` is the ceiling of the generator and upstream;
`asyncio pipe`, which copies bytes without reading them, is what the event loop and the system calls cost any proxy.
`kvist data path` only forwards; `kvist route` is the whole router, which reads the prompt, decides and counts as well.
Baseline: uvicorn (httptools) with an httpx client, the proxy one writes in an afternoon.

    python benchmarks/bench_proxy.py [--quick] [--save] [--connections 64]
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import httpx
import psutil
import uvicorn
from _common import report, table

from kvist.http import HttpServer, Request, Responder, UpstreamPool
from kvist.router.config import PolicyName, RouterConfig
from kvist.router.doors.service import RouterService

BODY = json.dumps({"model": "m", "prompt": list(range(1000, 1036)), "max_tokens": 16}).encode()
ANSWER = b'{"id":"cmpl-1","object":"text_completion","choices":[{"text":"' + b"y" * 160 + b'"}],"done":true}'
EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'
NUM_EVENTS = 64
UNARY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST_CHUNK = b"0\r\n\r\n"
ABOUT_WORKER = b'HTTP/1.1 200 OK\r\ncontent-length: 23\r\n\r\n{"data": [{"id": "m"}]}'
ENDINGS = {"unary": ANSWER[-12:], "stream": LAST_CHUNK}


class Upstream(asyncio.Protocol):
    """Answers `?unary` at once, and `?stream` with one event per loop turn."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.received.startswith(b"GET "):  # the router asks how its worker is
            self.received = b""
            self.transport.write(ABOUT_WORKER)
        if not self.received.endswith(BODY):
            return
        is_unary = self.received.startswith(b"POST /v1/completions?unary")
        self.received = b""
        if is_unary:
            self.transport.write(UNARY)
        else:
            self.transport.write(STREAM_HEAD)
            asyncio.get_running_loop().call_soon(self.send_event, NUM_EVENTS)

    def send_event(self, num_left: int) -> None:
        self.transport.write(CHUNK if num_left else LAST_CHUNK)
        if num_left:
            asyncio.get_running_loop().call_soon(self.send_event, num_left - 1)


async def serve_upstream(ready: Connection, _upstream_url: str) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=1024)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class Pipe(asyncio.Protocol):
    """One end of a pair of connections; what arrives at one end leaves by the other, unread."""

    def __init__(self, upstream_port: int | None = None) -> None:
        self.upstream_port = upstream_port
        self.other: Pipe | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self.upstream_port is not None:
            self.connecting = asyncio.create_task(self.connect(self.upstream_port))

    async def connect(self, port: int) -> None:
        _, self.other = await asyncio.get_running_loop().create_connection(Pipe, "127.0.0.1", port)
        self.other.other = self
        self.other.transport.write(b"".join(self.early))

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)


async def serve_pipe(ready: Connection, upstream_url: str) -> None:
    upstream_port = int(upstream_url.rpartition(":")[2])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Pipe(upstream_port), "127.0.0.1", 0, backlog=1024)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def serve_data_path(ready: Connection, upstream_url: str) -> None:
    async with UpstreamPool() as pool:

        async def forward(request: Request, responder: Responder) -> None:
            async with pool.exchange(
                upstream_url, request.method, request.target, request.headers, request.body
            ) as response:
                responder.start(response.status, response.headers)
                async for piece in response.body():
                    await responder.write(piece)
                await responder.finish()

        async with HttpServer(forward) as server:
            ready.send(server.port)
            await asyncio.Event().wait()


async def serve_router(policy: PolicyName, ready: Connection, upstream_url: str) -> None:
    config = RouterConfig(worker_urls=(upstream_url,), policy=policy, block_size=16, port=0)
    async with RouterService(config) as service:
        ready.send(int(service.url.rpartition(":")[2]))
        await asyncio.Event().wait()


async def serve_httpx(ready: Connection, upstream_url: str) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            message = await receive()
            headers = [field for field in scope["headers"] if field[0] not in (b"host", b"content-length")]
            url = f"{upstream_url}{scope['path']}?{scope['query_string'].decode()}"
            async with client.stream(scope["method"], url, headers=headers, content=message["body"]) as response:
                kept = [f for f in response.headers.raw if f[0].lower() != b"transfer-encoding"]
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})

        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        config = uvicorn.Config(app, http="httptools", loop="asyncio", lifespan="off", log_level="error")
        ready.send(listener.getsockname()[1])
        await uvicorn.Server(config).serve(sockets=[listener])


class Client(asyncio.Protocol):
    """Sends the next request as soon as the last byte of a response is there."""

    def __init__(self, answer: str, latencies_s: list[float]) -> None:
        self.request = b"POST /v1/completions?%b HTTP/1.1\r\nhost: bench\r\n" % answer.encode()
        self.request += b"content-type: application/json\r\n"
        self.request += b"authorization: Bearer sk-bench\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
        self.ending = ENDINGS[answer]
        self.latencies_s = latencies_s
        self.is_stopping = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.send()

    def send(self) -> None:
        self.started_s = time.perf_counter()
        self.last = b""
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.last = (self.last + data)[-16:]
        if self.last.endswith(self.ending):
            self.latencies_s.append(time.perf_counter() - self.started_s)
            if self.is_stopping:
                self.transport.close()
                self.ended.set_result(None)
            else:
                self.send()


async def load(port: int, answer: str, num_connections: int, duration_s: float) -> list[float]:
    """The latency of each response within `duration_s`."""
    latencies_s: list[float] = []
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(answer, latencies_s), "127.0.0.1", port))[1]
        for _ in range(num_connections)
    ]
    await asyncio.sleep(duration_s / 4)
    latencies_s.clear()
    await asyncio.sleep(duration_s)
    for client in clients:
        client.is_stopping = True
    measured_s = list(latencies_s)
    await asyncio.gather(*(client.ended for client in clients))
    return measured_s


def run_server(serve: Callable[[Connection, str], object], ready: Connection, upstream_url: str) -> None:
    asyncio.run(serve(ready, upstream_url))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Figures:
    requests_per_cpu_s: float
    requests_per_s: float
    p50_ms: float
    p99_ms: float


def measure(pid: int, port: int, answer: str, num_connections: int, duration_s: float) -> Figures:
    process = psutil.Process(pid)
    before_s = sum(process.cpu_times()[:2])
    latencies_s = asyncio.run(load(port, answer, num_connections, duration_s))
    # The warm-up is a fifth of the whole run, and costs the proxy its share.
    cpu_s = (sum(process.cpu_times()[:2]) - before_s) * 0.8
    cuts = statistics.quantiles(latencies_s, n=100)
    return Figures(len(latencies_s) / cpu_s, len(latencies_s) / duration_s, cuts[49] * 1e3, cuts[98] * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="keep the result below benchmarks/results")
    parser.add_argument("--connections", type=int, default=64)
    options = parser.parse_args()
    duration_s, num_rounds = (1.0, 1) if options.quick else (4.0, 3)
    spawn = multiprocessing.get_context("spawn")
    servers = {
        "direct": serve_upstream,
        "asyncio pipe": serve_pipe,
        "kvist data path": serve_data_path,
        "kvist route, round-robin": functools.partial(serve_router, "round-robin"),
        "kvist route, kv": functools.partial(serve_router, "kv"),
        "uvicorn + httpx": serve_httpx,
    }
    running: dict[str, tuple[int, int]] = {}
    processes = []
    for name, serve in servers.items():
        ours, theirs = spawn.Pipe()
        upstream_url = f"http://127.0.0.1:{running['direct'][1]}" if running else ""
        process = spawn.Process(target=run_server, args=(serve, theirs, upstream_url), daemon=True)
        process.start()
        processes.append(process)
        running[name] = (process.pid or 0, ours.recv())
    rows: dict[str, dict[str, Figures]] = {}
    for answer in ENDINGS:
        for name, (pid, port) in running.items():
            figures = [measure(pid, port, answer, options.connections, duration_s) for _ in range(num_rounds)]
            rows.setdefault(answer, {})[name] = sorted(figures, key=lambda f: f.requests_per_cpu_s)[num_rounds // 2]
    for process in processes:
        process.kill()
    show(rows, options.connections, options.save)


def show(rows: dict[str, dict[str, Figures]], num_connections: int, save: bool) -> None:
    cells = [
        (answer, name, round(f.requests_per_cpu_s), round(f.requests_per_s), f"{f.p50_ms:.2f}", f"{f.p99_ms:.2f}")
        for answer, by_name in rows.items()
        for name, f in by_name.items()
    ]
    markdown = f"{num_connections} connections, {len(BODY)} B requests; a stream is {NUM_EVENTS} events\n\n" + table(
        ["answer", "proxy", "requests / CPU s", "requests / s", "p50 ms", "p99 ms"], cells
    )
    results = {
        "requests_per_cpu_s": {
            answer: {name: round(f.requests_per_cpu_s) for name, f in by_name.items()}
            for answer, by_name in rows.items()
        },
        "kvist_over_uvicorn_httpx": {
            answer: round(
                by_name["kvist data path"].requests_per_cpu_s / by_name["uvicorn + httpx"].requests_per_cpu_s, 1
            )
            for answer, by_name in rows.items()
        },
    }
    report("proxy", markdown, results, ["uvicorn", "httpx", "httptools"], save)


if __name__ == "__main__":
    main()
