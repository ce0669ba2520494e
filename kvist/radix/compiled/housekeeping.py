"""Bounded slices of work on a whole index: removing ranks that are gone, evicting blocks, reading a snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types, uint32
from numpy.typing import NDArray

from kvist.radix.compiled import layout
from kvist.radix.compiled.blocks import EPOCH_MARKS, capture, count_held, set_holders
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records
from kvist.radix.compiled.sets import PURGE, change_set, free_set, is_retired, list_members

_NUM_SAMPLES = 64
"""Rows looked at for each one evicted, 0.3 µs."""
_0: Any = np.int64(0)  # typed: Numba compiles a function again for each literal
_MINUS_1: Any = np.int64(-1)


# --- Ranks that are gone --------------------------------------------------------------------------------------------


@jit((*layout.INDEX_TYPES, int64))
def purge(core: Records, segments: Records, number: int) -> None:
    """Take the retired slots out of a segment's sets. Raises MemoryError."""
    index, segment, place = core[0], segments[number], _0
    while place < segment.room:
        set_id = signed(segment.rows[place].set_id)
        if set_id & layout.INLINE:
            left = 0 if is_retired(index, (set_id & (layout.INLINE - 1)) >> 4) else set_id
        else:
            left = change_set(index, set_id, PURGE, index.retirement, _0) if set_id else 0
        if left != set_id:
            set_holders(index, segment, place, left)
        place += left != 0 or set_id == 0  # a deleted row's place may have another row now


@jit((layout.CORE_TYPE, int64, int64))
def free_sets(core: Records, first: int, end: int) -> None:
    """Free the sets from `first` up to `end` to which nothing refers; they were kept for a snapshot, now closed."""
    index = core[0]
    for set_id in range(first, end):
        if index.sets[set_id].stamp and index.sets[set_id].references == 0:
            free_set(index, set_id)


# --- Eviction -------------------------------------------------------------------------------------------------------


@helper
def _remove_holders(index: Record, block_hash: np.uint64, set_id: int) -> None:
    """Remove a block from all slots that hold it, and mark these as having lost blocks."""
    for number in range(list_members(index, set_id)):
        slot, tiers = signed(index.members[number]) >> 4, signed(index.members[number]) & 15
        if is_retired(index, slot):
            continue
        for tier in range(4):
            if tiers >> tier & 1:
                count_held(index, slot, block_hash, tier, _MINUS_1)
        index.slots[slot].has_lost = 1


@helper
def _find_victim(index: Record, segments: Records) -> tuple[int, int]:
    """Return segment and place of the row to evict among the next few rows; place -1 if there is none."""
    number, place, num_seen, num_passed = index.hand_segment, index.hand_place, 0, 0
    victim, victim_place, highest = _0, _MINUS_1, _MINUS_1
    while num_seen < _NUM_SAMPLES and num_passed <= len(segments):
        if place >= index.table.rooms[number]:
            number, place, num_passed = (number + 1) % len(segments), 0, num_passed + 1
            continue
        row = segments[number].rows[place]
        if row.set_id:
            marks = signed(row.marks)
            priority = ((index.epoch - (marks & EPOCH_MARKS)) & EPOCH_MARKS) | (marks & layout.MAX_DEPTH)
            if priority > highest:
                victim, victim_place, highest = number, place, priority
            num_seen += 1
        place += 1
    index.hand_segment, index.hand_place = number, place
    return victim, victim_place


@jit((*layout.INDEX_TYPES, int64))
def evict(core: Records, segments: Records, num_blocks: int) -> None:
    """Evict so many blocks: of each few rows, which hashing put side by side, the one that was used longest ago.

    Of several the deepest goes, so that a chain that was stored at once loses its end.
    """
    index = core[0]
    for _ in range(num_blocks):
        number, place = _find_victim(index, segments)
        if place < 0:
            return
        row = segments[number].rows[place]
        _remove_holders(index, row.hash, signed(row.set_id))
        set_holders(index, segments[number], place, _0)
        index.num_evicted += 1


# --- Snapshots ------------------------------------------------------------------------------------------------------


@jit((layout.SEGMENTS_TYPE, int64, int64, layout.ROWS_TYPE, int64))
def read_copies(segments: Records, number: int, first: int, output: Records, max_visits: int) -> tuple[int, int, int]:
    """Read the rows of a snapshot, from row `first` of a segment's copies on, until the output is full.

    Segments without copies are copied when their turn comes. Returns how many rows were read, and the segment and row
    to continue with.
    """
    count = num_visited = 0
    while number < len(segments) and count < len(output) and num_visited < max_visits:
        segment = segments[number]
        if segment.count and not segment.is_captured:
            capture(segment)
            num_visited += segment.room
        while first < segment.num_copied and count < len(output):
            output[count].hash, output[count].value = segment.copies[first].hash, segment.copies[first].value
            first += 1
            count += 1
        if first == segment.num_copied:
            number, first = number + 1, 0
        num_visited += 1
    return count, number, first


@jit((layout.CORE_TYPE, types.Array(uint32, 1, "C")))
def members_of(core: Records, set_ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the members of some sets side by side, and how many each has."""
    index, lengths, count = core[0], np.empty(len(set_ids), np.int64), 0
    for number in range(len(set_ids)):
        set_id = signed(set_ids[number])
        lengths[number] = 1 if set_id & layout.INLINE else signed(index.sets[set_id].num_members)
        count += lengths[number]
    members, count = np.empty(count, np.uint32), 0
    for number in range(len(set_ids)):
        for place in range(list_members(index, signed(set_ids[number]))):
            members[count] = index.members[place]
            count += 1
    return members, lengths
