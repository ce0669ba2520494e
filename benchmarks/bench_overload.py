"""What happens to thousands of chats that arrive at once, and to 1,000 a second beside thousands of idle connections?

Bursts of streaming chats of 2.7 kB, each on its own connection, over four workers that answer at once, so that any chat
without an answer is due to the router. Then idle connections are held, while chats of 100 tokens arrive at a fixed rate
whether or not earlier ones were answered; latency counts from when a chat was due. Both are bound by the router's CPU
(see `bench_proxy.py`, which has the same workers and clients) and by its number of descriptors: this process raises its
limit to the maximum, which the router inherits, and which stands below the table. Baseline: smg with its default policy
cache_aware. Both routers have all defaults, and are restarted for each row. By default smg refuses what exceeds 4,096
requests at once and 100 waiting.

    pip install smg uvloop
    python benchmarks/bench_overload.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from _chat_clients import Client, Load, raise_descriptor_limit
from _chat_fleet import Router
from _chats import WORKS, Chats, make_model
from _common import report, table

COMPARED = ("kvist kv", "smg cache_aware")
BURST_WORK = WORKS["stream, 2.7 kB, half shared"]
PACED_WORK = WORKS["unary, 100 tokens, half shared"]
RATE = 1000
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of some chats."""

    num_sent: int
    num_answered: int
    failures: dict[str, int]
    """By status, "closed" where a connection ended first, "refused" where there was none."""
    num_twice: int
    """Chats that workers received more than once."""
    num_idle_dropped: int
    peak_bytes: int
    p50_s: float | None
    p99_s: float | None
    all_answered_after_s: float


async def burst(load: Load, num_chats: int) -> int:
    """Send that many chats at once and wait for all; return how many they were."""
    num_ended, ended = 0, asyncio.Event()

    def end(client: Client | None) -> None:
        nonlocal num_ended
        num_ended += 1
        if client is not None:
            client.close()
        if num_ended == num_chats:
            ended.set()

    async def send() -> None:
        try:
            (await load.connect(end)).send()
        except OSError:
            load.failures["refused"] += 1
            end(None)

    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(send() for _ in range(num_chats)))
            await ended.wait()
    return num_chats


async def pace(load: Load, duration_s: float) -> int:
    """Send chats at the rate, each on a connection that is free; wait for all, and return how many they were."""
    free: list[Client] = []
    num_chats, num_ended, ended = int(RATE * duration_s), 0, asyncio.Event()

    def end(client: Client | None) -> None:
        nonlocal num_ended
        num_ended += 1
        if client is not None and not client.is_closed:
            free.append(client)
        if num_ended == num_chats:
            ended.set()

    async def send(due_s: float) -> None:
        try:
            client = free.pop() if free else await load.connect(end)
            client.send(due_s)
        except OSError:
            load.failures["refused"] += 1
            end(None)

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for idx in range(num_chats):
            due_s = begun_s + idx / RATE
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(send(due_s))
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    return num_chats


class Idle(asyncio.Protocol):
    """A connection that says nothing."""

    def __init__(self) -> None:
        self.is_lost = False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.is_lost = True


async def pace_beside_idle(load: Load, num_idle: int, duration_s: float) -> tuple[int, int]:
    """Hold idle connections during `pace`; return how many chats were sent, and how many connections were dropped."""
    loop = asyncio.get_running_loop()
    idle = [(await loop.create_connection(Idle, "127.0.0.1", load.port))[1] for _ in range(num_idle)]
    num_chats = await pace(load, duration_s)
    return num_chats, sum(each.is_lost for each in idle)


def measure(side: str, folder: Path, num_connections: int, idle_duration_s: float | None) -> Outcome:
    """Return what became of a burst of chats, or with a duration of the chats beside that many idle connections."""
    with Router(side, folder) as router:
        work = BURST_WORK if idle_duration_s is None else PACED_WORK
        load = Load(router.port, Chats(folder), work)
        begun_s = time.perf_counter()
        if idle_duration_s is None:
            num_sent, num_dropped = uvloop.run(burst(load, num_connections)), 0
        else:
            num_sent, num_dropped = uvloop.run(pace_beside_idle(load, num_connections, idle_duration_s))
        duration_s = time.perf_counter() - begun_s
        cuts = statistics.quantiles(load.latencies_s, n=100) if len(load.latencies_s) > 1 else None
        failures = {name: number for name, number in load.failures.items() if number}
        if num_open := num_sent - len(load.latencies_s) - sum(failures.values()):
            failures[f"no answer in {PATIENCE_S:.0f} s"] = num_open
        return Outcome(
            num_sent,
            len(load.latencies_s),
            failures,
            router.fleet.counts()["repeated"],
            num_dropped,
            router.peak_bytes(),
            cuts[49] if cuts else None,
            cuts[98] if cuts else None,
            duration_s,
        )


def main() -> None:
    """Measure, and print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer chats and connections, once each")
    parser.add_argument("--save", action="store_true", help="keep the result below benchmarks/results")
    options = parser.parse_args()
    limit = raise_descriptor_limit()
    bursts, num_idle, duration_s, num_rounds = ((500,), 500, 2.0, 1) if options.quick else ((2000, 8000), 8000, 10.0, 2)
    loads: list[tuple[str, int, float | None]] = [(f"burst of {number}", number, None) for number in bursts]
    loads.append((f"{RATE}/s beside {num_idle} idle", num_idle, duration_s))
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        for load, number, idle_duration_s in loads:
            for side in COMPARED * num_rounds:
                outcomes.append((load, side, measure(side, Path(name), number, idle_duration_s)))
                print(*outcomes[-1], file=sys.stderr)
    show(outcomes, limit, options.save)


def show(outcomes: list[tuple[str, str, Outcome]], limit: int, save: bool) -> None:
    """Print and keep the table."""
    rows = [
        (
            load,
            side,
            f"{outcome.num_answered} of {outcome.num_sent}",
            ", ".join(f"{name}: {number}" for name, number in outcome.failures.items()) or "–",
            outcome.num_twice,
            outcome.num_idle_dropped,
            " / ".join("–" if value is None else f"{value * 1e3:.1f}" for value in (outcome.p50_s, outcome.p99_s)),
            f"{outcome.all_answered_after_s:.1f}",
            f"{outcome.peak_bytes / 1e6:.0f}",
        )
        for load, side, outcome in outcomes
    ]
    headers = ["load", "router", "answered", "failed", "sent to workers twice", "idle dropped", "p50 / p99, ms"]
    markdown = table([*headers, "whole, s", "peak RSS, MB"], rows)
    markdown += f"\n\nDescriptors a process may have: {limit}."
    results = [{"load": load, "side": side, **asdict(outcome)} for load, side, outcome in outcomes]
    report("overload", markdown, {"descriptors": limit, "rows": results}, ["smg", "fastokens", "uvloop"], save)


if __name__ == "__main__":
    main()
