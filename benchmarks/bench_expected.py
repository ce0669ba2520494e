"""How much is lost if engines stream no events, and the router assumes that they cache what it sent them?

Two bundled engines behind a router get the same requests with their events on, with `--kv-events none`, and by round
robin: the conversations of `kvist up`, and with `--trace` the last requests of a trace, its lengths divided by 32, so
that its blocks of 512 tokens are of 16, in caches that hold a sixth of its blocks each. Four clients send the next
request as soon as they have an answer. `cached` is the share of prompt tokens that the engines report as cached;
`predicted` the share that the router expected. The rows with events are the best possible, and their variation from
round to round limits what can be concluded. Predicted: one point between them, as both know each prompt when its answer
begins; they differ in answers, whose blocks are not expected, and in what is freed late.

The same is simulated at full length, for fleets that this machine cannot run, and for wrong capacities
(`kvist/simulate/worker.py` describes the workers).

    python benchmarks/bench_expected.py [--quick] [--save] [--trace TRACE.jsonl]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import httpx
from _common import report, table

from kvist.cli._demo import Served, converse, fetch, metric
from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path
from kvist.simulate.fleet import Conditions, Simulation, at_load
from kvist.simulate.peers import POLICIES
from kvist.simulate.trace import Trace, conversations, read_trace, tool_agents
from kvist.simulate.worker import Machine

MODEL = str(bundled_model_path())
NUM_CLIENTS = 4
NUM_WORKERS = 8
SCALE = 32
NUM_BLOCKS = 2048
MODES = {"events": ([], "kv"), "expected": (["--kv-events", "none"], "kv"), "round robin": ([], "round-robin")}

Send = Callable[[str, int], Awaitable[tuple[int, int]]]
"""Sends a round's requests to a router; returns the prompts' tokens and how many of them were cached."""


async def measured(send: Send, num_rounds: int, *serve: str) -> dict[str, list[dict[str, float]]]:
    """Return each mode's rounds, on flushed caches and behind a new router each, the modes taking turns."""
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    async with ProcessGroup() as group:
        workers = {}
        for mode, (flags, _) in MODES.items():
            key = tuple(flags)
            if key not in workers:
                arguments = ("serve", "--model", MODEL, "--served-model-name", "m", "--port", "0", *serve, *flags)
                workers[key] = [(await group.start(f"worker {idx}, {mode}", *arguments)).url for idx in range(2)]
        for number in range(num_rounds):
            for mode, (flags, policy) in MODES.items():
                async with router_before(workers[tuple(flags)], policy) as url:
                    num_tokens, num_cached = await send(url, number)
                    predicted = await asyncio.to_thread(metric, url, "kvist_router_overlap_tokens_total")
                rounds[mode].append({"cached": num_cached / num_tokens, "predicted": predicted / num_tokens})
                print(f"round {number}, {mode}: {rounds[mode][-1]}", flush=True)
    return rounds


@asynccontextmanager
async def router_before(workers: list[str], policy: str) -> AsyncIterator[str]:
    """A new router, which knows of no request, before workers that hold nothing."""
    for url in workers:
        await asyncio.to_thread(fetch, url, "/flush_cache", method="POST")
    async with ProcessGroup() as group:
        arguments = ("route", "--worker-urls", *workers, "--model-path", MODEL, "--policy", policy, "--port", "0")
        router = await group.start("router", *arguments)
        while policy == "kv" and json.loads(fetch(router.url, "/health"))["cold_start_s"] is None:
            await asyncio.to_thread(time.sleep, 0.1)
        yield router.url


async def send_demo(url: str, number: int) -> tuple[int, int]:
    served: list[Served] = []
    await converse(url, "m", Random(number), served, lambda _: None)
    assert all(one.error is None for one in served), served
    return sum(one.prompt_tokens for one in served), sum(one.cached_tokens for one in served)


