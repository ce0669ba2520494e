"""Engine map: what each engine hash of one rank names in the index, and how many copies it has, in compiled tables."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.indexer.compiled import engine_map as compiled
from kvist.indexer.compiled.engine_map import COPY, GROUPS, IRREGULAR
from kvist.radix import RadixIndex
from kvist.radix.compiled import table
from kvist.radix.compiled.layout import FULL, HEAD, SEGMENT, Records
from kvist.radix.memory import Region, TableMemory, reserved, reserved_array

__all__ = ["COPY", "GROUPS", "CopyCounts", "EngineMap", "Names"]

_SEGMENT_BITS = 3
"""Few, for there may be thousands of maps: 32 KiB once each segment has a page. One of a million grows in 2 ms."""
_NAMES_AT_ONCE = 4096
"""Told by `names` in one go: each costs two or three cache misses, so that these take half a millisecond."""


class Names(NamedTuple):
    """Engine hashes, as `fold_hash` has them, each with the block that it names."""

    engine_hashes: NDArray[np.uint64]
    blocks: NDArray[np.uint64]


class _Table:
    """Leads from u64 to u64, in compiled code, with memory of its own."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        memory = reserved(SEGMENT.itemsize << _SEGMENT_BITS)
        self.segments: Records = np.frombuffer(memory, SEGMENT)
        self.head = reserved_array(HEAD, 1)
        self.head["multiplier"], self.head["bits"] = secrets.randbits(64) | 1, _SEGMENT_BITS
        self._table = TableMemory(self.head, self.segments, Region(memory))
        self._most = 0  # rows since all segments were of the size they need

    @property
    def size_bytes(self) -> int:
        """Return the memory it takes."""
        return self._table.size_bytes

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.head["num_rows"][0])

    def get(self, key: int) -> int:
        """Return what stands under a key, 0 if nothing does."""
        return compiled.look_up(self.head, self.segments, key)

    def put(self, key: int, value: int) -> None:
        """Let something other than 0 stand under a key."""
        while compiled.put_one(self.head, self.segments, key, value) == FULL:
            self.help_out()

    def drop(self, key: int) -> None:
        """Forget a key."""
        compiled.drop_one(self.head, self.segments, key)

    def help_out(self) -> None:
        """Make room when compiled code said FULL."""
        if not table.grow(self.head, self.segments):
            raise MemoryError(f"a map of {len(self)} engine hashes has no room for more")

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more: a segment's, so call it now and then."""
        self._most = max(self._most, len(self))
        if len(self) * 2 >= self._most:
            return
        shrinkable = self._table.shrinkable()
        if shrinkable:
            self._table.shrink(shrinkable[0])
        else:
            self._most = len(self)

    def _rows(self, number: int) -> Records:
        return self.segments[number]["rows"][: self.segments[number]["room"]]  # type: ignore[no-any-return]


