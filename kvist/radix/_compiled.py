"""Every compiled function of the index; `_layout` says what lies at the addresses they are given.

Functions take the address of the control block and integers, never an array, so that a call from Python costs a fifth
of a microsecond and calls among them count no references. Addresses, indices and set ids are int64 throughout; only
block hashes and their products are uint64. **Trap:** an int64 with a uint64 becomes a float64, so constants that meet a
hash are `_U*`. The machine code is cached by a hash of this file and the two it builds on; another module of compiled
functions would have to be added to that.
"""

# mypy: ignore-errors
# The signature string of each function is its type: mypy knows neither these nor Numba's intrinsics.
from __future__ import annotations

from pathlib import Path

import numpy as np

from kvist.radix import _intrinsics, _layout
from kvist.radix._cache import jit_for
from kvist.radix._intrinsics import (
    clear,
    equal_keys,
    get8,
    get32,
    get64,
    get_word,
    getu64,
    held_rows,
    intersect_words,
    lowest_bit,
    move,
    prefetch,
    put32,
    put64,
    putu64,
)
from kvist.radix._layout import (
    ACTIVE,
    BUCKET_BYTES,
    BUCKET_PASSED,
    BUCKET_ROWS,
    BUCKET_SETS,
    BUCKETS,
    BUCKETS_PER_PAGE,
    CLASS_BYTES,
    CLASSES,
    CLEAR,
    DEPTHS,
    INLINE,
    INPUT,
    INVALID,
    IS_CAPTURING,
    LOOSE_ROW_BYTES,
    MEMBERS,
    MULTIPLIER,
    NEED_ARG,
    NEED_CAPTURE,
    NEED_KIND,
    NEED_SEGMENT,
    NEED_SLAB,
    NEEDS_CLEAR,
    NEEDS_HELP,
    NEXT_STAMP,
    NUM_APPLIED,
    NUM_BUCKETS,
    NUM_CONFLICTS,
    NUM_EMPTY_SLABS,
    NUM_INVALID,
    NUM_NOT_FOUND,
    NUM_ORPHANS,
    NUM_RETIRED,
    NUM_ROWS,
    NUM_SETS,
    NUM_TRANSITIONS,
    OPERATION_BYTES,
    OPERATIONS,
    ORPHAN,
    OUTPUT,
    PIPELINE,
    RECORD_BITS,
    RECORD_HEADER_BYTES,
    REMOVE,
    RESUME,
    RESUME_OPERATION,
    RETIRE_EPOCH,
    RETIRED,
    SEGMENT_BITS,
    SEGMENT_BYTES,
    SEGMENTS,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    SLOTS,
    SNAPSHOT_ENTRY_BYTES,
    STORE_CHILD,
    STORE_ROOT,
    TRANSITION_BYTES,
    TRANSITIONS,
    UNREADABLE,
    WORDS,
)

_RECORD_MASK = (1 << RECORD_BITS) - 1
_PURGE = 1 << 31
_PREFETCH_AHEAD = 16
_GROUP = 32  # hashes a match looks up while the homes of as many are on their way
_FARTHEST_BYTES = 1024 * BUCKET_BYTES  # between home and row; so no count of passers reaches the id of a set, 8,192
_NO_HIT = np.uint64(1 << BUCKET_ROWS)
_FULL = np.uint64((1 << BUCKET_ROWS) - 1)
_FULLEST_EIGHTHS = 7  # of a segment's rows may be held: more, and a search passes too many buckets
_U1, _U2, _U3, _U8, _U27, _U30, _U31, _U32 = (np.uint64(n) for n in (1, 2, 3, 8, 27, 30, 31, 32))
_TIER_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_ABOVE_1, _ABOVE_2, _LOWEST = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC, 1))
_NIBBLE = np.uint64(15)
_NIL, _STORED_TAG, _REMOVED_TAG, _CLEARED_TAG, _HEARTBEAT_TAG = 0xC0, *b"srch"  # first letters are enough

_jit = jit_for(Path(__file__), Path(_intrinsics.__file__), Path(_layout.__file__))


# --- Rows -----------------------------------------------------------------------------------------------------------


@_jit("i8(u8,i8,i8)")
def _home(key, segment_bits, capacity):
    """Index of a key's home bucket in its segment."""
    return (np.int64((key << np.uint64(segment_bits)) >> _U32) * capacity) >> 32


@_jit("i8(i8,u8)")
def _segment_of(control, key):
    """Directory entry of a key's segment. Two shifts: by 64 at once would be undefined with a single segment."""
    index = np.int64((key >> _U1) >> np.uint64(63 - get64(control + SEGMENT_BITS)))
    return get64(control + SEGMENTS) + index * SEGMENT_BYTES


@_jit("i8(i8,i8,u8)")
def _home_bucket(control, segment, key):
    return get64(segment) + _home(key, get64(control + SEGMENT_BITS), get32(segment + 8)) * BUCKET_BYTES


