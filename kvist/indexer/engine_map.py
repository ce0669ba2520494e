"""Engine map: what each engine hash of one rank names in the index, in a compiled table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.indexer.compiled import engine_map as compiled
from kvist.indexer.compiled import engine_names as bulk
from kvist.indexer.compiled.engine_layout import IRREGULAR
from kvist.radix import RadixIndex
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap
from kvist.radix.tables import DENSE, SegmentTable, buckets_at

_SEGMENT_BITS = 3
"""Few, for there may be thousands of maps: 32 KiB once each segment has a page. One of a million grows in 2 ms."""
_NAMES_AT_ONCE = 4096
"""Told by `names` in one go: each costs two or three cache misses, so that these take half a millisecond."""


class Names(NamedTuple):
    """Engine hashes, as `fold_hash` has them, each with the block that it names."""

    engine_hashes: NDArray[np.uint64]
    blocks: NDArray[np.uint64]


class EngineMap:
    """Leads from the engine hashes of one rank, as `fold_hash` has them, to blocks of an index."""

    def __init__(self, index: RadixIndex) -> None:
        self._index = index
        self.slot: int | None = None
        """Whose blocks they are, where known: what names none of them is forgotten before the map grows."""
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._heap = heap = Heap()
        self.address = heap.allocate(layout.TABLE_BYTES)
        self._control = heap.view(self.address).cast("q")
        self._segments = SegmentTable(
            heap, self._control, self.address, DENSE, bits=_SEGMENT_BITS, scratch=self._index.heap
        )
        self._num_evicted = [self._index.num_evicted] * self._segments.num_segments  # when each was last looked through
        self._most = 0  # engine hashes since all segments were of the size they need

    @property
    def size_bytes(self) -> int:
        """Return the memory it takes."""
        return self._heap.size_bytes

    def __len__(self) -> int:
        """Return the number of engine hashes."""
        num_rows: int = self._control[layout.NUM_ROWS >> 3]
        return num_rows

    def is_irregular(self, name: int) -> bool:
        """Return whether the engine hash is marked: it is accounted for elsewhere."""
        is_marked: bool = compiled.look_up(self.address, name) == IRREGULAR
        return is_marked

    def block_of(self, name: int, slot: int) -> int | None:
        """Return the block that a regular engine hash names and the slot still holds."""
        is_known, block_hash = compiled.block_named(self._index.address, self.address, slot, name)
        return block_hash if is_known else None

    def is_regular(self, name: int, block_hash: int, slot: int) -> bool:
        """Return whether the slot may hold the block under this hash without either standing for anything else."""
        outlook = compiled.outlook(self._index.address, self.address, slot, 0, name, block_hash)
        return bool(outlook != compiled.ACCOUNTING)

    def tiers(self, block_hash: int, slot: int) -> int:
        """Return in which tiers the slot holds a block, by bit."""
        tiers: int = compiled.tiers_held(self._index.address, slot, block_hash)
        return tiers

    def can_name(self, block_hash: int) -> bool:
        """Return whether an entry can lead to the block: it is in the index, and alone with the prefix of its key."""
        return bool(compiled.name_of(self._index.address, block_hash) != 0)

    def put(self, name: int, block_hash: int) -> None:
        """Let an engine hash name a block that an entry can lead to."""
        self._put(name, compiled.name_of(self._index.address, block_hash))

    def mark(self, name: int) -> None:
        """Mark an engine hash as irregular."""
        self._put(name, IRREGULAR)

    def mark_row(self, block_hash: int) -> None:
        """Have compiled code leave alone what the regular hash of this block is told to do."""
        compiled.mark_irregular(self._index.address, block_hash)

    def drop(self, name: int) -> None:
        """Forget an engine hash."""
        compiled.drop_entry(self.address, name)

    def names(self, slot: int) -> Iterator[Names]:
        """Yield what regular engine hashes name and the slot holds, some at a time; what is there throughout, once."""
        for index in range(self._segments.num_segments):
            regular = self._regular_names(index)
            for start in range(0, len(regular), _NAMES_AT_ONCE):
                names = regular[start : start + _NAMES_AT_ONCE].copy()
                blocks = np.empty_like(names)
                num_known = bulk.read_names(
                    self._index.address, self.address, slot, names.ctypes.data, len(names), blocks.ctypes.data
                )
                yield Names(names[:num_known], blocks[:num_known])

    def put_all(self, names: Names, slot: int) -> NDArray[np.int64]:
        """Let engine hashes name blocks, as far as the slot holds them; return where no entry can lead to the block."""
        others = np.zeros(1 + len(names.blocks), np.int64)
        engine_hashes, blocks, start = names.engine_hashes.ctypes.data, names.blocks.ctypes.data, 0
        while True:
            start = bulk.put_names(
                self._index.address,
                self.address,
                slot,
                engine_hashes,
                blocks,
                start,
                len(names.blocks),
                others.ctypes.data,
            )
            if start == len(names.blocks):
                return others[1 : 1 + others[0]]
            self.help_out()

    def help_out(self) -> None:
        """Provide the room that compiled code asked for: that of engine hashes whose blocks were evicted, or more."""
        segment: int = self._control[layout.NEED_ARG >> 3]
        num_evicted, num_names = self._index.num_evicted, self._segments.count(segment)
        if self.slot is not None and (num_evicted - self._num_evicted[segment]) * 8 >= len(self):
            self._num_evicted[segment] = num_evicted
            names = self._regular_names(segment)
            arguments = self._index.address, self.address, self.slot, names.ctypes.data, len(names)
            if bulk.drop_stale(*arguments) * 16 >= num_names > 0:
                return
        self._segments.grow(segment)

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more: a segment's, so call it now and then."""
        self._most = max(self._most, len(self))
        if len(self) * 2 >= self._most:
            return
        shrinkable = self._segments.shrinkable()
        if shrinkable:
            self._segments.shrink(shrinkable[0])
        else:
            self._most = len(self)

    def _regular_names(self, segment: int) -> NDArray[np.uint64]:
        """Return the engine hashes in a segment that are not marked."""
        inverse = np.uint64(pow(self._control[layout.MULTIPLIER >> 3] % (1 << 64), -1, 1 << 64))
        address, num_rows = int(self._segments.directory["address"][segment]), self._segments.num_rows(segment)
        rows = buckets_at(self._heap, address, num_rows // layout.BUCKET_ROWS)
        names: NDArray[np.uint64] = rows["key"][rows["value"] > IRREGULAR] * inverse
        return names

    def _put(self, name: int, value: int) -> None:
        while compiled.put_entry(self.address, name, value) < 0:
            self.help_out()
