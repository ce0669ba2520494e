"""What does publishing cost an engine: on its own thread, in its process, on the wire, and in a sidecar?

Bound by the interpreter: a report copies token ids and appends to a deque; the background thread hashes (XXH3, twice a
block) under the same interpreter lock. Baseline: what vLLM's ZMQ publisher does on the engine's thread, putting an
event struct on a bounded `queue.Queue`; it copies nothing, and blocks when the queue is full.
Predicted before the first run, for 8 blocks of 16 tokens an event: 0.2 µs a block on the engine's thread, 2 µs a block
in the background, 10 bytes a block on the wire. Measured: 0.12 µs, 3.7 µs, 9.5 bytes.

    python benchmarks/bench_publisher.py [--quick] [--save] [--paced-only] [--paced-s S]
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _common import report, table, time_call_us
from _paced_sidecar import Outcome, PacedStream, follow_paced

from kvist.events import FULL, EngineStored
from kvist.events.transports import Endpoint, Message, ReplaySource
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.publisher.sidecar import LIMITS, SidecarFeed

BLOCK_SIZE = 16
NUM_CACHED_BLOCKS = 20_000
"""What the emulated vLLM holds before it removes, where no socket has a part."""
PARKED = PublisherLimits(inbox_capacity=10**9, coalesce_s=3600.0)
"""The background thread gathers for an hour: what is left is the cost of the call alone."""
BUSY = PublisherLimits(inbox_capacity=10**9)
NEVER_OFFERED = PublisherLimits(inbox_capacity=10**9, num_events_a_slice=10**9)


class Discarding:
    """A publication to nowhere."""

    endpoint = "discard://"

    def serve_replay(self, source: ReplaySource) -> None:
        """Keep nothing."""

    def send(self, message: Message) -> None:
        """Drop it."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Do nothing."""


def publisher_with(limits: PublisherLimits) -> KvEventPublisher:
    """Return a publisher of the full-attention group, that has a sliding group to filter too."""
    publisher = KvEventPublisher(Discarding(), worker="bench", block_size=BLOCK_SIZE, limits=limits)
    publisher.created(window=1024, group=0)
    publisher.created(window=FULL, group=1)
    return publisher


def call_costs(num_rounds: int) -> dict[str, float]:
    """Return CPU microseconds a block on the engine's thread, best of some rounds of 200 calls."""
    publisher = publisher_with(PARKED)
    baseline: queue.Queue[EngineStored] = queue.Queue(maxsize=10**9)

    def best(num_blocks: int, call: Callable[[], object]) -> float:
        rounds = []
        for _ in range(num_rounds):
            rounds.append(time_call_us(call, 200)[1])
            publisher._inbox.drop()  # as the background thread would have: memory is used again, not grown
            baseline.queue.clear()
        return min(rounds) / num_blocks

    costs = {}
    for num_blocks in (1, 8, 64):
        hashes = list(range(num_blocks))
        tokens = list(range(num_blocks * BLOCK_SIZE))
        calls: dict[str, Callable[[], object]] = {
            "stored, list": partial(publisher.stored, hashes, tokens, window=FULL, group=1),
            "stored, tuple": partial(publisher.stored, tuple(hashes), tuple(tokens), window=FULL, group=1),
            "stored, numpy": partial(publisher.stored, hashes, np.array(tokens, np.uint32), window=FULL, group=1),
            "stored, a filtered group": partial(publisher.stored, hashes, tokens, window=1024, group=0),
            "removed": partial(publisher.removed, hashes, window=FULL, group=1),
            "baseline: queue.Queue": partial(_put, baseline, hashes, tokens),
        }
        costs |= {f"{name}, {num_blocks} blocks": best(num_blocks, call) for name, call in calls.items()}
    publisher.close()
    return costs


def _put(baseline: queue.Queue[EngineStored], hashes: list[int], tokens: list[int]) -> None:
    baseline.put(EngineStored(hashes, tokens, BLOCK_SIZE, window=FULL, group=1))


def background(num_events: int, num_blocks: int, is_filtered: bool) -> tuple[float, float]:
    """Return microseconds and wire bytes a block of the background thread alone, for root chains of `num_blocks`."""
    publisher = publisher_with(PublisherLimits(inbox_capacity=10**9, coalesce_s=0.3))
    tokens = [
        np.random.default_rng(event).integers(0, 1 << 17, num_blocks * BLOCK_SIZE).tolist()
        for event in range(num_events)
    ]
    group: dict[str, Any] = {"window": 1024, "group": 0} if is_filtered else {"window": FULL, "group": 1}
    for event_idx, token_ids in enumerate(tokens):
        first = event_idx * num_blocks
        publisher.stored(range(first, first + num_blocks), token_ids, **group)
    cpu_s = time.process_time()
    publisher.close()
    cpu_s = time.process_time() - cpu_s
    return cpu_s / (num_events * num_blocks) * 1e6, publisher.statistics().num_sent_bytes / (num_events * num_blocks)


def sidecar(stream: PacedStream) -> tuple[float, int]:
    """Return CPU microseconds of a sidecar for each block stored, socket and splitting left out, and events lost."""
    messages = [Message(b"", sequence, payload) for sequence, payload in enumerate(stream.payloads())]
    publisher = KvEventPublisher(Discarding(), worker="bench", block_size=BLOCK_SIZE, num_ranks=0, limits=LIMITS)
    feed = SidecarFeed(Endpoint.parse("tcp://127.0.0.1:5557"), publisher)
    cpu_s = time.process_time()
    for start in range(0, stream.num_messages, 16):
        for _ in feed.receive_all(messages[start : start + 16], 1.0):
            pass
    publisher.close()
    cpu_s = time.process_time() - cpu_s
    return cpu_s / stream.num_blocks * 1e6, publisher.num_lost_events


