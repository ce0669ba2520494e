"""Replicas of a router over one simulated fleet: how much longer requests wait than with one router.

    python benchmarks/bench_replicas.py [--requests 1500] [--seeds 10] [--first 1] [--jobs 1] [--json FILE]

Each replica has its own board and decides by it; summaries of its load in flight go to the others every 10 ms, as
`kvist route --replicas` sends them. A load balancer distributes requests at random. With `silent`, no summaries are
sent. The ratio is that of the means over all seeds, which are the same for each number of replicas; after it the
standard error of the ratios of single seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.replicas import MAX_REPLICAS, TICK_S, WHOLE_S, ReplicaRows, SummaryBuilder
from kvist.router.policy.settings import PriceSettings
from kvist.simulate.driver import PricedDriver
from kvist.simulate.fleet import at_load, measure
from kvist.simulate.trace import Trace, conversations, tool_agents
from kvist.simulate.worker import Machine

TRACES = {"conversations": conversations, "tool agents": tool_agents}
LOADS = 0.7, 0.85
SORTS = [(1, True), (2, True), (4, True), (8, True), (2, False), (8, False)]
"""How many replicas, and whether they tell each other."""
NUM_WORKERS = 8


class Replicas:
    """A driver that is several: each request is one's of them."""

    def __init__(self, number: int, *, is_told: bool, num_workers: int, block_size: int, seed: int) -> None:
        self._drivers = [PricedDriver(num_workers, block_size, seed + idx) for idx in range(number)]
        boards = [LoadBoard(num_replicas=MAX_REPLICAS) for _ in self._drivers]
        for driver, board in zip(self._drivers, boards, strict=True):
            for idx in range(num_workers):
                board.column(WorkerRank(f"w{idx}", 0))
            driver._policy = LoadTracker(board).pricing(PriceSettings(), block_size)
        self._builders = [SummaryBuilder(board) for board in boards]
        self._rows = [ReplicaRows(board, lambda _: True) for board in boards]
        self._is_told, self._workers = is_told, range(num_workers)
        self._random, self._replica_of = Random(seed), dict[Hashable, int]()
        self._tick_at_s = self._whole_at_s = 0.0
        self._changed: set[int] = set()

    def _tick(self, now_s: float) -> None:
        if now_s < self._tick_at_s or not self._is_told:
            return
        self._tick_at_s, is_whole = now_s + TICK_S, now_s >= self._whole_at_s
        self._whole_at_s = now_s + WHOLE_S if is_whole else self._whole_at_s
        for idx in range(len(self._builders)) if is_whole else self._changed:
            summary = self._builders[idx].build(now_s, is_whole=is_whole)
            for other, rows in enumerate(self._rows):
                if other != idx:
                    rows.apply(str(idx), summary, now_s)
        self._changed = set()

    def _driver_of(self, request_id: Hashable) -> PricedDriver:
        """Return whose the request is; what changes there is told with the next tick."""
        idx = self._replica_of.setdefault(request_id, self._random.randrange(len(self._drivers)))
        self._changed.add(idx)
        return self._drivers[idx]

    def route(self, now_s: float, request_id: Hashable, *asked: Any, **named: Any) -> int:
        self._tick(now_s)
        *known, among = asked
        return self._driver_of(request_id).route(now_s, request_id, *known, among or self._workers, **named)

    def prefer(self, now_s: float, *asked: Any) -> int:
        return self._drivers[0].prefer(now_s, *asked)

    def answered(self, now_s: float, request_id: Hashable) -> None:
        self._tick(now_s)
        self._driver_of(request_id).answered(now_s, request_id)

    def tokens(self, now_s: float, request_id: Hashable, num: int) -> None:
        """Take note of it; that alone is told each second."""
        self._drivers[self._replica_of[request_id]].tokens(now_s, request_id, num)

    def finished(self, now_s: float, request_id: Hashable) -> None:
        self._driver_of(request_id).finished(now_s, request_id)


@cache
def trace_of(name: str, num_requests: int) -> Trace:
    """Return the trace of this name, made once a process."""
    return TRACES[name](num_requests)


def run(cell: tuple[str, float, int, bool, int], num_requests: int) -> tuple[float, float, float]:
    """Return mean and p99 time to first token and the cached share of one trace, load, number of replicas and seed."""
    name, load, number, is_told, seed = cell
    import_module("kvist.router.compiled.loops")  # decisions take a quarter of the time
    machines = [Machine()] * NUM_WORKERS
    trace = at_load(trace_of(name, num_requests), machines, load, seed)
    outcome = measure(trace, lambda **given: Replicas(number, is_told=is_told, **given), machines, seed)
    return outcome.ttft_mean_s, outcome.ttft_p99_s, outcome.cached


def main() -> None:
    """Print a table of each trace, load and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("| trace, load | replicas | mean TTFT, s | p99, s | cached | of one router's mean | cached, points |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(args.jobs) as jobs:
        for name, load in product(TRACES, LOADS):
            one: NDArray[np.float64] | None = None
            cells = [(name, load, *sort, seed) for sort in SORTS for seed in range(args.first, args.first + args.seeds)]
            outcomes = np.array([*jobs.map(run, cells, [args.requests] * len(cells))])
            for (number, is_told), seeds in zip(SORTS, outcomes.reshape(len(SORTS), args.seeds, 3), strict=True):
                one = seeds if one is None else one
                mean_s, p99_s, cached = seeds.mean(0)
                ratio, more = mean_s / one[:, 0].mean(), 100 * (cached - one[:, 2].mean())
                error = np.std(seeds[:, 0] / one[:, 0], ddof=min(1, args.seeds - 1)) / args.seeds**0.5
                print(
                    f"| {name}, {load:g} | {number}{'' if is_told else ', silent'} | {mean_s:.3f} | {p99_s:.2f} "
                    f"| {cached:.1%} | {ratio:.3f} ± {error:.3f} | {more:+.1f} |",
                    flush=True,
                )
                row = {"trace": name, "load": load, "replicas": number, "told": is_told}
                rows.append(row | {"seeds": seeds.tolist(), "ratio": ratio, "error": error})
    if args.json is not None:
        args.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
