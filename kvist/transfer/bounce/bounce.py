"""One write instead of many: gather into a region here, write once into a region there, scatter to where it belongs.

Neither end waits for its thread: a send and a scatter are polled. A part of a region is free again only when no write
can reach it. Where there is no room, or it is not worth it, the answer is None: fragments are written as they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvist.errors import KvistError
from kvist.transfer.agents.base import Fragments, Int64s, PeerId, TransferAgent, WriteState, as_array
from kvist.transfer.bounce.region import BounceConfig, RegionAllocator, split_extent
from kvist.transfer.results import BounceTail, Extent

M = TypeVar("M")
M_in = TypeVar("M_in", contravariant=True)
M_out = TypeVar("M_out", covariant=True)
_logger = logging.getLogger(__name__)


class Lease:
    """A part of the receive region, reserved for one transfer; `extents` is each writer's own, by rank."""

    __slots__ = ("extents", "is_released", "offset")

    def __init__(self, offset: int, extents: tuple[Extent, ...]) -> None:
        self.offset = offset
        self.extents = extents
        self.is_released = False


class Outgoing:
    """A send under way: `state` is polled; the tail says what the region of the peer will hold."""

    __slots__ = ("_ended", "reason", "state", "tail")

    def __init__(self, tail: BounceTail) -> None:
        self.tail = tail
        self.state = WriteState.PENDING
        self.reason: str | None = None
        self._ended = threading.Event()

    def end(self, state: WriteState, reason: str | None) -> None:
        """Leave PENDING: for the bounce alone."""
        self.reason = reason
        self.state = state
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, at the latest after `timeout_s`."""
        return self._ended.wait(timeout_s)


class Scattering:
    """A scatter under way: `is_done` is polled; `error` says why it failed."""

    __slots__ = ("_ended", "error")

    def __init__(self) -> None:
        self.error: str | None = None
        self._ended = threading.Event()

    @property
    def is_done(self) -> bool:
        """Return whether every byte lies in its place, or has failed to."""
        return self._ended.is_set()

    def end(self, error: str | None = None) -> None:
        """Be done: for the bounce alone."""
        self.error = error
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is done, at the latest after `timeout_s`."""
        return self._ended.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class BounceStatistics:
    """What was bounced, why it was not, and what is taken now."""

    num_sent: int = 0
    bytes_sent: int = 0
    num_fragments_sent: int = 0
    num_scattered: int = 0
    num_failed: int = 0
    refused_as_slower: int = 0
    refused_by_size: int = 0
    refused_for_room: int = 0
    receive_bytes: int = 0
    send_bytes: int = 0
    quarantined_bytes: int = 0


class Bounce:
    """What every bounce offers, so that callers have no branches; this one never bounces."""

    def reserve(self, size_bytes: int, num_fragments: int, num_writers: int = 1) -> Lease | None:  # noqa: ARG002
        """Return room for a transfer from so many writers; None: fragments as they are."""
        return None

    def release(self, lease: Lease) -> None:
        """Give room back that no write can reach any more; again does nothing."""

    def quarantine(self, lease: Lease) -> None:
        """Count room as lost until it is released: its transfer has failed, but may still be written."""

    def send(self, peer: PeerId, fragments: Fragments, base: int) -> Outgoing | None:  # noqa: ARG002
        """Gather, and write to `base` at the peer; None if there is no room to gather in: write fragments instead."""
        return None

    def scatter(self, lease: Lease, copies: Int64s) -> Scattering:  # noqa: ARG002
        """Copy out of a lease's room: [n, 3] of source, target and size. The transfer is complete when that is done."""
        scattering = Scattering()
        scattering.end("bouncing is off")
        return scattering

    def close(self) -> bool:
        """Finish what is queued and take the regions back, once; False if a write or a lease still needs them."""
        return True

    def statistics(self) -> BounceStatistics:
        """Return the counters."""
        return BounceStatistics()


