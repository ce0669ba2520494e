"""A table of u64 keys and u32 values, five to a cache line, in segments that grow one at a time; see `layout`.

The index is such a table, with a side word a row. Others may be built on it: `kvist.radix.tables` owns their memory.
No value may be 0.
"""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import (
    clear,
    equal_keys,
    get8,
    get32,
    get64,
    getu64,
    held_rows,
    lowest_bit,
    prefetch,
    put8,
    put32,
    put64,
    putu64,
)
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_PASSED,
    BUCKET_ROWS,
    BUCKET_SETS,
    FULLEST_128THS,
    HOMES,
    IS_CAPTURING,
    LOOSE_ROW_BYTES,
    MULTIPLIER,
    NEED_ARG,
    NEED_CAPTURE,
    NEED_KIND,
    NEED_SEGMENT,
    NEEDS_HELP,
    NUM_ROWS,
    SEGMENT_BITS,
    SEGMENT_BYTES,
    SEGMENTS,
    SIDE_BYTES,
)

PREFETCH_AHEAD = 16
_FARTHEST_BYTES = 1024 * BUCKET_BYTES  # between home and row; so no count of passers reaches the id of a set, 8,192
_FULL = np.uint64((1 << BUCKET_ROWS) - 1)
_U1, _U32 = (np.uint64(n) for n in (1, 32))


@jit("i8(u8,i8,i8)")
def home_index(key, segment_bits, capacity):
    """Index of a key's home bucket in its segment: the same for all keys of one prefix."""
    return (np.int64((key >> _U32) << np.uint64(32 + segment_bits) >> _U32) * capacity) >> 32


@jit("i8(i8,u8)")
def segment_of(control, key):
    """Directory entry of a key's segment. Two shifts: by 64 at once would be undefined with a single segment."""
    index = np.int64((key >> _U1) >> np.uint64(63 - get64(control + SEGMENT_BITS)))
    return get64(control + SEGMENTS) + index * SEGMENT_BYTES


@jit("i8(i8,i8,u8)")
def home_of(control, segment, key):
    return get64(segment) + home_index(key, get64(control + SEGMENT_BITS), get32(segment + 8)) * BUCKET_BYTES


@jit("i8(i8,i8,u8)")
def locate(segments, bits, key):
    """Home bucket of a key; for loops, which read the directory's address and the bits once."""
    segment = segments + np.int64((key >> _U1) >> np.uint64(63 - bits)) * SEGMENT_BYTES
    return get64(segment) + home_index(key, bits, get32(segment + 8)) * BUCKET_BYTES


@jit("i8(i8,u8)")
def find(bucket, key):
    """A key's row, from its home bucket on, or 0 if there is none."""
    while True:
        hits = equal_keys(bucket, key)
        while hits != np.uint64(0):
            row = bucket + BUCKET_SETS + lowest_bit(hits) * 4
            if get32(row) != 0:
                return row
            hits &= hits - _U1
        if get32(bucket + BUCKET_PASSED) == 0:
            return 0
        bucket += BUCKET_BYTES


@jit("i8(i8)")
def bucket_of(row):
    return row & -BUCKET_BYTES


@jit("i8(i8,i8)")
def index_of_row(address, row):
    """Index of a row in the segment that begins at an address."""
    bucket = bucket_of(row)
    return ((bucket - address) >> 6) * BUCKET_ROWS + ((row - bucket - BUCKET_SETS) >> 2)


@jit("u8(i8)")
def key_of(row):
    bucket = bucket_of(row)
    return getu64(bucket + (row - bucket - BUCKET_SETS) * 2)


@jit("i8(i8,i8)")
def side_of(segment, row):
    """Address of a row's side word."""
    address = get64(segment)
    return address + get32(segment + 12) * BUCKET_BYTES + index_of_row(address, row) * 4


@jit("i8(i8,i8,i8)")
def need(control, kind, argument):
    """Record what the caller must provide before the call can go on."""
    put64(control + NEED_KIND, kind)
    put64(control + NEED_ARG, argument)
    return NEEDS_HELP


@jit("b1(i8,i8)")
def is_uncaptured(control, segment):
    """Whether an open snapshot must copy this segment before it is written to."""
    return get64(control + IS_CAPTURING) != 0 and get32(segment + 20) == 0


