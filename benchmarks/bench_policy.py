"""Which policy, and which weights of the kv policy, serve which kind of traffic best?

A simulation of workers around the router's own policies and load tracker, on a virtual clock: continuous batching,
chunked prefill, a prefix cache with least-recently-used eviction, an index that knows a block once it is computed.
A step takes 6 ms + 40 µs a prefill token + 0.044 µs a token of context decoded (an 8B model on one H100, rounded).
Bound by the workload, not by this machine: figures are exact for a seed. The best-tuned baseline is the best row of a
workload; the default should be near it everywhere.

    python benchmarks/bench_policy.py [--quick] [--save] [--trace TRACE.jsonl]

A trace has a line a request: {"timestamp": ms, "input_length", "output_length", "hash_ids": [a 512-token block each]}.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random
from statistics import mean, quantiles

from _common import report, table

from kvist.events import WorkerRank
from kvist.router.load import ActiveRequest, LoadTracker
from kvist.router.policy import (
    Candidate,
    Decision,
    KvPolicy,
    LeastLoadedPolicy,
    Policy,
    PowerOfTwoPolicy,
    Prompt,
    RandomPolicy,
    RoundRobinPolicy,
    decide,
)

STEP_S = 6e-3
PREFILL_S = 40e-6
DECODE_S = 0.044e-6
MAX_PREFILL_TOKENS = 2048
NUM_WORKERS = 4


@dataclass(frozen=True)
class Arrival:
    at_s: float
    blocks: tuple[Hashable, ...]
    num_tokens: int
    num_output_tokens: int


@dataclass
class Job:
    arrival: Arrival
    active: ActiveRequest
    num_uncached_tokens: int = -1
    num_tokens: int = 0
    num_missing_tokens: int = 0
    ttft_s: float = 0.0


@dataclass
class Worker:
    """Steps through prefill and decode until a given time."""

    block_size: int
    capacity_blocks: int
    now_s: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    decoding: list[Job] = field(default_factory=list)
    cache: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    done: list[Job] = field(default_factory=list)

    def overlap(self, blocks: Sequence[Hashable]) -> int:
        return sum(1 for _ in takewhile(self.cache.__contains__, blocks))

    def advance(self, until_s: float) -> None:
        while self.now_s < until_s and (self.waiting or self.decoding):
            self._step(until_s)
        self.now_s = max(self.now_s, until_s) if not (self.waiting or self.decoding) else self.now_s

    def _step(self, until_s: float) -> None:
        budget = MAX_PREFILL_TOKENS
        finished_prefill = []
        for job in self.waiting:
            self._start(job)
            taken = min(budget, job.num_missing_tokens)
            job.num_missing_tokens -= taken
            budget -= taken
            if job.num_missing_tokens == 0:
                finished_prefill.append(job)
            if budget == 0:
                break
        context_tokens = sum(job.num_tokens for job in self.decoding)
        step_s = STEP_S + (MAX_PREFILL_TOKENS - budget) * PREFILL_S + context_tokens * DECODE_S
        num_steps = 1
        if not self.waiting:  # nothing changes until a request ends or arrives
            num_steps = min(job.num_missing_tokens for job in self.decoding)
            num_steps = max(1, min(num_steps, int((until_s - self.now_s) / step_s) + 1))
        self.now_s += step_s * num_steps
        self._decode(num_steps)
        for job in finished_prefill:
            self._finish_prefill(job)

    def _start(self, job: Job) -> None:
        if job.num_uncached_tokens < 0:
            num_cached = min(self.overlap(job.arrival.blocks), (job.arrival.num_tokens - 1) // self.block_size)
            for block in job.arrival.blocks[:num_cached]:
                self.cache.move_to_end(block)
            job.num_uncached_tokens = job.num_missing_tokens = job.arrival.num_tokens - num_cached * self.block_size

    def _finish_prefill(self, job: Job) -> None:
        self.waiting.remove(job)
        for block in job.arrival.blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.capacity_blocks:
            self.cache.popitem(last=False)
        job.ttft_s = self.now_s - job.arrival.at_s
        job.active.answered()
        job.num_tokens, job.num_missing_tokens = job.arrival.num_tokens, job.arrival.num_output_tokens
        self.decoding.append(job)

    def _decode(self, num_steps: int) -> None:
        for job in self.decoding:
            job.num_tokens += num_steps
            job.num_missing_tokens -= num_steps
            job.active.add_tokens(num_steps)
            if job.num_missing_tokens <= 0:
                job.active.finish()
                self.done.append(job)
        self.decoding = [job for job in self.decoding if job.num_missing_tokens > 0]


def simulate(policy: Policy, arrivals: Sequence[Arrival], block_size: int, capacity_blocks: int) -> dict[str, float]:
    """Serve the arrivals and return what the clients and the fleet saw."""
    workers = {WorkerRank(f"w{idx}", 0): Worker(block_size, capacity_blocks) for idx in range(NUM_WORKERS)}
    load, random = LoadTracker(), Random(1)
    for turn, arrival in enumerate(arrivals):
        for worker in workers.values():
            worker.advance(arrival.at_s)
        prompt = Prompt(arrival.num_tokens, block_size)
        candidates = [
            Candidate(target, load.load(target, arrival.at_s), (worker.overlap(arrival.blocks),), len(worker.cache))
            for target, worker in workers.items()
        ]
        decision: Decision = decide(policy, prompt, candidates, turn, random)
        active = load.begin(decision.chosen.target, prompt, decision.overlap_tokens, arrival.at_s)
        workers[decision.chosen.target].waiting.append(Job(arrival, active))
    for worker in workers.values():
        worker.advance(1e9)
    done = [job for worker in workers.values() for job in worker.done]
    assert len(done) == len(arrivals)
    ttfts = [job.ttft_s for job in done]
    num_prompt_tokens = sum(job.arrival.num_tokens for job in done)
    return {
        "ttft_mean_s": round(mean(ttfts), 3),
        "ttft_p90_s": round(quantiles(ttfts, n=10)[-1], 3),
        "cached": round(1 - sum(job.num_uncached_tokens for job in done) / num_prompt_tokens, 3),
        "busiest": round(max(len(worker.done) for worker in workers.values()) / len(done), 2),
    }


def poisson(random: Random, rate: float, count: int) -> Iterator[float]:
    at_s = 0.0
    for _ in range(count):
        at_s += random.expovariate(rate)
        yield at_s


def groups(random: Random, count: int) -> list[Arrival]:
    """83 tenants with a prefix of 8k tokens each; a worker caches a third of them."""
    found = []
    for number, at_s in enumerate(poisson(random, 18.0, count)):
        group = random.randrange(83)
        blocks = tuple((group, idx) for idx in range(128)) + tuple((number, idx, "own") for idx in range(4))
        found.append(Arrival(at_s, blocks, 132 * 64, 128))
    return found


def chats(random: Random, count: int) -> list[Arrival]:
    """Conversations behind one system prompt of 1k tokens; each turn repeats the history and adds 512 tokens."""
    found, num_turns = [], dict.fromkeys(range(240), 0)
    for at_s in poisson(random, 24.0, count):
        chat = random.randrange(240)
        conversation, turn = divmod(num_turns[chat], 16)
        num_turns[chat] += 1
        own = tuple((chat, conversation, idx) for idx in range(8 * (turn + 1)))
        blocks = tuple(("system", idx) for idx in range(16)) + own
        found.append(Arrival(at_s, blocks, len(blocks) * 64 + 1, 200))
    return found


def system_prompt(random: Random, count: int) -> list[Arrival]:
    """One system prompt of 1k tokens before everybody's own 1k: it must not pin them to one worker."""
    shared = tuple(("system", idx) for idx in range(16))
    return [
        Arrival(at_s, shared + tuple((number, idx) for idx in range(16)), 2048, 150)
        for number, at_s in enumerate(poisson(random, 45.0, count))
    ]