def send_trace(lines: Sequence[dict[str, Any]]) -> Send:
    def prompt_of(line: dict[str, Any]) -> list[int]:
        tokens = [Random(name * 16 + idx).randrange(10, 2000) for name in line["hash_ids"] for idx in range(16)]
        return tokens[: max(1, line["input_length"] // SCALE)]

    async def send(url: str, _: int) -> tuple[int, int]:
        waiting, usages = iter(lines), []

        async def client_loop(client: httpx.AsyncClient) -> None:
            for line in waiting:
                options = {"max_tokens": max(1, line["output_length"] // SCALE), "temperature": 0, "ignore_eos": True}
                stream = {"stream": True, "stream_options": {"include_usage": True}}
                answer = await client.post(
                    "/v1/completions", json={"model": "m", "prompt": prompt_of(line), **options, **stream}
                )
                last = [text for text in answer.text.split("\n\n") if text.startswith("data: {")][-1]
                usages.append(json.loads(last[6:])["usage"])

        async with (
            httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(NUM_CLIENTS):
                group.create_task(client_loop(client))
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return sum(usage["prompt_tokens"] for usage in usages), cached

    return send


def simulated(trace: Trace, cache_tokens: int, load: float) -> dict[str, float]:
    """Return the cached share of the prompt tokens with events, and with expectations of various capacities."""
    machines = [Machine(cache_tokens=cache_tokens)] * NUM_WORKERS
    paced = at_load(trace, machines, load, seed=1)

    def cached(num_silent: int, factor: float = 1.0) -> float:
        driver = POLICIES["kv-blocks"](num_workers=NUM_WORKERS, block_size=trace.block_size, seed=1)
        simulation = Simulation(paced, machines, driver, Conditions(num_silent=num_silent))
        for expected in simulation.index.expected.values():
            expected.capacity = int(expected.capacity * factor)
        return simulation.run().cached

    found = {"events": cached(0)}
    for factor in (1.0, 0.25, 0.5, 2.0, 8.0):
        found[f"expected, {factor:g} of its cache"] = cached(NUM_WORKERS, factor)
    return found


def simulations(num_requests: int, path: Path | None) -> dict[str, dict[str, float]]:
    """Return what is cached of each traffic, on eight workers."""
    traces = {"conversations": conversations(num_requests), "tool agents": tool_agents(num_requests)}
    if path is not None:
        traces["the trace"] = read_trace(path, num_requests)
    return {
        f"{name}, caches of {cache_tokens:,} tokens, load {load:g}": simulated(trace, cache_tokens, load)
        for name, trace in traces.items()
        for cache_tokens, load in ((400_000, 0.5), (400_000, 0.85), (100_000, 0.5))
    }


def rows_of(title: str, rounds: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    return [
        [
            title,
            mode,
            f"{mean(each['cached'] for each in found):.1%}",
            f"{min(each['cached'] for each in found):.1%} to {max(each['cached'] for each in found):.1%}",
            "–" if mode == "round robin" else f"{mean(each['predicted'] for each in found):.1%}",
        ]
        for mode, found in rounds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"demo": asyncio.run(measured(send_demo, 1 if args.quick else 5))}
    rows = rows_of("`kvist up`, 30 requests a round", results["demo"])
    if args.trace is not None:
        lines = [json.loads(line) for line in args.trace.read_text().splitlines()][-200 if args.quick else -1000 :]
        send, serve = send_trace(lines), ("--num-blocks", str(NUM_BLOCKS))
        results["trace"] = asyncio.run(measured(send, 1 if args.quick else 2, *serve))
        rows += rows_of(f"the trace's last {len(lines)}, a {SCALE}th as long", results["trace"])
    text = table(["requests", "", "cached", "of single rounds", "predicted"], rows)
    results["simulated"] = simulations(300 if args.quick else 3000, args.trace)
    columns = list(next(iter(results["simulated"].values())))
    cells = [[title, *(f"{share:.1%}" for share in found.values())] for title, found in results["simulated"].items()]
    text += f"\n\nSimulated: cached share\n\n{table(['traffic', *columns], cells)}"
    report("bench_expected", text, results, [], args.save)


if __name__ == "__main__":
    main()
