"""Evicts the least recently used rows of an index that has a cap: counts them by age, then takes out the oldest.

A round goes through the table twice, in bounded steps: once to count rows by priority (age in epochs, then depth), once
to take out what is above the priority found. `kvist.radix._cap` paces it; `layout` has the state of a round.
"""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get32, get64, getu64, held_rows, lowest_bit, put32, put64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    BUCKET_SETS,
    DEPTH_CLASSES,
    EPOCH_SHIFT,
    EPOCHS,
    INPUT,
    INVERSE,
    MAX_DEPTH,
    MEMBERS,
    MULTIPLIER,
    NUM_EVICTED,
    OLDEST,
    SEGMENT_BITS,
    SEGMENT_BYTES,
    SEGMENTS,
    SLOT_BYTES,
    SLOTS,
)
from kvist.radix.compiled.rows import stamp
from kvist.radix.compiled.sets import add_references, is_retired, list_members
from kvist.radix.compiled.table import (
    PREFETCH_AHEAD,
    delete_row,
    find,
    home_of,
    is_uncaptured,
    key_of,
    need_capture,
    prefetch_first,
    prefetch_home,
    segment_of,
    side_of,
)
from kvist.radix.compiled.updates import block_digest, credit

_EPOCH = (EPOCHS - 1) << EPOCH_SHIFT
_U1 = np.uint64(1)


@jit("void(i8,i8)", is_entry=True)
def touch(control, num_hashes):
    """Note that the input's hashes are in use now, up to the first that nobody holds."""
    hashes = get64(control + INPUT)
    end = hashes + num_hashes * 8
    prefetch_first(control, hashes, end)
    for at in range(hashes, end, 8):
        prefetch_home(control, at + PREFETCH_AHEAD * 8, end)
        key = getu64(at) * getu64(control + MULTIPLIER)
        segment = segment_of(control, key)
        row = find(home_of(control, segment, key), key)
        if row == 0:
            break
        stamp(control, side_of(segment, row))


@jit("i8(i8,i8)")
def _age(side, now):
    """Epochs since a row was used, as of an epoch; 0 if it was used since."""
    age = ((now - (side & _EPOCH)) & _EPOCH) >> EPOCH_SHIFT
    return 0 if age > OLDEST + OLDEST // 2 else age


@jit("i8(i8)")
def depth_class(depth):
    """Depths in ascending classes: below 64 each its own, then four to each doubling."""
    if depth < 64:
        return depth
    log = 6
    while depth >> (log + 1):
        log += 1
    return 64 + (log - 6) * 4 + ((depth >> (log - 2)) & 3)


@jit("i8(i8,i8)")
def _priority(side, now):
    return _age(side, now) * DEPTH_CLASSES + depth_class(side & MAX_DEPTH)


@jit("b1(i8,i8,i8)", is_entry=True)
def count_priorities(control, eviction, max_visits):
    """Count rows by priority, in whole segments from the cursor on; return whether that was the last of them.

    Rows older than OLDEST are made that old, so that epochs can come round.
    """
    num_segments, num_visited, now = 1 << get64(control + SEGMENT_BITS), 0, get64(eviction + 16)
    counts, oldest = get64(eviction + 40), (now - (OLDEST << EPOCH_SHIFT)) & _EPOCH
    while num_visited < max_visits and get64(eviction) < num_segments:
        segment = get64(control + SEGMENTS) + get64(eviction) * SEGMENT_BYTES
        address, num_buckets = get64(segment), get32(segment + 12)
        sides = address + num_buckets * BUCKET_BYTES
        for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
            held = held_rows(bucket)
            while held != np.uint64(0):
                side = sides + lowest_bit(held) * 4
                held &= held - _U1
                if _age(get32(side), now) > OLDEST:
                    put32(side, get32(side) & ~_EPOCH | oldest)
                priority = _priority(get32(side), now)
                put32(counts + priority * 4, get32(counts + priority * 4) + 1)
                if priority > get64(eviction + 48):
                    put64(eviction + 48, priority)
            sides += BUCKET_ROWS * 4
        num_visited += 1 + num_buckets * BUCKET_ROWS
        put64(eviction, get64(eviction) + 1)
    return get64(eviction) == num_segments


@jit("i8(i8,i8)")
def _take_from_holders(control, row):
    """Take a block from all who hold it, and note that they lost it to eviction; return how many they were."""
    block_hash, members = key_of(row) * getu64(control + INVERSE), get64(control + MEMBERS)
    num_members = list_members(control, get32(row))
    for at in range(members, members + num_members * 4, 4):
        slot, tiers = get32(at) >> 4, get32(at) & 15
        if not is_retired(control, slot):
            num_held, digest = 0, np.uint64(0)
            for tier in range(4):
                if tiers >> tier & 1:
                    num_held += 1
                    digest += block_digest(block_hash, tier)
            credit(control, slot, -num_held, np.uint64(0) - digest)
            put32(get64(control + SLOTS) + slot * SLOT_BYTES + 20, 1)
    return num_members


@jit("void(i8,i8,i8)")
def _evict_row(control, segment, row):
    set_id = get32(row)
    delete_row(control, segment, home_of(control, segment, key_of(row)), row)
    add_references(control, set_id, -1)
    put64(control + NUM_EVICTED, get64(control + NUM_EVICTED) + 1)


@jit("i8(i8,i8,i8,i8)")
def _evict_from_bucket(control, eviction, segment, index):
    """Take out a bucket's rows above the threshold; return about how much work it was, or NEEDS_HELP."""
    bucket, work = get64(segment) + index * BUCKET_BYTES, BUCKET_ROWS
    sides = get64(segment) + get32(segment + 12) * BUCKET_BYTES + index * BUCKET_ROWS * 4
    now, threshold, held = get64(eviction + 16), get64(eviction + 24), held_rows(bucket)
    while held != np.uint64(0):
        slot = lowest_bit(held)
        held &= held - _U1
        priority, quota = _priority(get32(sides + slot * 4), now), get64(eviction + 32)
        if priority > threshold or (priority == threshold and quota > 0):
            if is_uncaptured(control, segment):
                return need_capture(control, segment)
            row = bucket + BUCKET_SETS + slot * 4
            work += 32 + 4 * _take_from_holders(control, row)
            _evict_row(control, segment, row)
            put64(eviction + 32, quota - np.int64(priority == threshold))
    return work


@jit("i8(i8,i8,i8)", is_entry=True)
def evict(control, eviction, max_work):
    """Take out the rows above the threshold, and at it while the quota lasts, from the cursor on.

    Return 1 once through, 0 if there is more to do, or NEEDS_HELP: then call again.
    """
    num_segments, work = 1 << get64(control + SEGMENT_BITS), 0
    while get64(eviction) < num_segments:
        segment = get64(control + SEGMENTS) + get64(eviction) * SEGMENT_BYTES
        index, num_buckets = get64(eviction + 8), get32(segment + 12)
        while index < num_buckets:
            if work >= max_work:
                put64(eviction + 8, index)
                return 0
            added = _evict_from_bucket(control, eviction, segment, index)
            if added < 0:
                put64(eviction + 8, index)
                return added
            work += added
            index += 1
        work += 1
        put64(eviction, get64(eviction) + 1)
        put64(eviction + 8, 0)
    return 1