class Copier(Protocol[M_in]):
    """Copies between fragments and a contiguous piece of a region, a tensor M; done when it returns."""

    def gather(self, addresses: Int64s, sizes: Int64s, out: M_in) -> None:
        """Fill `out` with the fragments, one after the other."""
        ...

    def scatter(self, addresses: Int64s, sizes: Int64s, source: M_in) -> None:
        """Write the fragments, one after the other in `source`."""
        ...


class RegionMemory(Protocol[M_out]):
    """A region: where it lies, and a part of it as what a copier takes."""

    address: int
    size_bytes: int
    device_idx: int | None

    def part(self, offset: int, size_bytes: int) -> M_out:
        """Return a view of a part."""
        ...


class RegionBounce(Bounce, Generic[M]):
    """Bounces through two registered regions, one to send from and one to receive in, with one thread that copies."""

    def __init__(
        self,
        agent: TransferAgent,
        copier: Copier[M],
        allocate: Callable[[], RegionMemory[M]],
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
        self._statistics = BounceStatistics()
        self._is_closed = False
        self._close_outcome: bool | None = None
        # Bounded by the regions: each job in it holds a part of one.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"bounces of {agent.name}", daemon=True)
        self._thread.start()

    def reserve(self, size_bytes: int, num_fragments: int, num_writers: int = 1) -> Lease | None:
        """Return room, or None: not worth it, larger than the region, not divisible by the writers, or no room."""
        extents = split_extent(0, size_bytes, num_writers)
        if extents is None or num_fragments < 1 or size_bytes > self._receive_memory.size_bytes:
            self._count("refused_by_size")
            return None
        if not self._pays_off(num_fragments, size_bytes, num_writers):
            return None
        offset = self._allocate(self._receive_room, size_bytes)
        if offset is None:
            self._count("refused_for_room")
            return None
        base = self._receive_memory.address + offset
        return Lease(offset, tuple(Extent(base + part.base, part.size_bytes) for part in extents))

    def release(self, lease: Lease) -> None:
        """Give room back; again does nothing."""
        with self._changed:
            if lease.is_released:
                return
            lease.is_released = True
            self._receive_room.free(lease.offset)
            self._changed.notify_all()

    def quarantine(self, lease: Lease) -> None:
        """Count room as lost until it is released; after that does nothing."""
        with self._changed:
            if not lease.is_released:
                self._receive_room.quarantine(lease.offset)

    def send(self, peer: PeerId, fragments: Fragments, base: int) -> Outgoing | None:
        """Gather on the thread, then write once; the room is free when that write has ended.

        Whether it pays off is asked again: the receiver could not know how many fragments are left where neighbours are
        joined.
        """
        array = as_array(fragments)
        size_bytes = int(array[:, 2].sum())
        if not self._pays_off(len(array), size_bytes):
            return None
        offset = self._allocate(self._send_room, size_bytes)
        if offset is None:
            self._count("refused_for_room")
            return None
        outgoing = Outgoing(BounceTail(array[:, 1], array[:, 2], base))
        with self._changed:
            if self._is_closed:  # since room was found; nothing runs behind the end of the queue
                self._send_room.free(offset)
                return None
            self._jobs.put(lambda: self._gather_and_write(outgoing, peer, array, offset, size_bytes))
        return outgoing

    def scatter(self, lease: Lease, copies: Int64s) -> Scattering:
        """Copy on the thread; an error is the scatter's alone."""
        scattering = Scattering()
        with self._changed:
            if self._is_closed or lease.is_released:
                scattering.end("bouncing is closed" if self._is_closed else "the room is released")
                return scattering
            self._jobs.put(lambda: self._copy_out(scattering, lease, copies))
        return scattering

    def close(self) -> bool:
        """Finish what is queued, within a bound; regions that a write or a lease still needs stay registered."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
                self._changed.notify_all()
        self._thread.join(self._config.close_timeout_s)
        with self._changed:
            if self._close_outcome is None:
                room_free = self._changed.wait_for(self._is_idle, self._config.close_timeout_s)
                if self._thread.is_alive() or not room_free:
                    _logger.warning("bounce regions stay registered: they are in use: agent=%s", self._agent.name)
                    return False
                self._close_outcome = True
                for region in self._regions:
                    self._agent.deregister(region)
            return self._close_outcome

    def statistics(self) -> BounceStatistics:
        """Return the counters."""
        with self._changed:
            quarantined = self._receive_room.quarantined_bytes + self._send_room.quarantined_bytes
            return replace(
                self._statistics,
                receive_bytes=self._receive_room.used_bytes,
                send_bytes=self._send_room.used_bytes,
                quarantined_bytes=quarantined,
            )

    def _pays_off(self, num_fragments: int, size_bytes: int, num_writers: int = 1) -> bool:
        if self._config.pays_off(num_fragments, size_bytes, num_writers):
            return True
        self._count("refused_as_slower")
        return False

    def _is_idle(self) -> bool:
        return not (self._receive_room.used_bytes or self._send_room.used_bytes)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _allocate(self, room: RegionAllocator, size_bytes: int) -> int | None:
        """Return the offset of a part, without waiting for one: that is the service's thread."""
        with self._changed:
            return None if self._is_closed else room.allocate(size_bytes)

    def _give_back(self, room: RegionAllocator, offset: int) -> None:
        with self._changed:
            room.free(offset)
            self._changed.notify_all()

    def _count(self, counter: str, by: int = 1) -> None:
        with self._changed:
            changed = {counter: getattr(self._statistics, counter) + by}
            self._statistics = replace(self._statistics, **changed)

    def _gather_and_write(self, outgoing: Outgoing, peer: PeerId, array: Int64s, offset: int, size_bytes: int) -> None:
        address = self._send_memory.address + offset
        try:
            self._copier.gather(array[:, 0], array[:, 2], self._send_memory.part(offset, size_bytes))
            transfer = self._agent.write(peer, np.array([[address, outgoing.tail.src_base, size_bytes]], np.int64))
        except (KvistError, RuntimeError, ValueError, IndexError) as error:
            self._sent(outgoing, WriteState.FAILED, str(error), offset)
            return
        transfer.when_ended(lambda: self._sent(outgoing, transfer.state, transfer.reason, offset))

    def _sent(self, outgoing: Outgoing, state: WriteState, reason: str | None, offset: int) -> None:
        """Free the room, unless an abandoned write may still read it, and only then let the send have ended."""
        if state is WriteState.ABANDONED:
            with self._changed:
                self._send_room.quarantine(offset)
        else:
            self._give_back(self._send_room, offset)
        if state is WriteState.DONE:
            self._count("num_sent")
            self._count("bytes_sent", int(outgoing.tail.sizes_bytes.sum()))
            self._count("num_fragments_sent", len(outgoing.tail.sizes_bytes))
        else:
            self._count("num_failed")
        outgoing.end(state, reason)

    def _copy_out(self, scattering: Scattering, lease: Lease, copies: Int64s) -> None:
        base = self._receive_memory.address
        first = lease.extents[0].base
        try:
            for start, run in _contiguous(copies):
                size_bytes = int(run[:, 2].sum())
                if start < first or start + size_bytes > lease.extents[-1].end:
                    raise ValueError(f"{size_bytes} bytes at {start:#x} are outside the reserved room")
                self._copier.scatter(run[:, 1], run[:, 2], self._receive_memory.part(start - base, size_bytes))
        except (KvistError, RuntimeError, ValueError, IndexError) as error:
            _logger.warning("a scatter has failed: agent=%s error=%s", self._agent.name, error)
            self._count("num_failed")
            scattering.end(str(error))
        else:
            self._count("num_scattered")
            scattering.end()


def _contiguous(copies: Int64s) -> list[tuple[int, Int64s]]:
    """Return the copies in runs whose sources touch, each with its first address: [n, 3] of source, target, size."""
    if len(copies) == 0:
        return []
    breaks = np.flatnonzero(copies[1:, 0] != copies[:-1, 0] + copies[:-1, 2]) + 1
    return [(int(run[0, 0]), run) for run in np.split(copies, breaks)]
