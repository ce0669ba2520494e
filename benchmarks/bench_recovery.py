"""How long after its start is an index exact, if it has lost everything while the engines continue?

Bound, at a million blocks, by starting Python, and by the second until a publisher's next heartbeat where blocks from a
file have to be proven; at ten million by the one thread that puts blocks into the index. Baseline: `dynamo.indexer` of
ai-dynamo-runtime 1.6.1, which can start from another one's dump; from engines it gets what their replay buffers have.

16 workers already hold the blocks, each a `KvEventPublisher` in its own process; all of them and the index share this
machine's cores. They hold them like a restarted sidecar, so that only a snapshot can bring them; in "range" the workers
stored everything a moment ago and still keep those batches. `kvist index` is started, and it is *exact* when every rank
is live with its publisher's number of blocks; afterwards a dump is read, and each rank's digest must be its
publisher's. Meanwhile one client queries a prompt of 2,048 tokens again and again: "longest query" is the longest stall
of the service's loop once it answers. Memory is the process's peak.

The baseline follows engines' own streams of as many blocks from as many workers, and so does Kvist for comparison; each
is started from a dump of its own kind. Stall: one worker stores 50,000 blocks/s, and for 5 s the index is stopped
(SIGSTOP), or all that the worker sends is lost, which is a stall that outlasts every queue on the way.

    python benchmarks/bench_recovery.py [--quick] [--save] [--only ways peer stall]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

from _brokers import nats_server
from _common import best_and_spread, report, table
from _fleet import Fleet
from _holders import Held, known_prompt, running_holders
from _index_process import TIMEOUT_S, WORKERS_REQUEST, IndexProcess, counters_of, ranks_of, started
from _indexers import Connection, held_by, query_of

NUM_WORKERS = 16
NUM_BLOCKS, LARGE_NUM_BLOCKS = 1_000_000, 10_000_000
KEPT_S = 10.5
"""Publishers keep a snapshot for others who ask for a little less: the next round has them make another."""
BLOCKS_PER_S, STALL_S, NUM_BEFORE = 50_000, 5.0, 1_024


@dataclass
class Recovery:
    """One start of an index."""

    way: str
    num_blocks: int
    answers_s: float
    exact_s: float
    cpu_s: float
    peak_mb: float
    longest_query_ms: float
    num_snapshots: int
    is_right: bool


def recovered(way: str, service: IndexProcess, held: Sequence[Held]) -> Recovery:
    """Wait until a service is exact, and return what that took."""
    connection, answers_s, times_ms = service.await_exact(held)
    exact_s, cpu_s, peak_mb = time.monotonic() - service.started_s, service.cpu_s(), service.peak_mb()
    is_right = service.digests() == list(held)
    for worker_idx in range(len(held)):
        prompt = known_prompt(worker_idx)
        is_right &= held_by(json.loads(connection.exchange(query_of(prompt))), worker_idx) == len(prompt)
    num_snapshots = counters_of(connection)["num_snapshots"]
    connection.close()
    num_blocks = sum(each.num_blocks for each in held)
    return Recovery(
        way, num_blocks, answers_s, exact_s, cpu_s, peak_mb, max(times_ms, default=0.0), num_snapshots, is_right
    )


def local_ways(num_blocks: int, num_rounds: int) -> list[Recovery]:
    """Return starts beside workers on ZeroMQ: from their snapshots, another service's dump, and a folder."""
    with running_holders(["tcp://127.0.0.1:0"] * NUM_WORKERS) as holders, TemporaryDirectory() as folder:
        held: list[Held] = holders.call("put_back", num_blocks // NUM_WORKERS)
        done = []
        for round_idx in range(num_rounds):
            time.sleep(KEPT_S if round_idx else 0.0)
            with started(holders.endpoints) as service:
                done.append(recovered("snapshots, ZeroMQ", service, held))
                with started(holders.endpoints, "--peers", f"http://127.0.0.1:{service.port}") as other:
                    done.append(recovered("another one's dump", other, held))
            with started(holders.endpoints, "--state-dir", folder) as service:
                service.await_exact(held)[0].close()
            with started(holders.endpoints, "--state-dir", folder) as service:
                done.append(recovered("its --state-dir", service, held))
    return done


def stored_way(way: str, urls: Sequence[str], num_blocks: int, num_rounds: int, *, are_gone: bool) -> list[Recovery]:
    """Return starts beside workers that stored all blocks just now, or are gone since."""
    with ExitStack() as stack:
        holders = stack.enter_context(running_holders(urls))
        held: list[Held] = holders.call("store", num_blocks // NUM_WORKERS)
        if are_gone:
            holders.call("close")
            endpoints = list(urls)
            stack.close()
        else:
            endpoints = holders.endpoints
        return [_once(way, endpoints, held) for _ in range(num_rounds)]


def _once(way: str, endpoints: Sequence[str], held: Sequence[Held]) -> Recovery:
    with started(endpoints) as service:
        return recovered(way, service, held)


def broker_ways(num_blocks: int, num_rounds: int) -> list[Recovery]:
    """Return starts beside workers on NATS: from their snapshots, and from a durable stream when all are gone."""
    with nats_server() as broker:
        urls = [f"nats://127.0.0.1:{broker.port}/m/worker-{idx}" for idx in range(NUM_WORKERS)]
        with running_holders(urls) as holders:
            held: list[Held] = holders.call("put_back", num_blocks // NUM_WORKERS)
            done = []
            for round_idx in range(num_rounds):
                time.sleep(KEPT_S if round_idx else 0.0)
                done.append(_once("snapshots, NATS", holders.endpoints, held))
        durable = [f"{url.replace('/m/', '/durable/')}?jetstream=DURABLE" for url in urls]
        return done + stored_way("JetStream, workers gone", durable, num_blocks, num_rounds, are_gone=True)


def ways(is_quick: bool) -> list[Recovery]:
    """Return all starts."""
    num_rounds = 1 if is_quick else 3
    done = local_ways(NUM_BLOCKS, num_rounds)
    zeromq = ["tcp://127.0.0.1:0"] * NUM_WORKERS
    done += stored_way("range, ZeroMQ", zeromq, NUM_BLOCKS, num_rounds, are_gone=False)
    done += broker_ways(NUM_BLOCKS, num_rounds)
    return done if is_quick else done + local_ways(LARGE_NUM_BLOCKS, 2)


def peer(is_quick: bool) -> list[list[str]]:
    """Return starts from a dump of their like: the baseline's, and Kvist's on the same engines' own streams."""
    num_blocks = NUM_BLOCKS // (4 if is_quick else 1)
    rows = []
    with ExitStack() as stack:
        fleet = Fleet(stack, NUM_WORKERS)
        fleet.fill(num_blocks)
        prompts = fleet.publisher.call("whole_prompts", 100)
        for side in fleet.indexers:
            seconds, peaks, num_right = [], [], 0
            for _ in range(1 if is_quick else 3):
                with fleet.restored(side) as indexer:
                    seconds.append(indexer.start_s)
                    peaks.append(indexer.memory_bytes()[1] / 1e6)
                    answers = [held_by(indexer.ask(each.token_ids), each.stream_idx) for each in prompts]
                    num_right = sum(answer == each.num_held for answer, each in zip(answers, prompts, strict=True))
            least, median, most = best_and_spread(seconds)
            cells = [f"{num_blocks:,}", f"{median:.2f} ({least:.2f}–{most:.2f})", f"{max(peaks):.0f}"]
            rows.append([side, *cells, f"{num_right} of {len(prompts)}"])
    return rows


@dataclass
class Stall:
    """What five seconds without a stream cost."""

    what: str
    level_after_s: float
    num_gaps: int
    num_recovered: int
    num_snapshots: int
    num_cleared: int
    is_right: bool


def stall(what: str, *, is_stopped: bool) -> Stall:
    """Stop an index amid a stream, or lose what is sent for so long; return what it then asked for, while more came."""
    before_s, after_s = 2.0, 3.0
    resumes_s = before_s + STALL_S
    with running_holders(["tcp://127.0.0.1:0"]) as holders, started(holders.endpoints) as service:
        connection, _, _ = service.await_exact(holders.call("store", NUM_BEFORE))
        before = counters_of(connection)
        lost = (resumes_s, 0.0) if is_stopped else (before_s, resumes_s)
        holders.begin("flow", resumes_s + after_s, BLOCKS_PER_S, *lost)
        time.sleep(before_s)
        if is_stopped:
            os.kill(service.process.pid, signal.SIGSTOP)
        time.sleep(STALL_S)
        os.kill(service.process.pid, signal.SIGCONT)
        level_after_s = _await_level(connection, time.monotonic(), resumes_s)
        held: list[Held] = holders.results()
        service.await_exact(held)[0].close()
        counts = {name: number - before[name] for name, number in counters_of(connection).items()}
        is_right = service.digests()[0] == held[0]
    return Stall(
        what,
        level_after_s,
        num_gaps=counts["num_gaps"],
        num_recovered=counts["num_recovered"],
        num_snapshots=counts["num_snapshots"],
        num_cleared=counts["num_cleared"],
        is_right=is_right,
    )


def _await_level(connection: Connection, resumed_s: float, flowed_s: float) -> float:
    """Return how long after a moment the index is live, holds what was sent until then, and lags by less than 0.1 s."""
    num_expected = NUM_BEFORE + 0.9 * flowed_s * BLOCKS_PER_S  # a busy machine may send later
    while True:
        ((state, num_blocks),) = ranks_of(connection)
        lag_s = json.loads(connection.exchange(WORKERS_REQUEST))[0]["listeners"]["0"]["lag_s"]
        after_s = time.monotonic() - resumed_s
        if state == "live" and num_blocks >= num_expected and lag_s < 0.1:
            return after_s
        if after_s > TIMEOUT_S:
            raise TimeoutError(f"{state}, {num_blocks} blocks, expected {num_expected:.0f}, lag {lag_s}")
        time.sleep(0.002)


def way_rows(done: Sequence[Recovery]) -> list[list[str]]:
    """Return a line for each way and size: medians, of the time also the range."""
    rows = []
    for num_blocks, way in dict.fromkeys((each.num_blocks, each.way) for each in done):
        rounds = [each for each in done if (each.num_blocks, each.way) == (num_blocks, way)]
        least, median, most = best_and_spread(each.exact_s for each in rounds)
        middle = [best_and_spread(values)[1] for values in zip(*map(_figures, rounds), strict=True)]
        is_right = "yes" if all(each.is_right for each in rounds) else "NO"
        exact = f"**{median:.2f}** ({least:.2f}–{most:.2f})"
        cells = [f"{middle[0]:.2f}", exact, f"{middle[1]:.1f}", f"{middle[2]:.0f}", f"{middle[3]:.1f}"]
        rows.append([way, f"{num_blocks:,}", *cells, str(rounds[-1].num_snapshots), is_right])
    return rows


def _figures(each: Recovery) -> tuple[float, float, float, float]:
    return each.answers_s, each.cpu_s, each.peak_mb, each.longest_query_ms


WAY_HEADERS = [
    "from",
    "blocks",
    "answers, s",
    "exact, s",
    "CPU s",
    "peak MB",
    "longest query, ms",
    "snapshots",
    "right",
]


def main() -> None:
    """Measure and print; fail if an index was not what its publishers held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round each, and no ten million blocks")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    sections = ("ways", "peer", "stall")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="some sections")
    args = parser.parse_args()
    started_s = time.monotonic()
    parts, facts = ["# From start to exact"], dict[str, Any](is_quick=args.quick)
    are_right = True
    if "ways" in args.only:
        done = ways(args.quick)
        parts.append(f"## {NUM_WORKERS} workers\n\n{table(WAY_HEADERS, way_rows(done))}")
        facts["ways"] = [asdict(each) for each in done]
        are_right &= all(each.is_right for each in done)
    if "peer" in args.only:
        facts["peer"] = rows = peer(args.quick)
        headers = ["", "blocks", "answers from the dump, s", "peak MB", "prompts right"]
        parts.append(f"## Engines' own streams, started from a dump of its like\n\n{table(headers, rows)}")
    if "stall" in args.only:
        stalls = [stall("index stopped", is_stopped=True), stall("all that is sent is lost", is_stopped=False)]
        facts["stall"] = [asdict(each) for each in stalls]
        headers = ["for 5 s", "level again after, s", "gaps", "batches recovered", "snapshots", "cleared", "right"]
        rows = [[each.what, f"{each.level_after_s:.2f}", *list(asdict(each).values())[2:]] for each in stalls]
        parts.append(f"## A stall at {BLOCKS_PER_S:,} blocks/s\n\n{table(headers, rows)}")
        are_right &= all(each.is_right for each in stalls)
    facts["wall_s"] = round(time.monotonic() - started_s)
    report("bench_recovery", "\n\n".join(parts), facts, ("ai-dynamo-runtime", "numba", "pyzmq", "nats-py"), args.save)
    if not are_right:
        sys.exit("an index was not what its publishers held")


if __name__ == "__main__":
    main()
