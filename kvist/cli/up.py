"""`kvist up`: a router and bundled workers from one command, with real requests and where each went.

Router and workers are the ordinary `kvist route` and `kvist serve` commands, run as child processes. The conversations
of the demo have several turns and share system prompts, as those of a fleet of assistants do. Two routers stand in
front of the same workers; one routes by prefix, the other round robin. Each run starts on flushed caches and the order
alternates, so that neither policy profits from the other's blocks or from a warm machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import inspect
import json
import os.path
import queue
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import TYPE_CHECKING, Any, Self
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from kvist.cli._terminal import on_signal
from kvist.errors import InvalidValueError, KvistError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console


HELP = "start a router and bundled workers, send real conversations through them, and keep serving"

_URL = re.compile(rb"http://[^\s,]+")
_LOOK_S = 0.1
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 300.0, 4.0
"""How long a child may take to be ready, compiling included, and to end when asked."""
_SHUTDOWN_TIMEOUT_S = "2"
"""Less than what a child gets to end in."""
_DEMO_LOCAL_TOKENS = "64"
"""Conversations of the demo grow by some hundred tokens a turn, so that most turns are handed over."""
_NUM_ROUNDS = 2
_NUM_CLIENTS = 4
_MAX_TOKENS = 24
_REQUEST_TIMEOUT_S = 120.0
_SETTLE_TIMEOUT_S = 10.0
_MAX_QUOTE_CHARS = 240
_open = build_opener(ProxyHandler({})).open  # of this machine, whatever proxy the environment names
_RULES = """Answer in complete sentences and say only what the documentation says. When a function raises an
exception, name the exception and the condition. When an argument has a default value, state the default value. When the
behaviour depends on the platform or on the version of Python, say which platform and which version. Never invent a
module, a function or an argument. Prefer the simplest function of the standard library that does the job."""
_FILES = f"You are an assistant for people who work with files and paths in Python. {_RULES}"
_TEXT = f"You are an assistant for people who work with text and regular expressions in Python. {_RULES}"
_CONCURRENCY = f"You are an assistant for people who write concurrent programs in Python. {_RULES}"
# Six conversations over three system prompts: the user asks about one function after the other.
_CONVERSATIONS: tuple[tuple[str, tuple[Callable[..., Any], ...]], ...] = (
    (_FILES, (os.path.join, os.path.abspath, os.walk, os.makedirs, os.path.split)),
    (_TEXT, (re.compile, re.findall, re.sub, str.split, str.replace)),
    (_CONCURRENCY, (threading.Thread, queue.Queue.get, queue.Queue.put, asyncio.run, asyncio.sleep)),
    (_FILES, (shutil.copyfile, shutil.copytree, shutil.rmtree, shutil.move, shutil.which)),
    (_TEXT, (str.strip, str.join, str.format, re.escape, re.split)),
    (_CONCURRENCY, (asyncio.gather, asyncio.wait_for, asyncio.wait, asyncio.shield, threading.Thread.join)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=2, help="bundled engine workers to start (default: 2)")
    add("--disaggregated", action="store_true", help="the first worker computes prompts, the others go on")
    text = "with --disaggregated, the workers' flag of this name (default: 0, off)"
    add("--kv-transfer-bounce-mib", type=int, default=0, metavar="N", help=text)
    add("--model", help="a Hugging Face model directory (default: the bundled tiny model)")
    add("--host", default="127.0.0.1", help="address the router listens on (default: 127.0.0.1)")
    add("--port", type=int, default=30000, help="the router's port, 0 for a free one (default: 30000)")
    add("--otlp-traces-endpoint", metavar="URL", help="where all of them send traces, as kvist serve does")
    add("--record-requests", metavar="DIR", help="the router's flag of this name")
    add("--no-demo", action="store_true", help="serve at once, without the demo's requests")
    add("--exit", action="store_true", help="end after the demo instead of serving on")
    add("--json", action="store_true", help="print the demo's facts as one line of JSON, last")


def run(args: argparse.Namespace) -> int:
    """Run until the demo ends (`--exit`) or a signal comes."""
    if find_spec("torch") is None:  # or each worker would say so
        raise MissingExtraError("engine", "torch")
    if args.workers < 1:
        raise InvalidValueError("--workers", args.workers, "at least 1")
    if args.disaggregated and args.workers < 2:
        raise InvalidValueError("--workers", args.workers, "at least 2 with --disaggregated")
    if args.kv_transfer_bounce_mib < 0 or (args.kv_transfer_bounce_mib and not args.disaggregated):
        expected = "at least 0 MiB, and 0 without --disaggregated"
        raise InvalidValueError("--kv-transfer-bounce-mib", args.kv_transfer_bounce_mib, expected)
    if args.no_demo and (args.exit or args.json):
        raise InvalidValueError("--no-demo", True, "no --exit or --json, which are about the demo")
    try:
        return asyncio.run(_up(args))
    except asyncio.CancelledError:  # Ctrl-C or SIGTERM: the children are gone by now
        return 0


async def _up(args: argparse.Namespace) -> int:
    from rich.console import Console

    task = asyncio.current_task()
    assert task is not None
    on_signal(task.cancel)
    console = Console(stderr=args.json)
    async with ProcessGroup() as group:
        worker_urls, router_url = await _start(args, group, console)
        exit_code = 0 if args.no_demo else await _demo(args, group, console, worker_urls, router_url)
        if args.exit:
            return exit_code
        console.print(f"\nServing on [bold]{router_url}[/bold] (OpenAI API; metrics at /metrics). Ctrl-C stops it.")
        console.print(f"What it does, live: [bold]{router_url}/ui[/bold]")
        await asyncio.Event().wait()
    return exit_code


async def _start(args: argparse.Namespace, group: ProcessGroup, console: Console) -> tuple[list[str], str]:
    """Start the workers side by side, then the router in front of them."""
    console.print(f"Starting {args.workers} workers with {_model(args)} …")
    workers = await asyncio.gather(
        *(group.start(f"worker {index}", *_serve(args, index)) for index in range(args.workers))
    )
    for worker in workers:
        console.print(f"  {worker.name}: {worker.url}")
    worker_urls = [worker.url for worker in workers]
    recording = [] if args.record_requests is None else ["--record-requests", args.record_requests]
    router = await group.start("router", *_route(args, worker_urls, "kv", args.host, str(args.port)), *recording)
    console.print(f"  {router.name}: {router.url}")
    return worker_urls, router.url


def _model(args: argparse.Namespace) -> str:
    from kvist.engine import bundled_model_path

    return args.model or str(bundled_model_path())


def _serve(args: argparse.Namespace, index: int) -> list[str]:
    role = []
    if args.disaggregated:
        role = ["--role", "decode" if index else "prefill", "--kv-transfer", "tcp://127.0.0.1:0"]
        role += ["--kv-transfer-bounce-mib", str(args.kv_transfer_bounce_mib)]
    name = [] if args.model else ["--served-model-name", "kvist-tiny"]
    return ["serve", "--model", _model(args), "--port", "0", *name, *role, *_tracing(args)]


def _route(args: argparse.Namespace, worker_urls: list[str], policy: str, host: str, port: str) -> list[str]:
    handing_over = ["--max-local-prefill-tokens", _DEMO_LOCAL_TOKENS] if args.disaggregated else []
    return [
        *("route", "--worker-urls", *worker_urls, "--model-path", _model(args), *handing_over),
        *("--policy", policy, "--host", host, "--port", port, "--shutdown-timeout-s", _SHUTDOWN_TIMEOUT_S),
        *_tracing(args),
    ]


def _tracing(args: argparse.Namespace) -> list[str]:
    return [] if args.otlp_traces_endpoint is None else ["--otlp-traces-endpoint", args.otlp_traces_endpoint]


async def _demo(
    args: argparse.Namespace, group: ProcessGroup, console: Console, worker_urls: list[str], router_url: str
) -> int:
    """Run the demo and show it; the exit code tells whether every request completed."""
    with console.status("Compiling the index, once on this machine …"):
        while json.loads(fetch(router_url, "/health"))["cold_start_s"] is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_LOOK_S)
    baseline = await group.start("baseline", *_route(args, worker_urls, "round-robin", "127.0.0.1", "0"))
    model = json.loads(fetch(router_url, "/v1/models"))["data"][0]["id"]
    with console.status("Sending conversations …") as status:
        num_served = 0

        def progress(served: Served) -> None:
            nonlocal num_served
            num_served += 1
            status.update(f"{num_served} requests served; last: {served.title}")

        result = await run_demo(router_url, baseline.url, worker_urls, model, progress)
    events_filtered = sum(int(metric(url, "kvist_publisher_events_filtered_total")) for url in worker_urls)
    facts = summary(result, events_filtered)
    if args.disaggregated:
        facts |= transfer_summary(worker_urls, [router_url, baseline.url])
    _show(console, result, facts, {url: f"worker {index}" for index, url in enumerate(worker_urls)})
    for served in [*result.routed, *result.baseline]:
        if served.error:
            print(f"kvist up: {served.title}: {served.error}", file=sys.stderr)
    if args.json:
        print(json.dumps(facts), flush=True)
    completed = facts["completed"] + facts["baseline_completed"]
    return 0 if completed == facts["requests"] + facts["baseline_requests"] else 1


def _show(console: Console, result: DemoResult, facts: dict[str, float], names: dict[str, str]) -> None:
    from rich.table import Column, Table

    names_column = partial(Column, no_wrap=True)
    table = Table(names_column("request"), names_column("worker"), title="Routed by prefix")
    for column in ("prompt tokens", "cached tokens", "TTFT ms"):
        table.add_column(column, justify="right")
    for one in result.routed:
        cells = (f"{one.prompt_tokens:,}", f"{one.cached_tokens:,}", f"{one.ttft_s * 1000:.1f}")
        workers = [names.get(url, url) for url in (one.prefill_worker, one.worker) if url]
        table.add_row(one.title, " → ".join(workers), *cells)
    console.print(table)
    comparison = Table("policy", title="The same requests, each policy on flushed caches")
    for column in ("completed", "prompt tokens", "cached tokens", "cached", "TTFT ms p50"):
        comparison.add_column(column, justify="right")
    for policy, prefix in (("kv", ""), ("round-robin", "baseline_")):
        prompt, cached = facts[f"{prefix}prompt_tokens"], facts[f"{prefix}cached_tokens"]
        comparison.add_row(
            policy,
            f"{facts[f'{prefix}completed']}/{facts[f'{prefix}requests']}",
            f"{prompt:,}",
            f"{cached:,}",
            f"{cached / prompt:.0%}" if prompt else "–",
            f"{facts[f'{prefix}ttft_ms_p50']}",
        )
    console.print(comparison)
    console.print(f"Events of the sliding-window groups filtered by the publishers: {facts['events_filtered']:,}")
    if "transfers" in facts:
        moved = f"{facts['transfers']:,} prompts, {facts['bytes_transferred']:,} bytes"
        console.print(f"Moved from prefill to decode workers: {moved}; fallbacks: {facts['fallbacks']:,}")


class ProcessStartError(KvistError):
    """A child ended, or stayed silent, before it was ready; its own words are on stderr above."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Child:
    """A command that is ready: the URL it serves, and the process behind it."""

    name: str
    url: str
    process: asyncio.subprocess.Process


