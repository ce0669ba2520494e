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
    get32,
    get64,
    get_word,
    getu64,
    lowest_bit,
    move,
    nonzero_words,
    prefetch,
    put32,
    put64,
    put_word,
    putu64,
)
from kvist.radix._layout import (
    ACTIVE,
    BUCKETS,
    BUCKETS_PER_PAGE,
    CLASS_BYTES,
    CLASSES,
    DEPTHS,
    GUARD_ROWS,
    INLINE,
    INPUT,
    INVALID,
    IS_CAPTURING,
    MEMBERS,
    MULTIPLIER,
    NEED_ARG,
    NEED_CAPTURE,
    NEED_KIND,
    NEED_SEGMENT,
    NEED_SLAB,
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
    ROW_BYTES,
    SEGMENT_BITS,
    SEGMENT_BYTES,
    SEGMENTS,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    SLOTS,
    SNAPSHOT_ENTRY_BYTES,
    TRANSITION_BYTES,
    TRANSITIONS,
    WORDS,
)

_RECORD_MASK = (1 << RECORD_BITS) - 1
_PURGE = 1 << 31
_PREFETCH_AHEAD = 16
_PIPELINE_MASK = 2 * _PREFETCH_AHEAD - 1
_CLEAN_ROWS = 64
_U1, _U2, _U3, _U27, _U30, _U31, _U32 = (np.uint64(n) for n in (1, 2, 3, 27, 30, 31, 32))
_VACANT = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_TIER_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_ABOVE_1, _ABOVE_2, _LOWEST = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC, 1))
_NIBBLE = np.uint64(15)

_jit = jit_for(Path(__file__), Path(_intrinsics.__file__), Path(_layout.__file__))


# --- Rows -----------------------------------------------------------------------------------------------------------


@_jit("i8(u8,i8,i8)")
def _home(key, segment_bits, capacity):
    """Index of a key's home row in its segment."""
    return (np.int64((key << np.uint64(segment_bits)) >> _U32) * capacity) >> 32


@_jit("i8(i8,u8)")
def _segment_of(control, key):
    """Directory entry of a key's segment. Two shifts: by 64 at once would be undefined with a single segment."""
    index = np.int64((key >> _U1) >> np.uint64(63 - get64(control + SEGMENT_BITS)))
    return get64(control + SEGMENTS) + index * SEGMENT_BYTES


@_jit("i8(i8,i8,u8)")
def _home_row(control, segment, key):
    home = _home(key, get64(control + SEGMENT_BITS), get32(segment + 8))
    return get64(segment) + home * ROW_BYTES


@_jit("i8(i8,i8,u8)")
def _locate(segments, bits, key):
    """Home row of a key; for loops, which read the directory's address and the bits once."""
    segment = segments + np.int64((key >> _U1) >> np.uint64(63 - bits)) * SEGMENT_BYTES
    return get64(segment) + _home(key, bits, get32(segment + 8)) * ROW_BYTES


@_jit("i8(i8,u8)")
def _seek(row, key):
    """First row, from a key's home on, whose key is not smaller. Counting four at a time saves a mispredicted jump."""
    while True:
        smaller = (
            np.int64(getu64(row) < key)
            + np.int64(getu64(row + ROW_BYTES) < key)
            + np.int64(getu64(row + 2 * ROW_BYTES) < key)
            + np.int64(getu64(row + 3 * ROW_BYTES) < key)
        )
        row += smaller * ROW_BYTES
        if smaller < 4:
            return row


@_jit("i8(i8,u8)")
def _set_at(row, key):
    """Set id of the row if it is this key's, else 0."""
    return get32(row + 16) if getu64(row) == key else 0


@_jit("void(i8,i8)")
def _vacate(row, end):
    """Mark the rows in [row, end) vacant."""
    while row < end:
        putu64(row, _VACANT)
        put64(row + 8, 0)
        put32(row + 16, 0)
        row += ROW_BYTES


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


@_jit("i8(i8,i8,i8,u8,u8,i8)")
def _insert_row(control, segment, row, key, parent, set_id):
    """Put a new row at its place, moving its successors up to the next vacancy; needs a bigger segment if full."""
    count, capacity = get32(segment + 16), get32(segment + 8)
    end = get64(segment) + (get32(segment + 12) - GUARD_ROWS) * ROW_BYTES
    gap = row
    while get32(gap + 16) != 0:
        gap += ROW_BYTES
    if gap >= end or count >= capacity - (capacity >> 3):
        return _need_segment(control, segment)
    move(row + ROW_BYTES, row, gap - row)
    putu64(row, key)
    putu64(row + 8, parent)
    put32(row + 16, set_id)
    put32(segment + 16, count + 1)
    put64(control + NUM_ROWS, get64(control + NUM_ROWS) + 1)
    return 0


