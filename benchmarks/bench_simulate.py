"""How far is a simulation from real engines, and from another simulator?

Two bundled engines run behind `kvist route --record-requests`, with flushed caches and a new router each time. First
come requests one after the other, from whose recording `kvist simulate fit` takes the engines' rates; then tool agents
that arrive at random, a quarter as long as the simulator's own, at some load. The recorded requests are then simulated,
with the same arrivals by the same policy. Compared are time to first token and cached share: as measured, as simulated
with the earlier rates, and as simulated with rates fitted to that very run. Engines, router and client share this
machine's cores with other work, which the rates include: the difference between the two is the machine's.

Dynamo's own replay (`run_mocker_trace_replay` of ai-dynamo-runtime, with its own timing model and its real router) gets
a trace, too. Rates are fitted to its result with one worker, and our simulation with our copy of its rule is compared
with it.

    python benchmarks/bench_simulate.py [--quick] [--save] [--trace TRACE.jsonl] [--load 0.5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import httpx
from _common import report, table

from kvist.cli._demo import fetch
from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path
from kvist.simulate.fleet import at_load, measure
from kvist.simulate.peers import POLICIES
from kvist.simulate.rates import Fit, fit
from kvist.simulate.trace import Request, Trace, TraceLine, read_lines, read_trace, tool_agents
from kvist.simulate.worker import Machine

MODEL = str(bundled_model_path())
NUM_WORKERS, NUM_BLOCKS, BLOCK_SIZE, SCALE = 2, 3072, 16, 4
POLICY_NAMES = ("kv", "round-robin")
LONGEST_PROMPT = 6000


def scaled(seed: int, num_requests: int) -> Trace:
    """Return tool agents whose blocks of 64 tokens are of 16, of prompts that the model takes."""
    requests = [
        replace(each, num_tokens=each.num_tokens // SCALE, num_output_tokens=-(-each.num_output_tokens // SCALE))
        for each in tool_agents(num_requests, seed).requests
    ]
    return Trace([each for each in requests if each.num_tokens <= LONGEST_PROMPT], BLOCK_SIZE)


@asynccontextmanager
async def router_before(workers: Sequence[str], policy: str, folder: Path) -> AsyncIterator[str]:
    """A new router, which knows of no request, before workers that hold nothing."""
    for url in workers:
        await asyncio.to_thread(fetch, url, "/flush_cache", method="POST")
    async with ProcessGroup() as group:
        flags = ("--model-path", MODEL, "--policy", policy, "--port", "0", "--record-requests", str(folder))
        router = await group.start("router", "route", "--worker-urls", *workers, *flags)
        while policy == "kv" and json.loads(fetch(router.url, "/health"))["cold_start_s"] is None:
            await asyncio.to_thread(time.sleep, 0.1)
        yield router.url


async def send(url: str, requests: Iterable[Request], num_clients: int | None) -> None:
    """Send requests as they come, or, with so many clients, one behind the other."""
    turns, began_s = asyncio.Semaphore(num_clients or 10**6), time.monotonic()
    first_s: float | None = None

    async def ask(client: httpx.AsyncClient, request: Request) -> None:
        tokens = [Random(block * BLOCK_SIZE + idx).randrange(10, 2000) for block in request.blocks for idx in range(16)]
        tokens += [Random(f"{request.idx} {idx}").randrange(10, 2000) for idx in range(request.num_tokens % BLOCK_SIZE)]
        options = {"max_tokens": request.num_output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = {"model": "m", "prompt": tokens, **options, "stream_options": {"include_usage": True}}
        try:
            (await client.post("/v1/completions", json=body)).raise_for_status()
        finally:
            turns.release()

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for request in requests:
            first_s = request.at_s if first_s is None else first_s
            if num_clients is None:
                await asyncio.sleep(began_s + request.at_s - first_s - time.monotonic())
            await turns.acquire()
            group.create_task(ask(client, request))


async def recorded(workers: Sequence[str], policy: str, trace: Trace, num_clients: int | None, root: str) -> Path:
    """Return a new folder in `root` with what was recorded of a trace."""
    folder = Path(mkdtemp(dir=root))
    async with router_before(workers, policy, folder) as url:
        await send(url, trace.requests, num_clients)
    return folder


def figures(lines: Sequence[TraceLine]) -> dict[str, float]:
    """Return what clients saw."""
    ttfts = sorted(line.first_byte_s or 0.0 for line in lines)
    ends = sorted(line.total_s or 0.0 for line in lines)
    cached = sum(line.cached_tokens or 0 for line in lines) / sum(line.input_length or 0 for line in lines)
    at = [int(share * len(lines)) for share in (0.5, 0.9, 0.99)]
    return {
        "ttft_mean_s": fmean(ttfts),
        **{f"ttft_p{share}_s": ttfts[idx] for share, idx in zip((50, 90, 99), at, strict=True)},
        "end_to_end_p99_s": ends[at[2]],
        "cached": cached,
    }


def fits(folder: Path) -> dict[str, Fit]:
    return fit(line for _, line in read_lines(folder))


def machines(folder: Path) -> list[Machine]:
    return [replace(each.machine, cache_tokens=NUM_BLOCKS * BLOCK_SIZE) for each in fits(folder).values()]


async def against_engines(num_requests: int, loads: Sequence[float], root: str) -> dict[str, Any]:
    """Return the fitted rates and, a load and policy, what was measured and what was simulated."""
    serve = ("--model", MODEL, "--served-model-name", "m", "--port", "0", "--num-blocks", str(NUM_BLOCKS))
    results: dict[str, Any] = {}
    async with ProcessGroup() as group:
        starts = (group.start(f"worker {idx}", "serve", *serve, "--threads", "1") for idx in range(NUM_WORKERS))
        workers = [(await start).url for start in starts]
        before = await recorded(workers, "round-robin", scaled(1, num_requests // 2), NUM_WORKERS, root)
        results["rates"] = {name: {**asdict(each.machine), "error": each.error} for name, each in fits(before).items()}
        print(results["rates"], flush=True)
        for load, policy in product(loads, POLICY_NAMES):
            trace = at_load(scaled(2, num_requests), machines(before), load, seed=0)
            folder = await recorded(workers, policy, trace, None, root)
            found = figures([line for _, line in read_lines(folder)])
            sides = {"measured": found}
            served = read_trace(folder)  # prompts repeat other answers than these engines gave
            served = replace(served, requests=[replace(each, answer_blocks=()) for each in served.requests])
            for title, learnt_from in (("simulated, rates of before", before), ("simulated, rates of the run", folder)):
                told = asdict(measure(served, POLICIES[policy], machines(learnt_from), seed=0))
                sides[title] = {name: told[name] for name in found}
            results[f"{load:g}, {policy}"] = sides
            print(load, policy, sides, flush=True)
    return results


def replayed(path: Path, speedup: float, mode: str, num_workers: int) -> list[TraceLine]:
    """Return what Dynamo's replay says of each request."""
    from dynamo._core import run_mocker_trace_replay

    engine = {"block_size": 512, "num_gpu_blocks": 781, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
    with TemporaryDirectory() as folder:
        told = Path(folder) / "requests.jsonl"
        run_mocker_trace_replay(
            [path],
            extra_engine_args={"engine": engine},
            num_workers=num_workers,
            router_mode=mode,
            trace_block_size=512,
            arrival_speedup_ratio=speedup,
            report_jsonl_path=told,
        )
        requests = [json.loads(line) for line in told.read_text().splitlines()]
    return [
        TraceLine(
            timestamp=each["arrival_time_ms"],
            input_length=each["input_length"],
            output_length=each["output_length"],
            worker=str(each["decode_worker_idx"]),
            first_byte_s=each["ttft_ms"] / 1e3,
            total_s=each["e2e_latency_ms"] / 1e3,
            cached_tokens=each["reused_input_tokens"],
        )
        for each in requests
    ]


def against_replay(path: Path, speedups: Sequence[float]) -> dict[str, Any]:
    """Return, a speed and policy, what Dynamo's replay says of a trace, and our simulation with rates fitted to it."""
    machine = next(iter(fit(replayed(path, 0.2, "round_robin", 1)).values())).machine
    results: dict[str, Any] = {"rates of Dynamo's model": asdict(machine)}
    trace = read_trace(path)
    for speedup in speedups:
        paced = replace(trace, requests=[replace(each, at_s=each.at_s / speedup) for each in trace.requests])
        for mode, policy in (("kv_router", "dynamo"), ("round_robin", "round-robin")):
            found = figures(replayed(path, speedup, mode, 8))
            told = asdict(measure(paced, POLICIES[policy], [replace(machine, cache_tokens=781 * 512)] * 8, seed=0))
            cell = f"the trace {speedup:g} times as fast, {policy}"
            results[cell] = {"Dynamo's replay": found, "simulated": {name: told[name] for name in found}}
            print(cell, results[cell], flush=True)
    return results


def rows_of(results: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    rows = []
    for cell, sides in results.items():
        for side, found in sides.items():
            shown = (f"{value:.1%}" if name == "cached" else f"{value:.3g}" for name, value in found.items())
            rows.append([cell, side, *shown])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--load", type=float, nargs="*", default=[0.2, 0.4])
    args = parser.parse_args()
    with TemporaryDirectory() as root:
        results = asyncio.run(against_engines(120 if args.quick else 300, args.load, root))
    if args.trace is not None:
        results |= against_replay(args.trace, (1.0,) if args.quick else (1.0, 2.0, 4.0))
    rates = {name: results.pop(name) for name in list(results) if name.startswith("rates")}
    headers = ["load, policy", "", "TTFT mean, s", "p50", "p90", "p99", "answer p99, s", "cached"]
    text = table(headers, rows_of(results))
    report("bench_simulate", text, {**rates, **results}, ["torch"], args.save)


if __name__ == "__main__":
    main()
