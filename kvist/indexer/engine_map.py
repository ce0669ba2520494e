"""Engine map: what each engine hash of one rank names in the index, in a compiled table."""

from __future__ import annotations

from kvist.indexer.compiled import engine_map as compiled
from kvist.indexer.compiled.engine_layout import IRREGULAR
from kvist.radix import RadixIndex
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap
from kvist.radix.tables import DENSE, SegmentTable

_SEGMENT_BITS = 4
"""A rank's map is small: 64 KiB once each segment has a page, and growing one of a million takes a millisecond."""


class EngineMap:
    """Leads from the engine hashes of one rank, as `fold_hash` has them, to blocks of an index."""

    def __init__(self, index: RadixIndex) -> None:
        self._index = index
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._heap = heap = Heap()
        self.address = heap.allocate(layout.TABLE_BYTES)
        self._control = heap.view(self.address).cast("q")
        self._segments = SegmentTable(heap, self._control, self.address, DENSE, bits=_SEGMENT_BITS)

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

    def help_out(self) -> None:
        """Provide the room that compiled code asked for."""
        self._segments.grow(self._control[layout.NEED_ARG >> 3])

    def _put(self, name: int, value: int) -> None:
        while compiled.put_entry(self.address, name, value) < 0:
            self.help_out()
