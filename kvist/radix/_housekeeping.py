"""What an index does beside its work, in bounded slices: it forgets ranks that are gone, and keeps to its cap.

A sweep takes out what ranks that are gone held and what a snapshot kept, and gives back memory that nobody needs.

Beyond its cap the index evicts what was least recently used. Time is counted in epochs, each of which ends once as many
blocks were used as a 64th of the cap. A round of eviction begins a sixteenth below the cap and goes to an eighth below
it; what is stored meanwhile carries it on, at a pace at which it ends in time. The oldest epoch goes first, and within
an epoch the deepest blocks, by classes of depth that are exact below 64: a chain that was stored at once goes from its
end.

Matches count as uses once the index is half full: until then they cost what they cost without a cap, a fifth.
"""

from __future__ import annotations

import mmap

import numpy as np

from kvist.radix._slots import SlotTable
from kvist.radix.compiled import housekeeping
from kvist.radix.compiled.layout import CORE, EPOCH_SHIFT, FULL, NUM_EPOCHS, OLDEST, ROUND, Record, Records
from kvist.radix.memory import Region, TableMemory, reserved_array

_WORK_PER_ROW = 128  # rows looked at for each one stored; to evict one counts as 36, so two of them, and 43 looked at
_LEAST_WORK = 1 << 16  # rows looked at by a call that finds the index beyond its cap, or a round late; some 0.1 ms
_EPOCHS_A_ROUND = OLDEST // 8  # at most: a round must see rows before their epoch comes round again


def is_half_full(core: Record) -> bool:
    """Return whether matches count as uses: before, which blocks will be the least recently used is open."""
    return bool(0 < core["max_blocks"] <= core["table"]["num_rows"] * 2)


class Cap:
    """Evicts from one index."""

    def __init__(self, core: Records, segments: Records, max_blocks: int) -> None:
        self._arrays, self._core, self._max_blocks = (core, segments), core[0], max_blocks
        self._high, self._low = max_blocks - max_blocks // 16, max_blocks - max_blocks // 8
        self._epoch_blocks = max(1, max_blocks // 64)
        self._num_epochs = 0  # since the last round began
        self._num_rows = 0  # when the cap was last looked to
        self._rounds = reserved_array(ROUND, 1)
        self._round = self._rounds[0]
        self._is_under_way = self._is_counting = False
        self._core["max_blocks"] = max_blocks

    @property
    def is_exceeded(self) -> bool:
        """Return whether there are more blocks than there may be."""
        return bool(self._core["table"]["num_rows"] > self._max_blocks)

    def keep(self) -> None:
        """Do what is due after blocks were used or stored: work in proportion to what was stored since."""
        if self._core["num_stamped"] >= self._epoch_blocks:
            self._end_epoch()
        num_rows = self._core["table"]["num_rows"]
        is_late = num_rows > self._max_blocks or self._num_epochs >= _EPOCHS_A_ROUND
        work = max(_WORK_PER_ROW * (num_rows - self._num_rows), _LEAST_WORK if is_late else 0)
        if work > 0 and (is_late or num_rows > self._high or self._is_under_way):
            while self._step(work) and self._core["table"]["num_rows"] > self._max_blocks:
                pass
        self._num_rows = self._core["table"]["num_rows"]

    def _end_epoch(self) -> None:
        self._core["num_stamped"] = 0
        epoch = (self._core["epoch"] >> EPOCH_SHIFT) + 1
        self._core["epoch"] = epoch % NUM_EPOCHS << EPOCH_SHIFT
        self._num_epochs += 1

    def _step(self, work: int) -> bool:
        """Begin a round or carry it on, by about so much work; return whether that was enough for a part of it."""
        state, (core, segments) = self._round, self._arrays
        if not self._is_under_way:
            state["now"], state["segment"], state["highest"] = self._core["epoch"], 0, 0
            self._is_under_way, self._is_counting, self._num_epochs = True, True, 0
        if self._is_counting:
            if not housekeeping.count_priorities(segments, self._rounds, work):
                return False
            self._choose()
            return True
        self._is_under_way = not housekeeping.evict(core, segments, self._rounds, work)
        return not self._is_under_way

    def _choose(self) -> None:
        """Find the priority above which all rows go, and how many of those at it."""
        counts = self._round["counts"][: self._round["highest"] + 1]
        from_top = np.cumsum(counts[::-1], dtype=np.int64)
        num_excess = min(max(0, int(self._core["table"]["num_rows"]) - self._low), int(from_top[-1]))
        place = int(np.searchsorted(from_top, num_excess))
        self._round["threshold"] = len(counts) - 1 - place
        self._round["quota"] = num_excess - (int(from_top[place - 1]) if place else 0)
        self._round["segment"] = self._round["place"] = 0
        self._is_counting = False
        counts[:] = 0


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
        if housekeeping.purge(self._arrays, self._segments, self._next_segment) == FULL:
            raise MemoryError("the index has no room for more sets of holders")
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
