"""Which policy, and which weights of the kv policy, serve which kind of traffic best?

A simulation of workers around the router's own policies and load tracker, on a virtual clock: continuous batching,
chunked prefill, a prefix cache with least-recently-used eviction, an index that hears of a block 5 ms late, clients
that give up after 30 s without a token. Figures are exact for a seed: bound by the traffic, not by this machine. The
best-tuned baseline is the best row of a traffic; the default should be near it everywhere. `load` is the share of time
in which a worker has prefill to do under least-loaded; `busiest` is the busiest worker's prefill over the mean.

A step takes 6 ms + 40 µs a prefill token + 0.044 µs a token of context read: an 8B model (16 GB of weights, 131 kB of
KV cache a token) on one H100 (3 TB/s, 25k tokens/s of prefill), with room for 400k cached tokens. Attention within
prefill and memory held by running requests are left out. Reading a block for 150 steps costs 150 · 0.044 / 40 = 0.17
of computing it, and a new request meets about half of an older one's steps, so 0.1 was the prediction for decode_scale.
It was nearly right: 0.03 hits more in chats, and the rest cannot tell. Near saturation a row moves by a quarter with
the arrivals.

    python benchmarks/bench_policy.py [--quick] [--save] [--trace TRACE.jsonl]

A trace has a line a request: {"timestamp": ms, "input_length", "output_length", "hash_ids": [a 512-token block each]}.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from pathlib import Path
from random import Random
from statistics import mean, quantiles

from _common import report, table
from _simulated_worker import H100, TWO_CORES, Arrival, Job, Machine, Worker

from kvist.events import WorkerRank
from kvist.router.fleet.load import LoadTracker
from kvist.router.policy.baselines import LeastLoadedPolicy, PowerOfTwoPolicy, RandomPolicy, RoundRobinPolicy
from kvist.router.policy.cost import KvPolicy
from kvist.router.policy.decision import Candidate, Policy, Prompt, decide


@dataclass(frozen=True)
class Workload:
    arrivals: Sequence[Arrival]
    block_size: int
    num_workers: int = 4
    machine: Machine = H100
    max_concurrency: float = inf


def simulate(
    policy: Policy, workload: Workload, make_worker: Callable[[int, Machine, Callable[[Job], None]], Worker] = Worker
) -> dict[str, float]:
    """Serve the workload and return what the clients and the fleet saw."""
    arrivals, ready, done, in_flight = list(workload.arrivals), deque(), [], 0
    heapify(arrivals)

    def on_done(job: Job) -> None:
        nonlocal in_flight
        in_flight -= 1
        done.append(job)
        if job.arrival.then is not None and job.done_s is not None:
            heappush(arrivals, replace(job.arrival.then, at_s=job.done_s + job.arrival.then.at_s))

    think_s = min((each.then.at_s for each in arrivals if each.then is not None), default=inf)
    workers = {
        WorkerRank(f"w{idx}", 0): make_worker(workload.block_size, workload.machine, on_done)
        for idx in range(workload.num_workers)
    }
    load, random, turn, now_s, last_arrival_s = LoadTracker(), Random(1), 0, 0.0, 0.0
    while arrivals or ready or in_flight:
        next_s = arrivals[0].at_s if arrivals and in_flight < workload.max_concurrency else inf
        now_s = max(now_s, min(next_s, now_s + think_s))
        for worker in workers.values():
            worker.advance(min(now_s, 1e9))
        while arrivals and arrivals[0].at_s <= now_s:
            ready.append(heappop(arrivals))
        while ready and in_flight < workload.max_concurrency:
            arrival = ready.popleft()
            prompt = Prompt(arrival.num_tokens, workload.block_size)
            candidates = [
                Candidate(target, load.load(target, now_s), (each.overlap(arrival.blocks, now_s),), len(each.index))
                for target, each in workers.items()
            ]
            decision = decide(policy, prompt, candidates, turn, random)
            active = load.begin(decision.chosen.target, prompt, decision.overlap_tokens, now_s)
            workers[decision.chosen.target].waiting.append(Job(arrival, now_s, active))
            turn, in_flight, last_arrival_s = turn + 1, in_flight + 1, now_s
    return seen(done, list(workers.values()), last_arrival_s)


def seen(done: Sequence[Job], workers: Sequence[Worker], span_s: float) -> dict[str, float]:
    served = [job for job in done if job.done_s is not None]
    percentiles = quantiles((job.ttft_s for job in done), n=100)
    prefilling_s = [worker.prefilling_s for worker in workers]
    return {
        "completed": round(len(served) / len(done), 3),
        "cached": round(
            sum(job.num_cached_tokens for job in served) / sum(job.arrival.num_tokens for job in served), 3
        ),
        "ttft_mean_s": round(mean(job.ttft_s for job in done), 3),
        **{f"p{percent}_s": round(percentiles[percent - 1], 3) for percent in (50, 90, 99)},
        "answer_s": round(mean(job.done_s - job.at_s for job in served if job.done_s is not None), 2),
        "load": round(mean(prefilling_s) / span_s, 2),
        "busiest": round(max(prefilling_s) / mean(prefilling_s), 2),
    }


def conversations(
    rate: float,
    count: int,
    *,
    system_tokens: int = 0,
    num_systems: int = 1,
    num_turns: int = 1,
    user_tokens: int = 1024,
    think_s: float = 0.0,
    block_size: int = 64,
    seed: int = 7,
) -> list[Arrival]:
    """Return conversations that begin at random; each turn repeats the history and adds to it."""
    random, found, at_s = Random(seed), [], 0.0
    for _ in range(count):
        at_s += random.expovariate(rate)
        system, own, num_tokens = random.randrange(num_systems), random.random(), system_tokens
        turns = []
        for _ in range(num_turns):
            num_tokens += random.randint(user_tokens // 2, user_tokens * 3 // 2)
            num_output_tokens = random.randint(8, 40) if block_size == 16 else random.randint(50, 250)
            turns.append((num_tokens, num_output_tokens))
            num_tokens += num_output_tokens
        shared = tuple((seed, system, idx) for idx in range(system_tokens // block_size))
        blocks = shared + tuple((own, idx) for idx in range(num_tokens // block_size))
        then = None
        for turn, (prompt, output) in reversed(list(enumerate(turns))):
            then = Arrival(think_s if turn else at_s, blocks[: prompt // block_size], prompt, output, then)
        found.append(then)
    return found


def demo(count: int) -> Workload:
    """Six conversations of four turns over three system prompts, four at a time, as `kvist up`; again and again."""
    rounds = [
        replace(first, at_s=number * 1000.0)
        for number in range(count // 50)
        for first in conversations(
            1e6,
            6,
            system_tokens=144,
            num_systems=3,
            num_turns=4,
            user_tokens=96,
            think_s=2e-3,
            block_size=16,
            seed=number,
        )
    ]
    return Workload(rounds, 16, 2, TWO_CORES, 4)


def scaled(workload: Workload, load: float) -> Workload:
    """Return the workload with arrivals that keep the least-loaded policy's workers prefilling this share of time."""
    for _ in range(4):
        factor = simulate(LeastLoadedPolicy(), workload)["load"] / load
        arrivals = [replace(each, at_s=each.at_s * factor) for each in workload.arrivals]
        workload = replace(workload, arrivals=arrivals)
    return workload


