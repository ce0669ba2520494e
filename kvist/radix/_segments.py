"""The rows of the index, in segments that grow and shrink one at a time: no operation touches the whole table."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvist.radix import _compiled as compiled
from kvist.radix import _layout as layout
from kvist.radix._memory import PAGE_BYTES, Heap, page_rounded

# Rows beyond the last home, for the overflow of the last homes. A cluster that outgrows it makes the segment grow.
PADDING_ROWS = 64
_SMALL_BYTES = 64 * 1024  # below this a segment doubles, above it grows by an eighth
_DIRECTORY = np.dtype([("address", "i8"), ("capacity", "u4"), ("rows", "u4"), ("count", "u4"), ("captured", "u4")])


def _num_rows(size_bytes: int) -> int:
    return size_bytes // layout.ROW_BYTES


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
        # and those after it are capacity, rows and count.
        self._words, self._halves = heap.view(address).cast("q"), heap.view(address).cast("I")
        # All segments begin as one and the same, vacant and without room.
        self._nothing = heap.allocate(PAGE_BYTES)
        heap.view(self._nothing)[:] = b"\xff" * PAGE_BYTES
        for row in range(layout.GUARD_ROWS):
            at = row * layout.ROW_BYTES + 16
            heap.view(self._nothing)[at : at + 4] = bytes(4)
        self.directory["address"] = self._nothing
        self.directory["rows"] = layout.GUARD_ROWS
        if initial_blocks:
            share = initial_blocks / self.num_segments
            fullest = share + 4 * math.sqrt(share)  # hashes are spread at random: hardly any segment gets more
            size_bytes = (int(fullest * 8 / 7) + 1 + PADDING_ROWS) * layout.ROW_BYTES
            for index in range(self.num_segments):
                self._enlarge(index, size_bytes)

    def is_allocated(self, index: int) -> bool:
        """Tell whether a segment has memory of its own."""
        is_own: bool = self._words[3 * index] != self._nothing
        return is_own

    def num_rows(self, index: int) -> int:
        """Return the rows of a segment, vacant ones included."""
        num_rows: int = self._halves[6 * index + 3]
        return num_rows

    def grow(self, index: int) -> None:
        """Give a full segment more room; O(rows of one segment)."""
        size_bytes = self.num_rows(index) * layout.ROW_BYTES
        step = size_bytes if size_bytes < _SMALL_BYTES else size_bytes // 8
        self._enlarge(index, size_bytes + step if self.is_allocated(index) else PAGE_BYTES)

    def _enlarge(self, index: int, size_bytes: int) -> None:
        address = self._words[3 * index]
        if address != self._nothing:
            size_bytes = page_rounded(max(size_bytes, self._heap.capacity_bytes(address) + 1))
            address = self._heap.resize(address, size_bytes)
        else:
            size_bytes = page_rounded(size_bytes)
            address = self._heap.allocate(size_bytes)
            self._halves[6 * index + 3] = 0
        self._words[3 * index] = address
        capacity = _num_rows(size_bytes) - PADDING_ROWS
        while compiled.rebuild(self._control_address, index, capacity, _num_rows(size_bytes), 0) == 0:
            size_bytes += PAGE_BYTES  # more padding, for the same homes
            self._words[3 * index] = address = self._heap.resize(address, size_bytes)

    def purge(self, index: int, help_out: Callable[[], None]) -> None:
        """Take the retired slots out of a segment; O(rows of one segment)."""
        if not self.is_allocated(index):
            return
        capacity, num_rows = self._halves[6 * index + 2], self.num_rows(index)
        while compiled.rebuild(self._control_address, index, capacity, num_rows, 1) == layout.NEEDS_HELP:
            help_out()

    def shrinkable(self) -> list[int]:
        """Return the segments that hold far more memory than their rows need."""
        directory = self.directory
        is_large = directory["rows"] * layout.ROW_BYTES > PAGE_BYTES
        is_sparse = (directory["count"] * 2 < directory["capacity"]) & is_large
        is_vacant = (directory["count"] == 0) & (directory["address"] != self._nothing)
        return [int(index) for index in np.flatnonzero(is_sparse | is_vacant)]

    def shrink(self, index: int) -> None:
        """Give back what a segment does not need, all of it if it has no row; O(rows of one segment)."""
        address, count = self._words[3 * index], self._halves[6 * index + 4]
        if count == 0:
            self._heap.free(address)
            self.directory[index] = (self._nothing, 0, layout.GUARD_ROWS, 0, 0)
            return
        size_bytes = page_rounded((count * 5 // 4 + PADDING_ROWS) * layout.ROW_BYTES)
        capacity = _num_rows(size_bytes) - PADDING_ROWS
        num_needed = compiled.rebuild(self._control_address, index, capacity, self.num_rows(index), 0)
        num_rows = max(_num_rows(size_bytes), num_needed)
        self._halves[6 * index + 3] = num_rows
        self._words[3 * index] = self._heap.resize(address, num_rows * layout.ROW_BYTES)
