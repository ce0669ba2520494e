"""How long is it, over each transport, from an engine storing a block to the index holding it, at 50,000 blocks/s?

Bound, coalesced, by the 5 ms for which the publisher gathers events: half of it in the median and all of it at the 99th
percentile is the minimum. Message by message it is bound by the slowest client's cost of a message; the best baseline
is `zmq`, which has no broker.

An engine's loop stores 8 blocks every 160 µs in its own process; the index is fed by `Indexer` in this one, and is
checked after each step of its work. `memory` works only within a process: there the loop is a thread here, both share
one interpreter, and either's CPU is that of both. "Coalesced" is `KvEventPublisher` as it is, from tokens; "message by
message" sends finished batches, one a step, through its outbox. Both clocks are the machine's monotonic one.

    python benchmarks/bench_transports.py [--quick] [--save] [--only TRANSPORT ...]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing.connection import Connection

import numpy as np
import psutil
from _brokers import mosquitto, nats_server
from _common import best_and_spread, report, table
from numpy.typing import NDArray

from kvist.events import Batch, Stored, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.transports import Message, ReplayRequest, open_publication
from kvist.indexer import Indexer
from kvist.indexer.source import Source
from kvist.publisher import KvEventPublisher
from kvist.publisher.buffers import Outbox
from kvist.radix import RadixIndex

BLOCK_SIZE, STEP_BLOCKS, BLOCKS_PER_S = 16, 8, 50_000
STEP_S = STEP_BLOCKS / BLOCKS_PER_S
WORKER = "bench"
WARM_UP_S = 1.0
TRANSPORTS = ("memory", "zmq", "nats", "jetstream", "mqtt")
BROKERS = {"nats": nats_server, "jetstream": nats_server, "mqtt": mosquitto}
MODES = ("coalesced", "message by message")


@dataclass
class Sent:
    """What the engine's side did: when each step was stored, and CPU seconds meanwhile."""

    stored_at_s: NDArray[np.float64]
    cpu_s: float
    num_dropped: int


@dataclass
class Round:
    """Lags of the blocks of one round, in milliseconds, and what was spent on them."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    publisher_cpu: float
    index_cpu: float
    broker_cpu: float | None
    num_gaps: int
    num_dropped: int


def coalesced(url: str, num_steps: int, ready: Callable[[], None]) -> Sent:
    """Store blocks in a publisher, step by step."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 17, (num_steps, STEP_BLOCKS * BLOCK_SIZE), np.uint32)
    hashes = [tuple(range(first, first + STEP_BLOCKS)) for first in range(0, num_steps * STEP_BLOCKS, STEP_BLOCKS)]
    with KvEventPublisher(url, worker=WORKER, block_size=BLOCK_SIZE) as publisher:
        ready()
        sent = _paced(num_steps, lambda step: publisher.stored(hashes[step], tokens[step]))
        sent.num_dropped = publisher.statistics().num_dropped_batches
    return sent


def message_by_message(url: str, num_steps: int, ready: Callable[[], None]) -> Sent:
    """Send a finished batch for each step, and a heartbeat-free stream."""
    rng = random.Random(0)
    topic = f"kv/{WORKER}/0".encode()
    messages = []
    for step in range(num_steps):
        events = (Stored(rng.randbytes(8 * STEP_BLOCKS)),)
        messages.append(Message(topic, step, encode_batch(Batch(WORKER, 0, 1, step, BLOCK_SIZE, 0.0, events))))
    publication = open_publication(url)
    publication.serve_replay(KeepsNothing())
    outbox = Outbox(10_000)

    def send(step: int) -> None:
        outbox.put(messages[step])
        outbox.flush(publication)

    ready()
    sent = _paced(num_steps, send)
    while outbox:
        outbox.flush(publication)
        time.sleep(STEP_S)
    publication.close()
    sent.num_dropped = outbox.num_dropped
    return sent


class KeepsNothing:
    """Answers every question at once: whoever asks goes on listening."""

    def replay(self, _: ReplayRequest) -> Iterable[Message]:
        """Return nothing."""
        return ()


def _paced(num_steps: int, store: Callable[[int], object]) -> Sent:
    stored_at_s = np.empty(num_steps)
    cpu_s, start_s = time.process_time(), time.monotonic()
    for step in range(num_steps):
        wait_s = start_s + step * STEP_S - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        stored_at_s[step] = time.monotonic()
        store(step)
    return Sent(stored_at_s, time.process_time() - cpu_s, 0)


def publish(pipe: Connection, url: str, mode: str, num_steps: int) -> None:
    """Be the engine's process: say when the stream is there, begin when told to, report at the end."""

    def ready() -> None:
        pipe.send(None)
        pipe.recv()

    run = coalesced if mode == "coalesced" else message_by_message
    pipe.send(run(url, num_steps, ready))