def unshared(random: Random, count: int) -> list[Arrival]:
    """Nothing in common: 2k tokens each."""
    return [
        Arrival(at_s, tuple((number, idx) for idx in range(32)), 2048, 150)
        for number, at_s in enumerate(poisson(random, 28.0, count))
    ]


def paced(random: Random, count: int) -> list[Arrival]:
    """One request at a time with a block in common: nothing is ever in flight when the next one comes."""
    del random
    return [
        Arrival(number * 3.0, ("common", *((number, idx) for idx in range(63))), 4096, 50)
        for number in range(count // 10)
    ]


def read_trace(path: Path, count: int) -> list[Arrival]:
    lines = (json.loads(line) for line in path.read_text().splitlines()[:count])
    return [
        Arrival(each["timestamp"] / 1000, tuple(each["hash_ids"]), each["input_length"], each["output_length"])
        for each in lines
    ]


def policies(is_quick: bool) -> dict[str, Policy]:
    found: dict[str, Policy] = {
        "round-robin": RoundRobinPolicy(),
        "random": RandomPolicy(),
        "power-of-two": PowerOfTwoPolicy(),
        "least-loaded": LeastLoadedPolicy(),
        "kv (default)": KvPolicy(),
    }
    if not is_quick:
        for decode_scale in (1.0, 0.3, 0.03, 0.0):
            found[f"kv decode_scale={decode_scale:g}"] = KvPolicy(decode_scale=decode_scale)
        for recent_scale in (0.0, 0.01, 0.1, 0.3):
            found[f"kv recent_scale={recent_scale:g}"] = KvPolicy(recent_scale=recent_scale)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    count = 400 if args.quick else 2000
    workloads = {
        each.__name__: (each(Random(7), count), 64, 3600) for each in (groups, chats, system_prompt, unshared, paced)
    }
    if args.trace is not None:
        workloads["trace"] = (read_trace(args.trace, count), 512, 2000)
    results: dict[str, dict[str, dict[str, float]]] = {}
    text = []
    for workload, (arrivals, block_size, capacity_blocks) in workloads.items():
        rows = {
            name: simulate(policy, arrivals, block_size, capacity_blocks)
            for name, policy in policies(args.quick).items()
        }
        results[workload] = rows
        columns = ["ttft_mean_s", "ttft_p90_s", "cached", "busiest"]
        text += [
            f"\n{workload}\n",
            table(["policy", *columns], [[n, *(r[c] for c in columns)] for n, r in rows.items()]),
        ]
    report("policy", "\n".join(text), {"workloads": results}, ["msgspec"], args.save)


if __name__ == "__main__":
    main()
