"""Scores who holds a prefix: looks its hashes up, and follows the sets of holders only where the set changes.

Hashes go through four stages in groups of 32, each a group behind the one before: locating their homes, reading the
sets there, asking for the second buckets of those that are not at home, and following. So whatever is not in the cache
is asked for long before it is read, and a match that ends early has looked no more than three groups ahead.
"""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np
from numba import types

from kvist.radix.compiled.boxing import HASHES, SCORES, make_scores
from kvist.radix.compiled.following import begin, end, narrow
from kvist.radix.compiled.intrinsics import (
    are_below,
    are_changes,
    clear,
    equal_keys_at,
    get32,
    get64,
    getu64,
    locate_eight,
    lowest_bit,
    move,
    prefetch_far,
    put32,
    put64,
    put_same_16,
    putu64,
)
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    BUCKET_SETS,
    EXACT_SET,
    HOMES,
    INLINE,
    IS_BEHIND,
    MULTIPLIER,
    NUM_BEGUN,
    NUM_OUT,
    OUTPUT,
    OUTPUT_DEPTHS,
    PIPELINE,
    RECORD_BITS,
    SEGMENT_BITS,
)
from kvist.radix.compiled.sets import record_of, step_of
from kvist.radix.compiled.table import find

_GROUP = 32
# Scratch: a last group that is not full, then four groups. A group: addresses of homes, then keys, 64 bits each; where
# its sets change, as 32 bits; and its set ids, 32 bits each, with the last one of the group before in front of them.
_TAIL, _GROUPS, _GROUP_BYTES = PIPELINE, PIPELINE + 8 * _GROUP, 768
_KEYS, _CHANGES, _ID_BEFORE, _IDS = 256, 512, 572, 576
_LEAST_ID = 1 << RECORD_BITS
_NO_HIT = np.uint64(1 << BUCKET_ROWS)
_U0, _U1 = np.uint64(0), np.uint64(1)


@jit("i8(i8,i8)")
def _group_at(control, number):
    return control + _GROUPS + (number & 3) * _GROUP_BYTES


@jit("void(i8,i8,i8)")
def _locate(control, group, hashes):
    """Note the keys of a group of hashes, and where their homes are."""
    multiplier, bits, homes = getu64(control + MULTIPLIER), get64(control + SEGMENT_BITS), get64(control + HOMES)
    for at in range(0, _GROUP * 8, 8 * 8):
        locate_eight(hashes + at, multiplier, bits, homes, group + _KEYS + at, group + at)


@jit("void(i8,i8,i8)")
def _look_home(group, following, count):
    """Note the set of each row that is in its home bucket, as most are; else a number that is the id of no set.

    No jump to mispredict: where no key is found, the number read is the count of passers. Asks for the homes of the
    group that follows; into the second cache only, which takes a quarter off a match beyond all caches, for there more
    lines can be under way.
    """
    set_id = 0
    for index in range(count):
        prefetch_far(get64(following + index * 8))
        home = get64(group + index * 8)
        hits = equal_keys_at(home, group + _KEYS + index * 8) | _NO_HIT
        set_id = get32(home + BUCKET_SETS + lowest_bit(hits) * 4)
        put32(group + _IDS + index * 4, set_id)
    put32(following + _ID_BEFORE, set_id)


@jit("void(i8,i8)")
def _look_beyond(group, count):
    """Note where the sets of a group change, or are not known, and ask for the second buckets of those."""
    valid = (_U1 << np.uint64(count)) - _U1
    misses = are_below(group + _IDS, _LEAST_ID) & valid
    putu64(group + _CHANGES, are_changes(group + _IDS) & valid | misses)
    while misses != _U0:
        prefetch_far(get64(group + lowest_bit(misses) * 8) + BUCKET_BYTES)
        misses &= misses - _U1


@jit("i8(i8,i8)", is_inlined=True)
def _set_of(group, index):
    """Set of a block of a group, 0 if it has none."""
    set_id = get32(group + _IDS + index * 4)
    if set_id >= _LEAST_ID:
        return set_id
    row = find(get64(group + index * 8), getu64(group + _KEYS + index * 8))
    return get32(row) if row else 0