class ProcessGroup:
    """Owns child processes: leaving the context ends every one of them, by SIGTERM and then by SIGKILL."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._drains: list[asyncio.Task[bytes]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.gather(*(process.wait() for process in self._processes))
        except TimeoutError:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in self._processes))
        await asyncio.gather(*self._drains)

    async def start(self, name: str, *arguments: str) -> Child:
        """Start `kvist ARGUMENTS` and wait until it prints the line with its URL; raises ProcessStartError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvist", "--log-level", "warning", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends its children in order
        )
        self._processes.append(process)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while line := await process.stdout.readline():
                    if match := _URL.search(line):
                        self._drains.append(asyncio.create_task(process.stdout.read(), name=f"drain {name}"))
                        return Child(name, match[0].decode(), process)
        except TimeoutError:
            raise ProcessStartError(name, f"not ready after {_START_TIMEOUT_S:g} s") from None
        raise ProcessStartError(name, f"ended with exit code {await process.wait()} before it was ready")


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it, by the function it asks about; `error` tells why it did not complete."""

    title: str
    worker: str = ""
    prefill_worker: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    answer: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything both policies served, in the order in which requests ended."""

    routed: list[Served]
    baseline: list[Served]


async def run_demo(
    router_url: str, baseline_url: str, worker_urls: list[str], model: str, progress: Callable[[Served], None]
) -> DemoResult:
    """Send every conversation through both routers, `_NUM_ROUNDS` times each; `progress` hears of each request."""
    result = DemoResult([], [])
    warm_up = [{"role": "user", "content": "Hello"}]
    await asyncio.gather(*(asyncio.to_thread(_ask, url, model, "", warm_up) for url in worker_urls))
    runs = [(router_url, result.routed), (baseline_url, result.baseline)]
    for round_idx in range(_NUM_ROUNDS):
        for url, served in runs if round_idx % 2 == 0 else reversed(runs):
            await asyncio.to_thread(_flush, worker_urls, router_url)
            await _converse(url, model, Random(round_idx), served, progress)
    return result