class Watch:
    """Notes after each step of the index's work how many blocks it holds."""

    def __init__(self, index: RadixIndex) -> None:
        self._index = index
        self._source = WorkerRank(WORKER, 0)
        self.at_s: list[float] = []
        self.num_blocks: list[int] = []

    def wrap(self, receive_all: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        """Return `Source.receive_all` with a note after each step."""

        def noted(source: Source, messages: Sequence[Message], now_s: float) -> Iterator[None]:
            for step in receive_all(source, messages, now_s):
                self._note()
                yield step
            self._note()

        return noted

    def _note(self) -> None:
        self.num_blocks.append(self._index.digest(self._source).num_blocks)
        self.at_s.append(time.monotonic())

    def lags_ms(self, sent: Sent) -> NDArray[np.float64]:
        """Return each step's lag but those of the warm-up: until its last block was held."""
        steps = np.arange(int(WARM_UP_S / STEP_S), len(sent.stored_at_s))
        seen = np.searchsorted(np.maximum.accumulate(self.num_blocks), (steps + 1) * STEP_BLOCKS)
        return (np.array(self.at_s)[seen] - sent.stored_at_s[steps]) * 1e3


async def measure(url: str, mode: str, duration_s: float, broker_pid: int | None) -> Round:
    """Feed an index from one publisher and return what that took."""
    num_steps = int((WARM_UP_S + duration_s) / STEP_S)
    index = RadixIndex()
    watch = Watch(index)
    plain = Source.receive_all
    Source.receive_all = watch.wrap(plain)  # type: ignore[method-assign]
    pipe, far_end = multiprocessing.Pipe()
    kind = threading.Thread if url.startswith("memory:") else multiprocessing.get_context("spawn").Process
    publisher = kind(target=publish, args=(far_end, url, mode, num_steps), daemon=True)
    try:
        async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
            publisher.start()
            await asyncio.to_thread(pipe.recv)
            indexer.add_source(WORKER, url)
            await _until(lambda: indexer.are_all_connected)
            await asyncio.sleep(0.2)  # a broker may still be telling the publisher of us
            cpu_s, broker_cpu_s = time.process_time(), _cpu_s(broker_pid)
            pipe.send(None)
            sent: Sent = await asyncio.to_thread(pipe.recv)
            await _until(lambda: watch.num_blocks[-1:] == [num_steps * STEP_BLOCKS])
            cpu_s, broker_cpu_s = time.process_time() - cpu_s, _cpu_s(broker_pid) - broker_cpu_s
            num_gaps = indexer.statistics()[0].num_gaps
    finally:
        Source.receive_all = plain  # type: ignore[method-assign]
    publisher.join(10)
    p50, p99, most = np.quantile(watch.lags_ms(sent), (0.5, 0.99, 1.0)).tolist()
    span_s = float(sent.stored_at_s[-1] - sent.stored_at_s[0])
    broker_cpu = broker_cpu_s / span_s if broker_pid else None
    return Round(p50, p99, most, sent.cpu_s / span_s, cpu_s / span_s, broker_cpu, num_gaps, sent.num_dropped)


async def _until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > give_up_s:
            raise SystemExit("the index never held what was stored")
        await asyncio.sleep(0.01)


def _cpu_s(pid: int | None) -> float:
    return 0.0 if pid is None else sum(psutil.Process(pid).cpu_times()[:2])


def url_of(name: str, number: int, ports: dict[str, int]) -> str:
    """Return where a round's stream is, of which no other round hears."""
    path = f"model-{number}/{WORKER}"
    return {
        "memory": f"memory://bench-{number}",
        "zmq": f"tcp://127.0.0.1:{_free_port()}",
        "nats": f"nats://127.0.0.1:{ports.get('nats')}/{path}",
        "jetstream": f"nats://127.0.0.1:{ports.get('jetstream')}/{path}?jetstream=BENCH-{number}",
        "mqtt": f"mqtt://127.0.0.1:{ports.get('mqtt')}/{path}",
    }[name]


def run_rounds(chosen: Sequence[str], duration_s: float, num_rounds: int) -> dict[tuple[str, str], list[Round]]:
    """Measure all transports in turns."""
    rounds: dict[tuple[str, str], list[Round]] = {(mode, name): [] for mode in MODES for name in chosen}
    numbers = count()
    with ExitStack() as stack:
        running = {name: stack.enter_context(BROKERS[name]()) for name in chosen if name in BROKERS}
        ports = {name: broker.port for name, broker in running.items()}
        for _ in range(num_rounds):
            for (mode, name), done in rounds.items():
                pid = running[name].pid if name in running else None
                done.append(asyncio.run(measure(url_of(name, next(numbers), ports), mode, duration_s, pid)))
    return rounds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def row(mode: str, name: str, rounds: Sequence[Round]) -> list[str]:
    """Return the line of the table: medians of the rounds, of p50 and p99 also the range."""

    def shown(values: Sequence[float], digits: int) -> str:
        least, median, most = best_and_spread(values)
        return f"**{median:.{digits}f}** ({least:.{digits}f}–{most:.{digits}f})"

    def share(values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{best_and_spread(known)[1]:.0%}" if known else "–"

    return [
        mode,
        name,
        shown([each.p50_ms for each in rounds], 2),
        shown([each.p99_ms for each in rounds], 2),
        f"{max(each.max_ms for each in rounds):.1f}",
        share([each.publisher_cpu for each in rounds]),
        share([each.broker_cpu for each in rounds]),
        share([each.index_cpu for each in rounds]),
        f"{sum(each.num_gaps for each in rounds)}",
        f"{sum(each.num_dropped for each in rounds)}",
    ]


HEADERS = ["", "transport", "p50 ms", "p99 ms", "most ms", "engine CPU", "broker CPU", "index CPU", "gaps", "dropped"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round each, for a look")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    parser.add_argument("--only", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="some transports")
    args = parser.parse_args()
    rounds = run_rounds(args.only, *((2.0, 1) if args.quick else (5.0, 3)))
    lines = [row(mode, name, done) for (mode, name), done in rounds.items()]
    facts = {
        "is_quick": args.quick,
        "blocks_per_s": BLOCKS_PER_S,
        "rounds": [
            {"mode": mode, "transport": name, "rounds": [asdict(each) for each in done]}
            for (mode, name), done in rounds.items()
        ],
    }
    packages = ("numba", "pyzmq", "nats-py", "aiomqtt", "paho-mqtt")
    report("bench_transports", f"# From engine to index\n\n{table(HEADERS, lines)}", facts, packages, args.save)


if __name__ == "__main__":
    main()
