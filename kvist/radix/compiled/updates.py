"""Storing and removing blocks; what needs memory stops, says so, and goes on from there."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get32, get64, get_word, getu64, put32, put64, putu64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    CLEAR,
    EPOCH,
    INLINE,
    INPUT,
    INVALID,
    IS_CAPPED,
    MAX_DEPTH,
    MULTIPLIER,
    NEEDS_CLEAR,
    NEEDS_HELP,
    NUM_APPLIED,
    NUM_INVALID,
    NUM_NOT_FOUND,
    NUM_ORPHANS,
    NUM_STAMPED,
    OPERATION_BYTES,
    OPERATIONS,
    ORPHAN,
    REMOVE,
    RESUME,
    RESUME_OPERATION,
    SECONDARY,
    SLOT_BYTES,
    SLOTS,
)
from kvist.radix.compiled.rows import depth_below, depth_of, has_prefix, stamp
from kvist.radix.compiled.sets import MIX_1, MIX_2, add_references, changed_set, is_retired, tiers_of
from kvist.radix.compiled.table import (
    PREFETCH_AHEAD,
    delete_row,
    find,
    home_of,
    insert_row,
    is_uncaptured,
    need_capture,
    prefetch_first,
    prefetch_home,
    segment_of,
    side_of,
)

_TIER_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_U27, _U30, _U31 = (np.uint64(n) for n in (27, 30, 31))


@jit("u8(u8,i8)")
def block_digest(block_hash, tier):
    """The same number as `kvist.events.digest.block_digest`."""
    x = block_hash ^ (np.uint64(tier) * _TIER_STEP)
    x = (x ^ (x >> _U30)) * MIX_1
    x = (x ^ (x >> _U27)) * MIX_2
    return x ^ (x >> _U31)


@jit("i8(i8,i8,i8,u8,i8,i8)")
def _store_new(control, segment, home, key, depth, set_id):
    """Put in the row of a block that nobody holds; return 1, or NEEDS_HELP."""
    if is_uncaptured(control, segment):
        return need_capture(control, segment)
    is_secondary = has_prefix(home, key)
    row = insert_row(control, segment, home, key, set_id)
    if row < 0:
        return row
    put32(side_of(segment, row), depth | get64(control + EPOCH) | (SECONDARY if is_secondary else 0))
    put64(control + NUM_STAMPED, get64(control + NUM_STAMPED) + 1)
    return 1


@jit("i8(i8,u8,i8,i8,i8)")
def store_one(control, block_hash, depth, slot, tier):
    """Hold one block; return 1 if it was not held before, 0 if it was, NEEDS_HELP if help is needed first.

    The depth, at most MAX_DEPTH, is only noted of a block that nobody held. What a slot holds is counted by `credit`.
    """
    key = block_hash * getu64(control + MULTIPLIER)
    segment = segment_of(control, key)
    home = home_of(control, segment, key)
    row = find(home, key)
    if row == 0:
        return _store_new(control, segment, home, key, depth, INLINE | slot << 4 | 1 << tier)
    old = get32(row)
    base = old
    if old & INLINE and is_retired(control, (old & (INLINE - 1)) >> 4):
        base = 0  # only somebody who is gone held it: as good as new
    new = changed_set(control, base, slot, tier, 1)
    if get64(control + IS_CAPPED):
        stamp(control, side_of(segment, row))
    if new == old:
        return 0
    if new < 0:
        return NEEDS_HELP
    if is_uncaptured(control, segment):
        return need_capture(control, segment)
    put32(row, new)
    add_references(control, new, 1)
    add_references(control, old, -1)
    return 1


@jit("i8(i8,u8,i8,i8)")
def remove_one(control, block_hash, slot, tier):
    """Cease to hold one block; return 1 if it was held, 0 if not, negative if help is needed first."""
    key = block_hash * getu64(control + MULTIPLIER)
    segment = segment_of(control, key)
    home = home_of(control, segment, key)
    row = find(home, key)
    if row == 0:
        return 0
    old = get32(row)
    new = changed_set(control, old, slot, tier, 0)
    if new == old:
        return 0
    if new < 0:
        return NEEDS_HELP
    if is_uncaptured(control, segment):
        return need_capture(control, segment)
    if new == 0:
        delete_row(control, segment, home, row)
    else:
        put32(row, new)
        add_references(control, new, 1)
    add_references(control, old, -1)
    return 1


@jit("void(i8,i8,i8,u8)")
def credit(control, slot, num_held, digest):
    """Add to what a slot holds: a number of (block, tier) and their digest."""
    entry = get64(control + SLOTS) + slot * SLOT_BYTES
    put64(entry, get64(entry) + num_held)
    putu64(entry + 8, getu64(entry + 8) + digest)


@jit("i8(i8,i8,i8,u8,i8,i8)")
def check_chain(control, slot, is_child, parent, hashes, num_hashes):
    """Depth of a chain's first block; INVALID if a block is its own parent, ORPHAN if this slot does not hold the
    first parent in any tier. Nothing is changed."""
    num_same = 0
    for index in range(1, num_hashes):
        num_same += np.int64(get_word(hashes, index) == get_word(hashes, index - 1))
    if num_same > 0 or (is_child and num_hashes > 0 and getu64(hashes) == parent):
        return INVALID
    if not is_child:
        return 0
    key = parent * getu64(control + MULTIPLIER)
    segment = segment_of(control, key)
    row = find(home_of(control, segment, key), key)
    if row == 0 or tiers_of(control, get32(row), slot) == 0:
        return ORPHAN
    return min(depth_of(segment, row) + 1, MAX_DEPTH)


@jit("i8(i8,i8,i8,i8,u8,i8,i8,i8,i8)")
def store_chain(control, slot, tier, is_child, parent, hashes, num_hashes, start, end):
    """Hold a chain of hashes, beyond which others follow up to an end, and credit it; a refused one changes nothing.

    Return 0, ORPHAN, INVALID, or NEEDS_HELP: then call again with `RESUME` as the start.
    """
    if start == 0:
        depth = check_chain(control, slot, is_child, parent, hashes, num_hashes)
        if depth < 0:
            return depth
    else:
        depth = depth_below(control, getu64(hashes + start * 8 - 8))
    num_stored, digest, result = 0, np.uint64(0), 0
    for index in range(start, num_hashes):
        prefetch_home(control, hashes + (index + PREFETCH_AHEAD) * 8, end)
        block_hash = getu64(hashes + index * 8)
        result = store_one(control, block_hash, depth, slot, tier)
        if result < 0:
            put64(control + RESUME, index)
            break
        if result > 0:
            num_stored += 1
            digest += block_digest(block_hash, tier)
        depth = min(depth + 1, MAX_DEPTH)
    credit(control, slot, num_stored, digest)
    put64(control + NUM_APPLIED, get64(control + NUM_APPLIED) + num_stored)
    return NEEDS_HELP if result < 0 else 0


@jit("i8(i8,i8,i8,i8,i8,i8,i8)", is_entry=True)
def store(control, slot, tier, is_child, parent, num_hashes, start):
    """Hold the input's hashes, as a chain below the parent (its bits); a refused chain changes nothing.

    Return 0, ORPHAN, INVALID, or NEEDS_HELP: then call again from `RESUME`. NUM_APPLIED grows by what is newly held.
    """
    hashes = get64(control + INPUT)
    end = hashes + num_hashes * 8
    prefetch_first(control, hashes + start * 8, end)
    return store_chain(control, slot, tier, is_child, np.uint64(parent), hashes, num_hashes, start, end)


@jit("i8(i8,i8,i8,i8,i8,i8,i8)")
def remove_all(control, slot, tier, hashes, num_hashes, start, end):
    """Cease to hold hashes, beyond which others follow up to an end."""
    num_removed, digest, index, result = 0, np.uint64(0), start, 0
    while index < num_hashes:
        prefetch_home(control, hashes + (index + PREFETCH_AHEAD) * 8, end)
        block_hash = getu64(hashes + index * 8)
        result = remove_one(control, block_hash, slot, tier)
        if result < 0:
            put64(control + RESUME, index)
            break
        if result > 0:
            num_removed += 1
            digest += block_digest(block_hash, tier)
        index += 1
    credit(control, slot, -num_removed, np.uint64(0) - digest)
    put64(control + NUM_NOT_FOUND, get64(control + NUM_NOT_FOUND) + index - start - num_removed)
    return NEEDS_HELP if result < 0 else 0


@jit("i8(i8,i8,i8,i8,i8)", is_entry=True)
def remove(control, slot, tier, num_hashes, start):
    """Cease to hold the input's hashes, in any order. NUM_NOT_FOUND grows by those that were not held.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    hashes = get64(control + INPUT)
    end = hashes + num_hashes * 8
    prefetch_first(control, hashes + start * 8, end)
    return remove_all(control, slot, tier, hashes, num_hashes, start, end)


