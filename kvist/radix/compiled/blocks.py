"""Records who holds which blocks, one by one or in chains.

A row's number is valid until the next row is inserted or deleted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64

from kvist.radix.compiled import layout
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records, Words
from kvist.radix.compiled.sets import ADD, DISCARD, change_set, count_reference, is_retired, tiers_in
from kvist.radix.compiled.table import delete, insert, locate, segment_of

EPOCH_MARKS = (layout.NUM_EPOCHS - 1) << layout.EPOCH_SHIFT
_TIER_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_0: Any = np.int64(0)  # typed: Numba compiles a function again for each literal
_1: Any = np.int64(1)
_MINUS_1: Any = np.int64(-1)
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
    """Return the row that has a number."""
    return segments[row >> layout.SEGMENT_SHIFT].rows[row & (layout.SEGMENT_ROWS - 1)]


@helper
def find(index: Record, segments: Records, block_hash: np.uint64) -> int:
    """Return the number of a block's row, -1 if nobody holds it."""
    number = segment_of(index.table, block_hash)
    place = locate(index.table, segments, number, block_hash)
    return number << layout.SEGMENT_SHIFT | place if place >= 0 else -1


@helper
def holders_of(index: Record, segments: Records, block_hash: np.uint64) -> int:
    row = find(index, segments, block_hash)
    return signed(row_at(segments, row).set_id) if row >= 0 else 0


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
    return signed(row_at(segments, row).marks) & layout.MARKED != 0


@helper
def mark(segments: Records, row: int) -> None:
    """Mark a row's block, for as long as anybody holds it."""
    marked = row_at(segments, row)
    marked.marks = signed(marked.marks) | layout.MARKED


@helper
def mark_used(index: Record, row: Record) -> None:
    if signed(row.marks) & EPOCH_MARKS != index.epoch:
        row.marks = signed(row.marks) & ~EPOCH_MARKS | index.epoch
        index.num_used += 1


@helper
def set_holders(index: Record, segment: Record, place: int, set_id: int) -> None:
    """Set who holds a row's block; for 0 the row is deleted, and the one behind it may be at its place."""
    capture_before_change(index, segment)
    before = signed(segment.rows[place].set_id)
    if set_id:
        segment.rows[place].set_id = set_id
    else:
        delete(index.table, segment, place)
    count_reference(index, set_id, before)


# --- Snapshots, which read what was there when they began -----------------------------------------------------------


@helper
def capture(segment: Record) -> None:
    """Copy a segment's rows for an open snapshot."""
    rows, copies, count = segment.rows, segment.copies, 0
    for place in range(segment.room):
        if rows[place].set_id:
            copies[count].hash, copies[count].value = rows[place].hash, rows[place].value
            count += 1
    segment.is_captured, segment.num_copied = 1, count


@helper
def capture_before_change(index: Record, segment: Record) -> None:
    """Copy a segment that is about to change, if an open snapshot needs it and has no copy yet."""
    if index.captured_stamp and not segment.is_captured:
        capture(segment)


# --- One block ------------------------------------------------------------------------------------------------------


@helper
def count_held(index: Record, slot: int, block_hash: np.uint64, tier: int, num: int) -> None:
    """Count a block that a slot holds in a tier from now on, 1, or does not hold any more, -1."""
    digest = block_digest(block_hash, tier)
    index.slots[slot].num_held += num
    index.slots[slot].digest += digest if num > 0 else _U0 - digest


