"""The rows of the index, in segments that grow and shrink one at a time: no operation touches the whole table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvist.radix import _compiled as compiled
from kvist.radix._memory import PAGE_BYTES, Heap, page_rounded

# Rows beyond the last home, for the overflow of the last homes. A cluster that outgrows it makes the segment grow.
PADDING_ROWS = 64
_DIRECTORY = np.dtype([("address", "i8"), ("capacity", "u4"), ("rows", "u4"), ("count", "u4"), ("captured", "u4")])


def _num_rows(size_bytes: int) -> int:
    return size_bytes // compiled.ROW_BYTES


class SegmentTable:
    """Owns the segments' memory; the compiled code finds it through the control block."""

    def __init__(self, heap: Heap, control: memoryview, bits: int, initial_blocks: int) -> None:
        self._heap = heap
        self._control_address = control[compiled.SELF >> 3]
        self.num_segments = 1 << bits
        control[compiled.SEGMENT_BITS >> 3] = bits
        control[compiled.SEGMENTS >> 3] = address = heap.allocate(self.num_segments * compiled.SEGMENT_BYTES)
        self.directory = np.frombuffer(heap.view(address), _DIRECTORY, self.num_segments)
        # All segments begin as one and the same, vacant and without room.
        self._nothing = heap.allocate(PAGE_BYTES)
        heap.view(self._nothing)[:] = b"\xff" * PAGE_BYTES
        for row in range(compiled.GUARD_ROWS):
            at = row * compiled.ROW_BYTES + 16
            heap.view(self._nothing)[at : at + 4] = bytes(4)
        self.directory["address"] = self._nothing
        self.directory["rows"] = compiled.GUARD_ROWS
        if initial_blocks:
            share = initial_blocks * 8 // 7 // self.num_segments
            size_bytes = (share + share // 64 + PADDING_ROWS) * compiled.ROW_BYTES
            for index in range(self.num_segments):
                self._enlarge(index, size_bytes)

    def is_allocated(self, index: int) -> bool:
        """Tell whether a segment has memory of its own."""
        return bool(self.directory["address"][index] != self._nothing)

    def grow(self, index: int) -> None:
        """Give a full segment an eighth more room, at least a page; O(rows of one segment)."""
        size_bytes = int(self.directory["rows"][index]) * compiled.ROW_BYTES
        self._enlarge(index, size_bytes + size_bytes // 8 if self.is_allocated(index) else PAGE_BYTES)

    def _enlarge(self, index: int, size_bytes: int) -> None:
        entry = self.directory[index]
        if self.is_allocated(index):
            size_bytes = max(size_bytes, self._heap.capacity_bytes(int(entry["address"])) + 1)
            entry["address"] = self._heap.resize(int(entry["address"]), size_bytes)
        else:
            entry["address"] = self._heap.allocate(size_bytes)
            entry["rows"] = 0
        size_bytes = page_rounded(size_bytes)
        capacity = _num_rows(size_bytes) - PADDING_ROWS
        while compiled.rebuild(self._control_address, index, capacity, _num_rows(size_bytes), 0) == 0:
            size_bytes += PAGE_BYTES  # more padding, for the same homes
            entry["address"] = self._heap.resize(int(entry["address"]), size_bytes)

    def purge(self, index: int, help_out: Callable[[], None]) -> None:
        """Take the retired slots out of a segment; O(rows of one segment)."""
        entry = self.directory[index]
        if not self.is_allocated(index):
            return
        while (
            compiled.rebuild(self._control_address, index, int(entry["capacity"]), int(entry["rows"]), 1)
            == compiled.NEEDS_HELP
        ):
            help_out()

    def shrinkable(self) -> list[int]:
        """Return the segments that hold far more memory than their rows need."""
        directory = self.directory
        is_large = directory["rows"] * compiled.ROW_BYTES >= 2 * PAGE_BYTES
        is_sparse = (directory["count"] * 2 < directory["capacity"]) & is_large
        is_vacant = (directory["count"] == 0) & (directory["address"] != self._nothing)
        return [int(index) for index in np.flatnonzero(is_sparse | is_vacant)]

    def shrink(self, index: int) -> None:
        """Give back what a segment does not need, all of it if it has no row; O(rows of one segment)."""
        entry = self.directory[index]
        address, count = int(entry["address"]), int(entry["count"])
        if count == 0:
            self._heap.free(address)
            entry["address"], entry["capacity"], entry["rows"] = self._nothing, 0, compiled.GUARD_ROWS
            return
        size_bytes = page_rounded((count * 5 // 4 + PADDING_ROWS) * compiled.ROW_BYTES)
        capacity = _num_rows(size_bytes) - PADDING_ROWS
        num_needed = compiled.rebuild(self._control_address, index, capacity, int(entry["rows"]), 0)
        entry["rows"] = max(_num_rows(size_bytes), num_needed)
        entry["address"] = self._heap.resize(address, int(entry["rows"]) * compiled.ROW_BYTES)
