"""Answers subscribers that missed something: with the batches that are kept, or with a snapshot and what followed it.

The publisher's thread copies what a rank holds between two batches, a slice at a time; the thread that answers encodes
it, a part at a time. So an engine that shares the interpreter waits for neither. Requests that come within
`COPY_LIFETIME_S` share a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from typing import NamedTuple

from kvist.events import WorkerRank
from kvist.events.codec import encode_snapshot_part
from kvist.events.snapshot import Snapshot, snapshot_parts
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import Holding
from kvist.publisher.buffers import ReplayBuffer
from kvist.publisher.stream import Stream, Streams, topic_of, with_companions

MAX_RANGE_BYTES = 16 << 20
"""A subscriber that was away gets this much of a range before a snapshot is considered: it costs nobody a copy."""
RANGE_FACTOR = 4
"""Beyond that, a range is sent as long as a snapshot is not so many times smaller."""
MIN_SAVED_BYTES = 64 << 10
"""A subscriber that has nothing gets a snapshot if it is at least this much smaller than the range."""
SNAPSHOT_BYTES_A_BLOCK = 13
COPY_LIFETIME_S = 10.0
COPY_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 0.5
"""How often a subscriber that waits for a snapshot is sent the last heartbeat again."""

_logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """A copy of what a rank holds, made by the publisher's thread; cancelled if that thread ends before."""

    begun_at_s: float
    snapshot: Future[Snapshot]


class ReplayResponder:
    """The replay source of a publisher. Iterating over an answer may wait: not to be done in an event loop."""

    def __init__(
        self,
        worker: str,
        epoch: int,
        streams: Streams,
        buffer: ReplayBuffer,
        call_between_batches: Callable[[Callable[[Streams], Snapshot]], Future[Snapshot]],
    ) -> None:
        self._worker = worker
        self._epoch = epoch
        self._streams = streams
        self._buffer = buffer
        self._call_between_batches = call_between_batches
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}
        self.num_snapshots = 0

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        """Yield what is asked for; the last heartbeats if everything from a number far ahead is asked for."""
        if request.epoch is None:
            messages = self._buffer.replay(request)
            yield from messages or (() if request.topic else self._buffer.heartbeats())
            return
        start_sequence = request.start_sequence if request.epoch == self._epoch else 0
        for rank, stream in with_companions(self._streams).items():
            topic = topic_of(WorkerRank(self._worker, rank))
            if request.topic in (None, b"", topic):
                yield from self._answer(rank, stream, topic, start_sequence)

    def drop_old_copies(self, now_s: float) -> None:
        """Drop copies that are done and too old to be used again; call it now and then."""
        with self._lock:
            for rank, copy in tuple(self._copies.items()):
                if copy.snapshot.done() and now_s > copy.begun_at_s + COPY_LIFETIME_S:
                    del self._copies[rank]

    def _answer(self, rank: int, stream: Stream, topic: bytes, start_sequence: int) -> Iterator[Message]:
        messages = self._buffer.replay(ReplayRequest(topic, start_sequence))
        size_bytes = sum(len(message.payload) for message in messages)
        first_sequence = self._buffer.first_sequence(topic)
        if first_sequence is None:
            first_sequence = stream.next_sequence
        if first_sequence > start_sequence or _is_too_large(size_bytes, stream.residency.num_blocks, start_sequence):
            snapshot_sequence = yield from self._snapshot(rank, topic)
            if snapshot_sequence is not None:
                messages = self._buffer.replay(ReplayRequest(topic, snapshot_sequence))
        yield from messages

    def _snapshot(self, rank: int, topic: bytes) -> Generator[Message, None, int | None]:
        """Yield heartbeats while the copy is made, then the snapshot; return its sequence, None if there is no copy."""
        with self._lock:
            copy = self._copies.get(rank)
            if copy is None or not self._is_usable(copy, topic):
                copy = self._copies[rank] = self._begin_copy(rank)
        while not wait([copy.snapshot], KEEP_ALIVE_S).done:
            if time.monotonic() > copy.begun_at_s + COPY_TIMEOUT_S:
                return None
            yield from self._buffer.heartbeats(topic)
        if copy.snapshot.cancelled():
            return None
        snapshot = copy.snapshot.result()
        for part in snapshot_parts(snapshot):
            yield Message(topic, part.sequence, encode_snapshot_part(part))
        return snapshot.sequence

    def _begin_copy(self, rank: int) -> _Copy:
        begun_at_s = time.monotonic()

        def copy(streams: Streams) -> Snapshot:
            stream = with_companions(streams)[rank]
            state, slices = stream.heartbeat(time.time()), []
            for held in stream.residency.slices():
                slices.append(held)
                time.sleep(0)  # an engine may wait for the interpreter
            self.num_snapshots += 1
            made = rank, sum(len(held.hashes) for held in slices), time.monotonic() - begun_at_s
            _logger.info("snapshot made rank=%d blocks=%d seconds=%.3f", *made)
            holding = Holding(stream.residency.num_blocks, stream.residency.digest)
            return Snapshot(state.source, state.epoch, state.sequence, state.block_size, holding, tuple(slices))

        return _Copy(begun_at_s, self._call_between_batches(copy))

    def _is_usable(self, copy: _Copy, topic: bytes) -> bool:
        """Return whether a copy is being made, or is fresh, and what followed it is still kept."""
        if not copy.snapshot.done():
            return True
        if copy.snapshot.cancelled() or time.monotonic() > copy.begun_at_s + COPY_LIFETIME_S:
            return False
        return (self._buffer.first_sequence(topic) or 0) <= copy.snapshot.result().sequence


def _is_too_large(range_bytes: int, num_blocks: int, start_sequence: int) -> bool:
    """Return whether a range of batches is so much larger than a snapshot that one is worth making."""
    snapshot_bytes = num_blocks * SNAPSHOT_BYTES_A_BLOCK
    if start_sequence == 0:
        return range_bytes > snapshot_bytes + MIN_SAVED_BYTES
    return range_bytes > max(MAX_RANGE_BYTES, RANGE_FACTOR * snapshot_bytes)
