"""Answers to subscribers that missed something: what is kept, or a snapshot of what is held and what followed it.

What is held is copied by the publisher's thread between two batches, a slice at a time, and encoded by who answers, a
part at a time: an engine may share the interpreter. All who ask in a while share a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np

from kvist.events import Batch, WorkerRank
from kvist.events.codec import encode_snapshot_part
from kvist.events.snapshot import HeldBlocks, cut
from kvist.events.transports import Message, ReplayRequest
from kvist.publisher.buffers import ReplayBuffer
from kvist.publisher.residency import held_blocks
from kvist.publisher.stream import Stream, Streams, topic_of, with_companions

BetweenEvents = Callable[[Callable[[Streams], None]], Future[None]]
"""Has something done by the publisher's thread between two events, when all batches are closed."""

MAX_RANGE_BYTES = 16 << 20
"""A subscriber that was away gets this much of a range before a snapshot is considered: it costs nobody a copy."""
RANGE_FACTOR = 4
"""Beyond that, a range is sent as long as a snapshot is not so many times smaller."""
SPARED_BYTES = 64 << 10
"""A subscriber that has nothing gets a snapshot if it is at least this much smaller than the range."""
SNAPSHOT_BYTES_A_BLOCK = 13
KEPT_S = 10.0
COPY_TIMEOUT_S = 10.0
SIGN_OF_LIFE_S = 0.5
"""How often one who waits for a snapshot hears the last heartbeat again."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    """What a rank held before the batch that `state`, a heartbeat, tells of; there once `is_done`."""

    begun_at_s: float
    slices: list[HeldBlocks] = field(default_factory=list)
    state: Batch | None = None
    is_done: Future[None] = field(default_factory=Future)

    def take(self, stream: Stream) -> None:
        self.state = stream.heartbeat(time.time())
        for held in held_blocks(stream.residency.slices()):
            self.slices.append(held)
            time.sleep(0)

    def joined(self) -> HeldBlocks:
        empty = HeldBlocks(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint8))
        return HeldBlocks(*map(np.concatenate, zip(empty, *self.slices, strict=True)))


class Answers:
    """The replay source of a publisher. Iterating over an answer may wait: not to be done in an event loop."""

    def __init__(
        self, worker: str, epoch: int, streams: Streams, buffer: ReplayBuffer, between_events: BetweenEvents
    ) -> None:
        self._worker = worker
        self._epoch = epoch
        self._streams = streams
        self._buffer = buffer
        self._between_events = between_events
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}
        self.num_snapshots = 0

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        """Yield what is asked for; who asks for all there is from a number far ahead hears the last heartbeats."""
        if request.epoch is None:
            messages = self._buffer.replay(request)
            yield from messages or (() if request.topic else self._buffer.heartbeats())
            return
        start_sequence = request.start_sequence if request.epoch == self._epoch else 0
        for rank, stream in with_companions(self._streams).items():
            topic = topic_of(WorkerRank(self._worker, rank))
            if request.topic in (None, b"", topic):
                yield from self._answer(rank, stream, topic, start_sequence)

    def tidy(self, now_s: float) -> None:
        """Forget copies that were kept long enough; called now and then."""
        with self._lock:
            for rank, copy in tuple(self._copies.items()):
                if copy.is_done.done() and now_s > copy.begun_at_s + KEPT_S:
                    del self._copies[rank]

    def _answer(self, rank: int, stream: Stream, topic: bytes, start_sequence: int) -> Iterator[Message]:
        kept = self._buffer.kept(topic, start_sequence)
        is_whole = start_sequence == stream.next_sequence if kept is None else kept.first_sequence <= start_sequence
        if not is_whole or (kept is not None and _is_dear(kept.size_bytes, stream.num_blocks, start_sequence)):
            state = yield from self._snapshot(rank, topic)
            if state is not None:
                start_sequence = state.sequence
        yield from self._buffer.replay(ReplayRequest(topic, start_sequence))

    def _snapshot(self, rank: int, topic: bytes) -> Generator[Message, None, Batch | None]:
        """Yield signs of life, then a snapshot; return its state, or None if there is none to be had."""
        with self._lock:
            copy = self._copies.get(rank)
            if copy is None or not self._is_of_use(copy, topic):
                copy = self._copies[rank] = self._begin(rank)
        while not wait([copy.is_done], SIGN_OF_LIFE_S).done:
            if time.monotonic() > copy.begun_at_s + COPY_TIMEOUT_S:
                return None
            yield from self._buffer.heartbeats(topic)
        if copy.state is not None:  # else the publisher has ended
            for part in cut(copy.state, copy.joined()):
                yield Message(topic, part.sequence, encode_snapshot_part(part))
        return copy.state

    def _begin(self, rank: int) -> _Copy:
        copy = _Copy(time.monotonic())

        def take(streams: Streams) -> None:
            copy.take(with_companions(streams)[rank])
            self.num_snapshots += 1
            made = rank, sum(len(held.hashes) for held in copy.slices), time.monotonic() - copy.begun_at_s
            _logger.info("snapshot made rank=%d blocks=%d seconds=%.3f", *made)

        copy.is_done = self._between_events(take)
        return copy

    def _is_of_use(self, copy: _Copy, topic: bytes) -> bool:
        """Return whether a copy is being made, or is fresh, and what followed it is still kept."""
        if not copy.is_done.done():
            return True
        if copy.state is None or time.monotonic() > copy.begun_at_s + KEPT_S:
            return False
        kept = self._buffer.kept(topic, copy.state.sequence)
        return kept is None or kept.first_sequence <= copy.state.sequence


def _is_dear(range_bytes: int, num_blocks: int, start_sequence: int) -> bool:
    """Return whether a range costs the subscriber so much more than a snapshot that one is worth making."""
    snapshot_bytes = num_blocks * SNAPSHOT_BYTES_A_BLOCK
    if start_sequence == 0:
        return range_bytes > snapshot_bytes + SPARED_BYTES
    return range_bytes > max(MAX_RANGE_BYTES, RANGE_FACTOR * snapshot_bytes)
