"""How long does a router wait for "who holds this prompt", and what does a query cost the index service?

Bound by reading integers from JSON (a token is 4 to 7 bytes, 6 ns in compiled code), then hashing (20 ns a block for
its link in the chain), the loopback's copies and, at small sizes, the fixed cost of an event loop's iteration.
Baseline: `dynamo.indexer` of ai-dynamo-runtime 1.6.1, compiled Rust, with its default of 4 threads.

One kept-alive connection for each service, bodies encoded beforehand, a client that only reads the length of the
answer; the services are queried in turns. Worker w holds (w mod 8 + 1) eighths of each prompt. Under load the service
also receives 8 new blocks a message with as many removals, evenly or as fast as it can; the sender runs beside it on
the same machine.

    python benchmarks/bench_query.py [--quick] [--save] [--only SECTION ...]
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from _common import best_and_spread, report, table
from _engines import BLOCK_SIZE, Probe, StreamSpec
from _indexers import SIDES, Indexer, query_of
from _streams import Publisher

SIZES = {128: 64, 2_048: 32, 16_384: 8, 131_072: 2}
"""Tokens of a prompt, and how many prompts of that size there are."""
NUM_DEPTHS = 8
LOADS = {"idle": None, "20k blocks/s": 8 / 20_000, "flood": 0.0}
"""Seconds between messages of 8 blocks."""
HEADERS = [
    "tokens",
    *(f"{side}, p50 ms" for side in SIDES),
    "p50 ratio",
    *(f"{side}, p99 ms" for side in SIDES),
    "p99 ratio",
    *(f"{side}, CPU ms" for side in SIDES),
]


@dataclass
class Timing:
    """Rounds of queries of one size to one side."""

    rounds_ms: list[list[float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    messages_a_second: list[float] = field(default_factory=list)

    def quantiles_ms(self, share: float) -> list[float]:
        """Return a quantile of each round."""
        return [sorted(one)[min(int(share * len(one)), len(one) - 1)] for one in self.rounds_ms]


class Setting:
    """Both services with the same prompts, held by some workers, and an engine that can be made busy."""

    def __init__(self, stack: ExitStack, num_workers: int, prompt_sizes: dict[int, int]) -> None:
        self.num_workers = num_workers
        num_depths = min(num_workers, NUM_DEPTHS)
        self._num_depths = num_depths
        forms = dict.fromkeys(SIDES, "map")
        spec = StreamSpec(8, forms, capacity=20_480, num_streams=num_depths + 1, high_water_mark=1_000)
        self.publisher = stack.enter_context(Publisher(spec))
        self.indexers: dict[str, Indexer] = {}
        for side in SIDES:
            *endpoints, busy = self.publisher.endpoints[side]
            workers = {number + 1: endpoints[number % num_depths] for number in range(num_workers)}
            self.indexers[side] = Indexer(side, {**workers, num_workers + 1: busy})
            stack.callback(self.indexers[side].close)
            self.publisher.call("await_subscribers", side, [num_workers // num_depths] * num_depths + [1])
        num_tokens = [size for size, number in prompt_sizes.items() for _ in range(number)]
        self.prompts = self.publisher.call("make_prompts", num_tokens, num_depths, True)
        for side in SIDES:
            self.publisher.call("burst", side)
            self._await_prompts(side)
        probes, _ = self.publisher.call("make", 10_000, [num_depths])
        self.publisher.call("keep")
        for side in SIDES:
            self.publisher.call("burst", side)
            self.indexers[side].await_visible([self._of_busy(probes[0])])

    def _of_busy(self, probe: Probe) -> Probe:
        """Return a probe of the busy stream, which is that of the last worker."""
        return probe._replace(stream_idx=self.num_workers)

    def _await_prompts(self, side: str) -> None:
        request = query_of(self.prompts[-1])
        expected = self.expected(len(self.prompts[-1]))
        give_up_at_s = time.monotonic() + 120
        while self._scores(side, request) != expected:
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"{side} does not show the prompts that it was sent")
            time.sleep(0.1)

    def _scores(self, side: str, request: bytes) -> Any:
        return json.loads(self.indexers[side].connection.exchange(request))["scores"]

    def expected(self, num_tokens: int) -> dict[str, dict[str, int]]:
        """Return the scores that a prompt must get."""
        held = [num_tokens * (depth + 1) // self._num_depths // BLOCK_SIZE * BLOCK_SIZE for depth in range(NUM_DEPTHS)]
        workers = range(self.num_workers)
        return {str(worker + 1): {"0": held[worker % self._num_depths]} for worker in workers}

    def num_wrong(self) -> int:
        """Return how many prompts are not answered alike by both, or not as the engines have it."""
        num_wrong = 0
        for token_ids in self.prompts:
            answers = [indexer.ask(token_ids) for indexer in self.indexers.values()]
            num_wrong += answers[0] != answers[1] or answers[0]["scores"] != self.expected(len(token_ids))
        return num_wrong

    def time_queries(self, side: str, size: int, num_queries: int, interval_s: float | None, timing: Timing) -> None:
        """Ask one side for prompts of one size, while its engine is busy if there is an interval."""
        requests = [query_of(prompt) for prompt in self.prompts if len(prompt) == size]
        indexer = self.indexers[side]
        started_s = time.monotonic()
        if interval_s is not None:
            self.publisher.begin("endless", side, interval_s)
            time.sleep(0.3)
        exchange, now_s = indexer.connection.exchange, time.perf_counter
        exchange(requests[0])
        latencies_ms = []
        cpu_s = indexer.cpu_s()
        for number in range(num_queries):
            request = requests[number % len(requests)]
            asked_s = now_s()
            exchange(request)
            latencies_ms.append((now_s() - asked_s) * 1e3)
        timing.cpu_ms.append((indexer.cpu_s() - cpu_s) / num_queries * 1e3)
        timing.rounds_ms.append(latencies_ms)
        if interval_s is not None:
            num_messages = self.publisher.stop()
            probes, _ = self.publisher.call("make", 0, [self._num_depths])
            self.publisher.call("burst", side)
            seconds = indexer.await_visible([self._of_busy(probes[0])]) - started_s
            timing.messages_a_second.append(num_messages / seconds)


def run_load(setting: Setting, load: str, quick: bool) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Ask both sides in turns, for each size; return the lines of the table and the same as data."""
    rows, facts = [], []
    for size in SIZES:
        timings = {side: Timing() for side in SIDES}
        num_queries = 30 if quick else max(60, min(400, 2_000_000 // size))
        for number in range(3 if quick else 5):
            for side in SIDES[:: -1 if number % 2 else 1]:
                setting.time_queries(side, size, num_queries, LOADS[load], timings[side])
        row: list[str] = [f"{size:,}"]
        fact: dict[str, Any] = {"tokens": size}
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            quantiles = {side: timings[side].quantiles_ms(share) for side in SIDES}
            ratios = best_and_spread(
                ours / peer for ours, peer in zip(quantiles["kvist"], quantiles["peer"], strict=True)
            )
            middles = {side: best_and_spread(quantiles[side])[1] for side in SIDES}
            row += [
                *(f"{middles[side]:.3f}" for side in SIDES),
                f"**{ratios[1]:.2f}** ({ratios[0]:.2f}–{ratios[2]:.2f})",
            ]
            fact[name] = {"ms": middles, "ratio_min_median_max": ratios}
        row += [f"{best_and_spread(timings[side].cpu_ms)[1]:.3f}" for side in SIDES]
        fact["cpu_ms"] = {side: best_and_spread(timings[side].cpu_ms)[1] for side in SIDES}
        if LOADS[load] is not None:
            fact["messages_a_second"] = {side: best_and_spread(timings[side].messages_a_second)[1] for side in SIDES}
        rows.append(row)
        facts.append(fact)
    return rows, facts


SECTIONS = {
    "1 worker": (1, ("idle",)),
    "8 workers": (8, ("idle", "20k blocks/s", "flood")),
    "256 workers": (256, ("idle",)),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections")
    args = parser.parse_args()
    parts, results = ["# Query"], {}
    started_s = time.monotonic()
    for name in args.only:
        num_workers, loads = SECTIONS[name]
        with ExitStack() as stack:
            setting = Setting(stack, num_workers, SIZES)
            num_wrong = setting.num_wrong()
            for load in loads:
                rows, facts = run_load(setting, load, args.quick)
                title = f"{name} hold{'s' if num_workers == 1 else ''} the prompts, {load}"
                if LOADS[load] is not None:
                    rates = facts[0]["messages_a_second"].items()
                    title += " (" + ", ".join(f"{side} took {rate:,.0f} messages/s" for side, rate in rates) + ")"
                parts.append(f"## {title}\n\n{table(HEADERS, rows)}")
                results[f"{name}, {load}"] = facts
            num_wrong += setting.num_wrong()
            results[f"{name}, wrong answers"] = num_wrong
            num_asked = 2 * len(setting.prompts)
            parts.append(f"{num_asked - num_wrong} of {num_asked} answers are the engines' blocks and equal.")
    facts = {"is_quick": args.quick, "wall_s": round(time.monotonic() - started_s), **results}
    report("bench_query", "\n\n".join(parts), facts, ("ai-dynamo-runtime", "numba", "pyzmq"), args.save)


if __name__ == "__main__":
    main()
