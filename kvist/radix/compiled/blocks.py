"""Who holds which blocks: stored and removed one by one or in chains.

A row is known by its number until the next one comes or goes.
"""

# mypy: disable-error-code="no-any-return"
# To mypy, what a record has is Any.
from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64

from kvist.radix.compiled import layout
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records, Words
from kvist.radix.compiled.sets import ADD, DISCARD, changed, is_retired, refer, tiers_in
from kvist.radix.compiled.table import delete, insert, locate, segment_of

EPOCH_MARKS = (layout.NUM_EPOCHS - 1) << layout.EPOCH_SHIFT
_TIER_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_0: Any = np.int64(0)  # typed: Numba compiles a function again for each literal
_1: Any = np.int64(1)
_U0, _U1, _U27, _U30, _U31 = (np.uint64(n) for n in (0, 1, 27, 30, 31))


@helper
def block_digest(block_hash: np.uint64, tier: int) -> np.uint64:
    """Return the same number as `kvist.events.snapshot.block_digest`."""
    mixed = block_hash ^ (np.uint64(tier) * _TIER_STEP)
    mixed = (mixed ^ (mixed >> _U30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _U27)) * _MIX_2
    return mixed ^ (mixed >> _U31)


# --- Rows -----------------------------------------------------------------------------------------------------------


@helper
def row_at(segments: Records, row: int) -> Record:
    """Return the row of a number."""
    return segments[row >> layout.SEGMENT_SHIFT].rows[row & (layout.SEGMENT_ROWS - 1)]


@helper
def find(index: Record, segments: Records, block_hash: np.uint64) -> int:
    """Return the row of a block, -1 if nobody holds it."""
    number = segment_of(index.table, block_hash)
    place = locate(index.table, segments, number, block_hash)
    return number << layout.SEGMENT_SHIFT | place if place >= 0 else -1


@helper
def depth_at(segments: Records, row: int) -> int:
    """Return how many blocks come before a row's block, at most MAX_DEPTH."""
    return signed(row_at(segments, row).marks) & layout.MAX_DEPTH


@helper
def tiers_at(index: Record, segments: Records, row: int, slot: int) -> int:
    """Return in which tiers, as bits, a slot holds a row's block."""
    return tiers_in(index, signed(row_at(segments, row).set_id), slot)


@helper
def is_marked(segments: Records, row: int) -> bool:
    """Whether a row's block was marked."""
    return signed(row_at(segments, row).marks) & layout.MARKED != 0


@helper
def mark(segments: Records, row: int) -> None:
    """Mark a row's block, for as long as anybody holds it."""
    marked = row_at(segments, row)
    marked.marks = signed(marked.marks) | layout.MARKED


@helper
def stamp(index: Record, row: Record) -> None:
    """Note that a row's block is in use now."""
    if signed(row.marks) & EPOCH_MARKS != index.epoch:
        row.marks = signed(row.marks) & ~EPOCH_MARKS | index.epoch
        index.num_stamped += 1


@helper
def replace(index: Record, segment: Record, place: int, set_id: int) -> None:
    """Have a row refer to another set; without one it goes, and the one behind it may be at its place."""
    before_change(index, segment)
    before = signed(segment.rows[place].set_id)
    if set_id:
        segment.rows[place].set_id = set_id
    else:
        delete(index.table, segment, place)
    refer(index, set_id, before)


# --- Snapshots, which are told what was there when they began -------------------------------------------------------


@helper
def capture(segment: Record) -> None:
    """Copy what an open snapshot has to tell of a segment."""
    rows, copies, count = segment.rows, segment.copies, 0
    for place in range(segment.room):
        if rows[place].set_id:
            copies[count].hash, copies[count].value = rows[place].hash, rows[place].value
            count += 1
    segment.is_captured, segment.num_copied = 1, count


@helper
def before_change(index: Record, segment: Record) -> None:
    """Let an open snapshot have what it has not yet of a segment that is about to change."""
    if index.captured_stamp and not segment.is_captured:
        capture(segment)


# --- One block ------------------------------------------------------------------------------------------------------


@helper
def store_one(index: Record, segments: Records, block_hash: np.uint64, depth: int, slot: int, tier: int) -> int:
    """Hold one block; return 1 if it was not held before, 0 if it was, FULL if there is no room for it.

    The depth, at most MAX_DEPTH, is only noted of a block that nobody held. What a slot holds is counted by `credit`.
    """
    number = segment_of(index.table, block_hash)
    segment = segments[number]
    place = locate(index.table, segments, number, block_hash)
    if place < 0:
        before_change(index, segment)
        place = insert(index.table, segments, number, -1 - place, block_hash, _U1)
        if place < 0:
            return layout.FULL
        segment.rows[place].set_id = layout.INLINE | slot << 4 | 1 << tier
        segment.rows[place].marks = depth | index.epoch
        index.num_stamped += 1
        return 1
    row = segment.rows[place]
    old = signed(row.set_id)
    if index.max_blocks:
        stamp(index, row)
    # Whether only somebody who is gone held it.
    is_as_new = old & layout.INLINE and is_retired(index, (old & (layout.INLINE - 1)) >> 4)
    new = changed(index, 0 if is_as_new else old, ADD, slot, tier)
    if new < 0 or new == old:
        return min(new, 0)
    replace(index, segment, place, new)
    return 1


