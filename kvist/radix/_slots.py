"""Slots: the small integers that stand for ranks. A rank's slot is given up at once, and reused only when swept."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.radix import compiled
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap

MAX_SLOTS, _LEAST_SLOTS = 1 << 20, 64
_SLOT = np.dtype([("num_held", "i8"), ("digest", "u8"), ("state", "u4"), ("has_lost", "u4"), ("unused", "u4", 2)])
# Scratch of the compiled code, in bytes a slot; the fixed part leaves room for one member more than there are slots,
# and for words in eights.
_SCRATCH = (
    (layout.MEMBERS, 4),
    (layout.WORDS, 4),
    (layout.ACTIVE, 4),
    (layout.DEPTHS, 16),
    (layout.OUTPUT, 4),
    (layout.OUTPUT_DEPTHS, 16),
)
_SCRATCH_FIXED_BYTES = 64


class SlotTable:
    """Maps ranks to slots, and keeps for each the number and digest of what it holds."""

    def __init__(self, heap: Heap, control: memoryview) -> None:
        self._heap = heap
        self._control = control
        self._slots: dict[WorkerRank, int] = {}
        self._giving_of: dict[WorkerRank, int] = {}
        self._num_given = 0
        self._ranks_of: dict[str, list[WorkerRank]] = {}
        self._free: list[int] = []
        self._capacity = _LEAST_SLOTS
        # Copied when a slot is reused, so that an earlier match still names whom it meant.
        self.ranks: list[WorkerRank] = []
        control[layout.SLOTS >> 3] = heap.allocate(self._capacity * layout.SLOT_BYTES)
        self._scratch = heap.allocate(1)
        self._place_scratch()

    def table(self) -> NDArray[np.void]:
        """Return a view of the slots; drop it before a slot is added."""
        return np.frombuffer(self._heap.view(self._control[layout.SLOTS >> 3]), _SLOT, len(self.ranks))

    def get(self, source: WorkerRank) -> int | None:
        """Return the slot of a rank, if it has one."""
        return self._slots.get(source)

    def giving_of(self, source: WorkerRank) -> int | None:
        """Return the number of the giving by which a rank has its slot, which no other one has or had."""
        return self._giving_of.get(source)

    def items(self) -> list[tuple[WorkerRank, int]]:
        """Return the ranks that have a slot, with it."""
        return list(self._slots.items())

    def ranks_of(self, worker: str) -> list[WorkerRank]:
        """Return the ranks of a worker that have a slot."""
        return list(self._ranks_of.get(worker, ()))

    def add(self, source: WorkerRank) -> int:
        """Give a rank the lowest free slot."""
        if self._free:
            slot = heapq.heappop(self._free)
            self.ranks = list(self.ranks)
            self.ranks[slot] = source
        else:
            slot = len(self.ranks)
            if slot == self._capacity:
                self._double()
            self.ranks.append(source)
        self._slots[source] = slot
        self._num_given += 1
        self._giving_of[source] = self._num_given
        self._ranks_of.setdefault(source.worker, []).append(source)
        self.table()[slot] = (0, 0, layout.LIVE, 0, 0)
        return slot

    def remove(self, source: WorkerRank) -> int | None:
        """Take the slot from a rank; return it if blocks still refer to it, and a sweep must free it."""
        slot = self._slots.pop(source)
        del self._giving_of[source]
        self._ranks_of[source.worker].remove(source)
        if not self._ranks_of[source.worker]:
            del self._ranks_of[source.worker]
        entry = self.table()[slot]
        is_referenced = entry["num_held"] > 0
        self.table()[slot] = (0, 0, layout.RETIRED, 0, 0)
        if not is_referenced:
            self.free(slot)
            return None
        self._control[layout.NUM_RETIRED >> 3] += 1
        self._control[layout.RETIRE_EPOCH >> 3] += 1
        return slot

    def free_swept(self, slots: list[int]) -> None:
        """Make retired slots usable again; no block may refer to them any more."""
        self._control[layout.NUM_RETIRED >> 3] -= len(slots)
        for slot in slots:
            self.free(slot)

    def release_spare(self) -> None:
        """Give back room if not a quarter of it is needed; O(slots) where that is so, and O(1) otherwise."""
        if (len(self.ranks) - len(self._free)) * 4 > self._capacity or self._capacity == _LEAST_SLOTS:
            return
        num_needed = 1 + int(np.flatnonzero(self.table()["state"]).max(initial=-1))
        capacity = max(_LEAST_SLOTS, 1 << (2 * num_needed).bit_length())
        if capacity * 2 <= self._capacity:
            self.ranks = self.ranks[:num_needed]
            self._free = sorted(slot for slot in self._free if slot < num_needed)
            self._resize(capacity)

    def free(self, slot: int) -> None:
        """Put a slot back on the list of free ones."""
        self.table()["state"][slot] = 0
        heapq.heappush(self._free, slot)

    def _double(self) -> None:
        if self._capacity == MAX_SLOTS:
            raise InvalidValueError("ranks", self._capacity + 1, f"at most {MAX_SLOTS} ranks, with those not yet swept")
        self._resize(2 * self._capacity)

    def _resize(self, capacity: int) -> None:
        self._capacity = capacity
        address = self._control[layout.SLOTS >> 3]
        self._control[layout.SLOTS >> 3] = self._heap.resize(address, capacity * layout.SLOT_BYTES)
        self._place_scratch()

    def _place_scratch(self) -> None:
        """Make room for sets and matches of as many slots as there may be now."""
        size_bytes = sum(_SCRATCH_FIXED_BYTES + self._capacity * each for _, each in _SCRATCH)
        self._scratch = at = self._heap.resize(self._scratch, size_bytes)
        for field, each in _SCRATCH:
            self._control[field >> 3] = at
            at += _SCRATCH_FIXED_BYTES + self._capacity * each

    def members_of(self, set_id: int) -> bytes:
        """Return a set's members, ascending, as u32."""
        num_members = compiled.list_members(self._control[layout.SELF >> 3], set_id)
        start = self._control[layout.MEMBERS >> 3] - self._scratch
        return bytes(self._heap.view(self._scratch)[start : start + num_members * 4])
