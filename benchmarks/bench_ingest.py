"""What does it cost an index service to receive an engine's KV events, and how soon are they visible?

The receive path is the bottleneck: a ZMQ message is some 2 µs of system calls and framing with libzmq, while reading
tokens, hashing and applying 8 blocks is 1 to 2 µs of compiled code. Baseline: `dynamo.indexer` of ai-dynamo-runtime
1.6.1, compiled Rust, with its default of 4 threads; 1 and 2 threads took the same CPU.

One ZMQ publisher sends both the same vLLM events, in turns and in chunks. CPU is that of the whole process, user and
system, from the kernel's clock. A chunk ends when its last block is visible over HTTP. Messages are made beforehand.
"Canonical" is what Kvist's publisher would send for the same engine, while the baseline follows the engine's own
stream. At the end of each case both get some hundred queries: answers must be the engine's blocks, and equal.

    python benchmarks/bench_ingest.py [--quick] [--save] [--only SECTION ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from _common import best_and_spread, report, table
from _engines import StreamSpec
from _indexers import SIDES, Indexer, compare, start_both
from _streams import Publisher

NUM_BLOCKS_WARM = 24_576
CAPACITY = 20_480
"""Blocks of an engine with churn: 328k tokens, what a model of 8B has room for beside its weights in 80 GB."""


@dataclass
class Chunk:
    """What a chunk cost one side."""

    cpu_s: float
    wall_s: float
    num_messages: int


@dataclass
class Case:
    """A stream, its chunks by side, and how far the answers at the end were right."""

    name: str
    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: {side: [] for side in SIDES})
    message_bytes: float = 0.0
    num_steps: int = 0
    num_compared: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def us(self, side: str) -> float:
        """Return the median CPU microseconds an engine step, which is a message of the engine's own stream."""
        return best_and_spread(chunk.cpu_s / self.num_steps * 1e6 for chunk in self.chunks[side])[1]

    def ratios(self) -> tuple[float, float, float]:
        """Return the least, median and greatest of ours to the peer's, chunk by chunk."""
        pairs = zip(self.chunks["kvist"], self.chunks["peer"], strict=True)
        return best_and_spread(ours.cpu_s / peer.cpu_s for ours, peer in pairs)

    def row(self) -> list[str]:
        """Return the line of the table."""
        least, median, most = self.ratios()
        walls = [best_and_spread(chunk.wall_s for chunk in self.chunks[side])[1] * 1e3 for side in SIDES]
        return [
            self.name,
            f"{self.message_bytes:.0f}",
            *(f"{self.us(side):.2f}" for side in SIDES),
            f"**{median:.2f}** ({least:.2f}–{most:.2f})",
            *(f"{wall:.0f}" for wall in walls),
            f"{self.num_compared - len(self.wrong)} of {self.num_compared}",
        ]


HEADERS = ["stream", "bytes", *(f"{side}, CPU µs" for side in SIDES), "ratio", *(f"{s}, ms" for s in SIDES), "equal"]


def send_and_wait(publisher: Publisher, indexer: Indexer, probes: list[Any], pace_s: float, num: int) -> Chunk:
    """Send what was made to one side and measure until all of it is visible."""
    cpu_s = indexer.cpu_s()
    started_s = publisher.call("paced", indexer.side, pace_s) if pace_s else publisher.call("burst", indexer.side)
    visible_s = indexer.await_visible(probes)
    return Chunk(indexer.cpu_s() - cpu_s, visible_s - started_s, num)


