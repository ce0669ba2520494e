"""Bounded slices of what goes over a whole index: forgetting ranks that are gone, evicting, telling a snapshot."""

# mypy: disable-error-code="no-any-return"
# To mypy, what a record has is Any.
from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types, uint32
from numpy.typing import NDArray

from kvist.radix.compiled import layout
from kvist.radix.compiled.blocks import EPOCH_MARKS, block_digest, capture, credit, replace
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records
from kvist.radix.compiled.sets import PURGE, changed, free_set, is_retired, list_members

_U0 = np.uint64(0)
_0: Any = np.int64(0)  # typed: Numba compiles a function again for each literal
_MINUS_1: Any = np.int64(-1)


# --- Ranks that are gone --------------------------------------------------------------------------------------------


@jit((*layout.INDEX_TYPES, int64))
def purge(core: Records, segments: Records, number: int) -> int:
    """Take the retired slots out of a segment's sets; return 0, or FULL if there is no room for other sets."""
    index, segment, place = core[0], segments[number], _0
    while place < segment.room:
        set_id = signed(segment.rows[place].set_id)
        if set_id & layout.INLINE:
            left = 0 if is_retired(index, (set_id & (layout.INLINE - 1)) >> 4) else set_id
        else:
            left = changed(index, set_id, PURGE, index.retirement, _0) if set_id else 0
        if left < 0:
            return layout.FULL
        if left != set_id:
            replace(index, segment, place, left)
        place += left != 0 or set_id == 0  # another row may have come to the place of one that went
    return 0


@jit((layout.CORE_TYPE, int64, int64))
def free_sets(core: Records, first: int, end: int) -> None:
    """Free the sets of some numbers to which nothing refers: those that stayed for a snapshot which is over."""
    index = core[0]
    for set_id in range(first, end):
        if index.sets[set_id].stamp and index.sets[set_id].references == 0:
            free_set(index, set_id)


# --- Eviction -------------------------------------------------------------------------------------------------------


@helper
def _age(marks: int, now: int) -> int:
    """Return the epochs since a row was used, as of an epoch; 0 if it was used since."""
    age = ((now - (marks & EPOCH_MARKS)) & EPOCH_MARKS) >> layout.EPOCH_SHIFT
    return 0 if age > layout.OLDEST + layout.OLDEST // 2 else age


@helper
def _depth_class(depth: int) -> int:
    """Return a class that ascends with the depth: below 64 each its own, then four to each doubling."""
    if depth < 64:
        return depth
    log = 6
    while depth >> (log + 1):
        log += 1
    return 64 + (log - 6) * 4 + ((depth >> (log - 2)) & 3)


@helper
def _priority(marks: int, now: int) -> int:
    return _age(marks, now) * layout.NUM_DEPTH_CLASSES + _depth_class(marks & layout.MAX_DEPTH)


@jit((layout.SEGMENTS_TYPE, layout.ROUND_TYPE, int64))
def count_priorities(segments: Records, rounds: Records, max_visits: int) -> bool:
    """Count rows by priority, in whole segments from where a round stands; return whether that was the last of them.

    Rows older than OLDEST are made that old, so that epochs can come round.
    """
    state, num_visited = rounds[0], 0
    while num_visited < max_visits and state.segment < len(segments):
        segment = segments[state.segment]
        for place in range(segment.room):
            row = segment.rows[place]
            if row.set_id == 0:
                continue
            marks = signed(row.marks)
            if _age(marks, state.now) > layout.OLDEST:
                marks = (marks & ~EPOCH_MARKS) | ((state.now - (layout.OLDEST << layout.EPOCH_SHIFT)) & EPOCH_MARKS)
                row.marks = marks
            priority = _priority(marks, state.now)
            state.counts[priority] += np.uint32(1)
            state.highest = max(state.highest, priority)
        num_visited += 1 + segment.room
        state.segment += 1
    return state.segment == len(segments)


@helper
def _take_from_holders(index: Record, block_hash: np.uint64, set_id: int) -> int:
    """Take a block from all who hold it, and note that they lost it to eviction; return how many they were."""
    num_members = list_members(index, set_id)
    for number in range(num_members):
        slot, tiers = signed(index.members[number]) >> 4, signed(index.members[number]) & 15
        if is_retired(index, slot):
            continue
        for tier in range(4):
            if tiers >> tier & 1:
                credit(index, slot, _MINUS_1, _U0 - block_digest(block_hash, tier))
        index.slots[slot].has_lost = 1
    return num_members


@jit((*layout.INDEX_TYPES, layout.ROUND_TYPE, int64))
def evict(core: Records, segments: Records, rounds: Records, max_work: int) -> bool:
    """Take out rows above the threshold, and at it while the quota lasts, from where a round stands on.

    Returns whether it is through. To evict a row counts as 36 looked at.
    """
    index, state, work = core[0], rounds[0], 0
    while state.segment < len(segments):
        segment, place = segments[state.segment], state.place
        while place < segment.room:
            if work >= max_work:
                state.place = place
                return False
            row = segment.rows[place]
            priority = _priority(signed(row.marks), state.now) if row.set_id else -1
            if priority > state.threshold or (priority == state.threshold and state.quota > 0):
                state.quota -= priority == state.threshold
                work += 32 + 4 * _take_from_holders(index, row.hash, signed(row.set_id))
                replace(index, segment, place, _0)
                index.num_evicted += 1
            else:
                place += 1
            work += 1
        state.segment += 1
        state.place = 0
    return True


# --- Snapshots ------------------------------------------------------------------------------------------------------


@jit((layout.SEGMENTS_TYPE, int64, int64, layout.ROWS_TYPE, int64))
def tell(segments: Records, number: int, first: int, output: Records, max_visits: int) -> tuple[int, int, int]:
    """Write what a snapshot tells, from some row of a segment's copies on, until the output is full.

    Returns how many rows, and the segment and row to go on with.
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
