"""Scores who holds a prefix: looks its hashes up and intersects their sets, only where the set changes."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import (
    equal_keys,
    get32,
    get64,
    getu64,
    intersect_words,
    lowest_bit,
    move,
    prefetch,
    put32,
    put64,
    putu64,
)
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    ACTIVE,
    BUCKET_ROWS,
    BUCKET_SETS,
    DEPTHS,
    INLINE,
    INPUT,
    MEMBERS,
    MULTIPLIER,
    NUM_RETIRED,
    OUTPUT,
    PIPELINE,
    RECORD_BITS,
    RECORD_HEADER_BYTES,
    SEGMENT_BITS,
    SEGMENTS,
    WORDS,
)
from kvist.radix.compiled.sets import NIBBLE, is_retired, list_members, record_of, tiers_of
from kvist.radix.compiled.table import find, locate

_GROUP = 32  # hashes a match looks up while the homes of as many are on their way
_NO_HIT = np.uint64(1 << BUCKET_ROWS)
_ABOVE_1, _ABOVE_2, _LOWEST = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC, 1))
_U1, _U2, _U3 = (np.uint64(n) for n in (1, 2, 3))


@jit("i8(i8)")
def _closed(tiers):
    """Tiers at or above the fastest one held: what makes the scores cumulative."""
    tiers |= tiers << 1
    return (tiers | tiers << 2) & 15


@jit("u8(u8)")
def _closed_word(word):
    word |= (word << _U1) & _ABOVE_1
    return word | ((word << _U2) & _ABOVE_2)


@jit("i8(i8,i8,i8,i8,i8,i8)")
def _drop(depths, output, slot, dropped, remaining, depth):
    """Note that a slot's lead in some tiers ends at a depth; write its result once none is left."""
    at = depths + slot * 16
    if dropped == 15:
        put32(output, slot)
        put64(output + 4, depth << 32 | depth)
        put64(output + 12, depth << 32 | depth)
        return output + 20
    for tier in range(4):
        if dropped >> tier & 1:
            put32(at + tier * 4, depth)
    if remaining:
        return output
    put32(output, slot)
    move(output + 4, at, 16)
    return output + 20


@jit("i8(i8,i8)")
def _begin(control, set_id):
    """Make a set's living members the active list; return how many."""
    members, active, depths = get64(control + MEMBERS), get64(control + ACTIVE), get64(control + DEPTHS)
    has_retired, num_active = get64(control + NUM_RETIRED) > 0, 0
    for index in range(list_members(control, set_id)):
        member = get32(members + index * 4)
        if has_retired and is_retired(control, member >> 4):
            continue
        tiers = _closed(member & 15)
        if tiers != 15:
            put64(depths + (member >> 4) * 16, 0)
            put64(depths + (member >> 4) * 16 + 8, 0)
        put32(active + num_active * 4, (member >> 4) << 4 | tiers)
        num_active += 1
    return num_active


@jit("i8(i8,i8)")
def _begin_dense(control, record):
    """Make a dense set, without retired slots, the active words; return how many words."""
    active, depths, num_words = get64(control + ACTIVE), get64(control + DEPTHS), get32(record + 20)
    has_retired = get64(control + NUM_RETIRED) > 0
    for index in range(num_words):
        word = _closed_word(getu64(record + RECORD_HEADER_BYTES + index * 8))
        slower = (word >> _U3) & ~word & _LOWEST  # held, but not in tier 0
        while slower != np.uint64(0):
            at = depths + (index * 16 + (lowest_bit(slower) >> 2)) * 16
            put64(at, 0)
            put64(at + 8, 0)
            slower &= slower - _U1
        if has_retired:
            held = (word >> _U3) & _LOWEST
            while held != np.uint64(0):
                bit = lowest_bit(held)
                if is_retired(control, index * 16 + (bit >> 2)):
                    word &= ~(NIBBLE << np.uint64(bit))
                held &= held - _U1
        putu64(active + index * 8, word)
    for index in range(num_words, num_words + 7):
        putu64(active + index * 8, np.uint64(0))
    return num_words


@jit("i8(i8,i8,i8,i8,i8)", is_inlined=True)
def _intersect_words(control, num_words, record, depth, output):
    """Drop from the active words who is not in a dense set (nobody is, for record 0); return the end of the output.

    Active words come in eights, with zeros at the end; what is read there beyond a record does not matter.
    """
    active, depths, gone = get64(control + ACTIVE), get64(control + DEPTHS), get64(control + WORDS)
    payload, num_held = record + RECORD_HEADER_BYTES, get32(record + 20) if record else 0
    for base in range(0, num_words, 64):
        # All words first, then those that changed: which of them did is random, and a jump on it would be mispredicted.
        changed = np.uint64(0)
        for first in range(base, min(num_words, base + 64), 8):
            held = payload + first * 8 if first < num_held else active  # beyond a record there may be no memory
            each = intersect_words(active + first * 8, held, num_held - first, gone + first * 8)
            changed |= each << np.uint64(first - base)
        while changed != np.uint64(0):
            index = base + lowest_bit(changed)
            changed &= changed - _U1
            dropped, left = getu64(gone + index * 8), getu64(active + index * 8)
            while dropped != np.uint64(0):
                shift = lowest_bit(dropped) & 60
                tiers = np.int64((dropped >> np.uint64(shift)) & NIBBLE)
                remaining = np.int64((left >> np.uint64(shift)) & NIBBLE)
                output = _drop(depths, output, index * 16 + (shift >> 2), tiers, remaining, depth)
                dropped &= ~(NIBBLE << np.uint64(shift))
    return output


