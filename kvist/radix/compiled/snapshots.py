"""Collects the rows of the moment a snapshot began, a range of depths a pass over the table; see `layout`.

Rows collected, and those copied from a segment that is about to change, count as references to their sets, so that no
set goes while a snapshot still has to tell its members.
"""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get32, get64, getu64, held_rows, lowest_bit, move, put32, put64, putu64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    BUCKET_SETS,
    LOOSE_ROW_BYTES,
    MAX_DEPTH,
    SEGMENT_BITS,
    SEGMENT_BYTES,
    SEGMENTS,
    SNAPSHOT_ENTRY_BYTES,
)
from kvist.radix.compiled.sets import add_references

_U1 = np.uint64(1)


@jit("void(i8,i8,i8)", is_entry=True)
def release(control, rows, num_rows):
    """Take back the references of loose rows, and make them refer to nothing; some may do so already."""
    for row in range(rows, rows + num_rows * LOOSE_ROW_BYTES, LOOSE_ROW_BYTES):
        add_references(control, get32(row + 12), -1)
        put32(row + 12, 0)


@jit("i8(i8,i8,i8,i8,i8)")
def _copy_held(control, target, bucket, slot, sides):
    """Copy a row of a bucket to a loose one, as a reference to its set; return the end of that."""
    set_id = get32(bucket + BUCKET_SETS + slot * 4)
    putu64(target, getu64(bucket + slot * 8))
    put32(target + 8, get32(sides + slot * 4))
    put32(target + 12, set_id)
    add_references(control, set_id, 1)
    return target + LOOSE_ROW_BYTES


@jit("i8(i8,i8,i8)", is_entry=True)
def capture(control, snapshot, segment_index):
    """Copy the rows of a segment that are still to be collected to where its entry says; return how many."""
    segment = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    entry = get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
    address, num_buckets, copy = get64(segment), get32(segment + 12), get64(entry)
    least = get64(snapshot + 24) if segment_index < get64(snapshot + 8) else get64(snapshot + 16)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            slot = lowest_bit(held)
            held &= held - _U1
            if get32(sides + slot * 4) & MAX_DEPTH >= least:
                copy = _copy_held(control, copy, bucket, slot, sides)
        sides += BUCKET_ROWS * 4
    return (copy - get64(entry)) // LOOSE_ROW_BYTES


@jit("void(i8,i8)")
def _count_row(snapshot, side):
    depth = side & MAX_DEPTH
    count = get64(snapshot + 56) + depth * 4
    put32(count, get32(count) + 1)
    if depth > get64(snapshot + 64):
        put64(snapshot + 64, depth)


@jit("i8(i8,i8,i8)")
def _count_segment(control, snapshot, segment_index):
    """Count a segment's rows by depth; return how many were looked at."""
    segment = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    if get32(segment + 20):
        entry = get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
        copy, num_rows = get64(entry), get64(entry + 8)
        for row in range(copy, copy + num_rows * LOOSE_ROW_BYTES, LOOSE_ROW_BYTES):
            _count_row(snapshot, get32(row + 8))
        return num_rows
    address, num_buckets = get64(segment), get32(segment + 12)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            _count_row(snapshot, get32(sides + lowest_bit(held) * 4))
            held &= held - _U1
        sides += BUCKET_ROWS * 4
    return num_buckets * BUCKET_ROWS


@jit("b1(i8,i8,i8)", is_entry=True)
def count_depths(control, snapshot, max_visits):
    """Count rows by depth, in whole segments from the cursor on; return whether that was the last of them."""
    num_segments, num_visited = 1 << get64(control + SEGMENT_BITS), 0
    while num_visited < max_visits and get64(snapshot + 8) < num_segments:
        num_visited += 1 + _count_segment(control, snapshot, get64(snapshot + 8))
        put64(snapshot + 8, get64(snapshot + 8) + 1)
    return get64(snapshot + 8) == num_segments


@jit("i8(i8,i8)")
def _place_of(snapshot, depth):
    """Where the next row of a depth is to be collected."""
    place = get64(snapshot + 40)
    if place:
        place += (depth - get64(snapshot + 16)) * 4
        put32(place, get32(place) + 1)
        return get64(snapshot + 32) + (get32(place) - 1) * LOOSE_ROW_BYTES
    put64(snapshot + 48, get64(snapshot + 48) + 1)
    return get64(snapshot + 32) + (get64(snapshot + 48) - 1) * LOOSE_ROW_BYTES


@jit("i8(i8,i8)")
def _collect_from_copy(snapshot, entry):
    """Move rows of the depths wanted out of a copy; return how many were looked at."""
    first, end, copy, num_rows = get64(snapshot + 16), get64(snapshot + 24), get64(entry), get64(entry + 8)
    row, last = copy, copy + (num_rows - 1) * LOOSE_ROW_BYTES
    while row <= last:
        depth = get32(row + 8) & MAX_DEPTH
        if first <= depth < end:
            move(_place_of(snapshot, depth), row, LOOSE_ROW_BYTES)
            move(row, last, LOOSE_ROW_BYTES)
            last -= LOOSE_ROW_BYTES
        else:
            row += LOOSE_ROW_BYTES
    put64(entry + 8, (row - copy) // LOOSE_ROW_BYTES)
    return num_rows


@jit("i8(i8,i8,i8)")
def _collect_in_place(control, snapshot, segment):
    """Copy rows of the depths wanted from a segment; return how many were looked at."""
    first, end = get64(snapshot + 16), get64(snapshot + 24)
    address, num_buckets = get64(segment), get32(segment + 12)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        for slot in range(BUCKET_ROWS):
            depth = get32(sides + slot * 4) & MAX_DEPTH
            if first <= depth < end and get32(bucket + BUCKET_SETS + slot * 4) != 0:
                _copy_held(control, _place_of(snapshot, depth), bucket, slot, sides)
        sides += BUCKET_ROWS * 4
    return num_buckets * BUCKET_ROWS


@jit("b1(i8,i8,i8)", is_entry=True)
def collect(control, snapshot, max_visits):
    """Collect rows of the depths wanted, in whole segments from the cursor on; return whether that was the last."""
    num_segments, num_visited = 1 << get64(control + SEGMENT_BITS), 0
    while num_visited < max_visits and get64(snapshot + 8) < num_segments:
        segment = get64(control + SEGMENTS) + get64(snapshot + 8) * SEGMENT_BYTES
        if get32(segment + 20):
            entry = get64(snapshot) + get64(snapshot + 8) * SNAPSHOT_ENTRY_BYTES
            num_visited += 1 + _collect_from_copy(snapshot, entry)
        else:
            num_visited += 1 + _collect_in_place(control, snapshot, segment)
        put64(snapshot + 8, get64(snapshot + 8) + 1)
    return get64(snapshot + 8) == num_segments