@_jit("i8(i8,i8,u8)")
def _locate(segments, bits, key):
    """Home bucket of a key; for loops, which read the directory's address and the bits once."""
    segment = segments + np.int64((key >> _U1) >> np.uint64(63 - bits)) * SEGMENT_BYTES
    return get64(segment) + _home(key, bits, get32(segment + 8)) * BUCKET_BYTES


@_jit("i8(i8,u8)")
def _find(bucket, key):
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


@_jit("i8(i8)")
def _bucket_of(row):
    return row & -BUCKET_BYTES


@_jit("i8(i8,i8)")
def _row_index(address, row):
    """Index of a row in the segment that begins at an address."""
    bucket = _bucket_of(row)
    return ((bucket - address) >> 6) * BUCKET_ROWS + ((row - bucket - BUCKET_SETS) >> 2)


@_jit("i8(i8,i8)")
def _row_at(address, row_index):
    return address + row_index // BUCKET_ROWS * BUCKET_BYTES + BUCKET_SETS + row_index % BUCKET_ROWS * 4


@_jit("u8(i8)")
def _key_of(row):
    bucket = _bucket_of(row)
    return getu64(bucket + (row - bucket - BUCKET_SETS) * 2)


@_jit("i8(i8,i8,i8)")
def _parent_at(address, num_buckets, row_index):
    """Address of a row's parent."""
    return address + num_buckets * BUCKET_BYTES + row_index * 8


@_jit("i8(i8,i8)")
def _parent_of(segment, row):
    address = get64(segment)
    return _parent_at(address, get32(segment + 12), _row_index(address, row))


@_jit("i8(i8,i8,i8)")
def _need(control, kind, argument):
    """Record what the caller must provide before the call can go on."""
    put64(control + NEED_KIND, kind)
    put64(control + NEED_ARG, argument)
    return NEEDS_HELP


@_jit("b1(i8,i8)")
def _is_uncaptured(control, segment):
    """Whether an open snapshot must copy this segment before it is written to."""
    return get64(control + IS_CAPTURING) != 0 and get32(segment + 20) == 0


