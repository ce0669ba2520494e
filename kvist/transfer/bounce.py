"""Bouncing turns the thousands of fragments of one transfer into one write: gather here, write, scatter there.

Each worker has two regions, one to send from and one to receive in. Neither end waits for the thread that copies: a
send and a scatter are polled. A part of a region is free again only when no write can reach it. Where there is no room,
or it is not worth it, the answer is None: fragments are written as they are. Only `copier` touches tensors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from kvist.errors import KvistError
from kvist.transfer.agents.base import Int64s, PeerId, TransferAgent, Write, WriteFailedError

if TYPE_CHECKING:
    import torch

    from kvist.transfer.copier import TorchCopier

MIB = 1 << 20
CHUNK_BYTES = 32 * MIB
ALIGNMENT_BYTES = 512
_COPY_ERRORS = (KvistError, RuntimeError, ValueError, IndexError)
_logger = logging.getLogger(__name__)


def region_bytes(size_mib: int, free_bytes: int) -> int:
    """Return the size of each of two regions, in whole chunks, which take at most half of what is free; 0 for none."""
    wanted = -(-size_mib * MIB // CHUNK_BYTES) * CHUNK_BYTES
    return min(wanted, free_bytes // 4 // CHUNK_BYTES * CHUNK_BYTES)


class RegionAllocator:
    """Gives out the first hole that is large enough; O(n log n) in what is taken, which is one part a transfer.

    Not thread-safe. A part is quarantined where it lies: it stays taken until it is freed like any other.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}  # by offset, quarantined parts among them
        self._quarantined: set[int] = set()

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def quarantined_bytes(self) -> int:
        return sum(self._sizes[offset] for offset in self._quarantined)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a part, rounded up to the alignment; None if no hole holds it."""
        size_bytes += -size_bytes % ALIGNMENT_BYTES
        offset = 0
        for taken in sorted(self._sizes):
            if taken - offset >= size_bytes:
                break
            offset = taken + self._sizes[taken]
        if offset + size_bytes > self._capacity_bytes:
            return None
        self._sizes[offset] = size_bytes
        return offset

    def quarantine(self, offset: int) -> None:
        """Mark a taken part as one that a late write could reach."""
        assert offset in self._sizes, "a part that is taken"
        self._quarantined.add(offset)

    def free(self, offset: int) -> None:
        del self._sizes[offset]
        self._quarantined.discard(offset)


@dataclass(slots=True, eq=False)
class Lease:
    """A part of the receive region, reserved for one transfer."""

    offset: int
    address: int
    is_released: bool = False


@dataclass(slots=True)
class BounceStatistics:
    """What was sent, in so many fragments, and what is taken of both regions now."""

    bytes_sent: int = 0
    num_fragments_sent: int = 0
    used_bytes: int = 0
    quarantined_bytes: int = 0


class Bounce:
    """Bounces through two registered regions, one to send from and one to receive in, with one thread that copies."""

    max_fragment_bytes = 2048
    """What fragments have at most, in the mean, to be bounced.

    The time of 64 MiB as they are over that of a bounce was, in shared memory and over NIXL, 1.5 and 2.5 in fragments
    of 1 KiB, 1.1 and 1.7 of 2 KiB, 0.9 and 1.3 of 4 KiB, below 1 of any larger. Few fragments of any size take half a
    millisecond longer (two AMD EPYC cores, benchmarks/results/bench_transfer.md, 2026-11-21).
    """

    def __init__(
        self,
        agent: TransferAgent,
        copier: TorchCopier,
        allocate: Callable[[], torch.Tensor],
        close_timeout_s: float = 2.0,
    ) -> None:
        """Allocate and register both regions, in bytes; if the second cannot be, the first is taken back."""
        self._agent, self._copier, self._close_timeout_s = agent, copier, close_timeout_s
        with ExitStack() as undo:
            self._regions = []
            memories = []
            for _ in range(2):
                memory = allocate()
                region = agent.register(memory.data_ptr(), memory.numel(), memory.device.index)
                undo.callback(agent.deregister, region)
                self._regions.append(region)
                memories.append(memory)
            self._send_memory, self._receive_memory = memories
            self._send_room, self._receive_room = (RegionAllocator(memory.numel()) for memory in memories)
            undo.pop_all()
        self._changed = threading.Condition()
        self._counts = BounceStatistics()
        self._is_closed = False
        # Bounded by the regions: each job in it holds a part of one.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"bounces of {agent.name}", daemon=True)
        self._thread.start()

    def reserve(self, size_bytes: int, num_fragments: int) -> Lease | None:
        """Return room for all writers together, or None: not worth it, larger than the region, or no room."""
        if not 0 < size_bytes <= num_fragments * self.max_fragment_bytes:
            return None
        with self._changed:
            offset = None if self._is_closed else self._receive_room.allocate(size_bytes)
        return None if offset is None else Lease(offset, self._receive_memory.data_ptr() + offset)

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

    def send(self, peer: PeerId, fragments: Int64s, base: int) -> Write | None:
        """Gather on the thread, then write once, to `base`; None if there is no room, or it does not pay off."""
        size_bytes = int(fragments[:, 2].sum())
        if size_bytes > len(fragments) * self.max_fragment_bytes:
            return None
        with self._changed:
            offset = None if self._is_closed else self._send_room.allocate(size_bytes)
            if offset is None:
                return None
            write: Write = Future()
            self._jobs.put(lambda: self._gather_and_write(write, peer, fragments, offset, base))
        return write

    def scatter(self, parts: Sequence[tuple[int, Int64s]]) -> Future[None]:
        """Copy parts of a lease's room to `[num_pieces, 2]`, places and bytes, on the thread; errors are this one's."""
        scattering: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                scattering.set_exception(RuntimeError("bouncing is closed"))
            else:
                self._jobs.put(lambda: self._copy_out(scattering, parts))
        return scattering

    def close(self) -> bool:
        """Finish what is queued and take the regions back, once; False if a write or a lease still needs them."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
                self._changed.notify_all()
        self._thread.join(self._close_timeout_s)
        with self._changed:
            is_idle = self._changed.wait_for(self._is_idle, self._close_timeout_s)
            if self._thread.is_alive() or not is_idle:
                _logger.warning("bounce regions stay registered: they are in use: agent=%s", self._agent.name)
                return False
            while self._regions:
                self._agent.deregister(self._regions.pop())
            return True

    def statistics(self) -> BounceStatistics:
        with self._changed:
            receive, send = self._receive_room, self._send_room
            return replace(
                self._counts,
                used_bytes=receive.used_bytes + send.used_bytes,
                quarantined_bytes=receive.quarantined_bytes + send.quarantined_bytes,
            )

    def _is_idle(self) -> bool:
        return not (self._receive_room.used_bytes or self._send_room.used_bytes)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _gather_and_write(self, write: Write, peer: PeerId, fragments: Int64s, offset: int, base: int) -> None:
        room = self._send_memory[offset : offset + int(fragments[:, 2].sum())]
        try:
            self._copier.gather(fragments[:, 0], fragments[:, 2], room)
            whole = self._agent.write(peer, np.array([[room.data_ptr(), base, len(room)]], np.int64))
        except _COPY_ERRORS as error:
            whole = Future()
            whole.set_exception(WriteFailedError(str(error)))
        whole.add_done_callback(lambda _: self._sent(write, whole.exception(), fragments, offset))

    def _sent(self, write: Write, error: BaseException | None, fragments: Int64s, offset: int) -> None:
        """Free the room, unless an abandoned write may still read it, and only then let the send have ended."""
        with self._changed:
            if isinstance(error, WriteFailedError) and not error.is_quiescent:
                self._send_room.quarantine(offset)
            else:
                self._send_room.free(offset)
            if error is None:
                self._counts.bytes_sent += int(fragments[:, 2].sum())
                self._counts.num_fragments_sent += len(fragments)
            self._changed.notify_all()
        if error is None:
            write.set_result(None)
        else:
            write.set_exception(error)

    def _copy_out(self, scattering: Future[None], parts: Sequence[tuple[int, Int64s]]) -> None:
        memory = self._receive_memory
        try:
            for address, pieces in parts:
                targets, sizes = pieces.T
                offset = address - memory.data_ptr()
                self._copier.scatter(targets, sizes, memory[offset : offset + int(sizes.sum())])
        except _COPY_ERRORS as error:
            _logger.warning("a scatter has failed: agent=%s error=%s", self._agent.name, error)
            scattering.set_exception(error)
        else:
            scattering.set_result(None)
