"""Workers that already hold blocks, each a process with its own `KvEventPublisher`, for an index to learn from.

They hold them like a restarted sidecar, which restored them, or have stored them one by one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import blocks_digest
from kvist.events.transports import Message, Publication, open_publication
from kvist.publisher import KvEventPublisher
from kvist.publisher.filter import FilterState
from kvist.publisher.residency import Residency
from kvist.publisher.stream import RankState, Streams

BLOCK_SIZE, CHAIN_BLOCKS, STEP_BLOCKS = 16, 128, 8
START_TIMEOUT_S = 120.0


class Held(NamedTuple):
    """What a rank holds: (block, tier) pairs, and their digest."""

    num_blocks: int
    digest: int


def known_prompt(worker_idx: int) -> list[int]:
    """Return the tokens of the one chain of a worker that can be asked for."""
    tokens: list[int] = np.random.default_rng(worker_idx).integers(0, 1 << 17, CHAIN_BLOCKS * BLOCK_SIZE).tolist()
    return tokens


def made_residency(worker_idx: int, num_blocks: int) -> Residency:
    """Return chains of 128 blocks; the first is the known prompt's, the others' hashes are random."""
    hashes = np.random.default_rng((1, worker_idx)).integers(1, 1 << 64, num_blocks, np.uint64)
    known: NDArray[np.uint64] = np.asarray(block_hashes(known_prompt(worker_idx), BLOCK_SIZE), np.uint64)
    hashes[: len(known)] = known[:num_blocks]
    blocks = hashes.tolist()
    places = {
        block: (blocks[idx - 1] if idx % CHAIN_BLOCKS else 0) << 36 | idx % CHAIN_BLOCKS << 4 | 1 << Tier.GPU
        for idx, block in enumerate(blocks)
    }
    names = {Tier.GPU: {block ^ 1: block for block in blocks}}
    return Residency.of(names, {}, places, {}, blocks_digest(blocks, Tier.GPU))


class _Publication:
    """A publication that can be made to lose what it is given."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self.endpoint = publication.endpoint
        self.serve_replay = publication.serve_replay
        self.close = publication.close
        self.is_lossy = False

    def send(self, message: Message) -> None:
        """Hand a message to the transport, or throw it away."""
        if not self.is_lossy:
            self._publication.send(message)


class _Worker:
    """What runs in a worker's process."""

    def __init__(self, url: str, worker_idx: int) -> None:
        self._worker_idx = worker_idx
        worker = f"worker-{worker_idx}"
        self._publication = _Publication(open_publication(url, worker))
        self._publisher = KvEventPublisher(self._publication, worker=worker, block_size=BLOCK_SIZE)
        self._num_stored = 0

    def endpoint(self) -> str:
        """Return where to subscribe."""
        return self._publisher.endpoint

    def put_back(self, num_blocks: int) -> Held:
        """Hold blocks as after a restart: nobody can have heard of them but from a snapshot."""
        residency = made_residency(self._worker_idx, num_blocks)
        self._publisher.resume({0: RankState(FilterState(), residency)})
        return self.held()

    def store(self, num_blocks: int) -> Held:
        """Store blocks as fast as they are taken, first the known prompt."""
        rng = np.random.default_rng((2, self._worker_idx))
        for start in range(0, num_blocks, CHAIN_BLOCKS):
            length = min(CHAIN_BLOCKS, num_blocks - start)
            tokens = rng.integers(0, 1 << 17, length * BLOCK_SIZE, np.uint32)
            if start == 0:
                tokens = np.array(known_prompt(self._worker_idx)[: length * BLOCK_SIZE], np.uint32)
            self._store(tokens, length)
            while self._publisher.statistics().num_waiting_events > 100:
                time.sleep(0.001)
        return self.held()

    def flow(self, duration_s: float, blocks_per_s: int, lost_from_s: float, lost_until_s: float) -> Held:
        """Store 8 blocks at a time, evenly; what is sent between two times is lost."""
        rng, step_s, start_s = np.random.default_rng(3), STEP_BLOCKS / blocks_per_s, time.monotonic()
        for step in range(int(duration_s / step_s)):
            time.sleep(max(0.0, start_s + step * step_s - time.monotonic()))
            self._publication.is_lossy = lost_from_s <= step * step_s < lost_until_s
            self._store(rng.integers(0, 1 << 17, STEP_BLOCKS * BLOCK_SIZE, np.uint32), STEP_BLOCKS)
        return self.held()

    def _store(self, tokens: NDArray[np.uint32], num_blocks: int) -> None:
        names = tuple(range(self._num_stored, self._num_stored + num_blocks))
        self._publisher.stored(names, tokens)  # type: ignore[arg-type]  # arrays are taken, too
        self._num_stored += num_blocks

    def held(self) -> Held:
        """Return what is held when all that was reported is."""

        def look(streams: Streams) -> Held:
            return Held(streams[0].residency.num_blocks, streams[0].residency.digest)

        return self._publisher.call_between_batches(look).result(START_TIMEOUT_S)

    def close(self) -> None:
        """Send what is left."""
        self._publisher.close()


def _serve(pipe: Connection, url: str, worker_idx: int) -> None:
    worker = _Worker(url, worker_idx)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(worker, name)(*arguments))


class Holders:
    """Processes of workers; `call` has each do the same at the same time."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self.endpoints: list[str] = self.call("endpoint")
        self.held: list[Held] = []

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker and return the results."""
        self.begin(name, *arguments)
        return self.results()

    def begin(self, name: str, *arguments: Any) -> None:
        """Call a method of every worker; `results` waits for them."""
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def results(self) -> list[Any]:
        """Return what the call that was begun gave."""
        return [pipe.recv() for pipe in self._pipes]


@contextmanager
def running_holders(urls: Sequence[str]) -> Iterator[Holders]:
    """Run a worker for each URL, gone without a word at the end."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for worker_idx, url in enumerate(urls):
            pipe, child = context.Pipe()
            process = context.Process(target=_serve, args=(child, url, worker_idx), daemon=True)
            process.start()
            child.close()
            pipes.append(pipe)
            processes.append(process)
        yield Holders(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
