"""What is gained by routing with knowledge of which sessions will return?

Made-up tool agents in a closed loop on eight simulated workers, by `kv` and by variants of it that know, or guess,
which sessions come back from a tool: a variant that knows is the best possible. Each cell is the mean time to first
token and the cached share of prompt tokens, medians of seeds.

    sticky          a session's turns go to the worker of the one before, whatever that costs
    evictions       blocks of returning sessions count where a worker would evict them, at the price of computing them
    context 0.01    tokens of returning sessions count like those of running requests (0.05 there), at a fifth
    context 0.05    ..., in full; "first turns": only for the choice of a new session's worker

"known" variants know which sessions return; the others assume that all do, for a minute.

    python benchmarks/bench_returns.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from statistics import median
from typing import Any

import numpy as np
from _common import report, table

from kvist.simulate.driver import Counts, Depths, Hashes, PricedDriver
from kvist.simulate.fleet import Outcome, Simulation, at_load
from kvist.simulate.trace import Request, Trace, tool_agents
from kvist.simulate.worker import Machine

NUM_WORKERS, KEPT_S, ANSWER_BLOCKS = 8, 60.0, 8


@dataclass(frozen=True)
class Variant:
    """What returning sessions weigh."""

    evictions: float = 0.0
    context: float = 0.0
    is_known: bool = False
    is_for_first_turns: bool = False
    is_sticky: bool = False


VARIANTS = {
    "kv": Variant(),
    "sticky": Variant(is_sticky=True),
    "evictions, known": Variant(evictions=1.0, is_known=True),
    "evictions": Variant(evictions=0.6),
    "context 0.01": Variant(context=0.01),
    "context 0.05": Variant(context=0.05),
    "context 0.05, known": Variant(context=0.05, is_known=True),
    "context 0.05, first turns": Variant(context=0.05, is_for_first_turns=True),
}


@dataclass(frozen=True)
class Lease:
    """A session that may return."""

    worker_idx: int
    ended_s: float
    num_tokens: int
    blocks: Sequence[int]


class ReturnsDriver(PricedDriver):
    """`kv` with what a variant adds to its cost; a session is known by the last block of its last prompt."""

    def __init__(self, block_size: int, seed: int, variant: Variant, returning: set[int]) -> None:
        super().__init__(NUM_WORKERS, block_size, seed)
        self.simulation: Simulation
        self._variant, self._block_size, self._returning = variant, block_size, returning
        self._leases: dict[int, Lease] = {}
        self._ended: deque[tuple[float, int]] = deque()
        self._leased_blocks: Counter[int] = Counter()
        self._leased_tokens = np.zeros(NUM_WORKERS)
        self._worker_of: dict[Hashable, int] = {}

    def route(
        self,
        now_s: float,
        request_id: Hashable,
        block_hashes: Hashes,
        num_tokens: int,
        depths: Depths,
        held_blocks: Counts,
        among: Sequence[int] | None = None,  # noqa: ARG002
        *,
        is_fetched: bool = False,  # noqa: ARG002
    ) -> int:
        while self._ended and not self._variant.is_known and self._ended[0][0] <= now_s - KEPT_S:
            ended_s, name = self._ended.popleft()
            if name in self._leases and self._leases[name].ended_s == ended_s:
                self._end(name)
        turn_before = next((block for block in reversed(block_hashes) if block in self._leases), None)
        lease = None if turn_before is None else self._end(int(turn_before))
        on_gpu = np.asarray(depths)[:, 0]
        prices = self._policy.weigh(now_s, num_tokens, block_hashes, on_gpu)
        cost_s = prices.cost_s.copy()
        if not (self._variant.is_for_first_turns and lease is not None):
            cost_s += self._variant.context * self._leased_tokens * prices.load.unit_s
        if self._variant.evictions:
            lost = [self._num_evicted(idx, block_hashes, num_tokens, int(on_gpu[idx])) for idx in range(NUM_WORKERS)]
            price = self._variant.evictions * (1.0 + prices.price) * self._block_size
            cost_s += price * np.array(lost) * prices.load.unit_s
        chosen: int = self._policy.choose(prices._replace(cost_s=cost_s), list(held_blocks), self._random)
        if self._variant.is_sticky and lease is not None:
            chosen = lease.worker_idx
        self._running[request_id] = self._policy.dispatched(now_s, chosen, prices, chosen)
        self._worker_of[request_id] = chosen
        return chosen

    def finished(self, now_s: float, request_id: Hashable) -> None:
        super().finished(now_s, request_id)
        request: Request = self.simulation.jobs[int(str(request_id))].request
        if not request.blocks or (self._variant.is_known and request.idx not in self._returning):
            return
        name, blocks = request.blocks[-1], request.blocks + request.answer_blocks
        if name in self._leases:
            self._end(name)
        lease = Lease(self._worker_of[request_id], now_s, request.num_tokens + request.num_output_tokens, blocks)
        self._leases[name] = lease
        self._ended.append((now_s, name))
        self._leased_blocks.update(blocks)
        self._leased_tokens[lease.worker_idx] += lease.num_tokens

    def _end(self, name: int) -> Lease:
        lease = self._leases.pop(name)
        self._leased_blocks.subtract(lease.blocks)
        self._leased_tokens[lease.worker_idx] -= lease.num_tokens
        return lease

    def _num_evicted(self, idx: int, blocks: Hashes, num_tokens: int, depth: int) -> int:
        """Return how many blocks of returning sessions a worker would evict for a prompt, by looking into it."""
        (pool,), own = self.simulation._workers[idx]._pools, set(blocks[:depth])
        used = len(pool.pinned) + len(pool.idle) + pool.num_own
        num = used + -(-num_tokens // self._block_size) + ANSWER_BLOCKS - depth - pool.num_blocks
        lost = [block for block in islice(pool.idle, max(0, num)) if block not in own]
        return sum(isinstance(block, int) and self._leased_blocks[block] > 0 for block in lost)


def simulated(trace: Trace, cache_tokens: int, load: float, seed: int, variant: Variant) -> Outcome:
    machines = [Machine(cache_tokens=cache_tokens)] * NUM_WORKERS
    paced = at_load(trace, machines, load, seed)
    returning = {each.follows for each in paced.requests if each.follows is not None}
    driver = ReturnsDriver(paced.block_size, seed, variant, returning)
    driver.simulation = Simulation(paced, machines, driver)
    return driver.simulation.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    sessions = tool_agents(1500 if args.quick else 6000).in_sessions()
    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    for cache_tokens, longer, load in product((400_000, 250_000, 150_000), (1, 4), (0.5, 0.65, 0.75)):
        turns = [replace(each, pause_s=longer * (each.pause_s or 0.0)) for each in sessions.requests]
        title = f"{cache_tokens // 1000}k, {longer}x, {load:g}"
        results[title] = {}
        for name, variant in VARIANTS.items():
            trace = replace(sessions, requests=turns)
            runs = [simulated(trace, cache_tokens, load, seed, variant) for seed in range(1 if args.quick else 3)]
            results[title][name] = [median(run.ttft_mean_s for run in runs), median(run.cached for run in runs)]
        rows.append([title, *(f"{ttft_s:.3g} / {cached:.1%}" for ttft_s, cached in results[title].values())])
        print(rows[-1], flush=True)
    text = table(["cache a worker, pauses, load", *VARIANTS], rows)
    report("bench_returns", text, results, [], args.save)


if __name__ == "__main__":
    main()