@helper
def remove_one(index: Record, segments: Records, block_hash: np.uint64, slot: int, tier: int) -> int:
    """Cease to hold one block; return 1 if it was held, 0 if not, FULL if there is no room to note that."""
    number = segment_of(index.table, block_hash)
    segment = segments[number]
    place = locate(index.table, segments, number, block_hash)
    if place < 0:
        return 0
    old = signed(segment.rows[place].set_id)
    new = changed(index, old, DISCARD, slot, tier)
    if new < 0 or new == old:
        return min(new, 0)
    replace(index, segment, place, new)
    return 1


@helper
def credit(index: Record, slot: int, num_held: int, digest: np.uint64) -> None:
    """Add to what a slot holds: a number of (block, tier) and their digest."""
    index.slots[slot].num_held += num_held
    index.slots[slot].digest += digest


# --- Batches --------------------------------------------------------------------------------------------------------


@helper
def _first_depth(
    index: Record, segments: Records, slot: int, operation: Record, hashes: Words, first: int, end: int
) -> int:
    """Return the depth of a chain's first block, INVALID if a block is its own parent, or ORPHAN."""
    for place in range(first + 1, end):
        if hashes[place] == hashes[place - 1]:
            return layout.INVALID
    if operation.kind != layout.STORE_CHILD:
        return 0
    if first < end and hashes[first] == operation.parent:
        return layout.INVALID
    row = find(index, segments, operation.parent)
    if row < 0 or tiers_at(index, segments, row, slot) == 0:
        return layout.ORPHAN
    return min(depth_at(segments, row) + 1, layout.MAX_DEPTH)


@helper
def _store_chain(
    index: Record,
    segments: Records,
    slot: int,
    operation: Record,
    hashes: Words,
    first: int,
    end: int,
    progress: Record,
) -> int:
    """Hold a chain; return DONE, FULL, or why it is refused."""
    if progress.hash == 0:
        depth = _first_depth(index, segments, slot, operation, hashes, first, end)
        if depth < 0:
            return depth
    else:
        row = find(index, segments, hashes[first + progress.hash - 1])
        depth = min(depth_at(segments, row) + 1, layout.MAX_DEPTH) if row >= 0 else 0
    num_stored, digest, result, tier = 0, _U0, 0, operation.tier
    for place in range(first + progress.hash, end):
        result = store_one(index, segments, hashes[place], depth, slot, tier)
        if result < 0:
            progress.hash = place - first
            break
        if result:
            num_stored += 1
            digest += block_digest(hashes[place], tier)
        depth = min(depth + 1, layout.MAX_DEPTH)
    credit(index, slot, num_stored, digest)
    progress.num_stored += num_stored
    return min(result, 0)


@helper
def _remove_all(
    index: Record, segments: Records, slot: int, tier: int, hashes: Words, first: int, end: int, progress: Record
) -> int:
    """Cease to hold blocks; return DONE or FULL."""
    num_removed, digest, result = 0, _U0, 0
    for place in range(first + progress.hash, end):
        result = remove_one(index, segments, hashes[place], slot, tier)
        if result < 0:
            progress.hash = place - first
            break
        if result:
            num_removed += 1
            digest += block_digest(hashes[place], tier)
        else:
            progress.num_not_found += 1
    credit(index, slot, -num_removed, _U0 - digest)
    return min(result, 0)


@jit((*layout.INDEX_TYPES, int64, layout.OPERATIONS_TYPE, int64, layout.HASHES_TYPE, layout.PROGRESS_TYPE))
def apply(
    core: Records,
    segments: Records,
    slot: int,
    operations: Records,
    num_operations: int,
    hashes: Words,
    progresses: Records,
) -> int:
    """Carry out operations in order, whose hashes follow one another, from where the one progress says.

    Returns DONE; FULL; or CLEARED behind such an operation, which the caller carries out. Call again to go on.
    """
    index, progress, first = core[0], progresses[0], _0
    for number in range(progress.operation):
        first += operations[number].num_hashes
    for number in range(progress.operation, num_operations):
        operation, result = operations[number], layout.CLEARED
        end = first + operation.num_hashes
        progress.operation = number
        if operation.kind == layout.REMOVE:
            result = _remove_all(index, segments, slot, operation.tier, hashes, first, end, progress)
        elif operation.kind != layout.CLEAR:
            result = _store_chain(index, segments, slot, operation, hashes, first, end, progress)
        if result == layout.FULL:
            return layout.FULL
        progress.num_orphans += result == layout.ORPHAN
        progress.num_invalid += result == layout.INVALID
        progress.operation, progress.hash, first = number + 1, 0, end
        if result == layout.CLEARED:
            return layout.CLEARED
    return layout.DONE


@jit((*layout.INDEX_TYPES, layout.HASHES_TYPE, layout.HASHES_TYPE, layout.HASHES_TYPE, int64))
def restore(core: Records, segments: Records, hashes: Words, depths: Words, members: Words, start: int) -> int:
    """Have members hold blocks, whatever their parents; return how far that went, short of the end if it is full."""
    index = core[0]
    for number in range(start, len(hashes)):
        depth, member = min(signed(depths[number]), layout.MAX_DEPTH), signed(members[number])
        for tier in range(4):
            if member >> tier & 1:
                result = store_one(index, segments, hashes[number], depth, member >> 4, tier)
                if result < 0:
                    return number
                if result:
                    credit(index, member >> 4, _1, block_digest(hashes[number], tier))
    return len(hashes)
