"""What one rank holds: its digest, and snapshots of it, which a publisher cuts into parts. No I/O, no clock.

docs/wire-format.md defines both. The digest uses the finaliser of splitmix64 (Steele et al. 2014); adding and removing
are both O(1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.errors import MalformedMessageError
from kvist.events.types import Holding, SnapshotPart, Tier, WorkerRank

MAX_PART_BLOCKS = 8192
"""Blocks in one part: 64 KiB of hashes, a message of 104 KiB."""

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF
_TIER_STEP = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB
# Below this many blocks numpy's fixed cost of some 20 µs is the larger one.
_MIN_VECTOR_BLOCKS = 32
_LITTLE_U64, _LITTLE_U32 = np.dtype("<u8"), np.dtype("<u4")


def block_digest(block_hash: int, tier: int) -> int:
    """Return the u64 that one held (block, tier) contributes to its rank's digest."""
    x = block_hash ^ (tier * _TIER_STEP & _U64_MASK)
    x = (x ^ (x >> 30)) * _MIX_1 & _U64_MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _U64_MASK
    return x ^ (x >> 31)


def blocks_digest(block_hashes: Sequence[int] | NDArray[np.uint64], tier: int) -> int:
    """Return the u64 that these blocks, held in one tier, contribute together."""
    if len(block_hashes) < _MIN_VECTOR_BLOCKS:
        block_hashes = block_hashes.tolist() if isinstance(block_hashes, np.ndarray) else block_hashes
        return sum(block_digest(block_hash, tier) for block_hash in block_hashes) & _U64_MASK
    x = np.array(block_hashes, dtype=np.uint64) ^ np.uint64(tier * _TIER_STEP & _U64_MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


class HeldBlocks(NamedTuple):
    """Blocks with how many come before each in its chain, and a mask of the tiers that hold it; all `[num_blocks]`."""

    hashes: NDArray[np.uint64]
    depths: NDArray[np.uint32]
    tiers: NDArray[np.uint8]

    def holding(self) -> Holding:
        """Return the number of (block, tier) pairs, and their digest."""
        num_blocks = digest = 0
        for tier in Tier:
            hashes = self.hashes[self.tiers >> tier & 1 == 1]
            num_blocks += len(hashes)
            digest += blocks_digest(hashes, tier)
        return Holding(num_blocks, digest & _U64_MASK)


_NOTHING_HELD = HeldBlocks(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a rank held before the batch `sequence`, in slices, which have this `holding` together."""

    source: WorkerRank
    epoch: int
    sequence: int
    block_size: int
    holding: Holding
    slices: tuple[HeldBlocks, ...]


def snapshot_parts(snapshot: Snapshot) -> Iterator[SnapshotPart]:
    """Yield the parts of a snapshot, by ascending depth, at least one."""
    held = HeldBlocks(*map(np.concatenate, zip(_NOTHING_HELD, *snapshot.slices, strict=True)))
    # A sixth of the time, for numpy sorts 16 bits by radix: 10 ms for a million blocks.
    is_deep = held.depths.max(initial=0) > np.iinfo(np.uint16).max
    order = np.argsort(held.depths if is_deep else held.depths.astype(np.uint16), kind="stable")
    num_parts = max(1, -(-len(order) // MAX_PART_BLOCKS))
    of = *snapshot.source, snapshot.epoch, snapshot.sequence, snapshot.block_size
    for part_idx in range(num_parts):
        chosen = order[part_idx * MAX_PART_BLOCKS : (part_idx + 1) * MAX_PART_BLOCKS]
        yield SnapshotPart(
            *(*of, part_idx, num_parts, *snapshot.holding),
            hashes=held.hashes[chosen].astype(_LITTLE_U64, copy=False).tobytes(),
            depths=held.depths[chosen].astype(_LITTLE_U32, copy=False).tobytes(),
            tiers=held.tiers[chosen].tobytes(),
        )


class SnapshotAssembly:
    """Assembles a snapshot from its parts, in any order and possibly repeated; `source` is for errors."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._first: SnapshotPart | None = None
        self._slices: dict[int, HeldBlocks] = {}
        self._num_blocks = 0
        self._digest = 0

    def add(self, part: SnapshotPart) -> None:
        """Add a part; raises MalformedMessageError when it is another snapshot's."""
        first = self._first = self._first or part
        if snapshot_id(part) != snapshot_id(first):
            found = f"a part of snapshot {snapshot_id(part)}"
            raise MalformedMessageError(self._source, f"{found}, expected one of {snapshot_id(first)}")
        if part.part_idx in self._slices:
            return
        held = HeldBlocks(
            np.frombuffer(part.hashes, _LITTLE_U64).astype(np.uint64, copy=False),
            np.frombuffer(part.depths, _LITTLE_U32).astype(np.uint32, copy=False),
            np.frombuffer(part.tiers, np.uint8),
        )
        holding = held.holding()
        self._num_blocks += holding.num_blocks
        self._digest += holding.digest
        self._slices[part.part_idx] = held

    def snapshot(self) -> Snapshot:
        """Return the snapshot, in slices by ascending depth.

        Raises MalformedMessageError unless it is whole and has the digest that it names.
        """
        first = self._first
        if first is None or len(self._slices) < first.num_parts:
            num_parts = 0 if first is None else first.num_parts
            raise MalformedMessageError(self._source, f"{len(self._slices)} parts of a snapshot, expected {num_parts}")
        published, held = Holding(first.num_blocks, first.digest), Holding(self._num_blocks, self._digest & _U64_MASK)
        if held != published:
            raise MalformedMessageError(self._source, f"a snapshot of {held}, expected {published}")
        slices = tuple(self._slices[part_idx] for part_idx in range(first.num_parts))
        return Snapshot(first.source, first.epoch, first.sequence, first.block_size, published, slices)


def snapshot_id(part: SnapshotPart) -> tuple[int, ...]:
    """Return the fields that are equal in all parts of one snapshot."""
    return part.rank, part.epoch, part.sequence, part.num_parts, part.num_blocks, part.digest