@jit("i8(i8,i8)")
def need_segment(control, segment):
    return need(control, NEED_SEGMENT, (segment - get64(control + SEGMENTS)) // SEGMENT_BYTES)


@jit("i8(i8,i8)")
def need_capture(control, segment):
    return need(control, NEED_CAPTURE, (segment - get64(control + SEGMENTS)) // SEGMENT_BYTES)


@jit("i8(i8,i8,u8,i8)")
def _place(segment, home, key, value):
    """Put a new row into the first bucket with room from its home on; return 0 if there is none."""
    end = min(get64(segment) + get32(segment + 12) * BUCKET_BYTES, home + _FARTHEST_BYTES)
    bucket, held = home, held_rows(home)
    while held == _FULL:
        bucket += BUCKET_BYTES
        if bucket >= end:
            return 0
        held = held_rows(bucket)
    slot = lowest_bit(~held)
    row = bucket + BUCKET_SETS + slot * 4
    putu64(bucket + slot * 8, key)
    put32(row, value)
    for passed in range(home, bucket, BUCKET_BYTES):
        put32(passed + BUCKET_PASSED, get32(passed + BUCKET_PASSED) + 1)
    return row


@jit("i8(i8,i8,i8,u8,i8)")
def insert_row(control, segment, home, key, value):
    """Put in a row for a key that has none; return the row, or NEEDS_HELP if the segment is full."""
    count = get32(segment + 16)
    if count * 128 >= get32(segment + 8) * BUCKET_ROWS * get64(control + FULLEST_128THS):
        return need_segment(control, segment)
    row = _place(segment, home, key, value)
    if row == 0:
        return need_segment(control, segment)
    put32(segment + 16, count + 1)
    put64(control + NUM_ROWS, get64(control + NUM_ROWS) + 1)
    return row


@jit("void(i8,i8,i8,i8)")
def delete_row(control, segment, home, row):
    """Take a row out. No other moves: those that passed its bucket are still found by the counts of passers."""
    for passed in range(home, bucket_of(row), BUCKET_BYTES):
        put32(passed + BUCKET_PASSED, get32(passed + BUCKET_PASSED) - 1)
    put32(row, 0)
    put32(segment + 16, get32(segment + 16) - 1)
    put64(control + NUM_ROWS, get64(control + NUM_ROWS) - 1)


@jit("i8(i8,i8,i8)", is_entry=True)
def take_out(control, segment_index, output):
    """Write a segment's rows to the output as loose ones, about in the order of their homes; return how many."""
    segment, has_side = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES, get64(control + SIDE_BYTES) != 0
    address, num_buckets, loose = get64(segment), get32(segment + 12), output
    side = address + num_buckets * BUCKET_BYTES
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            slot = lowest_bit(held)
            putu64(loose, getu64(bucket + slot * 8))
            if has_side:
                put32(loose + 8, get32(side + slot * 4))
            put32(loose + 12, get32(bucket + BUCKET_SETS + slot * 4))
            loose += LOOSE_ROW_BYTES
            held &= held - _U1
        side += BUCKET_ROWS * 4
    return (loose - output) // LOOSE_ROW_BYTES


@jit("b1(i8,i8,i8,i8,i8,i8)", is_entry=True)
def put_back(control, segment_index, capacity, num_buckets, rows, dirty_bytes):
    """Lay a segment out anew, in the buffer it has now, with its loose rows; false if it is too small for them.

    What the buffer has beyond `dirty_bytes` must be zero. Behind the loose rows there must be a byte a bucket to count
    what each holds: to read that from the bucket just written to would wait for the writing, and take twice as long.
    """
    segment, bits = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES, get64(control + SEGMENT_BITS)
    address, has_side = get64(segment), get64(control + SIDE_BYTES) != 0
    end_of_rows, farthest = rows + get32(segment + 16) * LOOSE_ROW_BYTES, _FARTHEST_BYTES // BUCKET_BYTES
    clear(address, min(dirty_bytes, num_buckets * BUCKET_BYTES))
    clear(end_of_rows, num_buckets)
    put32(segment + 8, capacity)
    put32(segment + 12, num_buckets)
    put64(get64(control + HOMES) + segment_index * 8, address >> 12 << 28 | capacity)
    sides = address + num_buckets * BUCKET_BYTES
    for loose in range(rows, end_of_rows, LOOSE_ROW_BYTES):
        key = getu64(loose)
        home = home_index(key, bits, capacity)
        index, count = home, get8(end_of_rows + home)
        while count == BUCKET_ROWS:
            passed = address + index * BUCKET_BYTES + BUCKET_PASSED
            put32(passed, get32(passed) + 1)
            index += 1
            if index >= num_buckets or index >= home + farthest:
                return False
            count = get8(end_of_rows + index)
        put8(end_of_rows + index, count + 1)
        bucket = address + index * BUCKET_BYTES
        putu64(bucket + count * 8, key)
        put32(bucket + BUCKET_SETS + count * 4, get32(loose + 12))
        if has_side:
            put32(sides + (index * BUCKET_ROWS + count) * 4, get32(loose + 8))
    return True


@jit("void(i8,i8,i8)")
def prefetch_home(control, at, end):
    """Ask for the home of the hash at an address, and for the side words there, if that is before the end."""
    if at < end:
        key = getu64(at) * getu64(control + MULTIPLIER)
        segment = segment_of(control, key)
        home = home_of(control, segment, key)
        prefetch(home)
        prefetch(side_of(segment, home + BUCKET_SETS))


@jit("void(i8,i8,i8)")
def prefetch_first(control, hashes, end):
    """Ask for the homes of the first hashes; each one dealt with asks for another, so that cache misses overlap."""
    for at in range(hashes, min(end, hashes + PREFETCH_AHEAD * 8), 8):
        prefetch_home(control, at, end)