@jit("i8(i8,i8,i8,i8)")
def _take_steps(control, group, depth, last):
    """Follow the changes of a group as long as each is a step that is remembered; return the last set."""
    changes, start = getu64(group + _CHANGES), last
    slots, depths, row = get64(control + OUTPUT), get64(control + OUTPUT_DEPTHS), get64(control + NUM_OUT)
    is_exact = get64(control + EXACT_SET) == last
    stamp = get32(record_of(control, last) + 4) if is_exact else 0
    while changes != _U0:
        index = lowest_bit(changes)
        set_id = _set_of(group, index)
        if set_id != last:
            if not is_exact or set_id == 0 or set_id & INLINE:
                break
            following, step = get32(record_of(control, set_id) + 4), step_of(control, last)
            if get64(step) != set_id << 32 | last or get64(step + 8) != following << 32 | stamp:
                break
            move(slots + row * 4, step + 20, 16)  # rows beyond their number do not count
            put_same_16(depths + row * 16, depth + index)
            row += get32(step + 16)
            last, stamp = set_id, following
        changes &= changes - _U1
    putu64(group + _CHANGES, changes)
    if last != start:
        put64(control + NUM_OUT, row)
        put64(control + EXACT_SET, last)
        put64(control + IS_BEHIND, 1)
    return last


@jit("i8(i8,i8,i8,i8)")
def _follow(control, group, depth, last):
    """Follow the sets of a group from the last one of the group before (-1: it is the first); return the last one.

    Return 0 when nobody is left.
    """
    while True:
        if last >= 0:
            last = _take_steps(control, group, depth, last)
        changes = getu64(group + _CHANGES)
        if changes != _U0:
            index = lowest_bit(changes)
            set_id = _set_of(group, index)
            if last < 0:
                begin(control, set_id)
            elif set_id == 0:
                end(control, last, depth + index)
            else:
                narrow(control, last, set_id, depth + index)
            last = set_id
            putu64(group + _CHANGES, changes & (changes - _U1))
        if get64(control + NUM_OUT) == get64(control + NUM_BEGUN):
            return 0
        if changes == _U0:
            return last


@jit("void(i8,i8,i8)")
def _score(control, hashes, num_hashes):
    """Write, per slot that holds the first block, its cumulative depth in each tier."""
    put64(control + NUM_OUT, 0)
    put32(_group_at(control, 0) + _ID_BEFORE, 0)  # so the first set is a change
    tail, num_full, last = control + _TAIL, num_hashes // _GROUP, -1
    clear(tail, _GROUP * 8)  # all homes of what is not there are one
    move(tail, hashes + num_full * _GROUP * 8, num_hashes % _GROUP * 8)
    num_groups = (num_hashes + _GROUP - 1) // _GROUP
    for stage in range(num_groups + 3 if num_groups else 0):
        if stage < num_groups:
            _locate(control, _group_at(control, stage), hashes + stage * _GROUP * 8 if stage < num_full else tail)
        if stage == 0:
            for index in range(min(num_hashes, _GROUP)):
                prefetch_far(get64(_group_at(control, 0) + index * 8))
        elif stage <= num_groups:
            count = min(num_hashes - (stage - 1) * _GROUP, _GROUP)
            _look_home(_group_at(control, stage - 1), _group_at(control, stage), count)
        if 2 <= stage <= num_groups + 1:
            _look_beyond(_group_at(control, stage - 2), min(num_hashes - (stage - 2) * _GROUP, _GROUP))
        if stage >= 3:
            last = _follow(control, _group_at(control, stage - 3), (stage - 3) * _GROUP, last)
            if last == 0:
                return
    if num_groups:
        end(control, last, num_hashes)


@jit(SCORES(types.int64, HASHES), is_entry=True)
def match(control, hashes):
    """Return, per slot that holds the first block, the slot and its cumulative depth in each tier."""
    _score(control, hashes.ctypes.data, hashes.size)
    return make_scores(get64(control + NUM_OUT), get64(control + OUTPUT), get64(control + OUTPUT_DEPTHS))
