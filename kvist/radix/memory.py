"""Memory of tables: reserved at its greatest size, taken a page at a time as it is written to, and given back."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvist.radix.compiled import table
from kvist.radix.compiled.layout import CORE, FULLEST_128THS, ROW, SEGMENT, Records

CORE_BYTES = -(-CORE.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
"""Before the segments of an index."""
_BLOCKS_A_SEGMENT = 300_000
_ROWS_AT, _COPIES_AT = (int(SEGMENT.fields[name][1]) for name in ("rows", "copies"))  # type: ignore[index]


def segment_bits_for(num_blocks: int) -> int:
    """Return the binary logarithm of how many segments so many blocks need, and 8 at least."""
    return max(8, (num_blocks // _BLOCKS_A_SEGMENT).bit_length())


def index_bytes(segment_bits: int) -> int:
    """Return how much memory is to be reserved for an index of `2**segment_bits` segments."""
    return CORE_BYTES + (SEGMENT.itemsize << segment_bits)


def reserved(size_bytes: int) -> mmap.mmap:
    """Return private memory of zeros that is taken from the system a page at a time, as it is written to."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a table begins with a page in each segment
    return memory


def reserved_array(dtype: np.dtype[Any], length: int) -> Records:
    """Return an array of zeros in such memory."""
    return np.frombuffer(reserved(dtype.itemsize * length), dtype, length)


def room_for(num_rows: int) -> int:
    """Return the room, in whole pages, of a segment that need not grow for so many rows; 0 for none."""
    room = num_rows * 128 // FULLEST_128THS + 2
    num_pages = -(-(_ROWS_AT + room * ROW.itemsize) // mmap.PAGESIZE)
    return (num_pages * mmap.PAGESIZE - _ROWS_AT) // ROW.itemsize if num_rows else 0


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of an index or of a table alone, and what makes a part of it zeros that take no memory."""

    memory: mmap.mmap
    advice: int = mmap.MADV_DONTNEED

    def give_back(self, start: int, size_bytes: int) -> None:
        """Give the whole pages of a part back to the system."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.memory.madvise(self.advice, first, last - first)


class TableMemory:
    """Gives back what the segments of a table do not need."""

    def __init__(self, head: Records, segments: Records, region: Region, segments_at: int = 0) -> None:
        self._head, self._segments, self._region, self._segments_at = head, segments, region, segments_at

    @property
    def size_bytes(self) -> int:
        rooms = self._segments["room"]
        num_rows = int(rooms.sum()) + int(self._segments["num_copied"].sum())
        return num_rows * ROW.itemsize + int((rooms > 0).sum()) * _ROWS_AT

    def shrinkable(self) -> list[int]:
        """Return the segments that take far more memory than their rows need."""
        counts, rooms = self._segments["count"], self._segments["room"]
        sparse: list[int] = np.flatnonzero((counts * 2 < rooms) & (rooms > 0)).tolist()
        return [number for number in sparse if self._needed_room(number) * 4 < int(rooms[number]) * 3]

    def _needed_room(self, number: int) -> int:
        return room_for(int(self._segments["count"][number]) * 9 // 8)

    def shrink(self, number: int) -> int:
        """Give back what a segment does not need; return how many rows it had room for."""
        before, room = int(self._segments["room"][number]), self._needed_room(number)
        table.resize(self._head, self._segments, number, room)
        start = self._segments_at + number * SEGMENT.itemsize + _ROWS_AT
        self._region.give_back(start + room * ROW.itemsize, (before - room) * ROW.itemsize)
        return before

    def free_copies(self, number: int) -> int:
        """Give back what a snapshot copied of a segment; return how many rows that is."""
        num_rows = int(self._segments["num_copied"][number])
        start = self._segments_at + number * SEGMENT.itemsize + _COPIES_AT
        self._region.give_back(start, num_rows * ROW.itemsize + mmap.PAGESIZE)
        self._segments["num_copied"][number] = 0
        return num_rows
