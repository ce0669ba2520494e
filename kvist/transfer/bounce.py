"""Bounce buffers turn a transfer's thousands of fragments into one write: gather here, write, scatter there.

Each worker has two regions, one to send from and one to receive into. A part of a region is free again only when no
write can reach it. Where there is no room, or bouncing does not pay, fragments are written one by one. Only `copier`
accesses tensors. For one thread, except for statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
COPY_ERRORS = (KvistError, RuntimeError, ValueError, IndexError)
_logger = logging.getLogger(__name__)


def region_bytes(size_mib: int, free_bytes: int) -> int:
    """Return the size of each of two regions, in whole chunks; both take at most half of the free bytes. 0 is none."""
    wanted = -(-size_mib * MIB // CHUNK_BYTES) * CHUNK_BYTES
    return min(wanted, free_bytes // 4 // CHUNK_BYTES * CHUNK_BYTES)


class BounceRegion:
    """Allocates parts of a piece of memory, first fit; O(n log n) in parts, of which a transfer has one.

    A part is identified by its address. A quarantined part stays allocated until it is freed like any other.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.address = memory.data_ptr()
        self._sizes: dict[int, int] = {}  # by offset, including quarantined parts
        self._quarantined: set[int] = set()

    @property
    def used_bytes(self) -> int:
        return sum(list(self._sizes.values()))  # a copy, since another thread allocates and frees

    @property
    def quarantined_bytes(self) -> int:
        return sum(self._sizes.get(offset, 0) for offset in list(self._quarantined))

    def allocate(self, size_bytes: int) -> int | None:
        """Return the address of a new part, whose size is rounded up to the alignment; None if it does not fit."""
        size_bytes += -size_bytes % ALIGNMENT_BYTES
        offset = 0
        for taken in sorted(self._sizes):
            if taken - offset >= size_bytes:
                break
            offset = taken + self._sizes[taken]
        if offset + size_bytes > self._memory.numel():
            return None
        self._sizes[offset] = size_bytes
        return self.address + offset

    def quarantine(self, address: int) -> None:
        """Count an allocated part as one that a late write could reach."""
        assert address - self.address in self._sizes, "a part that is taken"
        self._quarantined.add(address - self.address)

    def free(self, address: int) -> None:
        del self._sizes[address - self.address]
        self._quarantined.discard(address - self.address)

    def bytes_at(self, address: int, size_bytes: int) -> torch.Tensor:
        return self._memory[address - self.address : address - self.address + size_bytes]


@dataclass(slots=True)
class BounceStatistics:
    """Bytes and fragments sent so far, and what is allocated in both regions now."""

    bytes_sent: int = 0
    num_fragments_sent: int = 0
    used_bytes: int = 0
    quarantined_bytes: int = 0


class Bounce:
    """Bounces through two registered regions, one to send from and one to receive into."""

    max_fragment_bytes = 2048
    """The largest mean size of fragments that are bounced.

    Writing 64 MiB unbounced, in shared memory and over NIXL, took 1.5 and 2.5 times as long as a bounce in fragments of
    1 KiB, 1.1 and 1.7 of 2 KiB, 0.9 and 1.3 of 4 KiB, and less than a bounce in larger ones. With few fragments, of any
    size, a bounce takes half a millisecond longer (two AMD EPYC cores, benchmarks/results/bench_transfer.md,
    2026-11-21).
    """

    def __init__(self, agent: TransferAgent, copier: TorchCopier, allocate: Callable[[], torch.Tensor]) -> None:
        """Allocate and register both regions; if the second fails, the first is deregistered."""
        self._agent, self._copier = agent, copier
        with ExitStack() as undo:
            regions = []
            for _ in range(2):
                memory = allocate()
                regions.append(BounceRegion(memory))
                agent.register(regions[-1].address, memory.numel(), memory.device.index)
                undo.callback(agent.deregister, regions[-1].address)
            undo.pop_all()
        self._regions = self._send_region, self._receive_region = regions
        self._counts = BounceStatistics()

    def reserve(self, size_bytes: int, num_fragments: int) -> int | None:
        """Return the address of room for all writers together; None if there is none or bouncing does not pay."""
        if not 0 < size_bytes <= num_fragments * self.max_fragment_bytes:
            return None
        return self._receive_region.allocate(size_bytes)

    def release(self, room: int) -> None:
        """Free room that no write can reach any more."""
        self._receive_region.free(room)

    def quarantine(self, room: int) -> None:
        """Quarantine room until it is released: its transfer has failed, but may still write."""
        self._receive_region.quarantine(room)

    def send(self, peer: PeerId, fragments: Int64s, base: int) -> Write | None:
        """Return a write that gathers, then writes once, to `base`; None without room, or if bouncing does not pay."""
        size_bytes = int(fragments[:, 2].sum())
        if size_bytes > len(fragments) * self.max_fragment_bytes:
            return None
        room = self._send_region.allocate(size_bytes)
        return None if room is None else self._gather_and_write(peer, fragments, room, size_bytes, base)

    def scatter(self, parts: Sequence[tuple[int, Int64s]]) -> None:
        """Copy each address's bytes to pieces `[num_pieces, 2]`, address and bytes; raises one of `COPY_ERRORS`."""
        for address, pieces in parts:
            targets, sizes = pieces.T
            self._copier.scatter(targets, sizes, self._receive_region.bytes_at(address, int(sizes.sum())))

    def close(self) -> bool:
        """Deregister the regions, once; return False if a write or room still needs them."""
        if any(region.used_bytes for region in self._regions):
            _logger.warning("bounce regions stay registered: they are in use: agent=%s", self._agent.name)
            return False
        while self._regions:
            self._agent.deregister(self._regions.pop().address)
        return True

    def statistics(self) -> BounceStatistics:
        return replace(
            self._counts,
            used_bytes=sum(region.used_bytes for region in self._regions),
            quarantined_bytes=sum(region.quarantined_bytes for region in self._regions),
        )

    def _gather_and_write(self, peer: PeerId, fragments: Int64s, room: int, size_bytes: int, base: int) -> Write:
        """Gather and write, then free the room, unless an abandoned write may still read it."""
        try:
            piece = self._send_region.bytes_at(room, size_bytes)
            self._copier.gather(fragments[:, 0], fragments[:, 2], piece)
            yield from self._agent.write(peer, np.array([[room, base, size_bytes]], np.int64))
        except COPY_ERRORS as error:
            failure = error if isinstance(error, WriteFailedError) else WriteFailedError(str(error))
            if failure.is_quiescent:
                self._send_region.free(room)
            else:
                self._send_region.quarantine(room)
            raise failure from None
        self._send_region.free(room)
        self._counts.bytes_sent += size_bytes
        self._counts.num_fragments_sent += len(fragments)
