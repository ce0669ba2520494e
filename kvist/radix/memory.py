"""Memory of an index: reserved at its greatest size, taken a page at a time as it is written to, and given back."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.radix._slots import SlotTable
from kvist.radix.compiled import housekeeping, table
from kvist.radix.compiled.layout import CORE, FULLEST_128THS, ROW, SEGMENT, Records

CORE_BYTES = -(-CORE.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
"""The memory before the segments of an index."""
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


def reserved_array(dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    """Return an array of zeros in `reserved` memory."""
    return np.frombuffer(reserved(dtype.itemsize * length), dtype, length)


def needed_room(num_rows: int) -> int:
    """Return the room, in whole pages, for an eighth more rows than a segment has; 0 if it has none."""
    room = num_rows * 9 // 8 * 128 // FULLEST_128THS + 2
    num_pages = -(-(_ROWS_AT + room * ROW.itemsize) // mmap.PAGESIZE)
    return (num_pages * mmap.PAGESIZE - _ROWS_AT) // ROW.itemsize if num_rows else 0


class Sweeper:
    """Removes what ranks that are gone held, frees what a snapshot kept, and gives memory back; in bounded slices."""

    def __init__(self, core: Records, segments: Records, slots: SlotTable, memory: mmap.mmap, advice: int) -> None:
        """`advice` makes a part of the index's memory zeros that take none."""
        self._arrays, self._core, self._segments = core, core[0], segments
        self._slots, self._memory, self._advice = slots, memory, advice
        self.retired: list[int] = []  # slots that wait for a sweep to begin
        self._sweeping: list[int] = []  # free once the sweep under way is through
        self._next_segment = 0
        self._next_set = self._end_of_sets = 0  # sets to check since a snapshot was closed
        self._copied: list[int] = []  # segments that have copies which nobody needs

    @property
    def size_bytes(self) -> int:
        core, rooms = self._core, self._segments["room"]
        num_rows = int(rooms.sum()) + int(self._segments["num_copied"].sum())
        sets = int(core["end_of_sets"]) * int(core["sets"].itemsize) + int(core["end_of_words"]) * 8
        slots = len(self._slots.ranks) * int(self._slots.table.itemsize)
        return num_rows * ROW.itemsize + int((rooms > 0).sum()) * _ROWS_AT + sets + slots

    def sweep(self, max_rows: int) -> bool:
        """Do a slice of about `max_rows` rows; return whether more is left to do."""
        num_rows = 0 if self._core["captured_stamp"] else self._free_snapshot(max_rows)
        while num_rows < max_rows and (self._sweeping or self.retired):
            num_rows += self._purge_segment()
        if num_rows < max_rows:
            for number in self.shrinkable():
                num_rows += 1 + self._shrink(number)
                if num_rows >= max_rows:
                    break
        return bool(num_rows >= max_rows or self._sweeping or self.retired)

    def on_snapshot_closed(self) -> None:
        """Let later sweeps free what the snapshot kept."""
        self._next_set, self._end_of_sets = 1, int(self._core["end_of_sets"])
        self._copied = np.flatnonzero(self._segments["num_copied"]).tolist()

    def _free_snapshot(self, max_rows: int) -> int:
        """Free some of what a closed snapshot kept; return how many rows and sets that is."""
        first = self._next_set
        self._next_set = min(self._end_of_sets, first + max_rows)
        if first < self._next_set:
            housekeeping.free_sets(self._arrays, first, self._next_set)
        num_rows = self._next_set - first
        while num_rows < max_rows and self._copied:
            num_rows += 1 + self._free_copies(self._copied.pop())
        return num_rows

    def _purge_segment(self) -> int:
        """Take the retired slots out of the next segment; return how many rows that is."""
        if not self._sweeping:
            self._sweeping, self.retired, self._next_segment = self.retired, [], 0
        housekeeping.purge(self._arrays, self._segments, self._next_segment)
        num_rows = 1 + int(self._segments["room"][self._next_segment])
        self._next_segment += 1
        if self._next_segment == len(self._segments):
            self._core["num_retired"] -= len(self._sweeping)
            for slot in self._sweeping:
                self._slots.free(slot)
            self._sweeping = []
        return num_rows

    def shrinkable(self) -> list[int]:
        """Return the segments that take far more memory than their rows need."""
        counts, rooms = self._segments["count"], self._segments["room"]
        sparse: list[int] = np.flatnonzero((counts * 2 < rooms) & (rooms > 0)).tolist()
        return [number for number in sparse if needed_room(int(counts[number])) * 4 < int(rooms[number]) * 3]

    def _shrink(self, number: int) -> int:
        """Give back what a segment does not need; return how many rows it had room for."""
        before, room = int(self._segments["room"][number]), needed_room(int(self._segments["count"][number]))
        table.resize(self._arrays["table"], self._segments, number, room)
        self._give_back(number, _ROWS_AT + room * ROW.itemsize, (before - room) * ROW.itemsize)
        return before

    def _free_copies(self, number: int) -> int:
        """Give back a segment's copies for a snapshot; return how many rows that is."""
        num_rows = int(self._segments["num_copied"][number])
        self._give_back(number, _COPIES_AT, num_rows * ROW.itemsize + mmap.PAGESIZE)
        self._segments["num_copied"][number] = 0
        return num_rows

    def _give_back(self, number: int, start: int, size_bytes: int) -> None:
        """Give the whole pages of a part of a segment back to the system."""
        start += CORE_BYTES + number * SEGMENT.itemsize
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._memory.madvise(self._advice, first, last - first)