@_jit("i8(i8,i8)")
def _need_segment(control, segment):
    return _need(control, NEED_SEGMENT, (segment - get64(control + SEGMENTS)) // SEGMENT_BYTES)


@_jit("i8(i8,i8)")
def _need_capture(control, segment):
    return _need(control, NEED_CAPTURE, (segment - get64(control + SEGMENTS)) // SEGMENT_BYTES)


@_jit("i8(i8,i8,u8,u8,i8)")
def _place(segment, home, key, parent, set_id):
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
    put32(row, set_id)
    putu64(_parent_of(segment, row), parent)
    for passed in range(home, bucket, BUCKET_BYTES):
        put32(passed + BUCKET_PASSED, get32(passed + BUCKET_PASSED) + 1)
    return row


@_jit("i8(i8,i8,i8,u8,u8,i8)")
def _insert_row(control, segment, home, key, parent, set_id):
    """Put a new row into a segment; needs a bigger one if it is full."""
    count = get32(segment + 16)
    if count * 8 >= get32(segment + 8) * (BUCKET_ROWS * _FULLEST_EIGHTHS):
        return _need_segment(control, segment)
    if _place(segment, home, key, parent, set_id) == 0:
        return _need_segment(control, segment)
    put32(segment + 16, count + 1)
    put64(control + NUM_ROWS, get64(control + NUM_ROWS) + 1)
    return 0


@_jit("void(i8,i8,i8,i8)")
def _delete_row(control, segment, home, row):
    """Take a row out. No other moves: those that passed its bucket are still found by the counts of passers."""
    for passed in range(home, _bucket_of(row), BUCKET_BYTES):
        put32(passed + BUCKET_PASSED, get32(passed + BUCKET_PASSED) - 1)
    put32(row, 0)
    put32(segment + 16, get32(segment + 16) - 1)
    put64(control + NUM_ROWS, get64(control + NUM_ROWS) - 1)


# --- Sets -----------------------------------------------------------------------------------------------------------


@_jit("i8(i8,i8)")
def _record(control, set_id):
    """Address of an interned set."""
    slab = get64(control + SLABS) + (set_id >> RECORD_BITS) * SLAB_BYTES
    return get64(slab) + (set_id & _RECORD_MASK) * get32(slab + 8)


@_jit("i8(i8,i8)")
def _stamp(control, set_id):
    """What tells this set from later users of its id: 0 for ids that tell their members themselves."""
    return 0 if set_id == 0 or set_id & INLINE else get32(_record(control, set_id) + 4)


@_jit("i8(i8)")
def _member_hash(member):
    mixed = np.uint64(member + 1) * _MIX_1
    return np.int64(((mixed ^ (mixed >> _U32)) * _MIX_2) >> _U32)


@_jit("i8(i8,i8)")
def _bucket(control, content_hash):
    """Address of a hash's bucket, by linear hashing."""
    num_buckets, span = get64(control + NUM_BUCKETS), BUCKETS_PER_PAGE
    while span < num_buckets:
        span <<= 1
    index = content_hash & (span - 1)
    if index >= num_buckets:
        index &= (span >> 1) - 1
    return get64(get64(control + BUCKETS) + (index >> 12) * 8) + (index & (BUCKETS_PER_PAGE - 1)) * 4


@_jit("b1(i8,i8,i8)")
def _is_equal(left, right, size_bytes):
    offset = 0
    while offset < size_bytes and get32(left + offset) == get32(right + offset):
        offset += 4
    return offset >= size_bytes


@_jit("i8(i8,i8)")
def _allocate_record(control, payload_bytes):
    """Id of a free record of the smallest class that fits; needs a slab if that class has none with room."""
    size_class, entry = 0, get64(control + CLASSES)
    while get32(entry) < RECORD_HEADER_BYTES + payload_bytes:
        entry += CLASS_BYTES
        size_class += 1
    slab_id = get32(entry + 4)
    if slab_id == 0:
        return _need(control, NEED_SLAB, size_class)
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


@_jit("i8(i8,i8,i8,i8,i8)")
def _intern(control, payload, num_members, num_words, content_hash):
    """Id of the set with this canonical payload, made with no references if there is none yet."""
    size_bytes = num_words * 8 if num_words else num_members * 4
    bucket = _bucket(control, content_hash)
    set_id = get32(bucket)
    while set_id != 0:
        record = _record(control, set_id)
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
    if stamp >> 32:  # stamps come round: no remembered transition may outlive that
        stamp = 1
        for offset in range(0, NUM_TRANSITIONS * TRANSITION_BYTES, 4):
            put32(get64(control + TRANSITIONS) + offset, 0)
    put64(control + NEXT_STAMP, stamp + 1)
    record = _record(control, set_id)
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


@_jit("void(i8,i8,i8)")
def _release(control, set_id, record):
    """Forget a set that no row refers to any more."""
    link = _bucket(control, get32(record + 8))
    while get32(link) != set_id:
        link = _record(control, get32(link)) + 12
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


@_jit("void(i8,i8,i8)")
def _add_references(control, set_id, change):
    """Count rows that begin or cease to refer to a set; the last one releases it."""
    if set_id == 0 or set_id & INLINE:
        return
    record = _record(control, set_id)
    references = get32(record) + change
    put32(record, references)
    if references == 0:
        _release(control, set_id, record)


@_jit("i8(i8,i8,i8)")
def _tiers_of(control, set_id, slot):
    """Tiers, as four bits, in which a slot belongs to a set."""
    if set_id & INLINE:
        return set_id & 15 if (set_id & (INLINE - 1)) >> 4 == slot else 0
    if set_id == 0:
        return 0
    record = _record(control, set_id)
    payload, num_words = record + RECORD_HEADER_BYTES, get32(record + 20)
    if num_words:
        if slot >> 4 >= num_words:
            return 0
        return np.int64((getu64(payload + (slot >> 4) * 8) >> np.uint64((slot & 15) * 4)) & _NIBBLE)
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


@_jit("i8(i8)")
def _most_sparse(num_words):
    """Members up to which a set is sparse: a match is faster on dense ones, so they may cost 128 bytes more."""
    return 2 * num_words - min(num_words, 32)


@_jit("i8(i8,i8,i8)")
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


@_jit("i8(i8,i8)")
def list_members(control, set_id):
    """Write a set's members, ascending, to the scratch list; return how many."""
    members = get64(control + MEMBERS)
    if set_id == 0:
        return 0
    if set_id & INLINE:
        put32(members, set_id & (INLINE - 1))
        return 1
    record = _record(control, set_id)
    payload, num_words = record + RECORD_HEADER_BYTES, get32(record + 20)
    if num_words == 0:
        move(members, payload, get32(record + 16) * 4)
        return get32(record + 16)
    count = 0
    for index in range(num_words):
        word = getu64(payload + index * 8)
        while word != np.uint64(0):
            slot = lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & _NIBBLE
            word &= ~(_NIBBLE << np.uint64(slot * 4))
            put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    return count


@_jit("i8(i8,i8,i8,i8,i8)")
def _with_tiers(control, set_id, slot, before, after):
    """Id of the set in which a slot has the tiers `after`, where now it has `before`; the two differ."""
    change = (_member_hash(slot << 4 | after) if after else 0) - (_member_hash(slot << 4 | before) if before else 0)
    if set_id != 0 and not set_id & INLINE:
        record = _record(control, set_id)
        content_hash = (get32(record + 8) + change) & 0xFFFF_FFFF
        num_members, num_words = get32(record + 16), get32(record + 20)
        num_members += np.int64(before == 0) - np.int64(after == 0)
        if (
            num_words and num_members > _most_sparse(num_words) and slot >> 4 < num_words
        ):  # stays dense: change the word
            words = get64(control + WORDS)
            move(words, record + RECORD_HEADER_BYTES, num_words * 8)
            word, shift = words + (slot >> 4) * 8, np.uint64((slot & 15) * 4)
            putu64(word, (getu64(word) & ~(_NIBBLE << shift)) | (np.uint64(after) << shift))
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


@_jit("i8(i8,i8,i8)")
def _transition(control, set_id, operation):
    """Address of the one place where the result of this operation on this set may be remembered."""
    mixed = (np.uint64(set_id) * _MIX_1) ^ (np.uint64(operation) * _MIX_2)
    return get64(control + TRANSITIONS) + np.int64(mixed >> np.uint64(52)) * TRANSITION_BYTES


@_jit("i8(i8,i8,i8,i8)")
def _recall(control, transition, set_id, operation):
    """Remembered result, or -1. An id that has been reused since has another stamp."""
    if get32(transition) != set_id or get32(transition + 4) != operation:
        return -1
    result = get32(transition + 12)
    if get32(transition + 8) != _stamp(control, set_id) or get32(transition + 16) != _stamp(control, result):
        return -1
    return result


@_jit("void(i8,i8,i8,i8,i8)")
def _remember(control, transition, set_id, operation, result):
    put32(transition, set_id)
    put32(transition + 4, operation)
    put32(transition + 8, _stamp(control, set_id))
    put32(transition + 12, result)
    put32(transition + 16, _stamp(control, result))


@_jit("i8(i8,i8,i8,i8,i8)")
def _changed(control, set_id, slot, tier, is_add):
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
    before = _tiers_of(control, set_id, slot)
    after = before | 1 << tier if is_add else before & ~(1 << tier)
    result = set_id if after == before else _with_tiers(control, set_id, slot, before, after)
    if result >= 0:
        _remember(control, transition, set_id, operation, result)
    return result


@_jit("b1(i8,i8)")
def _is_retired(control, slot):
    return get32(get64(control + SLOTS) + slot * SLOT_BYTES + 16) == RETIRED


@_jit("i8(i8,i8)")
def _purged(control, set_id):
    """Id of the set without its retired slots."""
    if set_id & INLINE:
        return 0 if _is_retired(control, (set_id & (INLINE - 1)) >> 4) else set_id
    operation = _PURGE | (get64(control + RETIRE_EPOCH) & (_PURGE - 1))
    transition = _transition(control, set_id, operation)
    result = _recall(control, transition, set_id, operation)
    if result >= 0:
        return result
    members, count, kept, content_hash = get64(control + MEMBERS), list_members(control, set_id), 0, 0
    for index in range(count):
        member = get32(members + index * 4)
        if not _is_retired(control, member >> 4):
            put32(members + kept * 4, member)
            content_hash += _member_hash(member)
            kept += 1
    result = set_id if kept == count else _intern_members(control, kept, content_hash & 0xFFFF_FFFF)
    if result >= 0:
        _remember(control, transition, set_id, operation, result)
    return result


# --- Store and remove -----------------------------------------------------------------------------------------------


@_jit("u8(u8,i8)")
def _block_digest(block_hash, tier):
    """The same number as `kvist.events.digest.block_digest`."""
    x = block_hash ^ (np.uint64(tier) * _TIER_STEP)
    x = (x ^ (x >> _U30)) * _MIX_1
    x = (x ^ (x >> _U27)) * _MIX_2
    return x ^ (x >> _U31)


@_jit("i8(i8,u8,u8,i8,i8)")
def _store_one(control, block_hash, parent, slot, tier):
    """Hold one block; return 1 if it was not held before, 0 if it was, negative if help is needed first."""
    key = block_hash * getu64(control + MULTIPLIER)
    segment = _segment_of(control, key)
    home = _home_bucket(control, segment, key)
    row = _find(home, key)
    if row == 0:
        if _is_uncaptured(control, segment):
            return _need_capture(control, segment)
        result = _insert_row(control, segment, home, key, parent, INLINE | slot << 4 | 1 << tier)
        return result if result < 0 else 1
    old = get32(row)
    base = old
    if old & INLINE and _is_retired(control, (old & (INLINE - 1)) >> 4):
        base = 0  # only somebody who is gone held it: as good as new
    new = _changed(control, base, slot, tier, 1)
    if new == old:
        return 0
    if new < 0:
        return NEEDS_HELP
    if _is_uncaptured(control, segment):
        return _need_capture(control, segment)
    known = _parent_of(segment, row)
    if base == 0:
        putu64(known, parent)
    elif getu64(known) != parent:
        put64(control + NUM_CONFLICTS, get64(control + NUM_CONFLICTS) + 1)
    put32(row, new)
    _add_references(control, new, 1)
    _add_references(control, old, -1)
    return 1


@_jit("i8(i8,u8,i8,i8)")
def _remove_one(control, block_hash, slot, tier):
    """Cease to hold one block; return 1 if it was held, 0 if not, negative if help is needed first."""
    key = block_hash * getu64(control + MULTIPLIER)
    segment = _segment_of(control, key)
    home = _home_bucket(control, segment, key)
    row = _find(home, key)
    if row == 0:
        return 0
    old = get32(row)
    new = _changed(control, old, slot, tier, 0)
    if new == old:
        return 0
    if new < 0:
        return NEEDS_HELP
    if _is_uncaptured(control, segment):
        return _need_capture(control, segment)
    if new == 0:
        _delete_row(control, segment, home, row)
    else:
        put32(row, new)
        _add_references(control, new, 1)
    _add_references(control, old, -1)
    return 1


@_jit("void(i8,i8,i8,u8)")
def _credit(control, slot, num_held, digest):
    """Add to what a slot holds: a number of (block, tier) and their digest."""
    entry = get64(control + SLOTS) + slot * SLOT_BYTES
    put64(entry, get64(entry) + num_held)
    putu64(entry + 8, getu64(entry + 8) + digest)


@_jit("void(i8,i8,i8)")
def _prefetch_home(control, at, end):
    """Ask for the home of the hash at an address, and for the parents of the rows there, if that is before the end."""
    if at < end:
        key = getu64(at) * getu64(control + MULTIPLIER)
        segment = _segment_of(control, key)
        home = _home_bucket(control, segment, key)
        prefetch(home)
        prefetch(_parent_of(segment, home + BUCKET_SETS))


@_jit("void(i8,i8,i8)")
def _prefetch_first(control, hashes, end):
    """Ask for the homes of the first hashes; each one dealt with asks for another, so that cache misses overlap."""
    for at in range(hashes, min(end, hashes + _PREFETCH_AHEAD * 8), 8):
        _prefetch_home(control, at, end)


@_jit("i8(i8,i8,i8,u8,i8,i8)")
def _check_chain(control, slot, is_child, parent, hashes, num_hashes):
    """INVALID if a block is its own parent, ORPHAN if this slot does not hold the first parent in any tier, else 0."""
    num_same = 0
    for index in range(1, num_hashes):
        num_same += np.int64(get_word(hashes, index) == get_word(hashes, index - 1))
    if num_same > 0 or (is_child and num_hashes > 0 and getu64(hashes) == parent):
        return INVALID
    if is_child:
        key = parent * getu64(control + MULTIPLIER)
        row = _find(_home_bucket(control, _segment_of(control, key), key), key)
        if row == 0 or _tiers_of(control, get32(row), slot) == 0:
            return ORPHAN
    return 0


@_jit("i8(i8,i8,i8,i8,u8,i8,i8,i8,i8)")
def _store_chain(control, slot, tier, is_child, parent, hashes, num_hashes, start, end):
    """Hold a chain of hashes, beyond which others follow up to an end."""
    if start == 0:
        refusal = _check_chain(control, slot, is_child, parent, hashes, num_hashes)
        if refusal < 0:
            return refusal
    if start > 0:
        parent = getu64(hashes + start * 8 - 8)
    elif not is_child and num_hashes > 0:
        parent = getu64(hashes)
    num_stored, digest, result = 0, np.uint64(0), 0
    for index in range(start, num_hashes):
        _prefetch_home(control, hashes + (index + _PREFETCH_AHEAD) * 8, end)
        block_hash = getu64(hashes + index * 8)
        result = _store_one(control, block_hash, parent, slot, tier)
        if result < 0:
            put64(control + RESUME, index)
            break
        if result > 0:
            num_stored += 1
            digest += _block_digest(block_hash, tier)
        parent = block_hash
    _credit(control, slot, num_stored, digest)
    put64(control + NUM_APPLIED, get64(control + NUM_APPLIED) + num_stored)
    return NEEDS_HELP if result < 0 else 0


@_jit("i8(i8,i8,i8,i8,i8,i8,i8)")
def store(control, slot, tier, is_child, parent, num_hashes, start):
    """Hold the input's hashes, as a chain below the parent (its bits); a refused chain changes nothing.

    Return 0, ORPHAN, INVALID, or NEEDS_HELP: then call again from `RESUME`. NUM_APPLIED grows by what is newly held.
    """
    hashes = get64(control + INPUT)
    end = hashes + num_hashes * 8
    _prefetch_first(control, hashes + start * 8, end)
    return _store_chain(control, slot, tier, is_child, np.uint64(parent), hashes, num_hashes, start, end)


@_jit("i8(i8,i8,i8,i8,i8,i8,i8)")
def _remove_all(control, slot, tier, hashes, num_hashes, start, end):
    """Cease to hold hashes, beyond which others follow up to an end."""
    num_removed, digest, index, result = 0, np.uint64(0), start, 0
    while index < num_hashes:
        _prefetch_home(control, hashes + (index + _PREFETCH_AHEAD) * 8, end)
        block_hash = getu64(hashes + index * 8)
        result = _remove_one(control, block_hash, slot, tier)
        if result < 0:
            put64(control + RESUME, index)
            break
        if result > 0:
            num_removed += 1
            digest += _block_digest(block_hash, tier)
        index += 1
    _credit(control, slot, -num_removed, np.uint64(0) - digest)
    put64(control + NUM_NOT_FOUND, get64(control + NUM_NOT_FOUND) + index - start - num_removed)
    return NEEDS_HELP if result < 0 else 0


@_jit("i8(i8,i8,i8,i8,i8)")
def remove(control, slot, tier, num_hashes, start):
    """Cease to hold the input's hashes, in any order. NUM_NOT_FOUND grows by those that were not held.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    hashes = get64(control + INPUT)
    end = hashes + num_hashes * 8
    _prefetch_first(control, hashes + start * 8, end)
    return _remove_all(control, slot, tier, hashes, num_hashes, start, end)


@_jit("u8(i8,i8)")
def _big_endian(address, num_bytes):
    number = np.uint64(0)
    for index in range(num_bytes):
        number = (number << _U8) | np.uint64(get8(address + index))
    return number


@_jit("i8(i8)")
def _uint_bytes(head):
    """Bytes that follow the first one of an unsigned integer in msgpack; -1 if it begins something else."""
    if head < 0x80:
        return 0
    return 1 << (head - 0xCC) if 0xCC <= head <= 0xCF else -1


@_jit("i8(i8,i8,i8,i8)")
def _read_chain(operation, at, is_stored, target):
    """Read the fields of one `Stored` or `Removed` into an operation, its hashes to the target; return their end.

    UNREADABLE for half a hash, and for a parent or tier that is none.
    """
    size_bytes = 1 << (get8(at) - 0xC4)  # bin 8, 16 or 32
    num_hash_bytes = np.int64(_big_endian(at + 1, size_bytes))
    at += 1 + size_bytes
    if num_hash_bytes & 7:
        return UNREADABLE
    move(target, at, num_hash_bytes)
    at += num_hash_bytes
    kind, parent = REMOVE, np.uint64(0)
    if is_stored:
        head = get8(at)
        if head == _NIL:
            kind, at = STORE_ROOT, at + 1
        else:
            num_bytes = _uint_bytes(head)
            if num_bytes < 0:
                return UNREADABLE
            kind, parent = STORE_CHILD, _big_endian(at + 1, num_bytes) if num_bytes else np.uint64(head)
            at += 1 + num_bytes
    tier = get8(at)
    if tier > 3:
        return UNREADABLE
    put64(operation, kind)
    put64(operation + 8, tier)
    putu64(operation + 16, parent)
    put64(operation + 24, num_hash_bytes >> 3)
    return at + 1


@_jit("i8(i8)")
def read_events(control):
    """Turn the input, a msgpack array of events as our own encoder writes it, into operations.

    Their hashes are moved to the front of the input, where they follow one another. Return the number of operations,
    or UNREADABLE.
    """
    at = target = get64(control + INPUT)
    head = get8(at)
    num_events, at = head & 15, at + 1
    if head >= 0xDC:  # array 16 or 32
        num_events = np.int64(_big_endian(at, 2 << (head - 0xDC)))
        at += 2 << (head - 0xDC)
    operation = get64(control + OPERATIONS)
    for _ in range(num_events):
        fields, tag = get8(at) & 15, get8(at + 2)
        at += 2 + (get8(at + 1) & 31)
        if (tag == _STORED_TAG and fields == 4) or (tag == _REMOVED_TAG and fields == 3):
            at = _read_chain(operation, at, tag == _STORED_TAG, target)
            if at < 0:
                return UNREADABLE
            target += get64(operation + 24) * 8
            operation += OPERATION_BYTES
        elif tag == _CLEARED_TAG and fields == 1:
            put64(operation, CLEAR)
            put64(operation + 24, 0)
            operation += OPERATION_BYTES
        elif tag == _HEARTBEAT_TAG and fields == 3:
            at += 1 + _uint_bytes(get8(at))
            at += 1 + _uint_bytes(get8(at))
        else:
            return UNREADABLE
    return (operation - get64(control + OPERATIONS)) // OPERATION_BYTES


@_jit("i8(i8,i8,i8,i8,i8)")
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
    _prefetch_first(control, hashes + start * 8, end)
    for index in range(first_operation, num_operations):
        operation = operations + index * OPERATION_BYTES
        kind, tier, num_hashes = get64(operation), get64(operation + 8), get64(operation + 24)
        if kind == CLEAR:
            put64(control + RESUME_OPERATION, index + 1)
            put64(control + RESUME, 0)
            return NEEDS_CLEAR
        if kind == REMOVE:
            result = _remove_all(control, slot, tier, hashes, num_hashes, start, end)
        else:
            parent = getu64(operation + 16)
            result = _store_chain(control, slot, tier, kind, parent, hashes, num_hashes, start, end)
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


@_jit("i8(i8,i8,i8)")
def restore(control, num_rows, start):
    """Hold the input's rows, each (hash, parent, slot << 4 | tiers), without asking for parents.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    for index in range(start, num_rows):
        row = get64(control + INPUT) + index * 24
        block_hash, member = getu64(row), get64(row + 16)
        for tier in range(4):
            if member >> tier & 1:
                result = _store_one(control, block_hash, getu64(row + 8), member >> 4, tier)
                if result < 0:
                    put64(control + RESUME, index)
                    return NEEDS_HELP
                if result > 0:
                    _credit(control, member >> 4, 1, _block_digest(block_hash, tier))
                    put64(control + NUM_APPLIED, get64(control + NUM_APPLIED) + 1)
    return 0


# --- Match ----------------------------------------------------------------------------------------------------------


@_jit("i8(i8)")
def _closed(tiers):
    """Tiers at or above the fastest one held: what makes the scores cumulative."""
    tiers |= tiers << 1
    return (tiers | tiers << 2) & 15


@_jit("u8(u8)")
def _closed_word(word):
    word |= (word << _U1) & _ABOVE_1
    return word | ((word << _U2) & _ABOVE_2)


@_jit("i8(i8,i8,i8,i8,i8,i8)")
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


@_jit("i8(i8,i8)")
def _begin(control, set_id):
    """Make a set's living members the active list; return how many."""
    members, active, depths = get64(control + MEMBERS), get64(control + ACTIVE), get64(control + DEPTHS)
    has_retired, num_active = get64(control + NUM_RETIRED) > 0, 0
    for index in range(list_members(control, set_id)):
        member = get32(members + index * 4)
        if has_retired and _is_retired(control, member >> 4):
            continue
        tiers = _closed(member & 15)
        if tiers != 15:
            put64(depths + (member >> 4) * 16, 0)
            put64(depths + (member >> 4) * 16 + 8, 0)
        put32(active + num_active * 4, (member >> 4) << 4 | tiers)
        num_active += 1
    return num_active


@_jit("i8(i8,i8)")
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
                if _is_retired(control, index * 16 + (bit >> 2)):
                    word &= ~(_NIBBLE << np.uint64(bit))
                held &= held - _U1
        putu64(active + index * 8, word)
    for index in range(num_words, num_words + 7):
        putu64(active + index * 8, np.uint64(0))
    return num_words


@_jit("i8(i8,i8,i8,i8,i8)", is_inlined=True)
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
                tiers = np.int64((dropped >> np.uint64(shift)) & _NIBBLE)
                remaining = np.int64((left >> np.uint64(shift)) & _NIBBLE)
                output = _drop(depths, output, index * 16 + (shift >> 2), tiers, remaining, depth)
                dropped &= ~(_NIBBLE << np.uint64(shift))
    return output


@_jit("i8(i8,i8)")
def _words_to_list(control, num_words):
    """Turn the active words into the active list; return how many are active."""
    active, members, count = get64(control + ACTIVE), get64(control + MEMBERS), 0
    for index in range(num_words):
        word = getu64(active + index * 8)
        while word != np.uint64(0):
            slot = lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & _NIBBLE
            word &= ~(_NIBBLE << np.uint64(slot * 4))
            put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    move(active, members, count * 4)
    return count


@_jit("i8(i8,i8,i8,i8,i8)")
def _intersect_list(control, num_active, set_id, depth, output):
    """Drop from the active list who is not in a set; return the end of the output."""
    active, depths, kept = get64(control + ACTIVE), get64(control + DEPTHS), 0
    is_sparse, payload, num_members, at = False, 0, 0, 0
    if set_id != 0 and not set_id & INLINE:
        record = _record(control, set_id)
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
            tiers = _tiers_of(control, set_id, slot)
        after = before & _closed(tiers)
        if after:
            put32(active + kept * 4, slot << 4 | after)
            kept += 1
        if after != before & 15:
            output = _drop(depths, output, slot, before & 15 & ~after, after, depth)
    return output


@_jit("void(i8,i8,u8,i8,i8,i8,i8)")
def _look_ahead(segments, bits, multiplier, hashes, pipeline, first, end):
    """Note where the homes of a group of hashes are, beside those of the group before, and ask for them."""
    homes = pipeline + ((first & _GROUP) - first) * 8
    for index in range(first, end):
        home = _locate(segments, bits, getu64(hashes + index * 8) * multiplier)
        prefetch(home)
        put64(homes + index * 8, home)


@_jit("i8(i8,u8)")
def _set_at_home(home, key):
    """Set id of a key's row if that is in its home bucket, as most are; else a number that is the id of no set.

    No jump to mispredict: where no key is found, the number read is the count of passers.
    """
    return get32(home + BUCKET_SETS + lowest_bit(equal_keys(home, key) | _NO_HIT) * 4)


@_jit("i8(i8,i8)")
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
                row = _find(home, key)
                set_id = get32(row) if row else 0
                if set_id == last:
                    depth += 1
                    continue
            is_dense, record = False, 0
            if set_id != 0 and not set_id & INLINE:
                record = _record(control, set_id)
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


# --- Housekeeping ---------------------------------------------------------------------------------------------------


@_jit("i8(i8,i8,i8)")
def take_out(control, segment_index, output):
    """Write a segment's rows to the output as loose ones, about in the order of their homes; return how many."""
    segment = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    address, num_buckets, loose = get64(segment), get32(segment + 12), output
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        held = held_rows(bucket)
        while held != np.uint64(0):
            row = bucket + BUCKET_SETS + lowest_bit(held) * 4
            putu64(loose, _key_of(row))
            putu64(loose + 8, getu64(_parent_at(address, num_buckets, _row_index(address, row))))
            put32(loose + 16, get32(row))
            loose += LOOSE_ROW_BYTES
            held &= held - _U1
    return (loose - output) // LOOSE_ROW_BYTES


@_jit("b1(i8,i8,i8,i8,i8,i8)")
def put_back(control, segment_index, capacity, num_buckets, rows, dirty_bytes):
    """Lay a segment out anew, in the buffer it has now, with its loose rows; false if it is too small for them.

    What the buffer has beyond `dirty_bytes` must be zero.
    """
    segment, bits = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES, get64(control + SEGMENT_BITS)
    address, num_rows = get64(segment), get32(segment + 16)
    clear(address, min(dirty_bytes, num_buckets * BUCKET_BYTES))
    put32(segment + 8, capacity)
    put32(segment + 12, num_buckets)
    for loose in range(rows, rows + num_rows * LOOSE_ROW_BYTES, LOOSE_ROW_BYTES):
        key = getu64(loose)
        home = address + _home(key, bits, capacity) * BUCKET_BYTES
        if _place(segment, home, key, getu64(loose + 8), get32(loose + 16)) == 0:
            return False
    return True


@_jit("i8(i8,i8)")
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
            new = _purged(control, old)
            if new < 0:
                result = NEEDS_HELP
            elif new != old:
                if new == 0:
                    _delete_row(control, segment, _home_bucket(control, segment, _key_of(row)), row)
                else:
                    put32(row, new)
                    _add_references(control, new, 1)
                _add_references(control, old, -1)
    return result


@_jit("void(i8)")
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
            record = _record(control, set_id)
            following = get32(record + 12)
            if get32(record + 8) & half:
                put32(link, following)
                put32(record + 12, get32(target))
                put32(target, set_id)
            else:
                link = record + 12
            set_id = following
    put64(control + NUM_BUCKETS, num_buckets + BUCKETS_PER_PAGE)


@_jit("void(i8)")
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
            link = _record(control, get32(link)) + 12
        put32(link, get32(upper + index * 4))
        put32(upper + index * 4, 0)
    put64(control + NUM_BUCKETS, num_buckets)


# --- Snapshots ------------------------------------------------------------------------------------------------------


@_jit("void(i8,i8,i8,i8)")
def pin(control, address, num_buckets, change):
    """Count the rows of a copy as references to their sets (change 1), or no longer (change -1)."""
    for bucket in range(address, address + num_buckets * BUCKET_BYTES, BUCKET_BYTES):
        for row in range(bucket + BUCKET_SETS, bucket + BUCKET_PASSED, 4):
            _add_references(control, get32(row), change)


@_jit("i8(i8,i8,i8)")
def _snapshot_address(control, snapshot, segment_index):
    """Address of a segment as it was."""
    copy = get64(get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES)
    return copy if copy else get64(get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES)


@_jit("i8(i8,i8,i8)")
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


@_jit("u8(i8,i8,i8,i8)")
def _snapshot_parent(control, snapshot, segment_index, row_index):
    num_buckets = get32(get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES + 12)
    return getu64(_parent_at(_snapshot_address(control, snapshot, segment_index), num_buckets, row_index))


@_jit("i8(i8,i8)")
def _push_parent(control, snapshot):
    """Put the parent of the row on top of the stack above it; return 0 if there is none, or it was there before."""
    top = get64(get64(snapshot + 24) + (get64(snapshot + 32) - 1) * 8)
    parent = _snapshot_parent(control, snapshot, top >> 32, top & 0xFFFF_FFFF)
    key, bits = parent * getu64(control + MULTIPLIER), get64(control + SEGMENT_BITS)
    segment_index = np.int64((key >> _U1) >> np.uint64(63 - bits))
    entry = get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
    address = _snapshot_address(control, snapshot, segment_index)
    row = _find(address + _home(key, bits, get32(entry + 8)) * BUCKET_BYTES, key)
    return _push_if_new(snapshot, segment_index, _row_index(address, row)) if row else 0


@_jit("void(i8,i8,i8,i8)")
def _write_snapshot_row(control, snapshot, top, loose):
    segment_index, row_index = top >> 32, top & 0xFFFF_FFFF
    row = _row_at(_snapshot_address(control, snapshot, segment_index), row_index)
    putu64(loose, _key_of(row))
    putu64(loose + 8, _snapshot_parent(control, snapshot, segment_index, row_index))
    put32(loose + 16, get32(row))


@_jit("i8(i8,i8,i8)")
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
                if get32(_row_at(_snapshot_address(control, snapshot, segment_index), row_index)) != 0:
                    put64(snapshot + 48, _push_if_new(snapshot, segment_index, row_index))
    return count
