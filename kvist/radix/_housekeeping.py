"""What an index does beside its work, in bounded slices.

A sweep takes out what ranks that are gone held and what a snapshot kept, and gives back memory that nobody needs.
"""

from __future__ import annotations

import mmap

import numpy as np

from kvist.radix._slots import SlotTable
from kvist.radix.compiled import housekeeping
from kvist.radix.compiled.layout import CORE, Records
from kvist.radix.memory import Region, TableMemory


class Sweeper:
    """Sweeps one index."""

    def __init__(self, core: Records, segments: Records, slots: SlotTable, region: Region, table: TableMemory) -> None:
        self._arrays, self._core, self._segments = core, core[0], segments
        self._slots, self._region, self._table = slots, region, table
        self.retired: list[int] = []  # slots that wait for a sweep to begin
        self._sweeping: list[int] = []  # free once the sweep under way is through
        self._next_segment = 0
        self._next_set = self._end_of_sets = 0  # of those to look at since a snapshot was closed
        self._copied: list[int] = []  # segments that have copies nobody needs

    @property
    def size_bytes(self) -> int:
        core = self._core
        set_bytes = int(core["sets"].itemsize) + int(core["buckets"].itemsize)
        sets = int(core["end_of_sets"]) * set_bytes + int(core["end_of_words"]) * 8
        slots = len(self._slots.ranks) * int(self._slots.table.itemsize)
        return self._table.size_bytes + sets + slots

    def sweep(self, max_rows: int) -> bool:
        """Do a slice of about `max_rows` rows; return whether more is left to do."""
        num_rows = 0 if self._core["captured_stamp"] else self._forget_snapshot(max_rows)
        while num_rows < max_rows and (self._sweeping or self.retired):
            num_rows += self._purge_next()
        if num_rows < max_rows:
            self._reset_sets()
            for number in self._table.shrinkable():
                num_rows += 1 + self._table.shrink(number)
                if num_rows >= max_rows:
                    break
        return bool(num_rows >= max_rows or self._sweeping or self.retired)

    def on_snapshot_closed(self) -> None:
        """Free later what the snapshot kept."""
        self._next_set, self._end_of_sets = 1, int(self._core["end_of_sets"])
        self._copied = np.flatnonzero(self._segments["num_copied"]).tolist()

    def _forget_snapshot(self, max_rows: int) -> int:
        """Free some of what a snapshot kept that is over; return how many rows and sets that is."""
        first = self._next_set
        self._next_set = min(self._end_of_sets, first + max_rows)
        if first < self._next_set:
            housekeeping.free_sets(self._arrays, first, self._next_set)
        num_rows = self._next_set - first
        while num_rows < max_rows and self._copied:
            num_rows += 1 + self._table.free_copies(self._copied.pop())
        return num_rows

    def _purge_next(self) -> int:
        """Take the retired slots out of the next segment; return how many rows that is."""
        if not self._sweeping:
            self._sweeping, self.retired, self._next_segment = self.retired, [], 0
        housekeeping.purge(self._arrays, self._segments, self._next_segment)
        num_rows = 1 + int(self._segments["room"][self._next_segment])
        self._next_segment += 1
        if self._next_segment == len(self._segments):
            self._slots.free_swept(self._sweeping)
            self._sweeping = []
        return num_rows

    def _reset_sets(self) -> None:
        """Give back the memory of all sets once there is none."""
        core = self._core
        if core["num_sets"] or core["end_of_sets"] == 1:
            return
        for field, end in (("sets", "end_of_sets"), ("words", "end_of_words")):
            start: int = CORE.fields[field][1]  # type: ignore[index]
            self._region.give_back(start, int(core[end]) * core[field].itemsize + mmap.PAGESIZE)
        core["buckets"][: core["num_buckets"]] = 0
        core["end_of_sets"] = core["num_buckets"] = 1
        core["end_of_words"] = core["free_set"] = self._next_set = self._end_of_sets = 0
        core["free_runs"][:] = 0
        core["memos"]["set_id"] = core["memos"]["stamp"] = 0
