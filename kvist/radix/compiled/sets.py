"""Interned sets of slots: who holds a block, in which tiers, by one id; see `layout`."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get32, get64, getu64, lowest_bit, move, put32, put64, putu64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKETS,
    BUCKETS_PER_PAGE,
    CLASS_BYTES,
    CLASSES,
    INLINE,
    MEMBERS,
    NEED_SLAB,
    NEXT_STAMP,
    NUM_BUCKETS,
    NUM_EMPTY_SLABS,
    NUM_SETS,
    NUM_STEPS,
    NUM_TRANSITIONS,
    RECORD_BITS,
    RECORD_HEADER_BYTES,
    RETIRE_EPOCH,
    RETIRED,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    SLOTS,
    STEP_BYTES,
    TRANSITION_BYTES,
    TRANSITIONS,
    WORDS,
)
from kvist.radix.compiled.table import need

_RECORD_MASK = (1 << RECORD_BITS) - 1
_PURGE = 1 << 31
MIX_1 = np.uint64(0xBF58_476D_1CE4_E5B9)
MIX_2 = np.uint64(0x94D0_49BB_1331_11EB)
NIBBLE = np.uint64(15)
_U32 = np.uint64(32)


@jit("i8(i8,i8)")
def record_of(control, set_id):
    """Address of an interned set."""
    slab = get64(control + SLABS) + (set_id >> RECORD_BITS) * SLAB_BYTES
    return get64(slab) + (set_id & _RECORD_MASK) * get32(slab + 8)


@jit("i8(i8,i8)")
def _stamp(control, set_id):
    """What tells this set from later users of its id: 0 for ids that tell their members themselves."""
    return 0 if set_id == 0 or set_id & INLINE else get32(record_of(control, set_id) + 4)


@jit("i8(i8)")
def _member_hash(member):
    mixed = np.uint64(member + 1) * MIX_1
    return np.int64(((mixed ^ (mixed >> _U32)) * MIX_2) >> _U32)


@jit("i8(i8,i8)")
def bucket_of_hash(control, content_hash):
    """Address of a hash's bucket, by linear hashing."""
    num_buckets, span = get64(control + NUM_BUCKETS), BUCKETS_PER_PAGE
    while span < num_buckets:
        span <<= 1
    index = content_hash & (span - 1)
    if index >= num_buckets:
        index &= (span >> 1) - 1
    return get64(get64(control + BUCKETS) + (index >> 12) * 8) + (index & (BUCKETS_PER_PAGE - 1)) * 4


@jit("b1(i8,i8,i8)")
def _is_equal(left, right, size_bytes):
    offset = 0
    while offset < size_bytes and get32(left + offset) == get32(right + offset):
        offset += 4
    return offset >= size_bytes


@jit("i8(i8,i8)")
def _allocate_record(control, payload_bytes):
    """Id of a free record of the smallest class that fits; needs a slab if that class has none with room."""
    size_class, entry = 0, get64(control + CLASSES)
    while get32(entry) < RECORD_HEADER_BYTES + payload_bytes:
        entry += CLASS_BYTES
        size_class += 1
    slab_id = get32(entry + 4)
    if slab_id == 0:
        return need(control, NEED_SLAB, size_class)
    slabs = get64(control + SLABS)
    slab = slabs + slab_id * SLAB_BYTES
    used = get32(slab + 16) + 1
    free = get32(slab + 24)
    if free != 0:
        index = free - 1
        put32(slab + 24, get32(get64(slab) + index * get32(slab + 8) + 12))
    else:
        index = get32(slab + 20)
        put32(slab + 20, index + 1)
    if used == 1:
        put64(control + NUM_EMPTY_SLABS, get64(control + NUM_EMPTY_SLABS) - 1)
    put32(slab + 16, used)
    if used == get32(slab + 12):  # full: off the list, of which it is the head
        following = get32(slab + 32)
        put32(entry + 4, following)
        if following != 0:
            put32(slabs + following * SLAB_BYTES + 28, 0)
    return slab_id << RECORD_BITS | index