def run_case(
    name: str, spec: StreamSpec, num_steps: int, num_chunks: int, num_probes: int, pace_s: float = 0.0
) -> Case:
    """Feed both sides a warm-up and then chunks of some engine steps, in turns; over `pace_s` each, if given."""
    case = Case(name, num_steps=num_steps)
    with Publisher(spec) as publisher, ExitStack() as stack:
        indexers = start_both(stack, publisher.endpoints)
        for side in SIDES:
            publisher.call("await_subscribers", side)
        for number in range(-1, num_chunks):
            is_warm_up = number < 0
            probes, sizes = publisher.call("make", NUM_BLOCKS_WARM // spec.num_blocks if is_warm_up else num_steps)
            for side in SIDES[:: -1 if number % 2 else 1]:
                pace = 0.0 if is_warm_up else pace_s
                chunk = send_and_wait(publisher, indexers[side], probes, pace, int(sizes[side][0]))
                if not is_warm_up:
                    case.chunks[side].append(chunk)
                    case.message_bytes = sizes["kvist"][1]
        questions = publisher.call("probes", num_probes)
        case.wrong = compare(indexers, questions)
        case.num_compared = len(questions)
    return case


def same(form: str) -> dict[str, str]:
    """Return the forms where both sides get the same."""
    return dict.fromkeys(SIDES, form)


def floods(quick: bool) -> list[Case]:
    """Engine streams as fast as the service takes them."""
    cases = []
    for num_blocks in (8, 1, 64):
        for form in ("map", "array"):
            for capacity in (None, CAPACITY):
                name = f"{num_blocks} block{'s' * (num_blocks > 1)}, {form}{', churn' if capacity else ''}"
                num_steps = min(40_000, 160_000 // num_blocks) // (8 if quick else 1)
                spec = StreamSpec(num_blocks, same(form), capacity)
                cases.append(run_case(name, spec, num_steps, 3 if quick else 5, 60 if quick else 300))
    return cases


def canonical(quick: bool) -> list[Case]:
    """Kvist's own stream of the same engine, the peer on the engine's; CPU a step of the engine, 8 blocks."""
    cases = []
    for num_events in (8, 32):
        for capacity in (None, CAPACITY):
            spec = StreamSpec(8, {"peer": "map", "kvist": f"canonical/{num_events}"}, capacity)
            name = f"{num_events} steps a batch{', churn' if capacity else ''}"
            cases.append(run_case(name, spec, 2_500 if quick else 20_000, 3 if quick else 5, 60 if quick else 300))
    return cases


def paced(quick: bool) -> list[Case]:
    """Messages that come one by one: the service sleeps between them. 8 blocks a step."""
    cases = []
    for rate in (20_000, 50_000):
        for form in ("map", "canonical/8"):
            for capacity in (None,) if form != "map" else (None, CAPACITY):
                duration_s = 0.5 if quick else 1.5
                num_steps = int(rate * duration_s / 8)
                name = f"{rate // 1000}k blocks/s, {form.partition('/')[0]}{', churn' if capacity else ''}"
                spec = StreamSpec(8, {"peer": "map", "kvist": form}, capacity)
                cases.append(run_case(name, spec, num_steps, 2 if quick else 4, 60, duration_s))
    for num_engines in (64, 256):
        name = f"{num_engines} engines, 30 steps a second each, map"
        spec, num_steps = StreamSpec(8, same("map"), num_streams=num_engines), int(num_engines * 30 * duration_s)
        cases.append(run_case(name, spec, num_steps, 2 if quick else 4, 60, duration_s))
    return cases


def latencies(quick: bool) -> list[list[str]]:
    """Return milliseconds from an event's sending to its being visible, when asked all the time, at some rates."""
    rows = []
    with Publisher(StreamSpec(8, same("map"), CAPACITY)) as publisher, ExitStack() as stack:
        indexers = start_both(stack, publisher.endpoints)
        for side in SIDES:
            publisher.call("await_subscribers", side)
        probes, _ = publisher.call("make", 10_000)
        publisher.call("keep")
        for side in SIDES:
            publisher.call("burst", side)
            indexers[side].await_visible(probes)
        for name, interval_s, num_around in VISIBLE_AT:
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(10 if quick else 100):
                probes, _ = publisher.call("make", 0)  # only an event of one block
                for side in SIDES[:: -1 if number % 2 else 1]:
                    time.sleep(0.03)
                    publisher.begin("mark", side, interval_s, num_around)
                    visible_s = indexers[side].await_visible(probes, poll_s=0.0)
                    times[side].append((visible_s - publisher.result()) * 1e3)
            rows.append([name, *(_quantile(times[side], q) for q in (0.5, 0.9, 0.99) for side in SIDES)])
    return rows


def _quantile(values: list[float], share: float) -> str:
    return f"{sorted(values)[min(int(share * len(values)), len(values) - 1)]:.2f}"


VISIBLE_AT = (
    ("alone", 0.0, 0),
    ("100 messages/s", 0.01, 2),
    ("1,000 messages/s", 0.001, 20),
    ("6,250 messages/s", 0.00016, 150),
)
"""Seconds between messages, and how many come before the one that is looked for."""
VISIBLE_HEADERS = ["stream", *(f"{side}, {q}" for q in ("p50", "p90", "p99") for side in SIDES)]
SECTIONS: dict[str, tuple[str, Callable[[bool], list[Case]]]] = {
    "floods": ("An engine's stream, as fast as it is taken; CPU a message", floods),
    "canonical": (
        "Kvist's stream of the same engine, the peer on vLLM's; CPU an engine step of 8 blocks",
        canonical,
    ),
    "paced": ("At a steady pace, message by message; CPU an engine step of 8 blocks", paced),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "latency"], help="some sections")
    args = parser.parse_args()
    chosen = args.only or [*SECTIONS, "latency"]
    started_s = time.monotonic()
    parts, results = ["# Ingest"], {}
    for name in chosen:
        if name == "latency":
            rows = latencies(args.quick)
            parts.append(f"## From an event's sending to its being visible, ms\n\n{table(VISIBLE_HEADERS, rows)}")
            results[name] = rows
            continue
        title, run = SECTIONS[name]
        cases = run(args.quick)
        parts.append(f"## {title}\n\n{table(HEADERS, [case.row() for case in cases])}")
        results[name] = [
            {
                "case": case.name,
                "cpu_us_a_step": {side: round(case.us(side), 3) for side in SIDES},
                "ratio_min_median_max": [round(ratio, 3) for ratio in case.ratios()],
                "num_equal": case.num_compared - len(case.wrong),
                "num_compared": case.num_compared,
                "first_wrong": case.wrong[:1],
            }
            for case in cases
        ]
    facts = {"is_quick": args.quick, "wall_s": round(time.monotonic() - started_s), **results}
    report("bench_ingest", "\n\n".join(parts), facts, ("ai-dynamo-runtime", "numba", "pyzmq"), args.save)


if __name__ == "__main__":
    main()