@helper
def store_one(index: Record, segments: Records, block_hash: np.uint64, depth: int, slot: int, tier: int) -> bool:
    """Record that a slot holds a block; return whether it did not before. Raises MemoryError, with nothing changed.

    The depth, at most MAX_DEPTH, is recorded only for a block that nobody held.
    """
    number = segment_of(index.table, block_hash)
    segment = segments[number]
    place = locate(index.table, segments, number, block_hash)
    if place < 0:
        capture_before_change(index, segment)
        place = insert(index.table, segments, number, -1 - place, block_hash, _U1)
        segment.rows[place].set_id = layout.INLINE | slot << 4 | 1 << tier
        segment.rows[place].marks = depth | index.epoch
        index.num_used += 1
        count_held(index, slot, block_hash, tier, _1)
        return True
    row = segment.rows[place]
    old = signed(row.set_id)
    if index.max_blocks:
        mark_used(index, row)
    # If only a rank that is gone held it, it is as if nobody did.
    is_as_new = old & layout.INLINE and is_retired(index, (old & (layout.INLINE - 1)) >> 4)
    new = change_set(index, 0 if is_as_new else old, ADD, slot, tier)
    if new == old:
        return False
    set_holders(index, segment, place, new)
    count_held(index, slot, block_hash, tier, _1)
    return True


@helper
def remove_one(index: Record, segments: Records, block_hash: np.uint64, slot: int, tier: int) -> bool:
    """Record that a slot does not hold a block any more; return whether it did. Raises MemoryError."""
    number = segment_of(index.table, block_hash)
    segment = segments[number]
    place = locate(index.table, segments, number, block_hash)
    if place < 0:
        return False
    old = signed(segment.rows[place].set_id)
    new = change_set(index, old, DISCARD, slot, tier)
    if new == old:
        return False
    set_holders(index, segment, place, new)
    count_held(index, slot, block_hash, tier, _MINUS_1)
    return True


# --- Batches --------------------------------------------------------------------------------------------------------

_ORPHAN, _INVALID = -1, -2


@helper
def _first_depth(
    index: Record, segments: Records, slot: int, operation: Record, hashes: Words, first: int, end: int
) -> int:
    """Return the depth of a chain's first block, _INVALID if a block is its own parent, or _ORPHAN."""
    for place in range(first + 1, end):
        if hashes[place] == hashes[place - 1]:
            return _INVALID
    if operation.kind != layout.STORE_CHILD:
        return 0
    if first < end and hashes[first] == operation.parent:
        return _INVALID
    row = find(index, segments, operation.parent)
    if row < 0 or tiers_at(index, segments, row, slot) == 0:
        return _ORPHAN
    return min(depth_at(segments, row) + 1, layout.MAX_DEPTH)


@jit((*layout.INDEX_TYPES, int64, layout.OPERATIONS_TYPE, layout.HASHES_TYPE))
def apply(core: Records, segments: Records, slot: int, operations: Records, hashes: Words) -> tuple[int, int, int, int]:
    """Apply operations in order, whose hashes follow one another; return the fields of an `ApplyResult`.

    Raises MemoryError at the first block for which there is no room; what comes before it is applied.
    """
    index, first = core[0], _0
    num_stored = num_not_found = num_orphans = num_invalid = 0
    for number in range(len(operations)):
        operation = operations[number]
        end, tier = first + signed(operation.num_hashes), signed(operation.tier)
        if operation.kind == layout.REMOVE:
            for place in range(first, end):
                num_not_found += not remove_one(index, segments, hashes[place], slot, tier)
        else:
            depth = _first_depth(index, segments, slot, operation, hashes, first, end)
            num_orphans += depth == _ORPHAN
            num_invalid += depth == _INVALID
            for place in range(first, end if depth >= 0 else first):
                num_stored += store_one(index, segments, hashes[place], depth, slot, tier)
                depth = min(depth + 1, layout.MAX_DEPTH)
        first = end
    return num_stored, num_not_found, num_orphans, num_invalid


@jit((*layout.INDEX_TYPES, layout.HASHES_TYPE, layout.HASHES_TYPE, layout.HASHES_TYPE))
def restore(core: Records, segments: Records, hashes: Words, depths: Words, members: Words) -> None:
    """Record that members hold blocks, whoever holds the parents. Raises MemoryError."""
    for number in range(len(hashes)):
        depth, member = min(signed(depths[number]), layout.MAX_DEPTH), signed(members[number])
        for tier in range(4):
            if member >> tier & 1:
                store_one(core[0], segments, hashes[number], depth, member >> 4, tier)