def summary(result: DemoResult, events_filtered: int) -> dict[str, Any]:
    """Return the facts of the demo under the names that `--json` prints."""
    facts: dict[str, Any] = {}
    for prefix, requests in (("", result.routed), ("baseline_", result.baseline)):
        completed = [served for served in requests if served.error is None]
        times_s = [served.ttft_s for served in completed]
        facts |= {
            f"{prefix}requests": len(requests),
            f"{prefix}completed": len(completed),
            f"{prefix}prompt_tokens": sum(served.prompt_tokens for served in completed),
            f"{prefix}cached_tokens": sum(served.cached_tokens for served in completed),
            f"{prefix}ttft_ms_p50": round(statistics.median(times_s) * 1000, 2) if times_s else None,
        }
    return facts | {"events_filtered": events_filtered}


def transfer_summary(worker_urls: list[str], router_urls: list[str]) -> dict[str, int]:
    """Return what prefill workers handed over since they started, and how often that came to nothing."""

    def total(urls: list[str], name: str) -> int:
        return int(sum(metric(url, name) for url in urls))

    return {
        "bytes_transferred": total(worker_urls, "kvist_transfer_received_bytes_total"),
        "transfers": total(worker_urls, "kvist_transfer_received_total"),
        "fallbacks": total(worker_urls, "kvist_engine_fallbacks_total")
        + total(router_urls, "kvist_router_disaggregation_fallbacks_total"),
    }