@jit("i8(i8,i8,i8,i8,i8)", is_entry=True)
def apply(control, slot, num_operations, first_operation, start):
    """Carry out operations in order, whose hashes follow one another in the input.

    Return 0; or NEEDS_HELP or NEEDS_CLEAR: then call again from `RESUME_OPERATION` and `RESUME`.
    """
    hashes, operations = get64(control + INPUT), get64(control + OPERATIONS)
    end = hashes
    for index in range(num_operations):
        num_hashes = get64(operations + index * OPERATION_BYTES + 24)
        if index < first_operation:
            hashes += num_hashes * 8
        end += num_hashes * 8
    prefetch_first(control, hashes + start * 8, end)
    for index in range(first_operation, num_operations):
        operation = operations + index * OPERATION_BYTES
        kind, tier, num_hashes = get64(operation), get64(operation + 8), get64(operation + 24)
        if kind == CLEAR:
            put64(control + RESUME_OPERATION, index + 1)
            put64(control + RESUME, 0)
            return NEEDS_CLEAR
        if kind == REMOVE:
            result = remove_all(control, slot, tier, hashes, num_hashes, start, end)
        else:
            parent = getu64(operation + 16)
            result = store_chain(control, slot, tier, kind, parent, hashes, num_hashes, start, end)
        if result == NEEDS_HELP:
            put64(control + RESUME_OPERATION, index)
            return NEEDS_HELP
        if result == ORPHAN:
            put64(control + NUM_ORPHANS, get64(control + NUM_ORPHANS) + 1)
        elif result == INVALID:
            put64(control + NUM_INVALID, get64(control + NUM_INVALID) + 1)
        start = 0
        hashes += num_hashes * 8
    return 0


@jit("i8(i8,i8,i8)", is_entry=True)
def restore(control, num_rows, start):
    """Hold the input's rows, each (hash, depth, slot << 4 | tiers), without asking for parents.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    for index in range(start, num_rows):
        row = get64(control + INPUT) + index * 24
        block_hash, depth, member = getu64(row), min(get64(row + 8), MAX_DEPTH), get64(row + 16)
        for tier in range(4):
            if member >> tier & 1:
                result = store_one(control, block_hash, depth, member >> 4, tier)
                if result < 0:
                    put64(control + RESUME, index)
                    return NEEDS_HELP
                if result > 0:
                    credit(control, member >> 4, 1, block_digest(block_hash, tier))
                    put64(control + NUM_APPLIED, get64(control + NUM_APPLIED) + 1)
    return 0