def workloads(count: int, trace: Path | None) -> Iterator[tuple[str, Workload]]:
    assistants = conversations(
        3.0, count // 4, system_tokens=1024, num_systems=3, num_turns=6, user_tokens=512, think_s=10
    )
    patient = conversations(0.25, count // 5, system_tokens=4096, num_turns=5, think_s=240)
    tenants = conversations(6.0, count, system_tokens=8192, num_systems=83, user_tokens=256)
    yield "83 tenants with 8k tokens each, load 0.8", scaled(Workload(tenants, 64), 0.8)
    yield (
        "one system prompt of 1k tokens, load 0.8",
        scaled(Workload(conversations(45, count, system_tokens=1024), 64), 0.8),
    )
    yield "assistants: conversations behind 3 system prompts", Workload(assistants, 64)
    yield "patient: conversations that outgrow the cache, 4 min a turn", Workload(patient, 64)
    yield (
        "paced: a request every 3 s, one block shared",
        Workload(conversations(0.33, count // 5, system_tokens=64), 64),
    )
    yield "unshared, load 0.8", scaled(Workload(conversations(28, count, user_tokens=2048), 64), 0.8)
    yield "kvist up", demo(count)
    if trace is not None:
        lines = [json.loads(line) for line in trace.read_text().splitlines()[: 2 * count]]
        for num_workers in (4, 8, 16):
            arrivals = [
                Arrival(
                    each["timestamp"] / 400 / num_workers,
                    tuple(each["hash_ids"]),
                    each["input_length"],
                    each["output_length"],
                )
                for each in lines
            ]
            for load in (0.5, 0.8, 0.95):
                yield f"trace, {num_workers} workers, load {load}", scaled(Workload(arrivals, 512, num_workers), load)


def policies(is_quick: bool) -> dict[str, Policy]:
    found: dict[str, Policy] = {
        "round-robin": RoundRobinPolicy(),
        "random": RandomPolicy(),
        "power-of-two": PowerOfTwoPolicy(),
        "least-loaded": LeastLoadedPolicy(),
        "kv (default)": KvPolicy(),
    }
    if not is_quick:
        found |= {f"kv decode_scale={scale:g}": KvPolicy(decode_scale=scale) for scale in (0.0, 0.01, 0.1, 1.0)}
        found |= {f"kv recent_scale={scale:g}": KvPolicy(recent_scale=scale) for scale in (0.0, 0.1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    text = []
    for title, workload in workloads(300 if args.quick else 2000, args.trace):
        rows = {name: simulate(policy, workload) for name, policy in policies(args.quick).items()}
        results[title] = rows
        columns = list(rows["kv (default)"])
        cells = [[name, *row.values()] for name, row in rows.items()]
        text += [f"\n{title}\n", table(["policy", *columns], cells)]
    report("bench_policy", "\n".join(text), {"workloads": results}, [], args.save)


if __name__ == "__main__":
    main()
