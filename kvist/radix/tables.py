"""Tables of u64 keys and u32 values, in segments that grow and shrink one at a time: no call touches a whole table.

The index is one, with a side word a row; a table of your own needs a control block and compiled functions that use it:

    heap = Heap()
    address = heap.allocate(layout.TABLE_BYTES)
    control = heap.view(address).cast("q")
    table = SegmentTable(heap, control, address, DENSE, bits=3)

    @jit("i8(i8,u8,i8)", is_entry=True)
    def put(control, number, value):  # 1 if it is new, 0 if not, NEEDS_HELP: call `table.grow`, then again
        key = number * getu64(control + MULTIPLIER)
        segment = segment_of(control, key)
        home = home_of(control, segment, key)
        row = find(home, key)
        if row:
            put32(row, value)
            return 0
        return min(insert_row(control, segment, home, key, value), 1)

    while put(address, number, value) == layout.NEEDS_HELP:
        table.grow(control[layout.NEED_ARG >> 3])

A value may not be 0. `delete_row` takes a row out. Now and then `shrink` what is `shrinkable` and free the scratch of
the heap, which tables may share; at the end, `free`.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.radix import compiled
from kvist.radix.compiled import layout
from kvist.radix.memory import PAGE_BYTES, Heap, page_rounded

# Buckets beyond the last home, for what passes the last homes. Rows that need more make the segment grow.
_PADDING_BUCKETS = 6
_ROWS_AT_ONCE = 8_192  # laid out anew by one call, unless one segment has more; some 0.3 ms
_DIRECTORY = np.dtype([("address", "i8"), ("capacity", "u4"), ("buckets", "u4"), ("count", "u4"), ("captured", "u4")])
_BUCKET = np.dtype([("key", "u8", 5), ("value", "u4", 5), ("passed", "u4")])


@dataclass(frozen=True, slots=True)
class Density:
    """How much memory a row takes, and how full a segment may be before it grows."""

    side_bytes: int  # 0 or 4 a row
    fullest_128ths: int
    step_bytes: int  # by which a segment grows, at least, or doubles if it is smaller

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket with its side words."""
        return layout.BUCKET_BYTES + layout.BUCKET_ROWS * self.side_bytes


# Measured while growing to ten and to one million rows (2-core x86-64 VM, 2026-11-20): 22.5 bytes a row on average, of
# which 15 to 20 % lie beyond their home line; and 15.1, with 35 to 40 %.
INDEX = Density(side_bytes=4, fullest_128ths=104, step_bytes=16 * 1024)
DENSE = Density(side_bytes=0, fullest_128ths=118, step_bytes=4 * 1024)


def signed(bits: int) -> int:
    """Return the i64 with the bits of a u64, as control blocks take it."""
    return bits - (1 << 64) if bits >> 63 else bits


def buckets_at(heap: Heap, address: int, num_buckets: int) -> NDArray[np.void]:
    """Return a view of a segment's buckets; drop it before their buffer is resized."""
    return np.frombuffer(heap.view(address), _BUCKET, num_buckets)


