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
)
from kvist.radix.compiled.sets import add_references

_U1 = np.uint64(1)


@jit("void(i8,i8,i8)", is_entry=True)
def release(control, rows, num_rows):
    """Take back the references of loose rows, and make them refer to nothing; some may do so already."""
    for row in range(rows, rows + num_rows * LOOSE_ROW_BYTES, LOOSE_ROW_BYTES):
        add_references(control, get32(row + 12), -1)
        put32(row + 12, 0)


@jit("void(i8,i8,i8,i8,i8)")
def _copy_held(control, target, bucket, slot, sides):
    """Copy a row of a bucket to a loose one, as a reference to its set."""
    set_id = get32(bucket + BUCKET_SETS + slot * 4)
    putu64(target, getu64(bucket + slot * 8))
    put32(target + 8, get32(sides + slot * 4))
    put32(target + 12, set_id)
    add_references(control, set_id, 1)


@jit("void(i8,i8)")
def _count_row(snapshot, depth):
    count = get64(snapshot + 48) + depth * 4
    put32(count, get32(count) + 1)
    if depth > get64(snapshot + 56):
        put64(snapshot + 56, depth)


@jit("i8(i8,i8,i8)")
def _in_order(snapshot, segment, least):
    """Make the table of order tell where rows of each depth go, the shallowest first; return the depths, packed.

    That is the least and the greatest one of the rows to be told, `least << 32 | greatest`.
    """
    order, shallowest, deepest = get64(snapshot + 64), MAX_DEPTH, 0
    address, num_buckets = get64(segment), get32(segment + 12)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            depth = get32(sides + lowest_bit(held) * 4) & MAX_DEPTH
            held &= held - _U1
            if depth >= least:
                put32(order + depth * 4, get32(order + depth * 4) + 1)
                shallowest, deepest = min(shallowest, depth), max(deepest, depth)
        sides += BUCKET_ROWS * 4
    place = 0
    for depth in range(shallowest, deepest + 1):
        count = get32(order + depth * 4)
        put32(order + depth * 4, place)
        place += count
    return shallowest << 32 | deepest


@jit("i8(i8,i8,i8,i8)", is_entry=True)
def capture(control, snapshot, segment_index, output):
    """Copy the rows of a segment that are still to be collected, by ascending depth; return how many.

    While depths are counted, those of a segment that the cursor has not reached are counted here.
    """
    segment = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    is_passed, order, num_copied = segment_index < get64(snapshot), get64(snapshot + 64), 0
    is_uncounted = get64(snapshot + 16) == 0 and not is_passed
    least = get64(snapshot + 16) if is_passed else get64(snapshot + 8)
    depths = _in_order(snapshot, segment, least)
    address, num_buckets = get64(segment), get32(segment + 12)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            slot = lowest_bit(held)
            held &= held - _U1
            depth = get32(sides + slot * 4) & MAX_DEPTH
            if depth >= least:
                place = get32(order + depth * 4)
                put32(order + depth * 4, place + 1)
                _copy_held(control, output + place * LOOSE_ROW_BYTES, bucket, slot, sides)
                num_copied += 1
                if is_uncounted:
                    _count_row(snapshot, depth)
        sides += BUCKET_ROWS * 4
    for depth in range(depths >> 32, (depths & 0xFFFFFFFF) + 1):
        put32(order + depth * 4, 0)
    return num_copied


@jit("i8(i8,i8,i8)")
def _count_segment(control, snapshot, segment_index):
    """Count a segment's rows by depth, unless capturing did; return how many were looked at."""
    segment = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    if get32(segment + 20):
        return 0
    address, num_buckets = get64(segment), get32(segment + 12)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            _count_row(snapshot, get32(sides + lowest_bit(held) * 4) & MAX_DEPTH)
            held &= held - _U1
        sides += BUCKET_ROWS * 4
    return num_buckets * BUCKET_ROWS


@jit("b1(i8,i8,i8)", is_entry=True)
def count_depths(control, snapshot, max_visits):
    """Count rows by depth, in whole segments from the cursor on; return whether that was the last of them."""
    num_segments, num_visited = 1 << get64(control + SEGMENT_BITS), 0
    while num_visited < max_visits and get64(snapshot) < num_segments:
        num_visited += 1 + _count_segment(control, snapshot, get64(snapshot))
        put64(snapshot, get64(snapshot) + 1)
    return get64(snapshot) == num_segments


@jit("i8(i8,i8)")
def _place_of(snapshot, depth):
    """Where the next row of a depth is to be collected."""
    place = get64(snapshot + 32)
    if place:
        place += (depth - get64(snapshot + 8)) * 4
        put32(place, get32(place) + 1)
        return get64(snapshot + 24) + (get32(place) - 1) * LOOSE_ROW_BYTES
    put64(snapshot + 40, get64(snapshot + 40) + 1)
    return get64(snapshot + 24) + (get64(snapshot + 40) - 1) * LOOSE_ROW_BYTES


@jit("i8(i8,i8,i8)", is_entry=True)
def collect_captured(snapshot, rows, num_rows):
    """Move the first of some copied rows, as far as their depths are wanted now; return how many.

    They come by ascending depth, and what is less deep than wanted was moved before.
    """
    end = get64(snapshot + 16)
    for number in range(num_rows):
        row = rows + number * LOOSE_ROW_BYTES
        depth = get32(row + 8) & MAX_DEPTH
        if depth >= end:
            return number
        move(_place_of(snapshot, depth), row, LOOSE_ROW_BYTES)
    return num_rows


@jit("i8(i8,i8,i8)")
def _collect_segment(control, snapshot, segment):
    """Copy rows of the depths wanted from a segment; return how many were looked at."""
    first, end = get64(snapshot + 8), get64(snapshot + 16)
    address, num_buckets = get64(segment), get32(segment + 12)
    sides = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        for slot in range(BUCKET_ROWS):
            depth = get32(sides + slot * 4) & MAX_DEPTH
            if first <= depth < end and get32(bucket + BUCKET_SETS + slot * 4) != 0:
                _copy_held(control, _place_of(snapshot, depth), bucket, slot, sides)
        sides += BUCKET_ROWS * 4
    return num_buckets * BUCKET_ROWS


@jit("i8(i8,i8,i8)", is_entry=True)
def collect(control, snapshot, max_visits):
    """Collect rows of the depths wanted, in whole segments from the cursor to the next captured one.

    Returns how many rows were looked at, at most `max_visits` but for a segment.
    """
    num_segments, num_visited = 1 << get64(control + SEGMENT_BITS), 0
    while num_visited < max_visits and get64(snapshot) < num_segments:
        segment = get64(control + SEGMENTS) + get64(snapshot) * SEGMENT_BYTES
        if get32(segment + 20):
            break
        num_visited += 1 + _collect_segment(control, snapshot, segment)
        put64(snapshot, get64(snapshot) + 1)
    return num_visited
