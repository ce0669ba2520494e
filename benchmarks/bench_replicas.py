"""Replicas of a router over one simulated fleet: how much longer requests wait than with one router.

    python benchmarks/bench_replicas.py [--requests 1500] [--seeds 5] [--json FILE]

Each replica has a board of its own and decides by it; summaries of what it has in flight go to the others every 20 ms,
as `kvist route --replicas` sends them. A load balancer hands requests out at random. Where they are `silent`, none go.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable
from importlib import import_module
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from kvist.events import WorkerRank
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.replicas import MAX_REPLICAS, TICK_S, WHOLE_S, Listener, Teller
from kvist.router.policy.settings import PriceSettings
from kvist.simulate.driver import PricedDriver
from kvist.simulate.fleet import at_load, measure
from kvist.simulate.trace import conversations, tool_agents
from kvist.simulate.worker import Machine

TRACES = {"conversations": conversations, "tool agents": tool_agents}
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
        self._tellers = [Teller(board) for board in boards]
        self._listeners = [Listener(board, lambda _: True) for board in boards]
        self._is_told, self._workers = is_told, range(num_workers)
        self._random, self._driver_of = Random(seed), dict[Hashable, PricedDriver]()
        self._tick_at_s = self._whole_at_s = 0.0

    def _tick(self, now_s: float) -> None:
        if now_s < self._tick_at_s or not self._is_told:
            return
        self._tick_at_s, is_whole = now_s + TICK_S, now_s >= self._whole_at_s
        self._whole_at_s = now_s + WHOLE_S if is_whole else self._whole_at_s
        for idx, teller in enumerate(self._tellers):
            summary = teller.summary(now_s, is_whole=is_whole)
            for other, listener in enumerate(self._listeners):
                if other != idx:
                    listener.take(str(idx), summary, now_s)

    def route(self, now_s: float, request_id: Hashable, *asked: Any, **named: Any) -> int:
        self._tick(now_s)
        driver = self._driver_of.setdefault(request_id, self._random.choice(self._drivers))
        *known, among = asked
        return driver.route(now_s, request_id, *known, among or self._workers, **named)

    def prefer(self, now_s: float, *asked: Any) -> int:
        return self._drivers[0].prefer(now_s, *asked)

    def answered(self, now_s: float, request_id: Hashable) -> None:
        self._tick(now_s)
        self._driver_of[request_id].answered(now_s, request_id)

    def tokens(self, now_s: float, request_id: Hashable, num: int) -> None:
        self._driver_of[request_id].tokens(now_s, request_id, num)

    def finished(self, now_s: float, request_id: Hashable) -> None:
        self._driver_of[request_id].finished(now_s, request_id)


def main() -> None:
    """Print a table of each trace, load and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import_module("kvist.router.compiled.loops")  # decisions take a quarter of the time
    machines, rows = [Machine()] * NUM_WORKERS, []
    print("| trace, load | replicas | mean TTFT, s | p99, s | cached | of one router's: mean, p99 | cached, points |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, make in TRACES.items():
        trace = make(args.requests)
        for load in (0.7, 0.85):
            one: list[float] = []
            for number, is_told in [(1, True), (2, True), (4, True), (8, True), (2, False), (8, False)]:
                outcomes = [
                    measure(
                        at_load(trace, machines, load, seed),
                        lambda number=number, is_told=is_told, **given: Replicas(number, is_told=is_told, **given),
                        machines,
                        seed,
                    )
                    for seed in range(1, args.seeds + 1)
                ]
                mean_s, p99_s, cached = (
                    median(getattr(outcome, field) for outcome in outcomes)
                    for field in ("ttft_mean_s", "ttft_p99_s", "cached")
                )
                one = one or [mean_s, p99_s, cached]
                told = "" if is_told else ", silent"
                print(
                    f"| {name}, {load:g} | {number}{told} | {mean_s:.3f} | {p99_s:.2f} | {cached:.1%} "
                    f"| {mean_s / one[0]:.2f}, {p99_s / one[1]:.2f} | {100 * (cached - one[2]):+.1f} |",
                    flush=True,
                )
                row = {"trace": name, "load": load, "replicas": number, "told": is_told}
                rows.append(row | {"ttft_mean_s": mean_s, "ttft_p99_s": p99_s, "cached": cached})
    if args.json is not None:
        args.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