class SegmentTable:
    """Owns the segments' memory; the compiled code finds it through the control block."""

    def __init__(
        self,
        heap: Heap,
        control: memoryview,
        address: int,
        density: Density,
        *,
        bits: int,
        multiplier: int | None = None,
        scratch: Heap | None = None,
    ) -> None:
        """Fill in the control block, of signed 64-bit words, at an address; cut the table into `2**bits` segments.

        Keys are to be multiplied by an odd number, by default a secret one, so that nobody can choose where they land.
        The scratch used to grow is that of another heap, if one is given: it need not be touched anew for each table.
        """
        self._heap, self._address, self._density = heap, address, density
        self._scratch = heap if scratch is None else scratch
        self.num_segments = 1 << bits
        # All segments begin as one and the same, a vacant bucket that belongs to none of them. Behind it lie their home
        # words and their directory.
        size_bytes = self.num_segments * (8 + layout.SEGMENT_BYTES)
        self._nothing = heap.allocate(layout.BUCKET_BYTES + size_bytes)
        words = heap.view(self._nothing)[layout.BUCKET_BYTES :][:size_bytes]
        homes, directory = words[: self.num_segments * 8], words[self.num_segments * 8 :]
        self._describe(control, bits, secrets.randbits(64) | 1 if multiplier is None else multiplier)
        self.directory = np.frombuffer(directory, _DIRECTORY)
        self.directory["address"] = self._nothing
        # The same memory by field, at a tenth of the time: `_words[3 * index]` is an address, `_halves[6 * index + 2]`
        # and those after it are capacity, buckets and count.
        self._words, self._halves = directory.cast("q"), directory.cast("I")
        self._homes = np.frombuffer(homes, np.uint64)
        self._homes[:] = self._home_of_nothing = self._nothing >> 12 << 28

    def _describe(self, control: memoryview, bits: int, multiplier: int) -> None:
        """Fill in what compiled code reads of the table."""
        homes = self._nothing + layout.BUCKET_BYTES
        for field, value in (
            (layout.SELF, self._address),
            (layout.MULTIPLIER, signed(multiplier)),
            (layout.SEGMENT_BITS, bits),
            (layout.SEGMENTS, homes + self.num_segments * 8),
            (layout.HOMES, homes),
            (layout.SIDE_BYTES, self._density.side_bytes),
            (layout.FULLEST_128THS, self._density.fullest_128ths),
        ):
            control[field >> 3] = value

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows in a table that is empty."""
        share = num_rows / self.num_segments
        fullest = share + 4 * math.sqrt(share)  # keys are spread at random: hardly any segment gets more
        for index in range(self.num_segments if num_rows else 0):
            self._lay_out(index, self._bytes_for(int(fullest) + 1))

    def is_allocated(self, index: int) -> bool:
        """Tell whether a segment has memory of its own."""
        is_own: bool = self._words[3 * index] != self._nothing
        return is_own

    def num_rows(self, index: int) -> int:
        """Return how many rows a segment has room for."""
        num_buckets: int = self._halves[6 * index + 3]
        return num_buckets * layout.BUCKET_ROWS

    def count(self, index: int) -> int:
        """Return how many rows a segment has."""
        count: int = self._halves[6 * index + 4]
        return count

    def _bytes_for(self, num_rows: int) -> int:
        """Return the least size of a segment that need not grow for so many rows."""
        num_buckets = num_rows * 128 // (layout.BUCKET_ROWS * self._density.fullest_128ths) + 1 + _PADDING_BUCKETS
        return num_buckets * self._density.bucket_bytes

    def grow(self, index: int) -> None:
        """Give a full segment more room, and small ones that will soon be full, too; O(rows of one segment).

        Segments fill evenly; they grow by different shares, a tenth to a fifth, so that large ones do not all grow at
        once, nor are all half empty after it.
        """
        num_rows = self.count(index)
        self._enlarge(index)
        if num_rows * 2 < _ROWS_AT_ONCE:
            for other in self._nearly_full():
                num_rows += self.count(other)
                if num_rows > _ROWS_AT_ONCE:
                    break
                self._enlarge(other)

    def _enlarge(self, index: int) -> None:
        size_bytes = self._halves[6 * index + 3] * self._density.bucket_bytes
        self._lay_out(index, max(PAGE_BYTES, self._enlarged_bytes(index, size_bytes)))

    def _enlarged_bytes(self, index: int, size_bytes: int) -> int:
        return size_bytes + max(min(size_bytes, self._density.step_bytes), size_bytes * (5 + index % 3 * 2) // 48)

    def _nearly_full(self) -> list[int]:
        """Return the segments that are full but for a sixteenth of their rows."""
        counts, room = self.directory["count"], self.directory["capacity"] * layout.BUCKET_ROWS
        most = room * self._density.fullest_128ths // 128
        is_nearly_full = (counts > 0) & (counts >= most - most // 16)
        nearly_full: list[int] = np.flatnonzero(is_nearly_full).tolist()
        return nearly_full

    def _lay_out(self, index: int, size_bytes: int) -> None:
        """Move a segment's rows into a buffer of this size, or of more if they need it."""
        dirty_bytes = 0
        compiled.take_out(self._address, index, self._loose_rows(index, size_bytes))
        if self.is_allocated(index):
            dirty_bytes = self._heap.capacity_bytes(self._words[3 * index])
            self._words[3 * index] = self._heap.resize(self._words[3 * index], size_bytes)
        else:
            self._words[3 * index] = self._heap.allocate(size_bytes)
        while not self._put_back(index, page_rounded(size_bytes), dirty_bytes):
            dirty_bytes, size_bytes = page_rounded(size_bytes), size_bytes * 9 // 8 + PAGE_BYTES
            self._words[3 * index] = self._heap.resize(self._words[3 * index], size_bytes)

    def _loose_rows(self, index: int, size_bytes: int) -> int:
        """Return where a segment's rows wait while it is laid out anew, with a byte for each bucket behind them."""
        return self._scratch.scratch(self.count(index) * layout.LOOSE_ROW_BYTES + size_bytes // layout.BUCKET_BYTES)

    def _put_back(self, index: int, size_bytes: int, dirty_bytes: int) -> bool:
        num_buckets = size_bytes // self._density.bucket_bytes
        capacity, loose = num_buckets - _PADDING_BUCKETS, self._loose_rows(index, size_bytes)
        is_done: bool = compiled.put_back(self._address, index, capacity, num_buckets, loose, dirty_bytes)
        return is_done

    def shrinkable(self) -> list[int]:
        """Return the segments that hold far more memory than their rows need."""
        directory = self.directory
        is_sparse = directory["count"] * 2 < directory["capacity"] * layout.BUCKET_ROWS
        is_vacant = (directory["count"] == 0) & (directory["address"] != self._nothing)
        return [index for index in np.flatnonzero(is_sparse | is_vacant).tolist() if self._would_shrink(index)]

    def _would_shrink(self, index: int) -> bool:
        """Tell whether a segment laid out anew is smaller by more than it grows by, and by a page at least."""
        held_bytes: int = self._halves[6 * index + 3] * self._density.bucket_bytes
        count, needed_bytes = self.count(index), self._bytes_for(self.count(index) * 9 // 8)
        is_smaller = page_rounded(needed_bytes) <= held_bytes - self._density.bucket_bytes
        return count == 0 or (is_smaller and self._enlarged_bytes(index, needed_bytes) < held_bytes)

    def shrink(self, index: int) -> None:
        """Give back what a segment does not need, all of it if it has no row; O(rows of one segment)."""
        count = self.count(index)
        if count == 0:
            self._heap.free(self._words[3 * index])
            # Still captured: a second copy, of what comes later, must not replace the one an open snapshot reads.
            self.directory[index] = (self._nothing, 0, 0, 0, self.directory["captured"][index])
            self._homes[index] = self._home_of_nothing
        else:
            self._lay_out(index, self._bytes_for(count * 9 // 8))

    def free(self) -> None:
        """Give back all memory but the control block; the table is not to be used any more."""
        for index in filter(self.is_allocated, range(self.num_segments)):
            self._heap.free(self._words[3 * index])
        del self.directory, self._homes
        self._words.release()
        self._halves.release()
        self._heap.free(self._nothing)