@_jit("void(i8,i8,i8)")
def _delete_row(control, segment, row):
    """Take a row out; successors that are not at home move down, so that no tombstone is left."""
    bits, capacity, address = get64(control + SEGMENT_BITS), get32(segment + 8), get64(segment)
    end = row + ROW_BYTES
    while get32(end + 16) != 0 and address + _home(getu64(end), bits, capacity) * ROW_BYTES < end:
        end += ROW_BYTES
    move(row, row + ROW_BYTES, end - row - ROW_BYTES)
    _vacate(end - ROW_BYTES, end)
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


@_jit("i8(i8,i8,i8)")
def _intern_members(control, num_members, content_hash):
    """Id of the set whose members stand, ascending, in the scratch list."""
    members = get64(control + MEMBERS)
    if num_members == 0:
        return 0
    if num_members == 1:
        return INLINE | get32(members)
    num_words = (get32(members + (num_members - 1) * 4) >> 8) + 1
    if num_members <= 2 * num_words:
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
        if num_words and num_members > 2 * (num_words + 1) and slot >> 4 < num_words:  # stays dense: change the word
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


@_jit("i8(i8,i8,u8,u8,i8,i8,i8)")
def _store_one(control, multiplier, block_hash, parent, slot, tier, entry):
    """Hold one block; return 1 if it was not held before, 0 if it was, negative if help is needed first."""
    key = block_hash * multiplier
    segment = _segment_of(control, key)
    row = _seek(_home_row(control, segment, key), key)
    old = _set_at(row, key)
    if old == 0:
        if _is_uncaptured(control, segment):
            return _need_capture(control, segment)
        if _insert_row(control, segment, row, key, parent, INLINE | slot << 4 | 1 << tier) < 0:
            return NEEDS_HELP
    else:
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
        if base == 0:
            putu64(row + 8, parent)
        elif getu64(row + 8) != parent:
            put64(control + NUM_CONFLICTS, get64(control + NUM_CONFLICTS) + 1)
        put32(row + 16, new)
        _add_references(control, new, 1)
        _add_references(control, old, -1)
    put64(entry, get64(entry) + 1)
    putu64(entry + 8, getu64(entry + 8) + _block_digest(block_hash, tier))
    return 1


@_jit("i8(i8,i8,u8,i8,i8,i8)")
def _remove_one(control, multiplier, block_hash, slot, tier, entry):
    """Cease to hold one block; return 1 if it was held, 0 if not, negative if help is needed first."""
    key = block_hash * multiplier
    segment = _segment_of(control, key)
    row = _seek(_home_row(control, segment, key), key)
    old = _set_at(row, key)
    new = _changed(control, old, slot, tier, 0)
    if new == old:
        return 0
    if new < 0:
        return NEEDS_HELP
    if _is_uncaptured(control, segment):
        return _need_capture(control, segment)
    if new == 0:
        _delete_row(control, segment, row)
    else:
        put32(row + 16, new)
        _add_references(control, new, 1)
    _add_references(control, old, -1)
    put64(entry, get64(entry) - 1)
    putu64(entry + 8, getu64(entry + 8) - _block_digest(block_hash, tier))
    return 1


@_jit("void(i8,i8,i8)")
def _prefetch_rows(control, hashes, num_hashes):
    """Ask for the home rows of the next few hashes, so that their cache misses overlap."""
    multiplier, segments = getu64(control + MULTIPLIER), get64(control + SEGMENTS)
    bits = get64(control + SEGMENT_BITS)
    for index in range(min(num_hashes, _PREFETCH_AHEAD)):
        key = getu64(hashes + index * 8) * multiplier
        row = _locate(segments, bits, key)
        prefetch(row)
        prefetch(row + 64)


@_jit("i8(i8,i8,i8,u8,i8,i8)")
def _check_chain(control, slot, is_child, parent, hashes, num_hashes):
    """INVALID if a block is its own parent, ORPHAN if this slot does not hold the first parent in any tier, else 0."""
    previous = parent
    for index in range(num_hashes):
        block_hash = getu64(hashes + index * 8)
        if block_hash == previous and (index > 0 or is_child):
            return INVALID
        previous = block_hash
    if is_child:
        key = parent * getu64(control + MULTIPLIER)
        row = _seek(_home_row(control, _segment_of(control, key), key), key)
        if _tiers_of(control, _set_at(row, key), slot) == 0:
            return ORPHAN
    return 0


