"""Do the router's learnt bounds make a fleet slower than a router without bounds?

Two workers, as processes, run a batch each as engines do: at most so many requests at a time, a step per token that
takes longer with more of them, prompts first, and the rest waiting; /metrics reports how many run and wait, by vLLM's
names. Clients keep a number of requests open, and send the next one when one is answered. Measured are the fleet's
answers a second and the time to the first byte, with the router's defaults and with `--max-worker-requests` out of
reach; both routers run the same work in turn. The workers' steps are the bottleneck: the two may differ by the cost of
the bound, and by the machine's noise, which the spread over rounds shows.

    python benchmarks/bench_admission.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import uvloop
from _common import report, table

NUM_WORKERS = 2
MAX_BATCH = 32
STEP_S = 4e-3
REQUEST_S = 0.05e-3
"""Of a step, for each request in the batch."""
PREFILL_TOKENS = 2048
"""Of a step."""
PREFILL_S = 4e-6
"""Of a step, for each token of a prompt: numbers of an engine made ten times as fast, so that rounds are short."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DATA = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
EVENT = b"%x\r\n%b\r\n" % (len(_DATA), _DATA)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
SIDES = {"defaults": (), "no bounds": ("--max-worker-requests", "1000000")}


@dataclass(frozen=True, slots=True)
class Work:
    """What clients ask for."""

    name: str
    num_clients: int
    num_prompt_tokens: int
    num_output_tokens: int
    is_stream: bool


WORKS = [
    Work("unsaturated, stream, long", 24, 500, 60, True),
    Work("saturated, stream, long", 320, 500, 60, True),
    Work("saturated, unary, short", 320, 20, 3, False),
    Work("saturated, stream, short", 320, 20, 3, True),
    Work("saturated, unary, prompts of 2,000", 320, 2000, 20, False),
]


@dataclass(eq=False, slots=True)
class Job:
    """A request at a worker."""

    transport: asyncio.Transport
    num_prompt_tokens: int
    num_output_tokens: int
    is_stream: bool


class Engine:
    """A batch and a queue, stepped as long as there is work."""

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self._has_work = asyncio.Event()

    def add(self, job: Job) -> None:
        """Queue a request."""
        self.waiting.append(job)
        self._has_work.set()

    async def run(self) -> None:
        """Step for ever."""
        due_s = time.monotonic()
        while True:
            if not self.running and not self.waiting:
                self._has_work.clear()
                await self._has_work.wait()
                due_s = time.monotonic()
            step_s = self._step()
            due_s = max(due_s + step_s, time.monotonic() - STEP_S)
            await asyncio.sleep(due_s - time.monotonic())

    def _step(self) -> float:
        self.running = [job for job in self.running if job.num_output_tokens and not job.transport.is_closing()]
        while self.waiting and self.waiting[0].transport.is_closing():
            self.waiting.popleft()
        budget = PREFILL_TOKENS
        while self.waiting and len(self.running) < MAX_BATCH and budget > 0:
            job = self.waiting[0]
            taken = min(budget, job.num_prompt_tokens)
            job.num_prompt_tokens -= taken
            budget -= taken
            if job.num_prompt_tokens == 0:
                self.running.append(self.waiting.popleft())
                if job.is_stream and not job.transport.is_closing():
                    job.transport.write(HEAD)
        for job in self.running:
            job.num_output_tokens -= 1
            if job.transport.is_closing():
                continue
            if job.is_stream:
                job.transport.write(EVENT if job.num_output_tokens else EVENT + END)
            elif job.num_output_tokens == 0:
                job.transport.write(_whole(b'{"choices":[{"index":0,"text":"a"}]}'))
        return STEP_S + REQUEST_S * len(self.running) + PREFILL_S * (PREFILL_TOKENS - budget)


