"""Answers to subscribers that missed something: what is kept, or a snapshot of what is held and what followed it.

A snapshot is copied by the publisher's thread between two batches, a slice at a time, and encoded by a thread of its
own, a part at a time: an engine may share the interpreter. One is made at a time, and shared by all who ask in a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np

from kvist.events import WorkerRank
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


@dataclass(frozen=True, slots=True)
class _Made:
    """A snapshot as messages, and until when it is kept."""

    sequence: int
    messages: list[Message]
    kept_until_s: float


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
        self._executor = ThreadPoolExecutor(1, "kvist-snapshot")
        self._lock = threading.Lock()
        self._snapshots: dict[int, Future[_Made | None]] = {}
        self.num_snapshots = 0

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        """Yield what is asked for; who asks for all there is from a number far ahead hears the last heartbeats."""
        if request.epoch is None:
            messages = self._buffer.replay(request)
            yield from messages or (() if request.topic else self._buffer.heartbeats())
            return
        start_sequence = request.start_sequence if request.epoch == self._epoch else 0
        for rank, stream in with_companions(self._streams).items():
            topic = self._topic(rank)
            if request.topic in (None, b"", topic):
                yield from self._answer(rank, stream, topic, start_sequence)

    def tidy(self, now_s: float) -> None:
        """Forget snapshots that were kept long enough; called now and then."""
        with self._lock:
            for rank, made in tuple(self._snapshots.items()):
                if made.done() and not self._is_of_use(rank, made, now_s):
                    del self._snapshots[rank]

    def close(self) -> None:
        """Make no more snapshots; whoever waits for one gets what is kept. The publisher's thread has ended."""
        self._executor.shutdown(cancel_futures=True)

    def _answer(self, rank: int, stream: Stream, topic: bytes, start_sequence: int) -> Iterator[Message]:
        kept = self._buffer.kept(topic, start_sequence)
        is_whole = start_sequence == stream.next_sequence if kept is None else kept.first_sequence <= start_sequence
        if not is_whole or (kept is not None and _is_dear(kept.size_bytes, stream.num_blocks, start_sequence)):
            made = yield from self._snapshot(rank, topic)
            if made is not None:
                yield from made.messages
                start_sequence = made.sequence
        yield from self._buffer.replay(ReplayRequest(topic, start_sequence))

    def _snapshot(self, rank: int, topic: bytes) -> Generator[Message, None, _Made | None]:
        """Yield signs of life until there is a snapshot; return it, or None if there is none to be had."""
        with self._lock:
            making = self._snapshots.get(rank)
            if making is None or not self._is_of_use(rank, making, time.monotonic()):
                try:
                    making = self._snapshots[rank] = self._executor.submit(self._make, rank, topic)
                except RuntimeError:  # closed
                    return None
        while True:
            try:
                return making.result(SIGN_OF_LIFE_S)
            except FutureTimeoutError:
                yield from self._buffer.heartbeats(topic)
            except CancelledError:
                return None

    def _is_of_use(self, rank: int, making: Future[_Made | None], now_s: float) -> bool:
        """Return whether a snapshot is being made, or what followed it is still kept."""
        if not making.done():
            return True
        made = None if making.cancelled() or making.exception() is not None else making.result()
        if made is None or now_s > made.kept_until_s:
            return False
        kept = self._buffer.kept(self._topic(rank), made.sequence)
        return kept is None or kept.first_sequence <= made.sequence

    def _make(self, rank: int, topic: bytes) -> _Made | None:
        begun_at_s = time.monotonic()
        copied: list[tuple[list[int], list[int]]] = []
        batches = []

        def copy(streams: Streams) -> None:
            stream = with_companions(streams)[rank]
            batches.append(stream.heartbeat(time.time()))
            for piece in stream.residency.slices():
                copied.append(piece)
                time.sleep(0)

        try:
            self._between_events(copy).result(COPY_TIMEOUT_S)
        except (FutureTimeoutError, CancelledError):
            return None
        held = _joined(copied)
        copied.clear()
        (state,) = batches
        messages = []
        for part in cut(state, held):
            messages.append(Message(topic, state.sequence, encode_snapshot_part(part)))
            time.sleep(0)
        self.num_snapshots += 1
        now_s = time.monotonic()
        made = topic.decode(), state.sequence, len(held.hashes), len(messages), now_s - begun_at_s
        _logger.info("snapshot made topic=%s sequence=%d blocks=%d parts=%d seconds=%.3f", *made)
        return _Made(state.sequence, messages, now_s + KEPT_S)

    def _topic(self, rank: int) -> bytes:
        return topic_of(WorkerRank(self._worker, rank))


def _joined(copied: list[tuple[list[int], list[int]]]) -> HeldBlocks:
    num_blocks = sum(len(blocks) for blocks, _ in copied)
    joined = HeldBlocks(
        np.empty(num_blocks, np.uint64), np.empty(num_blocks, np.uint32), np.empty(num_blocks, np.uint8)
    )
    start = 0
    for piece in held_blocks(copied):
        end = start + len(piece.hashes)
        joined.hashes[start:end], joined.depths[start:end], joined.tiers[start:end] = piece
        start = end
        time.sleep(0)
    return joined


def _is_dear(range_bytes: int, num_blocks: int, start_sequence: int) -> bool:
    """Return whether a range costs the subscriber so much more than a snapshot that one is worth making."""
    snapshot_bytes = num_blocks * SNAPSHOT_BYTES_A_BLOCK
    if start_sequence == 0:
        return range_bytes > snapshot_bytes + SPARED_BYTES
    return range_bytes > max(MAX_RANGE_BYTES, RANGE_FACTOR * snapshot_bytes)