@_jit("i8(i8,i8,i8,i8,u8,i8,i8,i8)")
def _store_chain(control, slot, tier, is_child, parent, hashes, num_hashes, start):
    multiplier = getu64(control + MULTIPLIER)
    _prefetch_rows(control, hashes, num_hashes)
    if start == 0:
        refusal = _check_chain(control, slot, is_child, parent, hashes, num_hashes)
        if refusal < 0:
            return refusal
    entry = get64(control + SLOTS) + slot * SLOT_BYTES
    for index in range(start, num_hashes):
        if index & (_PREFETCH_AHEAD - 1) == 0 and index > 0:
            _prefetch_rows(control, hashes + index * 8, num_hashes - index)
        block_hash = getu64(hashes + index * 8)
        if index > 0:
            parent = getu64(hashes + index * 8 - 8)
        elif not is_child:
            parent = block_hash
        result = _store_one(control, multiplier, block_hash, parent, slot, tier, entry)
        if result < 0:
            put64(control + RESUME, index)
            return NEEDS_HELP
        put64(control + NUM_APPLIED, get64(control + NUM_APPLIED) + result)
    return 0


@_jit("i8(i8,i8,i8,i8,i8,i8,i8)")
def store(control, slot, tier, is_child, parent, num_hashes, start):
    """Hold the input's hashes, as a chain below the parent (its bits); a refused chain changes nothing.

    Return 0, ORPHAN, INVALID, or NEEDS_HELP: then call again from `RESUME`. NUM_APPLIED grows by what is newly held.
    """
    return _store_chain(control, slot, tier, is_child, np.uint64(parent), get64(control + INPUT), num_hashes, start)


@_jit("i8(i8,i8,i8,i8,i8,i8)")
def _remove_all(control, slot, tier, hashes, num_hashes, start):
    multiplier = getu64(control + MULTIPLIER)
    entry = get64(control + SLOTS) + slot * SLOT_BYTES
    for index in range(start, num_hashes):
        if index & (_PREFETCH_AHEAD - 1) == 0 or index == start:
            _prefetch_rows(control, hashes + index * 8, num_hashes - index)
        result = _remove_one(control, multiplier, getu64(hashes + index * 8), slot, tier, entry)
        if result < 0:
            put64(control + RESUME, index)
            return NEEDS_HELP
        put64(control + NUM_NOT_FOUND, get64(control + NUM_NOT_FOUND) + 1 - result)
    return 0


