"""Bounded slices of what keeps memory in proportion: forgetting ranks that are gone, splitting and merging buckets."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get32, get64, held_rows, lowest_bit, put32, put64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_SETS,
    BUCKETS,
    BUCKETS_PER_PAGE,
    NEEDS_HELP,
    NUM_BUCKETS,
    SEGMENT_BYTES,
    SEGMENTS,
)
from kvist.radix.compiled.sets import add_references, purged_set, record_of
from kvist.radix.compiled.table import delete_row, home_of, key_of

_U1 = np.uint64(1)


@jit("i8(i8,i8)", is_entry=True)
def purge(control, segment_index):
    """Take the retired slots out of a segment's sets.

    Return 0, or NEEDS_HELP if a set needs a slab: then call again.
    """
    segment, result = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES, 0
    address = get64(segment)
    for bucket in range(address, address + get32(segment + 12) * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            row = bucket + BUCKET_SETS + lowest_bit(held) * 4
            held &= held - _U1
            old = get32(row)
            new = purged_set(control, old)
            if new < 0:
                result = NEEDS_HELP
            elif new != old:
                if new == 0:
                    delete_row(control, segment, home_of(control, segment, key_of(row)), row)
                else:
                    put32(row, new)
                    add_references(control, new, 1)
                add_references(control, old, -1)
    return result


@jit("void(i8)", is_entry=True)
def split_buckets(control):
    """Open the next page of buckets, already zeroed and in the directory, and move to it what hashes there now."""
    num_buckets, span = get64(control + NUM_BUCKETS), BUCKETS_PER_PAGE
    while span <= num_buckets:
        span <<= 1
    half = span >> 1  # bucket b of the new page takes from bucket b - half
    pages = get64(control + BUCKETS)
    upper = get64(pages + (num_buckets >> 12) * 8)
    lower = get64(pages + ((num_buckets - half) >> 12) * 8)
    for index in range(BUCKETS_PER_PAGE):
        link, target = lower + index * 4, upper + index * 4
        set_id = get32(link)
        while set_id != 0:
            record = record_of(control, set_id)
            following = get32(record + 12)
            if get32(record + 8) & half:
                put32(link, following)
                put32(record + 12, get32(target))
                put32(target, set_id)
            else:
                link = record + 12
            set_id = following
    put64(control + NUM_BUCKETS, num_buckets + BUCKETS_PER_PAGE)


@jit("void(i8)", is_entry=True)
def merge_buckets(control):
    """Undo the last `split_buckets`: empty the last page into the one it came from."""
    num_buckets, half = get64(control + NUM_BUCKETS) - BUCKETS_PER_PAGE, BUCKETS_PER_PAGE
    while half << 1 <= num_buckets:
        half <<= 1
    pages = get64(control + BUCKETS)
    upper = get64(pages + (num_buckets >> 12) * 8)
    lower = get64(pages + ((num_buckets - half) >> 12) * 8)
    for index in range(BUCKETS_PER_PAGE):
        link = lower + index * 4
        while get32(link) != 0:
            link = record_of(control, get32(link)) + 12
        put32(link, get32(upper + index * 4))
        put32(upper + index * 4, 0)
    put64(control + NUM_BUCKETS, num_buckets)