@jit("i8(i8,i8,i8,i8,i8)")
def _intern(control, payload, num_members, num_words, content_hash):
    """Id of the set with this canonical payload, made with no references if there is none yet."""
    size_bytes = num_words * 8 if num_words else num_members * 4
    bucket = bucket_of_hash(control, content_hash)
    set_id = get32(bucket)
    while set_id != 0:
        record = record_of(control, set_id)
        if (
            get32(record + 8) == content_hash
            and get32(record + 16) == num_members
            and get32(record + 20) == num_words
            and _is_equal(record + RECORD_HEADER_BYTES, payload, size_bytes)
        ):
            return set_id
        set_id = get32(record + 12)
    set_id = _allocate_record(control, size_bytes)
    if set_id < 0:
        return set_id
    stamp = get64(control + NEXT_STAMP)
    if stamp >> 32:  # stamps come round: no remembered transition or step may outlive that
        stamp = 1
        for offset in range(0, NUM_TRANSITIONS * TRANSITION_BYTES + NUM_STEPS * STEP_BYTES, 4):
            put32(get64(control + TRANSITIONS) + offset, 0)
    put64(control + NEXT_STAMP, stamp + 1)
    record = record_of(control, set_id)
    put32(record, 0)
    put32(record + 4, stamp)
    put32(record + 8, content_hash)
    put32(record + 12, get32(bucket))
    put32(record + 16, num_members)
    put32(record + 20, num_words)
    move(record + RECORD_HEADER_BYTES, payload, size_bytes)
    put32(bucket, set_id)
    put64(control + NUM_SETS, get64(control + NUM_SETS) + 1)
    return set_id


@jit("void(i8,i8,i8)")
def _release(control, set_id, record):
    """Forget a set that no row refers to any more."""
    link = bucket_of_hash(control, get32(record + 8))
    while get32(link) != set_id:
        link = record_of(control, get32(link)) + 12
    put32(link, get32(record + 12))
    put64(control + NUM_SETS, get64(control + NUM_SETS) - 1)
    slab_id, slabs = set_id >> RECORD_BITS, get64(control + SLABS)
    slab = slabs + slab_id * SLAB_BYTES
    put32(record + 4, 0)
    put32(record + 12, get32(slab + 24))
    put32(slab + 24, (set_id & _RECORD_MASK) + 1)
    used = get32(slab + 16)
    if used == get32(slab + 12):  # it was full: it has room again
        entry = get64(control + CLASSES) + get32(slab + 36) * CLASS_BYTES
        following = get32(entry + 4)
        put32(slab + 28, 0)
        put32(slab + 32, following)
        if following != 0:
            put32(slabs + following * SLAB_BYTES + 28, slab_id)
        put32(entry + 4, slab_id)
    put32(slab + 16, used - 1)
    if used == 1:
        put64(control + NUM_EMPTY_SLABS, get64(control + NUM_EMPTY_SLABS) + 1)


@jit("void(i8,i8,i8)")
def add_references(control, set_id, change):
    """Count rows that begin or cease to refer to a set; the last one releases it."""
    if set_id == 0 or set_id & INLINE:
        return
    record = record_of(control, set_id)
    references = get32(record) + change
    put32(record, references)
    if references == 0:
        _release(control, set_id, record)


@jit("i8(i8,i8,i8)")
def tiers_of(control, set_id, slot):
    """Tiers, as four bits, in which a slot belongs to a set."""
    if set_id & INLINE:
        return set_id & 15 if (set_id & (INLINE - 1)) >> 4 == slot else 0
    if set_id == 0:
        return 0
    record = record_of(control, set_id)
    payload, num_words = record + RECORD_HEADER_BYTES, get32(record + 20)
    if num_words:
        if slot >> 4 >= num_words:
            return 0
        return np.int64((getu64(payload + (slot >> 4) * 8) >> np.uint64((slot & 15) * 4)) & NIBBLE)
    low, high = 0, get32(record + 16)
    while low < high:
        middle = (low + high) >> 1
        if get32(payload + middle * 4) >> 4 < slot:
            low = middle + 1
        else:
            high = middle
    if low < get32(record + 16):
        member = get32(payload + low * 4)
        if member >> 4 == slot:
            return member & 15
    return 0


