"""Housekeeping in bounded slices: what ranks that are gone held, what closed snapshots left, memory nobody needs."""

from __future__ import annotations

from collections.abc import Callable

from kvist.radix import compiled
from kvist.radix._sets import SetArena
from kvist.radix._slots import SlotTable
from kvist.radix._spill import Leftovers
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap
from kvist.radix.tables import SegmentTable


class Sweeper:
    """Sweeps one index, whose owner lends how to prepare a segment for a change: to keep that would tie a knot."""

    def __init__(
        self,
        heap: Heap,
        address: int,
        segments: SegmentTable,
        sets: SetArena,
        slots: SlotTable,
    ) -> None:
        self._heap, self._address = heap, address
        self._segments, self._sets, self._slots = segments, sets, slots
        self.retired: list[int] = []  # slots that wait for a sweep to begin
        self._sweeping: list[int] = []  # free once the sweep under way is through
        self._cursor = 0
        self.leftovers: list[Leftovers] = []  # of closed snapshots

    def sweep(
        self, max_rows: int, capture: Callable[[int], None], help_out: Callable[[], None], *, has_snapshot: bool
    ) -> bool:
        """Do a slice of about `max_rows` rows; return whether more is left to do."""
        num_rows = 0
        while self.leftovers and num_rows < max_rows:
            num_rows += 1 + self.leftovers[-1].release(self._address, max_rows - num_rows)
            if not self.leftovers[-1]:
                self.leftovers.pop().close()
        while num_rows < max_rows and (self._sweeping or self.retired):
            num_rows += self._purge_next(capture, help_out)
        if num_rows < max_rows:
            self._sets.release_spare()
            num_rows += self._shrink(max_rows - num_rows, capture)
        if num_rows < max_rows:
            self._heap.free_scratch()
            if not has_snapshot:  # whose sets may have more members than there will be slots
                self._slots.release_spare()
        return bool(num_rows >= max_rows or self._sweeping or self.retired or self._sets.has_spare_buckets)

    def _purge_next(self, capture: Callable[[int], None], help_out: Callable[[], None]) -> int:
        """Take the retired slots out of the next segment; return how many rows that is."""
        if not self._sweeping:
            self._sweeping, self.retired, self._cursor = self.retired, [], 0
        num_rows = 1 + self._segments.num_rows(self._cursor)
        capture(self._cursor)
        while compiled.purge(self._address, self._cursor) == layout.NEEDS_HELP:
            help_out()
        self._cursor += 1
        if self._cursor == self._segments.num_segments:
            self._slots.free_swept(self._sweeping)
            self._sweeping = []
        return num_rows

    def _shrink(self, max_rows: int, capture: Callable[[int], None]) -> int:
        """Give back memory of sparse segments; return how many rows that took."""
        shrinkable, num_rows = self._segments.shrinkable(), 0
        while shrinkable and num_rows < max_rows:
            index = shrinkable.pop()
            num_rows += 1 + self._segments.num_rows(index)
            capture(index)
            self._segments.shrink(index)
        return num_rows
