"""The demo of `kvist up`: conversations that share system prompts, through two routers, and how each served them.

Each run starts on flushed caches and the order alternates, so that neither policy profits from the other's blocks or
from a warm machine.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import os.path
import queue
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.request import Request

from kvist.cli._client import fetch, open_url
from kvist.cli._terminal import make_table
from kvist.cli.why import percent
from kvist.errors import KvistError

if TYPE_CHECKING:
    from rich.console import RenderableType

LOCAL_TOKENS = "64"
"""Turns add some hundred tokens each, so that prefill workers compute most of them."""
_NUM_ROUNDS = 2
_NUM_CLIENTS = 4
_MAX_TOKENS = 24
_REQUEST_TIMEOUT_S = 120.0
_SETTLE_TIMEOUT_S = 10.0
_MAX_QUOTE_CHARS = 240
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
    (_CONCURRENCY, (asyncio.gather, asyncio.wait_for, asyncio.wait, asyncio.shield, threading.Thread.join)),  # noqa: TID251
)


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it; `error` says why it did not complete."""

    title: str
    """The function that it asks about."""
    worker: str = ""
    prefill_worker: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    answer: str = ""
    error: str | None = None


async def run_demo(
    front_url: str, router_url: str, baseline_url: str, worker_urls: list[str], progress: Callable[[Served], None]
) -> tuple[list[Served], list[Served]]:
    """Send every conversation to the front and to the baseline, `_NUM_ROUNDS` times each; return what each served.

    The router has the same workers as the front. `progress` is called with each request.
    """
    routed: list[Served] = []
    baseline: list[Served] = []
    model = json.loads(fetch(router_url, "/v1/models"))["data"][0]["id"]
    warm_up = [{"role": "user", "content": "Hello"}]
    await asyncio.gather(*(asyncio.to_thread(_ask, url, model, "", warm_up) for url in worker_urls))
    runs = [(front_url, routed), (baseline_url, baseline)]
    for round_idx in range(_NUM_ROUNDS):
        for url, served in runs if round_idx % 2 == 0 else reversed(runs):
            await asyncio.to_thread(_flush, worker_urls, router_url)
            await converse(url, model, Random(round_idx), served, progress)
    return routed, baseline


def summary(
    routed: list[Served], baseline: list[Served], worker_urls: list[str], handing_over: list[str]
) -> dict[str, Any]:
    """Return the facts of the demo under the names that `--json` prints.

    `handing_over` are the routers that have prompts moved between workers, if any.
    """
    facts: dict[str, Any] = {}
    for prefix, requests in (("", routed), ("baseline_", baseline)):
        completed = [served for served in requests if served.error is None]
        times_s = [served.ttft_s for served in completed]
        facts |= {
            f"{prefix}requests": len(requests),
            f"{prefix}completed": len(completed),
            f"{prefix}prompt_tokens": sum(served.prompt_tokens for served in completed),
            f"{prefix}cached_tokens": sum(served.cached_tokens for served in completed),
            f"{prefix}ttft_ms_p50": round(statistics.median(times_s) * 1000, 2) if times_s else None,
        }
    totals = {"events_filtered": "kvist_publisher_events_filtered_total"}
    if handing_over:
        totals |= {
            "bytes_transferred": "kvist_transfer_received_bytes_total",
            "transfers": "kvist_engine_prompts_fetched_total",
            "fallbacks": "kvist_engine_fallbacks_total",
        }
    facts |= {fact: int(sum(metric(url, name) for url in worker_urls)) for fact, name in totals.items()}
    for url in handing_over:
        facts["fallbacks"] += int(metric(url, "kvist_router_disaggregation_fallbacks_total"))
    return facts


async def converse(
    url: str, model: str, random: Random, served: list[Served], progress: Callable[[Served], None]
) -> None:
    """Have four clients send the next turn of any conversation that waits for one, in random order, as users do."""
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
        with open_url(request, _REQUEST_TIMEOUT_S) as response:
            return _read_stream(title, response, start)
    except (KvistError, OSError, http.client.HTTPException, ValueError) as error:
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
    """Empty every worker's cache, and wait until the router's index is empty, too."""
    for url in worker_urls:
        fetch(url, "/flush_cache", method="POST")
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while metric(router_url, "kvist_index_blocks") and time.monotonic() < deadline:
        time.sleep(0.02)


def metric(url: str, name: str) -> float:
    """Return a metric's sum over its labels, 0 when the server does not have it."""
    lines = fetch(url, "/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)


def render(routed: list[Served], facts: dict[str, Any], names: dict[str, str]) -> Iterator[RenderableType]:
    """Yield a table of each request's worker, and one that compares the policies."""
    yield "Routed by prefix:"
    rows = []
    for one in routed:
        workers = [names.get(url, url) for url in (one.prefill_worker, one.worker) if url]
        cells = (f"{one.prompt_tokens:,}", f"{one.cached_tokens:,}", f"{one.ttft_s * 1000:.1f}")
        rows.append((one.title, " → ".join(workers), *cells))
    yield make_table(("request", "worker", "prompt tokens", "cached tokens", "TTFT ms"), rows)
    yield "The same requests, each policy on flushed caches:"
    policies = []
    for policy, prefix in (("kv", ""), ("round-robin", "baseline_")):
        prompt, cached = facts[f"{prefix}prompt_tokens"], facts[f"{prefix}cached_tokens"]
        completed = f"{facts[f'{prefix}completed']}/{facts[f'{prefix}requests']}"
        time_ms = f"{facts[f'{prefix}ttft_ms_p50']}"
        policies.append((policy, completed, f"{prompt:,}", f"{cached:,}", percent(cached, prompt), time_ms))
    yield make_table(("policy", "completed", "prompt tokens", "cached tokens", "cached", "TTFT ms p50"), policies)
    yield f"Events of the sliding-window groups filtered by the publishers: {facts['events_filtered']:,}"
    if "transfers" in facts:
        moved = f"{facts['transfers']:,} prompts, {facts['bytes_transferred']:,} bytes"
        yield f"Moved from prefill to decode workers: {moved}; fallbacks: {facts['fallbacks']:,}"
