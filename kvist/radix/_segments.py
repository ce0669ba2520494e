"""The rows of the index, in segments that grow and shrink one at a time: no operation touches the whole table."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvist.radix import compiled
from kvist.radix._memory import PAGE_BYTES, Heap, page_rounded
from kvist.radix.compiled import layout

# Buckets beyond the last home, for what passes the last homes. Rows that need more make the segment grow.
_PADDING_BUCKETS = 6
_STRIDE_BYTES = layout.BUCKET_BYTES + layout.BUCKET_ROWS * 8
_SMALL_BYTES = 64 * 1024  # below this a segment doubles
_DIRECTORY = np.dtype([("address", "i8"), ("capacity", "u4"), ("buckets", "u4"), ("count", "u4"), ("captured", "u4")])
_BUCKET = np.dtype([("key", "u8", 5), ("set_id", "u4", 5), ("passed", "u4")])


def segment_bytes(num_buckets: int) -> int:
    """Return the size of a segment of so many buckets."""
    return num_buckets * _STRIDE_BYTES


def buckets_at(heap: Heap, address: int, num_buckets: int) -> NDArray[np.void]:
    """Return a view of a segment's buckets; drop it before their buffer is resized."""
    return np.frombuffer(heap.view(address), _BUCKET, num_buckets)


class SegmentTable:
    """Owns the segments' memory; the compiled code finds it through the control block."""

    def __init__(self, heap: Heap, control: memoryview, bits: int, initial_blocks: int) -> None:
        self._heap = heap
        self._control_address = control[layout.SELF >> 3]
        self.num_segments = 1 << bits
        control[layout.SEGMENT_BITS >> 3] = bits
        control[layout.SEGMENTS >> 3] = address = heap.allocate(self.num_segments * layout.SEGMENT_BYTES)
        self.directory = np.frombuffer(heap.view(address), _DIRECTORY, self.num_segments)
        # The same memory by field, at a tenth of the time: `_words[3 * index]` is an address, `_halves[6 * index + 2]`
        # and those after it are capacity, buckets and count.
        self._words, self._halves = heap.view(address).cast("q"), heap.view(address).cast("I")
        # All segments begin as one and the same, a vacant bucket that belongs to none of them.
        self.directory["address"] = self._nothing = heap.allocate(layout.BUCKET_BYTES)
        self._loose = heap.allocate(1)  # rows on their way from an old place to a new one
        if initial_blocks:
            share = initial_blocks / self.num_segments
            fullest = share + 4 * math.sqrt(share)  # hashes are spread at random: hardly any segment gets more
            num_buckets = int(fullest * 8 / 7 / layout.BUCKET_ROWS) + 1 + _PADDING_BUCKETS
            for index in range(self.num_segments):
                self._lay_out(index, segment_bytes(num_buckets))

    def is_allocated(self, index: int) -> bool:
        """Tell whether a segment has memory of its own."""
        is_own: bool = self._words[3 * index] != self._nothing
        return is_own

    def num_rows(self, index: int) -> int:
        """Return how many rows a segment has room for."""
        num_buckets: int = self._halves[6 * index + 3]
        return num_buckets * layout.BUCKET_ROWS

    def grow(self, index: int) -> None:
        """Give a full segment more room; O(rows of one segment).

        Segments fill evenly; they grow by different shares, a sixth to a third, so that they do not all grow at once,
        nor are all half empty after it.
        """
        size_bytes = segment_bytes(self._halves[6 * index + 3])
        step = size_bytes if size_bytes < _SMALL_BYTES else size_bytes * (2 + index % 3) // 12
        self._lay_out(index, max(PAGE_BYTES, size_bytes + step))

    def _lay_out(self, index: int, size_bytes: int) -> None:
        """Move a segment's rows into a buffer of this size, or of more if they need it."""
        num_rows, dirty_bytes = self._halves[6 * index + 4], 0
        if num_rows * layout.LOOSE_ROW_BYTES > self._heap.capacity_bytes(self._loose):
            self._loose = self._heap.resize(self._loose, num_rows * layout.LOOSE_ROW_BYTES * 3 // 2)
        compiled.take_out(self._control_address, index, self._loose)
        if self.is_allocated(index):
            dirty_bytes = self._heap.capacity_bytes(self._words[3 * index])
            self._words[3 * index] = self._heap.resize(self._words[3 * index], size_bytes)
        else:
            self._words[3 * index] = self._heap.allocate(size_bytes)
        while not self._put_back(index, page_rounded(size_bytes) // _STRIDE_BYTES, dirty_bytes):
            dirty_bytes, size_bytes = page_rounded(size_bytes), size_bytes * 9 // 8 + PAGE_BYTES
            self._words[3 * index] = self._heap.resize(self._words[3 * index], size_bytes)

    def _put_back(self, index: int, num_buckets: int, dirty_bytes: int) -> bool:
        capacity = num_buckets - _PADDING_BUCKETS
        is_done: bool = compiled.put_back(self._control_address, index, capacity, num_buckets, self._loose, dirty_bytes)
        return is_done

    def purge(self, index: int, help_out: Callable[[], None]) -> None:
        """Take the retired slots out of a segment; O(rows of one segment)."""
        while compiled.purge(self._control_address, index) == layout.NEEDS_HELP:
            help_out()

    def shrinkable(self) -> list[int]:
        """Return the segments that hold far more memory than their rows need."""
        directory = self.directory
        is_large = directory["buckets"] * _STRIDE_BYTES > PAGE_BYTES
        is_sparse = (directory["count"] * 2 < directory["capacity"] * layout.BUCKET_ROWS) & is_large
        is_vacant = (directory["count"] == 0) & (directory["address"] != self._nothing)
        return [int(index) for index in np.flatnonzero(is_sparse | is_vacant)]

    def shrink(self, index: int) -> None:
        """Give back what a segment does not need, all of it if it has no row; O(rows of one segment)."""
        count = self._halves[6 * index + 4]
        if count == 0:
            self._heap.free(self._words[3 * index])
            # Still captured: a second copy, of what comes later, must not replace the one an open snapshot reads.
            self.directory[index] = (self._nothing, 0, 0, 0, self.directory["captured"][index])
        else:
            self._lay_out(index, segment_bytes(count * 5 // 4 // layout.BUCKET_ROWS + _PADDING_BUCKETS + 1))
        self._loose = self._heap.resize(self._loose, 1)