@jit("i8(i8)")
def _most_sparse(num_words):
    """Members up to which a set is sparse: a match is faster on dense ones, so they may cost 128 bytes more."""
    return 2 * num_words - min(num_words, 32)


@jit("i8(i8,i8,i8)")
def _intern_members(control, num_members, content_hash):
    """Id of the set whose members stand, ascending, in the scratch list."""
    members = get64(control + MEMBERS)
    if num_members == 0:
        return 0
    if num_members == 1:
        return INLINE | get32(members)
    num_words = (get32(members + (num_members - 1) * 4) >> 8) + 1
    if num_members <= _most_sparse(num_words):
        return _intern(control, members, num_members, 0, content_hash)
    words = get64(control + WORDS)
    for word in range(num_words):
        put64(words + word * 8, 0)
    for index in range(num_members):
        member = get32(members + index * 4)
        word = words + (member >> 8) * 8
        putu64(word, getu64(word) | (np.uint64(member & 15) << np.uint64(((member >> 4) & 15) * 4)))
    return _intern(control, words, num_members, num_words, content_hash)


@jit("i8(i8,i8)", is_entry=True)
def list_members(control, set_id):
    """Write a set's members, ascending, to the scratch list; return how many."""
    members = get64(control + MEMBERS)
    if set_id == 0:
        return 0
    if set_id & INLINE:
        put32(members, set_id & (INLINE - 1))
        return 1
    record = record_of(control, set_id)
    payload, num_words = record + RECORD_HEADER_BYTES, get32(record + 20)
    if num_words == 0:
        move(members, payload, get32(record + 16) * 4)
        return get32(record + 16)
    count = 0
    for index in range(num_words):
        word = getu64(payload + index * 8)
        while word != np.uint64(0):
            slot = lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & NIBBLE
            word &= ~(NIBBLE << np.uint64(slot * 4))
            put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    return count


@jit("i8(i8,i8,i8,i8,i8)")
def _with_tiers(control, set_id, slot, before, after):
    """Id of the set in which a slot has the tiers `after`, where now it has `before`; the two differ."""
    change = (_member_hash(slot << 4 | after) if after else 0) - (_member_hash(slot << 4 | before) if before else 0)
    if set_id != 0 and not set_id & INLINE:
        record = record_of(control, set_id)
        content_hash = (get32(record + 8) + change) & 0xFFFF_FFFF
        num_members, num_words = get32(record + 16), get32(record + 20)
        num_members += np.int64(before == 0) - np.int64(after == 0)
        if (
            num_words and num_members > _most_sparse(num_words) and slot >> 4 < num_words
        ):  # stays dense: change the word
            words = get64(control + WORDS)
            move(words, record + RECORD_HEADER_BYTES, num_words * 8)
            word, shift = words + (slot >> 4) * 8, np.uint64((slot & 15) * 4)
            putu64(word, (getu64(word) & ~(NIBBLE << shift)) | (np.uint64(after) << shift))
            while getu64(words + (num_words - 1) * 8) == np.uint64(0):
                num_words -= 1
            return _intern(control, words, num_members, num_words, content_hash)
    elif set_id == 0:
        content_hash = change
    else:
        content_hash = (_member_hash(set_id & (INLINE - 1)) + change) & 0xFFFF_FFFF
    members, count = get64(control + MEMBERS), list_members(control, set_id)
    index = count
    while index > 0 and get32(members + (index - 1) * 4) >> 4 >= slot:
        index -= 1
    at = members + index * 4
    if before and after:
        put32(at, slot << 4 | after)
    elif after:
        move(at + 4, at, (count - index) * 4)
        put32(at, slot << 4 | after)
        count += 1
    else:
        move(at, at + 4, (count - index - 1) * 4)
        count -= 1
    return _intern_members(control, count, content_hash)