@jit("i8(i8,i8)")
def _words_to_list(control, num_words):
    """Turn the active words into the active list; return how many are active."""
    active, members, count = get64(control + ACTIVE), get64(control + MEMBERS), 0
    for index in range(num_words):
        word = getu64(active + index * 8)
        while word != np.uint64(0):
            slot = lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & NIBBLE
            word &= ~(NIBBLE << np.uint64(slot * 4))
            put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    move(active, members, count * 4)
    return count


@jit("i8(i8,i8,i8,i8,i8)")
def _intersect_list(control, num_active, set_id, depth, output):
    """Drop from the active list who is not in a set; return the end of the output."""
    active, depths, kept = get64(control + ACTIVE), get64(control + DEPTHS), 0
    is_sparse, payload, num_members, at = False, 0, 0, 0
    if set_id != 0 and not set_id & INLINE:
        record = record_of(control, set_id)
        is_sparse, payload, num_members = get32(record + 20) == 0, record + RECORD_HEADER_BYTES, get32(record + 16)
    for index in range(num_active):
        before = get32(active + index * 4)
        slot, tiers = before >> 4, 0
        if is_sparse:
            while at < num_members and get32(payload + at * 4) >> 4 < slot:
                at += 1
            if at < num_members and get32(payload + at * 4) >> 4 == slot:
                tiers = get32(payload + at * 4) & 15
        else:
            tiers = tiers_of(control, set_id, slot)
        after = before & _closed(tiers)
        if after:
            put32(active + kept * 4, slot << 4 | after)
            kept += 1
        if after != before & 15:
            output = _drop(depths, output, slot, before & 15 & ~after, after, depth)
    return output


@jit("void(i8,i8,u8,i8,i8,i8,i8)")
def _look_ahead(segments, bits, multiplier, hashes, pipeline, first, end):
    """Note where the homes of a group of hashes are, beside those of the group before, and ask for them."""
    homes = pipeline + ((first & _GROUP) - first) * 8
    for index in range(first, end):
        home = locate(segments, bits, getu64(hashes + index * 8) * multiplier)
        prefetch(home)
        put64(homes + index * 8, home)


@jit("i8(i8,u8)")
def _set_at_home(home, key):
    """Set id of a key's row if that is in its home bucket, as most are; else a number that is the id of no set.

    No jump to mispredict: where no key is found, the number read is the count of passers.
    """
    return get32(home + BUCKET_SETS + lowest_bit(equal_keys(home, key) | _NO_HIT) * 4)


@jit("i8(i8,i8)", is_entry=True)
def match(control, num_hashes):
    """Write, per slot that holds the first block, its cumulative depth in each tier; return the number of slots.

    Output, 20 bytes a slot: u32 slot, four u32 depths. The set is only looked at where its id changes.
    """
    multiplier, hashes, pipeline = getu64(control + MULTIPLIER), get64(control + INPUT), control + PIPELINE
    start, active = get64(control + OUTPUT), get64(control + ACTIVE)
    segments, bits = get64(control + SEGMENTS), get64(control + SEGMENT_BITS)
    output, last, num_begun, num_words, num_active, depth, is_done = start, -1, 0, 0, 0, 0, False
    _look_ahead(segments, bits, multiplier, hashes, pipeline, 0, min(num_hashes, _GROUP))
    while depth < num_hashes and not is_done:
        end = min(num_hashes, depth + _GROUP)
        _look_ahead(segments, bits, multiplier, hashes, pipeline, end, min(num_hashes, end + _GROUP))
        homes = pipeline + ((depth & _GROUP) - depth) * 8
        while depth < end:
            home, key = get64(homes + depth * 8), getu64(hashes + depth * 8) * multiplier
            set_id = _set_at_home(home, key)
            if set_id == last:
                depth += 1
                continue
            if set_id < 1 << RECORD_BITS:
                row = find(home, key)
                set_id = get32(row) if row else 0
                if set_id == last:
                    depth += 1
                    continue
            is_dense, record = False, 0
            if set_id != 0 and not set_id & INLINE:
                record = record_of(control, set_id)
                is_dense = get32(record + 20) != 0
            if depth == 0:
                if is_dense:
                    num_words = _begin_dense(control, record)
                else:
                    num_begun = num_active = _begin(control, set_id)
            elif set_id == 0:
                is_done = True
                break
            elif num_words and is_dense:
                output = _intersect_words(control, num_words, record, depth, output)
            else:
                if num_words:
                    num_active, num_words = _words_to_list(control, num_words), 0
                    num_begun = num_active + (output - start) // 20
                output = _intersect_list(control, num_active, set_id, depth, output)
                num_active = num_begun - (output - start) // 20
            while num_words and getu64(active + (num_words - 1) * 8) == np.uint64(0):
                num_words -= 1
            if num_words == 0 and num_active == 0:
                is_done = True
                break
            last = set_id
            depth += 1
    if num_words:
        output = _intersect_words(control, num_words, 0, depth, output)
    else:
        output = _intersect_list(control, num_active, 0, depth, output)
    return (output - start) // 20
