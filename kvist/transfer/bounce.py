"""Bouncing turns the thousands of fragments of one transfer into one write: gather here, write, scatter there.

Each worker has two regions, one to send from and one to receive in. Neither end waits for the thread that copies: a
send and a scatter are polled. A part of a region is free again only when no write can reach it. Where there is no room,
or it is not worth it, the answer is None: fragments are written as they are. Only `copier` touches tensors.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from kvist.errors import InvalidValueError, KvistError
from kvist.transfer.agents.base import Fragments, Int64s, TransferAgent, as_array
from kvist.transfer.agents.writes import PeerId, Write, WriteState
from kvist.transfer.tails import BounceTail, Extent

if TYPE_CHECKING:
    from kvist.transfer.copier import TensorRegion, TorchCopier

MIB = 1 << 20
CHUNK_BYTES = 32 * MIB
ALIGNMENT_BYTES = 512
_COPY_ERRORS = (KvistError, RuntimeError, ValueError, IndexError)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BounceConfig:
    """`size_mib` is that of each of two regions, one to send from and one to receive in; 0 turns bouncing off.

    A transfer is bounced whose fragments are many and small. The time of 64 MiB as they are over that of a bounce was,
    in shared memory and over NIXL, 1.5 and 2.5 in fragments of 1 KiB, 1.1 and 1.7 of 2 KiB, 0.9 and 1.3 of 4 KiB, below
    1 of any larger. A bounce costs half a millisecond of hand-overs, which 5,500 fragments of 2 KiB gain back in shared
    memory (two AMD EPYC cores, benchmarks/results/bench_transfer.md, 2026-11-21).
    """

    size_mib: int = 0
    max_fragment_bytes: int = 2048
    min_fragments: int = 8192
    close_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a negative value."""
        if not isinstance(self.size_mib, int) or isinstance(self.size_mib, bool) or self.size_mib < 0:
            raise InvalidValueError("size_mib", self.size_mib, "a whole number of MiB, 0 for off")
        for field in ("max_fragment_bytes", "min_fragments"):
            if getattr(self, field) < 1:
                raise InvalidValueError(field, getattr(self, field), "at least 1")
        if not self.close_timeout_s >= 0:
            raise InvalidValueError("close_timeout_s", self.close_timeout_s, "at least 0")

    def pays_off(self, num_fragments: int, size_bytes: int, num_writers: int = 1) -> bool:
        """Return whether fragments of so many bytes in all, by so many writers at a time, are better bounced."""
        is_many = num_fragments >= self.min_fragments * num_writers
        return is_many and size_bytes <= num_fragments * self.max_fragment_bytes

    def region_bytes(self, free_bytes: int) -> int | None:
        """Return the size of each region, in whole chunks, of which two take at most half of what is free.

        None for off, or too little memory.
        """
        wanted = -(-self.size_mib * MIB // CHUNK_BYTES) * CHUNK_BYTES
        return min(wanted, free_bytes // 4 // CHUNK_BYTES * CHUNK_BYTES) or None


class RegionAllocator:
    """Gives out the first hole that is large enough; O(n) in what is taken, which is one part a transfer.

    Not thread-safe. A part is quarantined where it lies: it stays taken until it is freed like any other.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Raise InvalidValueError for a capacity that is not whole parts."""
        if capacity_bytes < 1 or capacity_bytes % ALIGNMENT_BYTES:
            raise InvalidValueError("capacity_bytes", capacity_bytes, f"a positive multiple of {ALIGNMENT_BYTES}")
        self.capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []  # (offset, end), sorted, quarantined ones among them
        self._quarantined: set[int] = set()

    @property
    def used_bytes(self) -> int:
        """Return how much is taken, quarantined parts included."""
        return sum(end - offset for offset, end in self._taken)

    @property
    def quarantined_bytes(self) -> int:
        """Return how much is quarantined."""
        return sum(end - offset for offset, end in self._taken if offset in self._quarantined)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a part, rounded up to the alignment; None if it is empty or no hole holds it."""
        if size_bytes < 1:
            return None
        size_bytes += -size_bytes % ALIGNMENT_BYTES
        offset = 0
        for taken, end in self._taken:
            if taken - offset >= size_bytes:
                break
            offset = end
        if offset + size_bytes > self.capacity_bytes:
            return None
        insort(self._taken, (offset, offset + size_bytes))
        return offset

    def quarantine(self, offset: int) -> None:
        """Mark a taken part as one that a late write could reach; raises InvalidValueError."""
        self._find(offset)
        self._quarantined.add(offset)

    def free(self, offset: int) -> None:
        """Give a taken part back, quarantined or not; raises InvalidValueError for one that is not taken."""
        del self._taken[self._find(offset)]
        self._quarantined.discard(offset)

    def _find(self, offset: int) -> int:
        for idx, (taken, _) in enumerate(self._taken):
            if taken == offset:
                return idx
        raise InvalidValueError("offset", offset, "the offset of a part that is taken")


@dataclass(slots=True, eq=False)
class Lease:
    """A part of the receive region, reserved for one transfer; `extents` is each writer's own, by rank."""

    offset: int
    extents: tuple[Extent, ...]
    is_released: bool = False


class BouncedWrite(Write):
    """A write by way of the regions; the tail says what the region of the peer will hold."""

    __slots__ = ("tail",)

    def __init__(self, tail: BounceTail) -> None:
        super().__init__(len(tail.sizes_bytes), int(tail.sizes_bytes.sum()))
        self.tail = tail


@dataclass(frozen=True, slots=True)
class BounceStatistics:
    """What was sent, in so many fragments, what was scattered, and what is taken now."""

    bytes_sent: int = 0
    num_fragments_sent: int = 0
    num_scattered: int = 0
    receive_bytes: int = 0
    send_bytes: int = 0
    quarantined_bytes: int = 0


class Bounce:
    """Bounces through two registered regions, one to send from and one to receive in, with one thread that copies."""

    def __init__(
        self,
        agent: TransferAgent,
        copier: TorchCopier,
        allocate: Callable[[], TensorRegion],
        config: BounceConfig,
    ) -> None:
        """Register both regions; if the second cannot be, the first is taken back and the error raised."""
        self._agent, self._copier, self._config = agent, copier, config
        with ExitStack() as undo:
            self._regions = []
            memories = []
            for _ in range(2):
                memory = allocate()
                region = agent.register(memory.address, memory.size_bytes, memory.device_idx)
                undo.callback(agent.deregister, region)
                self._regions.append(region)
                memories.append(memory)
            self._send_memory, self._receive_memory = memories
            self._send_room = RegionAllocator(memories[0].size_bytes)
            self._receive_room = RegionAllocator(memories[1].size_bytes)
            undo.pop_all()
        self._changed = threading.Condition()
        self._bytes_sent = self._num_fragments_sent = self._num_scattered = 0
        self._is_closed = False
        # Bounded by the regions: each job in it holds a part of one.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"bounces of {agent.name}", daemon=True)
        self._thread.start()

    def reserve(self, size_bytes: int, num_fragments: int, num_writers: int = 1) -> Lease | None:
        """Return room, or None: not worth it, larger than the region, not divisible by the writers, or no room."""
        if num_writers < 1 or size_bytes % num_writers or not 1 <= num_fragments <= size_bytes:
            return None
        if not self._config.pays_off(num_fragments, size_bytes, num_writers):
            return None
        offset = self._allocate(self._receive_room, size_bytes)
        if offset is None:
            return None
        base, part = self._receive_memory.address + offset, size_bytes // num_writers
        return Lease(offset, tuple(Extent(base + writer * part, part) for writer in range(num_writers)))

    def release(self, lease: Lease) -> None:
        """Give room back that no write can reach any more; again does nothing."""
        with self._changed:
            if lease.is_released:
                return
            lease.is_released = True
            self._receive_room.free(lease.offset)
            self._changed.notify_all()

    def quarantine(self, lease: Lease) -> None:
        """Count room as lost until it is released: its transfer has failed, but may still be written."""
        with self._changed:
            if not lease.is_released:
                self._receive_room.quarantine(lease.offset)

    def send(self, peer: PeerId, fragments: Fragments, base: int) -> BouncedWrite | None:
        """Gather on the thread, then write once, to `base`; the room is free when that write has ended.

        None if there is no room to gather in, or it does not pay off, which the receiver could not know for sure: where
        neighbours are joined, fewer fragments are left.
        """
        array = as_array(fragments)
        size_bytes = int(array[:, 2].sum())
        if not self._config.pays_off(len(array), size_bytes):
            return None
        offset = self._allocate(self._send_room, size_bytes)
        if offset is None:
            return None
        write = BouncedWrite(BounceTail(array[:, 1], array[:, 2], base))
        with self._changed:
            if self._is_closed:  # since room was found; nothing runs behind the end of the queue
                self._send_room.free(offset)
                return None
            self._jobs.put(lambda: self._gather_and_write(write, peer, array, offset))
        return write

    def scatter(self, lease: Lease, copies: Int64s) -> Future[None]:
        """Copy out of a lease's room on the thread: [n, 3] of source, target and size; an error is this one's alone.

        The transfer is complete when that is done.
        """
        scattering: Future[None] = Future()
        with self._changed:
            if self._is_closed or lease.is_released:
                reason = "bouncing is closed" if self._is_closed else "the room is released"
                scattering.set_exception(RuntimeError(reason))
            else:
                self._jobs.put(lambda: self._copy_out(scattering, lease, copies))
        return scattering

    def close(self) -> bool:
        """Finish what is queued and take the regions back, once; False if a write or a lease still needs them."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
                self._changed.notify_all()
        self._thread.join(self._config.close_timeout_s)
        with self._changed:
            is_idle = self._changed.wait_for(self._is_idle, self._config.close_timeout_s)
            if self._thread.is_alive() or not is_idle:
                _logger.warning("bounce regions stay registered: they are in use: agent=%s", self._agent.name)
                return False
            while self._regions:
                self._agent.deregister(self._regions.pop())
            return True

    def statistics(self) -> BounceStatistics:
        """Return the counters."""
        with self._changed:
            return BounceStatistics(
                self._bytes_sent,
                self._num_fragments_sent,
                self._num_scattered,
                self._receive_room.used_bytes,
                self._send_room.used_bytes,
                self._receive_room.quarantined_bytes + self._send_room.quarantined_bytes,
            )

    def _is_idle(self) -> bool:
        return not (self._receive_room.used_bytes or self._send_room.used_bytes)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _allocate(self, room: RegionAllocator, size_bytes: int) -> int | None:
        """Return the offset of a part, without waiting for one: that is the service's thread."""
        with self._changed:
            return None if self._is_closed else room.allocate(size_bytes)

    def _gather_and_write(self, write: BouncedWrite, peer: PeerId, array: Int64s, offset: int) -> None:
        address = self._send_memory.address + offset
        try:
            self._copier.gather(array[:, 0], array[:, 2], self._send_memory.part(offset, write.size_bytes))
            piece = np.array([[address, write.tail.src_base, write.size_bytes]], np.int64)
            whole = self._agent.write(peer, piece)
        except _COPY_ERRORS as error:
            self._sent(write, WriteState.FAILED, str(error), offset)
            return
        whole.when_ended(lambda: self._sent(write, whole.state, whole.reason, offset))

    def _sent(self, write: BouncedWrite, state: WriteState, reason: str | None, offset: int) -> None:
        """Free the room, unless an abandoned write may still read it, and only then let the send have ended."""
        with self._changed:
            if state is WriteState.ABANDONED:
                self._send_room.quarantine(offset)
            else:
                self._send_room.free(offset)
            if state is WriteState.DONE:
                self._bytes_sent += write.size_bytes
                self._num_fragments_sent += write.num_fragments
            self._changed.notify_all()
        write.end(state, reason)

    def _copy_out(self, scattering: Future[None], lease: Lease, copies: Int64s) -> None:
        base, first, end = self._receive_memory.address, lease.extents[0].base, lease.extents[-1].end
        try:
            for start, run in _contiguous(copies):
                size_bytes = int(run[:, 2].sum())
                if start < first or start + size_bytes > end:
                    raise ValueError(f"{size_bytes} bytes at {start:#x} are outside the reserved room")
                self._copier.scatter(run[:, 1], run[:, 2], self._receive_memory.part(start - base, size_bytes))
        except _COPY_ERRORS as error:
            _logger.warning("a scatter has failed: agent=%s error=%s", self._agent.name, error)
            scattering.set_exception(error)
        else:
            with self._changed:
                self._num_scattered += 1
            scattering.set_result(None)


def _contiguous(copies: Int64s) -> list[tuple[int, Int64s]]:
    """Return the copies in runs whose sources touch, each with its first address: [n, 3] of source, target, size."""
    if len(copies) == 0:
        return []
    breaks = np.flatnonzero(copies[1:, 0] != copies[:-1, 0] + copies[:-1, 2]) + 1
    return [(int(run[0, 0]), run) for run in np.split(copies, breaks)]