@jit("i8(i8,i8,i8)")
def _transition(control, set_id, operation):
    """Address of the one place where the result of this operation on this set may be remembered."""
    mixed = (np.uint64(set_id) * MIX_1) ^ (np.uint64(operation) * MIX_2)
    return get64(control + TRANSITIONS) + np.int64(mixed >> np.uint64(52)) * TRANSITION_BYTES


@jit("i8(i8,i8)")
def step_of(control, set_id):
    """Address of the one place where a step from this set to a smaller one may be remembered."""
    steps = get64(control + TRANSITIONS) + NUM_TRANSITIONS * TRANSITION_BYTES
    spread = set_id + (set_id >> RECORD_BITS) * 1_301  # records of all slabs are counted from 0
    return steps + (spread & (NUM_STEPS - 1)) * STEP_BYTES


@jit("i8(i8,i8,i8,i8)")
def _recall(control, transition, set_id, operation):
    """Remembered result, or -1. An id that has been reused since has another stamp."""
    if get32(transition) != set_id or get32(transition + 4) != operation:
        return -1
    result = get32(transition + 12)
    if get32(transition + 8) != _stamp(control, set_id) or get32(transition + 16) != _stamp(control, result):
        return -1
    return result


@jit("void(i8,i8,i8,i8,i8)")
def _remember(control, transition, set_id, operation, result):
    put32(transition, set_id)
    put32(transition + 4, operation)
    put32(transition + 8, _stamp(control, set_id))
    put32(transition + 12, result)
    put32(transition + 16, _stamp(control, result))


@jit("i8(i8,i8,i8,i8,i8)")
def changed_set(control, set_id, slot, tier, is_add):
    """Id of the set with one (slot, tier) added or taken out; the same id if that changes nothing."""
    if set_id == 0:
        return INLINE | slot << 4 | 1 << tier if is_add else 0
    if set_id & INLINE and (set_id & (INLINE - 1)) >> 4 == slot:
        if is_add:
            return set_id | 1 << tier
        tiers = set_id & 15 & ~(1 << tier)
        return (set_id & ~15) | tiers if tiers else 0
    operation = slot << 3 | tier << 1 | is_add
    transition = _transition(control, set_id, operation)
    result = _recall(control, transition, set_id, operation)
    if result >= 0:
        return result
    before = tiers_of(control, set_id, slot)
    after = before | 1 << tier if is_add else before & ~(1 << tier)
    result = set_id if after == before else _with_tiers(control, set_id, slot, before, after)
    if result >= 0:
        _remember(control, transition, set_id, operation, result)
    return result


@jit("b1(i8,i8)")
def is_retired(control, slot):
    return get32(get64(control + SLOTS) + slot * SLOT_BYTES + 16) == RETIRED


@jit("i8(i8,i8)")
def purged_set(control, set_id):
    """Id of the set without its retired slots."""
    if set_id & INLINE:
        return 0 if is_retired(control, (set_id & (INLINE - 1)) >> 4) else set_id
    operation = _PURGE | (get64(control + RETIRE_EPOCH) & (_PURGE - 1))
    transition = _transition(control, set_id, operation)
    result = _recall(control, transition, set_id, operation)
    if result >= 0:
        return result
    members, count, kept, content_hash = get64(control + MEMBERS), list_members(control, set_id), 0, 0
    for index in range(count):
        member = get32(members + index * 4)
        if not is_retired(control, member >> 4):
            put32(members + kept * 4, member)
            content_hash += _member_hash(member)
            kept += 1
    result = set_id if kept == count else _intern_members(control, kept, content_hash & 0xFFFF_FFFF)
    if result >= 0:
        _remember(control, transition, set_id, operation, result)
    return result