class CopyCounts(_Table):
    """Counts copies beyond the first of engine hashes, as `fold_hash` has them, in each tier.

    And all of them in each of the rank's other groups: those are `GROUPS` and more instead of a tier.
    """

    def of(self, name: int, tier: int) -> int:
        """Return how many there are."""
        return len(self) and self.get(_copies_key(name, tier)) // compiled.COPY

    def add(self, name: int, tier: int, num_copies: int) -> None:
        """Count some more, or less."""
        num_copies += self.of(name, tier)
        if num_copies > 0:
            self.put(_copies_key(name, tier), num_copies * compiled.COPY | tier)
        else:
            self.drop(_copies_key(name, tier))

    @property
    def has_room(self) -> bool:
        """Return whether blocks of other groups are counted that were not yet."""
        return len(self) < compiled.MAX_ROWS

    def drop_all(self, name: int, tier: int) -> None:
        """Count none any more."""
        if len(self):
            self.drop(_copies_key(name, tier))

    def told(self) -> NDArray[np.uint64]:
        """Return engine hashes, tiers and numbers of copies, as columns of `[num_rows, 3]`."""
        rows = np.concatenate([self._rows(number) for number in range(len(self.segments))])
        rows = rows[rows["value"] > 0]
        tiers = rows["value"] % np.uint64(compiled.COPY)  # or groups
        names = rows["hash"] ^ tiers * np.uint64(compiled.TIER_STEP)
        return np.stack((names, tiers, rows["value"] // np.uint64(compiled.COPY)), axis=1)


def _copies_key(name: int, tier: int) -> int:
    return name ^ tier * compiled.TIER_STEP % (1 << 64)


class EngineMap(_Table):
    """Leads from the engine hashes of one rank, as `fold_hash` has them, to blocks of an index."""

    def __init__(self, index: RadixIndex) -> None:
        self._index = index
        self.slot: int | None = None
        """Whose blocks they are, where known: what names none of them is forgotten before the map grows."""
        super().__init__()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        super().clear()
        self._num_evicted = [self._index.num_evicted] * len(self.segments)  # when each was last looked through

    def is_irregular(self, name: int) -> bool:
        """Return whether the engine hash is marked: it is accounted for elsewhere."""
        return self.get(name) == IRREGULAR

    def block_of(self, name: int, slot: int) -> int | None:
        """Return the block that a regular engine hash names and the slot still holds."""
        block_hash = self.get(name)
        return block_hash if block_hash > IRREGULAR and self.tiers(block_hash, slot) else None

    def is_regular(self, name: int, block_hash: int, slot: int) -> bool:
        """Return whether the slot may hold the block under this hash without either standing for anything else."""
        index = self._index
        return not compiled.needs_account(index.core, index.segments, self.head, self.segments, slot, name, block_hash)

    def tiers(self, block_hash: int, slot: int) -> int:
        """Return in which tiers the slot holds a block, by bit."""
        return compiled.tiers_held(self._index.core, self._index.segments, slot, block_hash)

    def can_name(self, block_hash: int) -> bool:
        """Return whether the map can lead to the block, which is not so of one that is not in the index."""
        return compiled.can_name(self._index.core, self._index.segments, block_hash)

    def mark(self, name: int) -> None:
        """Mark an engine hash as irregular."""
        self.put(name, IRREGULAR)

    def mark_row(self, block_hash: int) -> None:
        """Have compiled code leave alone what the regular hash of this block is told to do."""
        with self._index.writing:
            compiled.mark_block(self._index.core, self._index.segments, block_hash)

    def names(self, slot: int) -> Iterator[Names]:
        """Yield what regular engine hashes name and the slot holds, some at a time; what is there throughout, once."""
        index = self._index
        for number in range(len(self.segments)):
            regular = self._regular_names(number)
            for start in range(0, len(regular), _NAMES_AT_ONCE):
                names = regular[start : start + _NAMES_AT_ONCE]
                blocks = np.empty_like(names)
                num_known = compiled.read_names(
                    index.core, index.segments, self.head, self.segments, slot, names, blocks
                )
                yield Names(names[:num_known], blocks[:num_known])

    def put_all(self, names: Names, slot: int) -> NDArray[np.int64]:
        """Let engine hashes name blocks, as far as the slot holds them; return where blocks cannot be named."""
        index, start = self._index, 0
        while True:
            start = compiled.put_names(
                index.core, index.segments, self.head, self.segments, slot, names.engine_hashes, names.blocks, start
            )
            if start == len(names.blocks):
                others = np.flatnonzero(names.blocks <= IRREGULAR)
                return others[[self.tiers(block_hash, slot) > 0 for block_hash in names.blocks[others].tolist()]]
            self.help_out()

    def help_out(self) -> None:
        """Make room when compiled code said FULL: that of engine hashes whose blocks were evicted, or more."""
        index = self._index
        if self.slot is not None:
            for number in self._table.full():
                if (index.num_evicted - self._num_evicted[number]) * 8 < len(self):
                    continue
                self._num_evicted[number] = index.num_evicted
                names, num_names = self._regular_names(number), int(self.segments["count"][number])
                arrays = index.core, index.segments, self.head, self.segments
                if compiled.drop_stale(*arrays, self.slot, names) * 16 >= num_names > 0:
                    return
        super().help_out()

    def _regular_names(self, number: int) -> NDArray[np.uint64]:
        """Return the engine hashes in a segment that are not marked."""
        rows = self._rows(number)
        names: NDArray[np.uint64] = rows["hash"][rows["value"] > IRREGULAR]
        return names
