"""Reads the table as it was when a snapshot began, each row after its parent."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get32, get64, getu64, put32, put64, putu64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_PASSED,
    BUCKET_ROWS,
    BUCKET_SETS,
    LOOSE_ROW_BYTES,
    MULTIPLIER,
    SEGMENT_BITS,
    SEGMENT_BYTES,
    SEGMENTS,
    SNAPSHOT_ENTRY_BYTES,
)
from kvist.radix.compiled.sets import add_references
from kvist.radix.compiled.table import find, home_index, index_of_row, key_of, parent_at, row_at

_U1 = np.uint64(1)


@jit("void(i8,i8,i8,i8)", is_entry=True)
def pin(control, address, num_buckets, change):
    """Count the rows of a copy as references to their sets (change 1), or no longer (change -1)."""
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        for row in range(bucket + BUCKET_SETS, bucket + BUCKET_PASSED, 4):
            add_references(control, get32(row), change)


@jit("i8(i8,i8,i8)")
def _snapshot_address(control, snapshot, segment_index):
    """Address of a segment as it was."""
    copy = get64(get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES)
    return copy if copy else get64(get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES)


@jit("i8(i8,i8,i8)")
def _push_if_new(snapshot, segment_index, row_index):
    """Put a row on the stack and return 1, or 0 if it was there before."""
    entry = get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
    mark = get64(entry + 16) + (row_index & ~3)  # marks are bytes, read four at a time
    bit = 1 << ((row_index & 3) * 8)
    if get32(mark) & bit:
        return 0
    put32(mark, get32(mark) | bit)
    depth = get64(snapshot + 32)
    put64(get64(snapshot + 24) + depth * 8, segment_index << 32 | row_index)
    put64(snapshot + 32, depth + 1)
    return 1


@jit("u8(i8,i8,i8,i8)")
def _snapshot_parent(control, snapshot, segment_index, row_index):
    num_buckets = get32(get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES + 12)
    return getu64(parent_at(_snapshot_address(control, snapshot, segment_index), num_buckets, row_index))


@jit("i8(i8,i8)")
def _push_parent(control, snapshot):
    """Put the parent of the row on top of the stack above it; return 0 if there is none, or it was there before."""
    top = get64(get64(snapshot + 24) + (get64(snapshot + 32) - 1) * 8)
    parent = _snapshot_parent(control, snapshot, top >> 32, top & 0xFFFF_FFFF)
    key, bits = parent * getu64(control + MULTIPLIER), get64(control + SEGMENT_BITS)
    segment_index = np.int64((key >> _U1) >> np.uint64(63 - bits))
    entry = get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
    address = _snapshot_address(control, snapshot, segment_index)
    row = find(address + home_index(key, bits, get32(entry + 8)) * BUCKET_BYTES, key)
    return _push_if_new(snapshot, segment_index, index_of_row(address, row)) if row else 0


@jit("void(i8,i8,i8,i8)")
def _write_snapshot_row(control, snapshot, top, loose):
    segment_index, row_index = top >> 32, top & 0xFFFF_FFFF
    row = row_at(_snapshot_address(control, snapshot, segment_index), row_index)
    putu64(loose, key_of(row))
    putu64(loose + 8, _snapshot_parent(control, snapshot, segment_index, row_index))
    put32(loose + 16, get32(row))


@jit("i8(i8,i8,i8)", is_entry=True)
def snapshot_next(control, snapshot, max_rows):
    """Write the next rows as they were, each after its parent; return how many, or -1 at the end.

    A call takes a bounded number of steps, so it may return 0 rows though there are more.
    """
    output, count = get64(snapshot + 40), 0
    for _ in range(4 * max_rows):
        if count == max_rows:
            break
        depth = get64(snapshot + 32)
        if get64(snapshot + 48) != 0:  # climbing from a new row to its eldest ancestor
            put64(snapshot + 48, _push_parent(control, snapshot))
        elif depth > 0:  # the eldest is on top
            top = get64(get64(snapshot + 24) + (depth - 1) * 8)
            _write_snapshot_row(control, snapshot, top, output + count * LOOSE_ROW_BYTES)
            put64(snapshot + 32, depth - 1)
            count += 1
        else:
            segment_index, row_index = get64(snapshot + 8), get64(snapshot + 16)
            if segment_index == 1 << get64(control + SEGMENT_BITS):
                return count if count else -1
            num_buckets = get32(get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES + 12)
            if row_index == num_buckets * BUCKET_ROWS:
                put64(snapshot + 8, segment_index + 1)
                put64(snapshot + 16, 0)
            else:
                put64(snapshot + 16, row_index + 1)
                if get32(row_at(_snapshot_address(control, snapshot, segment_index), row_index)) != 0:
                    put64(snapshot + 48, _push_if_new(snapshot, segment_index, row_index))
    return count