async def _converse(
    url: str, model: str, random: Random, served: list[Served], progress: Callable[[Served], None]
) -> None:
    """Let four clients go on with whatever conversation waits, one turn at a time: users do not queue up in order."""
    waiting = [
        ([{"role": "system", "content": system_prompt}], list(functions)) for system_prompt, functions in _CONVERSATIONS
    ]

    async def client() -> None:
        while waiting:
            messages, functions = waiting.pop(random.randrange(len(waiting)))
            title, question = _question(functions.pop(0))
            messages.append({"role": "user", "content": question})
            one = await asyncio.to_thread(_ask, url, model, title, messages)
            served.append(one)
            progress(one)
            messages.append({"role": "assistant", "content": one.answer})
            if functions:
                waiting.append((messages, functions))

    async with asyncio.TaskGroup() as group:
        for _ in range(_NUM_CLIENTS):
            group.create_task(client())


def _question(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's name, and a question about it that quotes its documentation."""
    module = getattr(function, "__module__", None)  # methods of built-in types have none
    name = f"{module}.{function.__qualname__}" if module else function.__qualname__
    quote = (inspect.getdoc(function) or "")[:_MAX_QUOTE_CHARS]
    return name, f"The documentation of {name} says:\n\n{quote}\n\nWhat does {name} do?"


def _ask(url: str, model: str, title: str, messages: list[dict[str, str]]) -> Served:
    """Stream one answer, greedily, so that both policies see the same history."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # As somebody on this machine, wherever the router listens: it tells administrators which worker answered.
    headers = {"content-type": "application/json", "host": "localhost"}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    start = time.perf_counter()
    try:
        with _open(request, timeout=_REQUEST_TIMEOUT_S) as response:
            return _read_stream(title, response, start)
    except HTTPError as error:
        return Served(title, error=f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Served(title, error=f"{type(error).__name__}: {error}")


def _read_stream(title: str, response: http.client.HTTPResponse, start: float) -> Served:
    ttft_s = 0.0
    usage: dict[str, Any] = {}
    answer: list[str] = []
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if text and not ttft_s:
            ttft_s = time.perf_counter() - start
        answer.append(text)
    if not usage:
        return Served(title, error="the stream ended early")
    return Served(
        title,
        worker=response.headers.get("x-kvist-worker", ""),
        prefill_worker=response.headers.get("x-kvist-prefill-worker", ""),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s=ttft_s,
        answer="".join(answer),
    )


def _flush(worker_urls: list[str], router_url: str) -> None:
    """Empty every worker's cache, and wait until the router's index has heard of it."""
    for url in worker_urls:
        fetch(url, "/flush_cache", method="POST")
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while metric(router_url, "kvist_index_blocks") and time.monotonic() < deadline:
        time.sleep(0.02)


def fetch(url: str, path: str, *, method: str = "GET") -> bytes:
    """Return the body of an answer; raises OSError when the server refuses."""
    try:
        with _open(Request(f"{url}{path}", method=method), timeout=10) as response:
            body: bytes = response.read()
            return body
    except HTTPError as error:
        raise ConnectionRefusedError(f"{method} {url}{path}: HTTP {error.code}") from None


def metric(url: str, name: str) -> float:
    """Return a metric's sum over its labels, 0 when the server does not have it."""
    lines = fetch(url, "/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)