@_jit("i8(i8,i8,i8,i8,i8)")
def remove(control, slot, tier, num_hashes, start):
    """Cease to hold the input's hashes, in any order. NUM_NOT_FOUND grows by those that were not held.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    return _remove_all(control, slot, tier, get64(control + INPUT), num_hashes, start)


@_jit("i8(i8,i8,i8,i8,i8)")
def apply(control, slot, num_operations, first_operation, start):
    """Carry out stores and removals in order, whose hashes follow one another in the input.

    Return the number of hashes used up; or NEEDS_HELP: then call again from `RESUME_OPERATION` and `RESUME`.
    """
    hashes = get64(control + INPUT)
    for index in range(num_operations):
        operation = get64(control + OPERATIONS) + index * OPERATION_BYTES
        kind, tier, num_hashes = get64(operation), get64(operation + 8), get64(operation + 24) >> 3
        if index >= first_operation:
            if kind == REMOVE:
                result = _remove_all(control, slot, tier, hashes, num_hashes, start)
            else:
                parent = getu64(operation + 16)
                result = _store_chain(control, slot, tier, kind, parent, hashes, num_hashes, start)
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
    multiplier = getu64(control + MULTIPLIER)
    for index in range(start, num_rows):
        row = get64(control + INPUT) + index * 24
        member = get64(row + 16)
        entry = get64(control + SLOTS) + (member >> 4) * SLOT_BYTES
        for tier in range(4):
            if member >> tier & 1:
                result = _store_one(control, multiplier, getu64(row), getu64(row + 8), member >> 4, tier, entry)
                if result < 0:
                    put64(control + RESUME, index)
                    return NEEDS_HELP
                put64(control + NUM_APPLIED, get64(control + NUM_APPLIED) + result)
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
        for tier in range(4):
            put32(output + 4 + tier * 4, depth)
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
        put_word(active, index, np.uint64(0))
    return num_words


@_jit("i8(i8,i8,i8,i8,i8)")
def _intersect_words(control, num_words, record, depth, output):
    """Drop from the active words who is not in a dense set (nobody is, for record 0); return the end of the output.

    Active words come in eights, with zeros at the end; what is read there beyond a record does not matter.
    """
    active, depths, gone = get64(control + ACTIVE), get64(control + DEPTHS), get64(control + WORDS)
    payload, num_held, num_padded = record + RECORD_HEADER_BYTES, 0, (num_words + 7) & ~7
    if record:
        num_held = num_padded if get32(record + 20) >= num_words else get32(record + 20)
    for index in range(num_held):
        word = get_word(active, index)
        left = word & _closed_word(get_word(payload, index))
        put_word(active, index, left)
        put_word(gone, index, word ^ left)
    for index in range(num_held, num_padded):
        put_word(gone, index, get_word(active, index))
        put_word(active, index, np.uint64(0))
    for first in range(0, num_words, 8):
        changed = nonzero_words(gone + first * 8)
        while changed != np.uint64(0):
            index = first + lowest_bit(changed)
            changed &= changed - _U1
            dropped, left = get_word(gone, index), get_word(active, index)
            while dropped != np.uint64(0):
                slot = lowest_bit(dropped) >> 2
                shift = np.uint64(slot * 4)
                tiers = np.int64((dropped >> shift) & _NIBBLE)
                remaining = np.int64((left >> shift) & _NIBBLE)
                output = _drop(depths, output, index * 16 + slot, tiers, remaining, depth)
                dropped &= ~(_NIBBLE << shift)
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


@_jit("i8(i8,i8)")
def match(control, num_hashes):
    """Write, per slot that holds the first block, its cumulative depth in each tier; return the number of slots.

    Output, 20 bytes a slot: u32 slot, four u32 depths. The set is only looked at where its id changes.
    """
    multiplier, hashes, pipeline = getu64(control + MULTIPLIER), get64(control + INPUT), control + PIPELINE
    start, active = get64(control + OUTPUT), get64(control + ACTIVE)
    segments, bits = get64(control + SEGMENTS), get64(control + SEGMENT_BITS)
    output, last, num_begun, num_words, num_active, num_located, depth = start, -1, 0, 0, 0, 0, 0
    while depth < num_hashes:
        # One group is looked up while the lines of the next one are on their way; a row may lie in the second line.
        for index in range(num_located, min(num_hashes, depth + 2 * _PREFETCH_AHEAD)):
            key = getu64(hashes + index * 8) * multiplier
            row = _locate(segments, bits, key)
            prefetch(row)
            prefetch(row + 64)
            entry = pipeline + (index & _PIPELINE_MASK) * 16
            putu64(entry, key)
            put64(entry + 8, row)
        num_located = min(num_hashes, depth + 2 * _PREFETCH_AHEAD)
        is_done = False
        for index in range(depth, min(num_hashes, depth + _PREFETCH_AHEAD)):
            entry = pipeline + (index & _PIPELINE_MASK) * 16
            key = getu64(entry)
            set_id = _set_at(_seek(get64(entry + 8), key), key)
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
        if is_done:
            break
    if num_words:
        output = _intersect_words(control, num_words, 0, depth, output)
    else:
        output = _intersect_list(control, num_active, 0, depth, output)
    return (output - start) // 20


# --- Housekeeping ---------------------------------------------------------------------------------------------------


@_jit("i8(i8,i8,i8,i8,i8)")
def _pack(address, old_end, end, bits, capacity):
    """Move the rows in [address, old_end) up to the end, in order; return the first, negated if one passes its home."""
    first, cursor, fits = end, old_end, True
    while cursor > address:
        cursor -= ROW_BYTES
        move(first - ROW_BYTES, cursor, ROW_BYTES)  # a vacant one is overwritten: no jump to mispredict
        first -= np.int64(get32(cursor + 16) != 0) * ROW_BYTES
        fits = fits and (first == end or address + _home(getu64(first), bits, capacity) * ROW_BYTES <= first)
    _vacate(address, first)
    return first if fits else -first


@_jit("i8(i8,i8,i8,i8,i8)")
def rebuild(control, segment_index, capacity, rows, is_purge):
    """Lay a segment out anew, in place, for another capacity; with `is_purge`, take the retired slots out of it.

    Its buffer must have room for `rows` and for the rows it has now. One pass from left to right writes each row at
    max(home, end of the one before), which never passes the row that is read: rows only move left. If the segment
    grows, they are packed to the right end first.
    Return the number of rows in use, with the guard; or 0, with nothing lost, if the padding is too small for that
    capacity; or NEEDS_HELP if a purged set needs a slab: then call again.
    """
    segment = get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    bits, address, old_rows = get64(control + SEGMENT_BITS), get64(segment), get32(segment + 12)
    read, read_end, result = address, address + old_rows * ROW_BYTES, 0
    if rows > old_rows:
        read_end = address + rows * ROW_BYTES
        _vacate(address + old_rows * ROW_BYTES, read_end)
        read = _pack(address, address + old_rows * ROW_BYTES, read_end - GUARD_ROWS * ROW_BYTES, bits, capacity)
        put32(segment + 12, rows)
        if read < 0:
            return 0
    end, clean, count = address, read, 0  # rows in [end, clean) are vacant, and so read already
    while read < read_end:
        old = get32(read + 16)
        if old != 0:
            new = _purged(control, old) if is_purge else old
            if new < 0:
                new, result = old, NEEDS_HELP
            key, parent = getu64(read), getu64(read + 8)
            if new != old:
                _add_references(control, new, 1)
                _add_references(control, old, -1)
            if new != 0:
                row = max(address + _home(key, bits, capacity) * ROW_BYTES, end)
                if row >= clean:
                    limit = min(row + _CLEAN_ROWS * ROW_BYTES, read)
                    _vacate(clean, limit)
                    clean = max(limit, row + ROW_BYTES)
                putu64(row, key)
                putu64(row + 8, parent)
                put32(row + 16, new)
                end = row + ROW_BYTES
                count += 1
        read += ROW_BYTES
    _vacate(max(clean, end), read_end)
    put64(control + NUM_ROWS, get64(control + NUM_ROWS) + count - get32(segment + 16))
    put32(segment + 8, capacity)
    put32(segment + 16, count)
    return result if result < 0 else (end - address) // ROW_BYTES + GUARD_ROWS


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
def pin(control, address, num_rows, change):
    """Count the rows of a copy as references to their sets (change 1), or no longer (change -1)."""
    for row in range(address, address + num_rows * ROW_BYTES, ROW_BYTES):
        _add_references(control, get32(row + 16), change)


@_jit("i8(i8,i8,i8)")
def _snapshot_rows(control, snapshot, segment_index):
    """Address of a segment's rows as they were."""
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