def paced(duration_s: float) -> dict[str, Outcome]:
    """Return what becomes of 100,000 blocks/s in a whole sidecar, and of as many at once."""
    num_blocks = int(100_000 * duration_s)
    runs = {
        "1 block an event, 16 events a message, one core": (PacedStream(num_blocks, 1, 16, 100_000), 1),
        "1 block an event, 16 events a message": (PacedStream(num_blocks, 1, 16, 100_000), None),
        "1 block an event, 16 events a message, all at once": (PacedStream(num_blocks, 1, 16, None), None),
        "8 blocks an event, 4 events a message, one core": (PacedStream(num_blocks, 8, 4, 100_000), 1),
    }
    return {name: follow_paced(stream, num_cores) for name, (stream, num_cores) in runs.items()}


def paced_table(outcomes: dict[str, Outcome]) -> str:
    """Return the table of what became of paced streams."""
    headers = [
        "a whole sidecar",
        "blocks/s sent",
        "CPU µs a block",
        "lag in the end",
        "events waiting, peak",
        "lost",
        "held",
    ]
    rows = [
        [
            name,
            f"{outcome.sent_per_s:,.0f}",
            f"{outcome.cpu_us_per_block:.2f}",
            f"{outcome.lag_s:.2f} s",
            outcome.peak_waiting,
            outcome.num_missing,
            outcome.num_held,
        ]
        for name, outcome in outcomes.items()
    ]
    return table(headers, rows)


def step_times_ms(num_steps: int, num_events: int, limits: PublisherLimits = BUSY) -> list[float]:
    """Return the milliseconds of engine steps: 1 ms of Python, some events of 8 blocks, 2 ms waiting for a device."""
    publisher = publisher_with(limits)
    steps = []
    for step in range(num_steps):
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < 0.001:
            pass
        for event_idx in range(num_events):
            first = (step * num_events + event_idx) * 8
            publisher.stored(range(first, first + 8), range(first, first + 8 * BLOCK_SIZE), window=FULL, group=1)
        time.sleep(0.002)
        steps.append((time.perf_counter() - started_s) * 1e3)
    publisher.close()
    return sorted(steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--paced-only", action="store_true", help="print what a paced engine costs a sidecar, no more")
    parser.add_argument("--paced-s", type=float, default=8.0, metavar="S", help="for how long it sends (%(default)s)")
    args = parser.parse_args()
    outcomes = paced(1.0 if args.quick else args.paced_s)
    if args.paced_only:
        print(paced_table(outcomes))
        return
    costs = call_costs(5 if args.quick else 50)
    text = [table(["on the engine's thread", "CPU µs a block"], [[name, f"{us:.3f}"] for name, us in costs.items()])]

    num_events = 500 if args.quick else 5_000
    shares = {
        f"{'filtered' if is_filtered else 'published'}, {num_blocks} blocks an event": background(
            num_events, num_blocks, is_filtered
        )
        for num_blocks in (1, 8, 64)
        for is_filtered in (False, True)
    }
    rows = [[name, f"{us:.2f}", f"{size:.1f}"] for name, (us, size) in shares.items()]
    text.append(table(["in the background", "CPU µs a block", "bytes a block sent"], rows))

    beside = {
        f"{num_blocks} blocks an event, {num_events} events a message": sidecar(
            PacedStream(64_000 if args.quick else 320_000, num_blocks, num_events, None, NUM_CACHED_BLOCKS)
        )
        for num_blocks, num_events in ((1, 1), (1, 16), (8, 4), (64, 1))
    }
    rows = [[name, f"{us:.2f}", f"{1e6 / us:,.0f}", lost] for name, (us, lost) in beside.items()]
    text.append(table(["a sidecar of vLLM", "CPU µs a block", "blocks/s of one core", "events lost"], rows))

    text.append(paced_table(outcomes))

    num_steps = 100 if args.quick else 1_500
    steps = {f"{num_events} events": step_times_ms(num_steps, num_events) for num_events in (0, 4, 32)}
    for num_events in (4, 32):
        steps[f"{num_events} events, the lock not offered"] = step_times_ms(num_steps, num_events, NEVER_OFFERED)
    quantiles = {
        name: {q: round(times[min(int(q * len(times)), len(times) - 1)], 3) for q in (0.5, 0.99, 1.0)}
        for name, times in steps.items()
    }
    rows = [[name, *times.values()] for name, times in quantiles.items()]
    text.append(table(["an engine step of 3 ms", "median ms", "p99 ms", "max ms"], rows))
    results = {
        "engine_thread_us_per_block": {name: round(us, 4) for name, us in costs.items()},
        "background_us_and_bytes_per_block": {name: [round(v, 3) for v in share] for name, share in shares.items()},
        "sidecar_us_per_block": {name: round(us, 3) for name, (us, _) in beside.items()},
        "paced_sidecar": {name: outcome._asdict() for name, outcome in outcomes.items()},
        "engine_step_ms": {name: {str(q): ms for q, ms in times.items()} for name, times in quantiles.items()},
    }
    report("publisher", "\n\n".join(text), results, ["msgspec", "numpy", "xxhash"], args.save)


if __name__ == "__main__":
    main()
