"""A `kvist index` in its own process, observed from its start until it holds exactly the expected blocks."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _holders import BLOCK_SIZE, Held, known_prompt
from _indexers import Connection, query_of

from kvist.events.snapshot import blocks_digest
from kvist.indexer.dumps.format import Blocks, DumpReader, residencies_of

WORKERS_REQUEST = b"GET /workers HTTP/1.1\r\nhost: bench\r\n\r\n"
READINESS_REQUEST = b"GET /readiness HTTP/1.1\r\nhost: bench\r\n\r\n"
LOOK_EVERY = 8
"""Queries between two looks at /workers."""
TIMEOUT_S = 120.0


class IndexProcess:
    """A `kvist index` that was just started."""

    def __init__(self, endpoints: Sequence[str], *flags: str) -> None:
        self.port = _free_port()
        self._num_workers = len(endpoints)
        workers = ",".join(f"{number}={endpoint}" for number, endpoint in enumerate(endpoints, 1))
        command = [sys.executable, "-m", "kvist", "--log-level", "error", "index", "--port", str(self.port)]
        command += ["--workers", workers, "--block-size", str(BLOCK_SIZE), "--model-name", "m", *flags]
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def connect(self) -> Connection:
        """Return a connection once the index has joined."""
        while True:
            try:
                connection = Connection(self.port)
                connection.exchange(READINESS_REQUEST)
                return connection
            except OSError:
                if self.process.poll() is not None or time.monotonic() > self.started_s + TIMEOUT_S:
                    raise
                time.sleep(0.002)

    def await_exact(self, held: Sequence[Held]) -> tuple[Connection, float, list[float]]:
        """Return a connection, when it first answered, and the times of all queries, in ms, until the index is exact.

        Raises TimeoutError, with what the ranks were then, if that takes too long.
        """
        connection = self.connect()
        answers_s, times_ms = time.monotonic() - self.started_s, []
        requests = [query_of(known_prompt(worker_idx)) for worker_idx in range(len(held))]
        while True:
            for request in requests[:LOOK_EVERY]:
                asked_s = time.monotonic()
                connection.exchange(request)
                times_ms.append((time.monotonic() - asked_s) * 1e3)
                time.sleep(0.001)
            ranks = ranks_of(connection)
            if ranks == [("live", each.num_blocks) for each in held]:
                return connection, answers_s, times_ms
            if time.monotonic() > self.started_s + TIMEOUT_S:
                raise TimeoutError(f"not exact: {ranks}, expected {held}")

    def digests(self) -> list[Held]:
        """Return what each worker's rank holds, by a dump."""
        reader = DumpReader("the service")
        sums: dict[str, list[int]] = {}
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/dump") as answer:
            while piece := answer.read(1 << 20):
                for frame in reader.feed(piece):
                    if isinstance(frame, Blocks):
                        _add(sums, frame)
        reader.close()
        return [Held(*sums.get(f"{number}:0", (0, 0))) for number in range(1, self._num_workers + 1)]

    def peak_mb(self) -> float:
        """Return the peak of the resident size."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

    def cpu_s(self) -> float:
        """Return the CPU time of the process so far, all threads."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def close(self) -> None:
        """End the service, which saves its state if it is to."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def _add(sums: dict[str, list[int]], frame: Blocks) -> None:
    ranks, hashes, _, members = residencies_of(frame, "the service")
    for rank_idx, rank in enumerate(ranks):
        total = sums.setdefault(rank.worker, [0, 0])
        for tier in range(4):
            held = hashes[(members >> 4 == rank_idx) & (members >> tier & 1 == 1)]
            total[0] += len(held)
            total[1] = (total[1] + blocks_digest(held, tier)) & ((1 << 64) - 1)


def ranks_of(connection: Connection) -> list[tuple[str, int]]:
    """Return each worker's state and number of blocks, in order."""
    workers = json.loads(connection.exchange(WORKERS_REQUEST))
    found = {}
    for worker in workers:
        rank = worker["listeners"]["0"]["ranks"].get("0", {"state": "unheard", "num_blocks": 0})
        found[worker["instance_id"]] = (rank["state"], rank["num_blocks"])
    return [found[number] for number in sorted(found)]


def counters_of(connection: Connection) -> dict[str, int]:
    """Return the counters of all workers added up."""
    counters = [worker["listeners"]["0"]["counters"] for worker in json.loads(connection.exchange(WORKERS_REQUEST))]
    return {name: sum(each[name] for each in counters) for name in counters[0]}


@contextmanager
def started(endpoints: Sequence[str], *flags: str) -> Iterator[IndexProcess]:
    """Run a service."""
    service = IndexProcess(endpoints, *flags)
    try:
        yield service
    finally:
        service.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