@_jit("i8(i8,i8)")
def _push_parent(control, snapshot):
    """Put the parent of the row on top of the stack above it; return 0 if there is none, or it was there before."""
    top = get64(get64(snapshot + 24) + (get64(snapshot + 32) - 1) * 8)
    row = _snapshot_rows(control, snapshot, top >> 32) + (top & 0xFFFF_FFFF) * ROW_BYTES
    key, bits = getu64(row + 8) * getu64(control + MULTIPLIER), get64(control + SEGMENT_BITS)
    segment_index = np.int64((key >> _U1) >> np.uint64(63 - bits))
    entry = get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
    address = _snapshot_rows(control, snapshot, segment_index)
    row = _seek(address + _home(key, bits, get32(entry + 8)) * ROW_BYTES, key)
    if _set_at(row, key) == 0:
        return 0
    return _push_if_new(snapshot, segment_index, (row - address) // ROW_BYTES)


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
            row = _snapshot_rows(control, snapshot, top >> 32) + (top & 0xFFFF_FFFF) * ROW_BYTES
            move(output + count * ROW_BYTES, row, ROW_BYTES)
            put64(snapshot + 32, depth - 1)
            count += 1
        else:
            segment_index, row_index = get64(snapshot + 8), get64(snapshot + 16)
            if segment_index == 1 << get64(control + SEGMENT_BITS):
                return count if count else -1
            if row_index == get32(get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES + 12):
                put64(snapshot + 8, segment_index + 1)
                put64(snapshot + 16, 0)
            else:
                put64(snapshot + 16, row_index + 1)
                row = _snapshot_rows(control, snapshot, segment_index) + row_index * ROW_BYTES
                if get32(row + 16) != 0:
                    put64(snapshot + 48, _push_if_new(snapshot, segment_index, row_index))
    return count