class WorkerConnection(asyncio.Protocol):
    """Takes one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0):
            return
        self._received = b""
        path = head.split(b" ", 2)[1]
        if path == b"/v1/completions":
            asked = json.loads(body)
            self._engine.add(Job(self._transport, asked["user"], asked["max_tokens"], asked["stream"]))
        elif path == b"/metrics":
            running, waiting = len(self._engine.running), len(self._engine.waiting)
            page = f"vllm:num_requests_running {running}.0\nvllm:num_requests_waiting {waiting}.0\n"
            self._transport.write(_whole(page.encode()))
        else:
            known = {b"/health": b"", b"/v1/models": b'{"data":[{"id":"m"}]}'}
            self._transport.write(_whole(known.get(path, b"{}")))


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def _serve(pipe: Connection) -> None:
    loop, engines = asyncio.get_running_loop(), [Engine() for _ in range(NUM_WORKERS)]
    servers = [
        await loop.create_server(lambda engine=engine: WorkerConnection(engine), "127.0.0.1", 0, backlog=4096)
        for engine in engines
    ]
    pipe.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.gather(*(engine.run() for engine in engines))


def _run_workers(pipe: Connection) -> None:
    uvloop.run(_serve(pipe))


class Client(asyncio.Protocol):
    """Sends a request as soon as the last was answered; notes when each began and ended."""

    def __init__(self, work: Work, samples: list[tuple[float, float]]) -> None:
        fields = {"model": "m", "prompt": "x", "user": work.num_prompt_tokens, "max_tokens": work.num_output_tokens}
        body = json.dumps(fields | {"stream": work.is_stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._request = head + body
        self._ending = b"0\r\n\r\n" if work.is_stream else b"]}"
        self._samples = samples
        self.failure: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._first_byte_s is None:
            self._first_byte_s = time.perf_counter() - self._sent_s
            if data[9:12] != b"200":
                self.failure = data
                self._transport.close()
                return
        if data.endswith(self._ending):
            self._samples.append((time.perf_counter(), self._first_byte_s))
            self._send()

    def close(self) -> None:
        """Leave."""
        self._transport.abort()

    def _send(self) -> None:
        self._sent_s, self._first_byte_s = time.perf_counter(), None
        self._transport.write(self._request)


async def drive(port: int, work: Work, warm_up_s: float, duration_s: float) -> tuple[float, list[float]]:
    """Return answers a second and times to the first byte, once a warm-up is over."""
    samples: list[tuple[float, float]] = []
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(work, samples), "127.0.0.1", port))[1]
        for _ in range(work.num_clients)
    ]
    await asyncio.sleep(warm_up_s)
    begun_s = time.perf_counter()
    await asyncio.sleep(duration_s)
    ended_s = time.perf_counter()
    for client in clients:
        client.close()
    failures = [client.failure for client in clients if client.failure]
    if failures:
        raise RuntimeError(f"{work.name}: {failures[0]!r}")
    counted = [first_byte_s for at_s, first_byte_s in samples if begun_s <= at_s < ended_s]
    return len(counted) / (ended_s - begun_s), counted


class Sides:
    """The workers and a router of each side in front of them."""

    def __enter__(self) -> dict[str, int]:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._workers: BaseProcess = spawn.Process(target=_run_workers, args=(theirs,), daemon=True)
        self._workers.start()
        urls = [f"http://127.0.0.1:{port}" for port in ours.recv()]
        self._routers, ports = [], {}
        for side, flags in SIDES.items():
            command = [sys.executable, "-m", "kvist", "--log-level", "error", "route", "--policy", "least-loaded"]
            command += ["--port", "0", "--worker-urls", *urls, *flags]
            router = subprocess.Popen(command, stdout=subprocess.PIPE)
            self._routers.append(router)
            assert router.stdout is not None
            ports[side] = int(router.stdout.readline().split(b"http://127.0.0.1:")[1].split()[0])
        return ports

    def __exit__(self, *_: object) -> None:
        for router in self._routers:
            router.kill()
            router.wait()
        self._workers.kill()
        self._workers.join()


def main() -> None:
    """Measure, and print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="keep the result below benchmarks/results")
    options = parser.parse_args()
    num_rounds, warm_up_s, duration_s = (1, 2.0, 2.0) if options.quick else (3, 3.0, 5.0)
    rates: dict[tuple[str, str], list[float]] = {}
    firsts: dict[tuple[str, str], list[float]] = {}
    with Sides() as ports:
        for idx in range(num_rounds):
            for work in WORKS:
                for side in list(SIDES)[:: 1 if idx % 2 else -1]:
                    rate, first_bytes_s = uvloop.run(drive(ports[side], work, warm_up_s, duration_s))
                    rates.setdefault((work.name, side), []).append(rate)
                    firsts.setdefault((work.name, side), []).extend(first_bytes_s)
                    print(work.name, side, round(rate), file=sys.stderr)
                    time.sleep(0.5)
    rows, results = [], []
    for (name, side), values in rates.items():
        cuts = statistics.quantiles(firsts[name, side], n=100)
        rows.append((name, side, f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"))
        rows[-1] += (f"{cuts[49] * 1e3:.0f} / {cuts[98] * 1e3:.0f}",)
        results.append({"work": name, "side": side, "rates": values, "p50_s": cuts[49], "p99_s": cuts[98]})
    markdown = table(["work", "router", "answers/s: median (all rounds)", "first byte p50 / p99, ms"], sorted(rows))
    report("admission", markdown, {"rows": results}, ["uvloop"], options.save)


if __name__ == "__main__":
    main()
