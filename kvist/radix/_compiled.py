"""Every compiled function of the index; nothing here calls compiled code of another module, or takes an array.

Functions take the address of the control block and integers, so that a call from Python costs a fifth of a microsecond
and calls among them count no references. Addresses, indices and set ids are int64 throughout; only block hashes and
their products are uint64. **Trap:** an int64 with a uint64 becomes a float64, so constants that meet a hash are `_U*`.

Layout (all sizes in bytes)
---------------------------
Row, 20: a block that somebody holds.
    0  u64 key      hash times a secret odd number, modulo 2**64; all ones where the row is vacant
    8  u64 parent   hash of the block before it; its own hash at a root (no block is its own parent)
    16 u32 set id   who holds it; 0 where the row is vacant

Segment: the keys that share their top bits, in ascending order with gaps: linear probing that stays sorted. A row's
home is its key's place in the key range, scaled to the capacity. Between home and row there is no vacancy, and the last
`GUARD_ROWS` rows are always vacant; hence a search needs no bounds check. Entry in the segment directory, 24:
    0  i64 address    8  u32 capacity (range of homes)    12 u32 rows (with padding)    16 u32 count    20 u32 captured

Set id, u32: who holds a block, in which tiers. A *member* is `slot << 4 | tiers`: a slot stands for one rank of one
worker, `tiers` has bit t set if it holds the block in tier t.
    0                  nobody
    1 << 31 | member   one slot, told by the id itself
    slab << 13 | record                      several slots; equal sets have equal ids, and a record counts its rows
Record: 0 u32 references  4 u32 stamp (unique among living records; 0 = free)  8 u32 hash (sum over members)
    12 u32 next in bucket or free list  16 u32 number of members  20 u32 number of words, 0 if sparse  24 payload
    sparse payload: u32 members, ascending       dense payload: u64 words of 16 slots, four tier bits each
    Dense exactly if that is smaller, so that equal sets are equal bytes.
Slab, 40: 0 i64 address  8 u32 record bytes  12 u32 capacity  16 u32 used  20 u32 fresh (never used from here on)
    24 u32 free list (index + 1)  28 u32 previous  32 u32 next slab with room  36 u32 class
Class, 8: 0 u32 record bytes  4 u32 first slab with room (0 = none; slab 0 is never used)
Bucket: u32 set id, head of a chain. Pages of 4,096 buckets; linear hashing adds or merges one page at a time.
Transition, 20: (set id, operation) -> set id, valid while the stamps match. 0 u32 set  4 u32 operation
    8 u32 stamp of set  12 u32 result  16 u32 stamp of result
Snapshot, 48: 0 i64 directory  8 segment and  16 row of the cursor  24 stack  32 its depth  40 output, of rows
    Its directory, 24 an entry: 0 i64 address of a copy (0: the segment is as it was)  8 u32 capacity  12 u32 rows
    16 i64 address of one byte a row: 1 once the row was put on the stack
Slot, 32: 0 i64 number of (block, tier) held  8 u64 digest of them  16 u32 state
"""

# mypy: ignore-errors
# The signature string of each function is its type: mypy knows neither these nor Numba's intrinsics.
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvist.radix._cache import jit_for

# The control block: 64-bit fields, by byte offset.
MULTIPLIER, INVERSE, SEGMENT_BITS, SEGMENTS, SLABS, CLASSES, BUCKETS, NUM_BUCKETS = range(0, 64, 8)
TRANSITIONS, SLOTS, MEMBERS, WORDS, ACTIVE, DEPTHS, OUTPUT, SELF = range(64, 128, 8)
INPUT, OPERATIONS, NUM_ROWS, NUM_SETS, NEXT_STAMP, NUM_EMPTY_SLABS, NUM_RETIRED, RETIRE_EPOCH = range(128, 192, 8)
NEED_KIND, NEED_ARG, RESUME, RESUME_OPERATION, NUM_CONFLICTS, IS_CAPTURING = range(192, 240, 8)
NUM_APPLIED, NUM_NOT_FOUND, NUM_ORPHANS, NUM_INVALID = range(240, 272, 8)
PIPELINE, CONTROL_BYTES = 512, 1024  # the rest is scratch for the keys and rows looked up ahead

SNAPSHOT_BYTES, SNAPSHOT_ENTRY_BYTES = 48, 24
ROW_BYTES, SEGMENT_BYTES, SLAB_BYTES, CLASS_BYTES, TRANSITION_BYTES, SLOT_BYTES = 20, 24, 40, 8, 20, 32
OPERATION_BYTES = 32  # u64 kind, tier, parent hash, size of its hashes in bytes
STORE_ROOT, STORE_CHILD, REMOVE = 0, 1, 2
RECORD_HEADER_BYTES, RECORD_BITS, BUCKETS_PER_PAGE = 24, 13, 4096
NUM_TRANSITIONS = 4096
GUARD_ROWS = 4
INLINE = 1 << 31
NEED_SEGMENT, NEED_SLAB, NEED_CAPTURE = 1, 2, 3
LIVE, RETIRED = 1, 2
# Results of a store, beside the number of newly held residencies.
NEEDS_HELP, ORPHAN, INVALID = -1, -2, -3

_RECORD_MASK = (1 << RECORD_BITS) - 1
_PURGE = 1 << 31
_PREFETCH_AHEAD = 16
_CLEAN_ROWS = 64
_U1, _U2, _U3, _U4, _U27, _U30, _U31, _U32 = (np.uint64(n) for n in (1, 2, 3, 4, 27, 30, 31, 32))
_VACANT = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_TIER_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_ABOVE_1, _ABOVE_2, _LOWEST = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC, 1))
_NIBBLE = np.uint64(15)

_jit = jit_for(Path(__file__))


def _access(name: str, bits: int, result: Any, *, is_store: bool = False) -> Any:
    """Return an intrinsic that loads from, or stores to, an address; 32-bit values are unsigned."""
    stored = ir.IntType(bits)

    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, stored.as_pointer())

    def load(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = builder.load(pointer(builder, args[0]), align=4, typ=stored)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return result(types.int64), generate

    def store(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = args[1] if bits == 64 else builder.trunc(args[1], stored)
            builder.store(value, pointer(builder, args[0]), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, result), generate

    function = store if is_store else load
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


_get32 = _access("get32", 32, types.int64)
_get64 = _access("get64", 64, types.int64)
_getu64 = _access("getu64", 64, types.uint64)
_put32 = _access("put32", 32, types.int64, is_store=True)
_put64 = _access("put64", 64, types.int64, is_store=True)
_putu64 = _access("putu64", 64, types.uint64, is_store=True)


def _word_access(name: str, *, is_store: bool) -> Any:
    """Return an intrinsic on the words of an array, by address and index: in this form LLVM makes vectors of them."""
    word = ir.IntType(64)

    def pointer(builder: Any, args: Any) -> Any:
        return builder.gep(builder.inttoptr(args[0], word.as_pointer()), [args[1]], inbounds=True, source_etype=word)

    def load(_typing: Any, _array: Any, _index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args), align=4, typ=word)

        return types.uint64(types.int64, types.int64), generate

    def store(_typing: Any, _array: Any, _index: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[2], pointer(builder, args), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.uint64), generate

    function = store if is_store else load
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


_get_word = _word_access("get_word", is_store=False)
_put_word = _word_access("put_word", is_store=True)


@intrinsic
def _nonzero_words(_typing: Any, _address: Any) -> Any:
    """Return eight bits: which of eight words are not zero. One vector comparison, and no jump to mispredict."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), 8)
        words = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=4, typ=vector)
        bits = builder.icmp_unsigned("!=", words, ir.Constant(vector, None))
        return builder.zext(builder.bitcast(bits, ir.IntType(8)), ir.IntType(64))

    return types.uint64(types.int64), generate


@intrinsic
def _move(_typing: Any, _target: Any, _source: Any, _size: Any) -> Any:
    """Copy bytes between regions that may overlap."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        cgutils.raw_memmove(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch(_typing: Any, _address: Any) -> Any:
    """Ask for the cache line of an address that will be read soon."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32]), "llvm.prefetch.p0"
        )
        builder.call(function, [builder.inttoptr(args[0], byte), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _lowest_bit(_typing: Any, _value: Any) -> Any:
    """Return the index of the lowest bit set of a value that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


# --- Rows -----------------------------------------------------------------------------------------------------------


@_jit("i8(u8,i8,i8)")
def _home(key, segment_bits, capacity):
    """Index of a key's home row in its segment."""
    return (np.int64((key << np.uint64(segment_bits)) >> _U32) * capacity) >> 32


@_jit("i8(i8,u8)")
def _segment_of(control, key):
    """Directory entry of a key's segment. Two shifts: by 64 at once would be undefined with a single segment."""
    index = np.int64((key >> _U1) >> np.uint64(63 - _get64(control + SEGMENT_BITS)))
    return _get64(control + SEGMENTS) + index * SEGMENT_BYTES


@_jit("i8(i8,i8,u8)")
def _home_row(control, segment, key):
    home = _home(key, _get64(control + SEGMENT_BITS), _get32(segment + 8))
    return _get64(segment) + home * ROW_BYTES


@_jit("i8(i8,i8,u8)")
def _locate(segments, bits, key):
    """Home row of a key; for loops, which read the directory's address and the bits once."""
    segment = segments + np.int64((key >> _U1) >> np.uint64(63 - bits)) * SEGMENT_BYTES
    return _get64(segment) + _home(key, bits, _get32(segment + 8)) * ROW_BYTES


@_jit("i8(i8,u8)")
def _seek(row, key):
    """First row, from a key's home on, whose key is not smaller. Counting four at a time saves a mispredicted jump."""
    while True:
        smaller = (
            np.int64(_getu64(row) < key)
            + np.int64(_getu64(row + ROW_BYTES) < key)
            + np.int64(_getu64(row + 2 * ROW_BYTES) < key)
            + np.int64(_getu64(row + 3 * ROW_BYTES) < key)
        )
        row += smaller * ROW_BYTES
        if smaller < 4:
            return row


@_jit("i8(i8,u8)")
def _set_at(row, key):
    """Set id of the row if it is this key's, else 0."""
    return _get32(row + 16) if _getu64(row) == key else 0


@_jit("void(i8,i8)")
def _vacate(row, end):
    """Mark the rows in [row, end) vacant."""
    while row < end:
        _putu64(row, _VACANT)
        _put64(row + 8, 0)
        _put32(row + 16, 0)
        row += ROW_BYTES


@_jit("i8(i8,i8,i8)")
def _need(control, kind, argument):
    """Record what the caller must provide before the call can go on."""
    _put64(control + NEED_KIND, kind)
    _put64(control + NEED_ARG, argument)
    return NEEDS_HELP


@_jit("b1(i8,i8)")
def _is_uncaptured(control, segment):
    """Whether an open snapshot must copy this segment before it is written to."""
    return _get64(control + IS_CAPTURING) != 0 and _get32(segment + 20) == 0


@_jit("i8(i8,i8)")
def _need_segment(control, segment):
    return _need(control, NEED_SEGMENT, (segment - _get64(control + SEGMENTS)) // SEGMENT_BYTES)


@_jit("i8(i8,i8)")
def _need_capture(control, segment):
    return _need(control, NEED_CAPTURE, (segment - _get64(control + SEGMENTS)) // SEGMENT_BYTES)


@_jit("i8(i8,i8,i8,u8,u8,i8)")
def _insert_row(control, segment, row, key, parent, set_id):
    """Put a new row at its place, moving its successors up to the next vacancy; needs a bigger segment if full."""
    count, capacity = _get32(segment + 16), _get32(segment + 8)
    end = _get64(segment) + (_get32(segment + 12) - GUARD_ROWS) * ROW_BYTES
    gap = row
    while _get32(gap + 16) != 0:
        gap += ROW_BYTES
    if gap >= end or count >= capacity - (capacity >> 3):
        return _need_segment(control, segment)
    _move(row + ROW_BYTES, row, gap - row)
    _putu64(row, key)
    _putu64(row + 8, parent)
    _put32(row + 16, set_id)
    _put32(segment + 16, count + 1)
    _put64(control + NUM_ROWS, _get64(control + NUM_ROWS) + 1)
    return 0


@_jit("void(i8,i8,i8)")
def _delete_row(control, segment, row):
    """Take a row out; successors that are not at home move down, so that no tombstone is left."""
    bits, capacity, address = _get64(control + SEGMENT_BITS), _get32(segment + 8), _get64(segment)
    end = row + ROW_BYTES
    while _get32(end + 16) != 0 and address + _home(_getu64(end), bits, capacity) * ROW_BYTES < end:
        end += ROW_BYTES
    _move(row, row + ROW_BYTES, end - row - ROW_BYTES)
    _vacate(end - ROW_BYTES, end)
    _put32(segment + 16, _get32(segment + 16) - 1)
    _put64(control + NUM_ROWS, _get64(control + NUM_ROWS) - 1)


# --- Sets -----------------------------------------------------------------------------------------------------------


@_jit("i8(i8,i8)")
def _record(control, set_id):
    """Address of an interned set."""
    slab = _get64(control + SLABS) + (set_id >> RECORD_BITS) * SLAB_BYTES
    return _get64(slab) + (set_id & _RECORD_MASK) * _get32(slab + 8)


@_jit("i8(i8,i8)")
def _stamp(control, set_id):
    """What tells this set from later users of its id: 0 for ids that tell their members themselves."""
    return 0 if set_id == 0 or set_id & INLINE else _get32(_record(control, set_id) + 4)


@_jit("i8(i8)")
def _member_hash(member):
    mixed = np.uint64(member + 1) * _MIX_1
    return np.int64(((mixed ^ (mixed >> _U32)) * _MIX_2) >> _U32)


@_jit("i8(i8,i8)")
def _bucket(control, content_hash):
    """Address of a hash's bucket, by linear hashing."""
    num_buckets, span = _get64(control + NUM_BUCKETS), BUCKETS_PER_PAGE
    while span < num_buckets:
        span <<= 1
    index = content_hash & (span - 1)
    if index >= num_buckets:
        index &= (span >> 1) - 1
    return _get64(_get64(control + BUCKETS) + (index >> 12) * 8) + (index & (BUCKETS_PER_PAGE - 1)) * 4


@_jit("b1(i8,i8,i8)")
def _is_equal(left, right, size_bytes):
    offset = 0
    while offset < size_bytes and _get32(left + offset) == _get32(right + offset):
        offset += 4
    return offset >= size_bytes


@_jit("i8(i8,i8)")
def _allocate_record(control, payload_bytes):
    """Id of a free record of the smallest class that fits; needs a slab if that class has none with room."""
    size_class, entry = 0, _get64(control + CLASSES)
    while _get32(entry) < RECORD_HEADER_BYTES + payload_bytes:
        entry += CLASS_BYTES
        size_class += 1
    slab_id = _get32(entry + 4)
    if slab_id == 0:
        return _need(control, NEED_SLAB, size_class)
    slabs = _get64(control + SLABS)
    slab = slabs + slab_id * SLAB_BYTES
    used = _get32(slab + 16) + 1
    free = _get32(slab + 24)
    if free != 0:
        index = free - 1
        _put32(slab + 24, _get32(_get64(slab) + index * _get32(slab + 8) + 12))
    else:
        index = _get32(slab + 20)
        _put32(slab + 20, index + 1)
    if used == 1:
        _put64(control + NUM_EMPTY_SLABS, _get64(control + NUM_EMPTY_SLABS) - 1)
    _put32(slab + 16, used)
    if used == _get32(slab + 12):  # full: off the list, of which it is the head
        following = _get32(slab + 32)
        _put32(entry + 4, following)
        if following != 0:
            _put32(slabs + following * SLAB_BYTES + 28, 0)
    return slab_id << RECORD_BITS | index


@_jit("i8(i8,i8,i8,i8,i8)")
def _intern(control, payload, num_members, num_words, content_hash):
    """Id of the set with this canonical payload, made with no references if there is none yet."""
    size_bytes = num_words * 8 if num_words else num_members * 4
    bucket = _bucket(control, content_hash)
    set_id = _get32(bucket)
    while set_id != 0:
        record = _record(control, set_id)
        if (
            _get32(record + 8) == content_hash
            and _get32(record + 16) == num_members
            and _get32(record + 20) == num_words
            and _is_equal(record + RECORD_HEADER_BYTES, payload, size_bytes)
        ):
            return set_id
        set_id = _get32(record + 12)
    set_id = _allocate_record(control, size_bytes)
    if set_id < 0:
        return set_id
    stamp = _get64(control + NEXT_STAMP)
    if stamp >> 32:  # stamps come round: no remembered transition may outlive that
        stamp = 1
        for offset in range(0, NUM_TRANSITIONS * TRANSITION_BYTES, 4):
            _put32(_get64(control + TRANSITIONS) + offset, 0)
    _put64(control + NEXT_STAMP, stamp + 1)
    record = _record(control, set_id)
    _put32(record, 0)
    _put32(record + 4, stamp)
    _put32(record + 8, content_hash)
    _put32(record + 12, _get32(bucket))
    _put32(record + 16, num_members)
    _put32(record + 20, num_words)
    _move(record + RECORD_HEADER_BYTES, payload, size_bytes)
    _put32(bucket, set_id)
    _put64(control + NUM_SETS, _get64(control + NUM_SETS) + 1)
    return set_id


@_jit("void(i8,i8,i8)")
def _release(control, set_id, record):
    """Forget a set that no row refers to any more."""
    link = _bucket(control, _get32(record + 8))
    while _get32(link) != set_id:
        link = _record(control, _get32(link)) + 12
    _put32(link, _get32(record + 12))
    _put64(control + NUM_SETS, _get64(control + NUM_SETS) - 1)
    slab_id, slabs = set_id >> RECORD_BITS, _get64(control + SLABS)
    slab = slabs + slab_id * SLAB_BYTES
    _put32(record + 4, 0)
    _put32(record + 12, _get32(slab + 24))
    _put32(slab + 24, (set_id & _RECORD_MASK) + 1)
    used = _get32(slab + 16)
    if used == _get32(slab + 12):  # it was full: it has room again
        entry = _get64(control + CLASSES) + _get32(slab + 36) * CLASS_BYTES
        following = _get32(entry + 4)
        _put32(slab + 28, 0)
        _put32(slab + 32, following)
        if following != 0:
            _put32(slabs + following * SLAB_BYTES + 28, slab_id)
        _put32(entry + 4, slab_id)
    _put32(slab + 16, used - 1)
    if used == 1:
        _put64(control + NUM_EMPTY_SLABS, _get64(control + NUM_EMPTY_SLABS) + 1)


@_jit("void(i8,i8,i8)")
def _add_references(control, set_id, change):
    """Count rows that begin or cease to refer to a set; the last one releases it."""
    if set_id == 0 or set_id & INLINE:
        return
    record = _record(control, set_id)
    references = _get32(record) + change
    _put32(record, references)
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
    payload, num_words = record + RECORD_HEADER_BYTES, _get32(record + 20)
    if num_words:
        if slot >> 4 >= num_words:
            return 0
        return np.int64((_getu64(payload + (slot >> 4) * 8) >> np.uint64((slot & 15) * 4)) & _NIBBLE)
    low, high = 0, _get32(record + 16)
    while low < high:
        middle = (low + high) >> 1
        if _get32(payload + middle * 4) >> 4 < slot:
            low = middle + 1
        else:
            high = middle
    if low < _get32(record + 16):
        member = _get32(payload + low * 4)
        if member >> 4 == slot:
            return member & 15
    return 0


@_jit("i8(i8,i8,i8)")
def _intern_members(control, num_members, content_hash):
    """Id of the set whose members stand, ascending, in the scratch list."""
    members = _get64(control + MEMBERS)
    if num_members == 0:
        return 0
    if num_members == 1:
        return INLINE | _get32(members)
    num_words = (_get32(members + (num_members - 1) * 4) >> 8) + 1
    if num_members <= 2 * num_words:
        return _intern(control, members, num_members, 0, content_hash)
    words = _get64(control + WORDS)
    for word in range(num_words):
        _put64(words + word * 8, 0)
    for index in range(num_members):
        member = _get32(members + index * 4)
        word = words + (member >> 8) * 8
        _putu64(word, _getu64(word) | (np.uint64(member & 15) << np.uint64(((member >> 4) & 15) * 4)))
    return _intern(control, words, num_members, num_words, content_hash)


@_jit("i8(i8,i8)")
def list_members(control, set_id):
    """Write a set's members, ascending, to the scratch list; return how many."""
    members = _get64(control + MEMBERS)
    if set_id == 0:
        return 0
    if set_id & INLINE:
        _put32(members, set_id & (INLINE - 1))
        return 1
    record = _record(control, set_id)
    payload, num_words = record + RECORD_HEADER_BYTES, _get32(record + 20)
    if num_words == 0:
        _move(members, payload, _get32(record + 16) * 4)
        return _get32(record + 16)
    count = 0
    for index in range(num_words):
        word = _getu64(payload + index * 8)
        while word != np.uint64(0):
            slot = _lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & _NIBBLE
            word &= ~(_NIBBLE << np.uint64(slot * 4))
            _put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    return count


@_jit("i8(i8,i8,i8,i8,i8)")
def _with_tiers(control, set_id, slot, before, after):
    """Id of the set in which a slot has the tiers `after`, where now it has `before`; the two differ."""
    change = (_member_hash(slot << 4 | after) if after else 0) - (_member_hash(slot << 4 | before) if before else 0)
    if set_id != 0 and not set_id & INLINE:
        record = _record(control, set_id)
        content_hash = (_get32(record + 8) + change) & 0xFFFF_FFFF
        num_members, num_words = _get32(record + 16), _get32(record + 20)
        num_members += np.int64(before == 0) - np.int64(after == 0)
        if num_words and num_members > 2 * (num_words + 1) and slot >> 4 < num_words:  # stays dense: change the word
            words = _get64(control + WORDS)
            _move(words, record + RECORD_HEADER_BYTES, num_words * 8)
            word, shift = words + (slot >> 4) * 8, np.uint64((slot & 15) * 4)
            _putu64(word, (_getu64(word) & ~(_NIBBLE << shift)) | (np.uint64(after) << shift))
            while _getu64(words + (num_words - 1) * 8) == np.uint64(0):
                num_words -= 1
            return _intern(control, words, num_members, num_words, content_hash)
    elif set_id == 0:
        content_hash = change
    else:
        content_hash = (_member_hash(set_id & (INLINE - 1)) + change) & 0xFFFF_FFFF
    members, count = _get64(control + MEMBERS), list_members(control, set_id)
    index = count
    while index > 0 and _get32(members + (index - 1) * 4) >> 4 >= slot:
        index -= 1
    at = members + index * 4
    if before and after:
        _put32(at, slot << 4 | after)
    elif after:
        _move(at + 4, at, (count - index) * 4)
        _put32(at, slot << 4 | after)
        count += 1
    else:
        _move(at, at + 4, (count - index - 1) * 4)
        count -= 1
    return _intern_members(control, count, content_hash)


@_jit("i8(i8,i8,i8)")
def _transition(control, set_id, operation):
    """Address of the one place where the result of this operation on this set may be remembered."""
    mixed = (np.uint64(set_id) * _MIX_1) ^ (np.uint64(operation) * _MIX_2)
    return _get64(control + TRANSITIONS) + np.int64(mixed >> np.uint64(52)) * TRANSITION_BYTES


@_jit("i8(i8,i8,i8,i8)")
def _recall(control, transition, set_id, operation):
    """Remembered result, or -1. An id that has been reused since has another stamp."""
    if _get32(transition) != set_id or _get32(transition + 4) != operation:
        return -1
    result = _get32(transition + 12)
    if _get32(transition + 8) != _stamp(control, set_id) or _get32(transition + 16) != _stamp(control, result):
        return -1
    return result


@_jit("void(i8,i8,i8,i8,i8)")
def _remember(control, transition, set_id, operation, result):
    _put32(transition, set_id)
    _put32(transition + 4, operation)
    _put32(transition + 8, _stamp(control, set_id))
    _put32(transition + 12, result)
    _put32(transition + 16, _stamp(control, result))


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
    return _get32(_get64(control + SLOTS) + slot * SLOT_BYTES + 16) == RETIRED


@_jit("i8(i8,i8)")
def _purged(control, set_id):
    """Id of the set without its retired slots."""
    if set_id & INLINE:
        return 0 if _is_retired(control, (set_id & (INLINE - 1)) >> 4) else set_id
    operation = _PURGE | (_get64(control + RETIRE_EPOCH) & (_PURGE - 1))
    transition = _transition(control, set_id, operation)
    result = _recall(control, transition, set_id, operation)
    if result >= 0:
        return result
    members, count, kept, content_hash = _get64(control + MEMBERS), list_members(control, set_id), 0, 0
    for index in range(count):
        member = _get32(members + index * 4)
        if not _is_retired(control, member >> 4):
            _put32(members + kept * 4, member)
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
            _putu64(row + 8, parent)
        elif _getu64(row + 8) != parent:
            _put64(control + NUM_CONFLICTS, _get64(control + NUM_CONFLICTS) + 1)
        _put32(row + 16, new)
        _add_references(control, new, 1)
        _add_references(control, old, -1)
    _put64(entry, _get64(entry) + 1)
    _putu64(entry + 8, _getu64(entry + 8) + _block_digest(block_hash, tier))
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
        _put32(row + 16, new)
        _add_references(control, new, 1)
    _add_references(control, old, -1)
    _put64(entry, _get64(entry) - 1)
    _putu64(entry + 8, _getu64(entry + 8) - _block_digest(block_hash, tier))
    return 1


@_jit("void(i8,i8,i8)")
def _prefetch_rows(control, hashes, num_hashes):
    """Ask for the home rows of the next few hashes, so that their cache misses overlap."""
    multiplier, segments = _getu64(control + MULTIPLIER), _get64(control + SEGMENTS)
    bits = _get64(control + SEGMENT_BITS)
    for index in range(min(num_hashes, _PREFETCH_AHEAD)):
        key = _getu64(hashes + index * 8) * multiplier
        row = _locate(segments, bits, key)
        _prefetch(row)
        _prefetch(row + 64)


@_jit("i8(i8,i8,i8,u8,i8,i8)")
def _check_chain(control, slot, is_child, parent, hashes, num_hashes):
    """INVALID if a block is its own parent, ORPHAN if this slot does not hold the first parent in any tier, else 0."""
    previous = parent
    for index in range(num_hashes):
        block_hash = _getu64(hashes + index * 8)
        if block_hash == previous and (index > 0 or is_child):
            return INVALID
        previous = block_hash
    if is_child:
        key = parent * _getu64(control + MULTIPLIER)
        row = _seek(_home_row(control, _segment_of(control, key), key), key)
        if _tiers_of(control, _set_at(row, key), slot) == 0:
            return ORPHAN
    return 0


@_jit("i8(i8,i8,i8,i8,u8,i8,i8,i8)")
def _store_chain(control, slot, tier, is_child, parent, hashes, num_hashes, start):
    multiplier = _getu64(control + MULTIPLIER)
    _prefetch_rows(control, hashes, num_hashes)
    if start == 0:
        refusal = _check_chain(control, slot, is_child, parent, hashes, num_hashes)
        if refusal < 0:
            return refusal
    entry = _get64(control + SLOTS) + slot * SLOT_BYTES
    for index in range(start, num_hashes):
        if index & (_PREFETCH_AHEAD - 1) == 0 and index > 0:
            _prefetch_rows(control, hashes + index * 8, num_hashes - index)
        block_hash = _getu64(hashes + index * 8)
        if index > 0:
            parent = _getu64(hashes + index * 8 - 8)
        elif not is_child:
            parent = block_hash
        result = _store_one(control, multiplier, block_hash, parent, slot, tier, entry)
        if result < 0:
            _put64(control + RESUME, index)
            return NEEDS_HELP
        _put64(control + NUM_APPLIED, _get64(control + NUM_APPLIED) + result)
    return 0


@_jit("i8(i8,i8,i8,i8,i8,i8,i8)")
def store(control, slot, tier, is_child, parent, num_hashes, start):
    """Hold the input's hashes, as a chain below the parent (its bits); a refused chain changes nothing.

    Return 0, ORPHAN, INVALID, or NEEDS_HELP: then call again from `RESUME`. NUM_APPLIED grows by what is newly held.
    """
    return _store_chain(control, slot, tier, is_child, np.uint64(parent), _get64(control + INPUT), num_hashes, start)


@_jit("i8(i8,i8,i8,i8,i8,i8)")
def _remove_all(control, slot, tier, hashes, num_hashes, start):
    multiplier = _getu64(control + MULTIPLIER)
    entry = _get64(control + SLOTS) + slot * SLOT_BYTES
    for index in range(start, num_hashes):
        if index & (_PREFETCH_AHEAD - 1) == 0 or index == start:
            _prefetch_rows(control, hashes + index * 8, num_hashes - index)
        result = _remove_one(control, multiplier, _getu64(hashes + index * 8), slot, tier, entry)
        if result < 0:
            _put64(control + RESUME, index)
            return NEEDS_HELP
        _put64(control + NUM_NOT_FOUND, _get64(control + NUM_NOT_FOUND) + 1 - result)
    return 0


@_jit("i8(i8,i8,i8,i8,i8)")
def remove(control, slot, tier, num_hashes, start):
    """Cease to hold the input's hashes, in any order. NUM_NOT_FOUND grows by those that were not held.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    return _remove_all(control, slot, tier, _get64(control + INPUT), num_hashes, start)


@_jit("i8(i8,i8,i8,i8,i8)")
def apply(control, slot, num_operations, first_operation, start):
    """Carry out stores and removals in order, whose hashes follow one another in the input.

    Return the number of hashes used up; or NEEDS_HELP: then call again from `RESUME_OPERATION` and `RESUME`.
    """
    hashes = _get64(control + INPUT)
    for index in range(num_operations):
        operation = _get64(control + OPERATIONS) + index * OPERATION_BYTES
        kind, tier, num_hashes = _get64(operation), _get64(operation + 8), _get64(operation + 24) >> 3
        if index >= first_operation:
            if kind == REMOVE:
                result = _remove_all(control, slot, tier, hashes, num_hashes, start)
            else:
                parent = _getu64(operation + 16)
                result = _store_chain(control, slot, tier, kind, parent, hashes, num_hashes, start)
            if result == NEEDS_HELP:
                _put64(control + RESUME_OPERATION, index)
                return NEEDS_HELP
            if result == ORPHAN:
                _put64(control + NUM_ORPHANS, _get64(control + NUM_ORPHANS) + 1)
            elif result == INVALID:
                _put64(control + NUM_INVALID, _get64(control + NUM_INVALID) + 1)
            start = 0
        hashes += num_hashes * 8
    return 0


@_jit("i8(i8,i8,i8)")
def restore(control, num_rows, start):
    """Hold the input's rows, each (hash, parent, slot << 4 | tiers), without asking for parents.

    Return 0, or NEEDS_HELP: then call again from `RESUME`.
    """
    multiplier = _getu64(control + MULTIPLIER)
    for index in range(start, num_rows):
        row = _get64(control + INPUT) + index * 24
        member = _get64(row + 16)
        entry = _get64(control + SLOTS) + (member >> 4) * SLOT_BYTES
        for tier in range(4):
            if member >> tier & 1:
                result = _store_one(control, multiplier, _getu64(row), _getu64(row + 8), member >> 4, tier, entry)
                if result < 0:
                    _put64(control + RESUME, index)
                    return NEEDS_HELP
                _put64(control + NUM_APPLIED, _get64(control + NUM_APPLIED) + result)
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
        _put32(output, slot)
        for tier in range(4):
            _put32(output + 4 + tier * 4, depth)
        return output + 20
    for tier in range(4):
        if dropped >> tier & 1:
            _put32(at + tier * 4, depth)
    if remaining:
        return output
    _put32(output, slot)
    _move(output + 4, at, 16)
    return output + 20


@_jit("i8(i8,i8)")
def _begin(control, set_id):
    """Make a set's living members the active list; return how many."""
    members, active, depths = _get64(control + MEMBERS), _get64(control + ACTIVE), _get64(control + DEPTHS)
    has_retired, num_active = _get64(control + NUM_RETIRED) > 0, 0
    for index in range(list_members(control, set_id)):
        member = _get32(members + index * 4)
        if has_retired and _is_retired(control, member >> 4):
            continue
        tiers = _closed(member & 15)
        if tiers != 15:
            _put64(depths + (member >> 4) * 16, 0)
            _put64(depths + (member >> 4) * 16 + 8, 0)
        _put32(active + num_active * 4, (member >> 4) << 4 | tiers)
        num_active += 1
    return num_active


@_jit("i8(i8,i8)")
def _begin_dense(control, record):
    """Make a dense set, without retired slots, the active words; return how many words."""
    active, depths, num_words = _get64(control + ACTIVE), _get64(control + DEPTHS), _get32(record + 20)
    has_retired = _get64(control + NUM_RETIRED) > 0
    for index in range(num_words):
        word = _closed_word(_getu64(record + RECORD_HEADER_BYTES + index * 8))
        slower = (word >> _U3) & ~word & _LOWEST  # held, but not in tier 0
        while slower != np.uint64(0):
            at = depths + (index * 16 + (_lowest_bit(slower) >> 2)) * 16
            _put64(at, 0)
            _put64(at + 8, 0)
            slower &= slower - _U1
        if has_retired:
            held = (word >> _U3) & _LOWEST
            while held != np.uint64(0):
                bit = _lowest_bit(held)
                if _is_retired(control, index * 16 + (bit >> 2)):
                    word &= ~(_NIBBLE << np.uint64(bit))
                held &= held - _U1
        _putu64(active + index * 8, word)
    for index in range(num_words, num_words + 7):
        _put_word(active, index, np.uint64(0))
    return num_words


@_jit("i8(i8,i8,i8,i8,i8)")
def _intersect_words(control, num_words, record, depth, output):
    """Drop from the active words who is not in a dense set (nobody is, for record 0); return the end of the output.

    Active words come in eights, with zeros at the end; what is read there beyond a record does not matter.
    """
    active, depths, gone = _get64(control + ACTIVE), _get64(control + DEPTHS), _get64(control + WORDS)
    payload, num_held, num_padded = record + RECORD_HEADER_BYTES, 0, (num_words + 7) & ~7
    if record:
        num_held = num_padded if _get32(record + 20) >= num_words else _get32(record + 20)
    for index in range(num_held):
        word = _get_word(active, index)
        left = word & _closed_word(_get_word(payload, index))
        _put_word(active, index, left)
        _put_word(gone, index, word ^ left)
    for index in range(num_held, num_padded):
        _put_word(gone, index, _get_word(active, index))
        _put_word(active, index, np.uint64(0))
    for first in range(0, num_words, 8):
        changed = _nonzero_words(gone + first * 8)
        while changed != np.uint64(0):
            index = first + _lowest_bit(changed)
            changed &= changed - _U1
            dropped, left = _get_word(gone, index), _get_word(active, index)
            while dropped != np.uint64(0):
                slot = _lowest_bit(dropped) >> 2
                shift = np.uint64(slot * 4)
                tiers = np.int64((dropped >> shift) & _NIBBLE)
                remaining = np.int64((left >> shift) & _NIBBLE)
                output = _drop(depths, output, index * 16 + slot, tiers, remaining, depth)
                dropped &= ~(_NIBBLE << shift)
    return output


@_jit("i8(i8,i8)")
def _words_to_list(control, num_words):
    """Turn the active words into the active list; return how many are active."""
    active, members, count = _get64(control + ACTIVE), _get64(control + MEMBERS), 0
    for index in range(num_words):
        word = _getu64(active + index * 8)
        while word != np.uint64(0):
            slot = _lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & _NIBBLE
            word &= ~(_NIBBLE << np.uint64(slot * 4))
            _put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    _move(active, members, count * 4)
    return count


@_jit("i8(i8,i8,i8,i8,i8)")
def _intersect_list(control, num_active, set_id, depth, output):
    """Drop from the active list who is not in a set; return the end of the output."""
    active, depths, kept = _get64(control + ACTIVE), _get64(control + DEPTHS), 0
    is_sparse, payload, num_members, at = False, 0, 0, 0
    if set_id != 0 and not set_id & INLINE:
        record = _record(control, set_id)
        is_sparse, payload, num_members = _get32(record + 20) == 0, record + RECORD_HEADER_BYTES, _get32(record + 16)
    for index in range(num_active):
        before = _get32(active + index * 4)
        slot, tiers = before >> 4, 0
        if is_sparse:
            while at < num_members and _get32(payload + at * 4) >> 4 < slot:
                at += 1
            if at < num_members and _get32(payload + at * 4) >> 4 == slot:
                tiers = _get32(payload + at * 4) & 15
        else:
            tiers = _tiers_of(control, set_id, slot)
        after = before & _closed(tiers)
        if after:
            _put32(active + kept * 4, slot << 4 | after)
            kept += 1
        if after != before & 15:
            output = _drop(depths, output, slot, before & 15 & ~after, after, depth)
    return output


@_jit("i8(i8,i8)")
def match(control, num_hashes):
    """Write, per slot that holds the first block, its cumulative depth in each tier; return the number of slots.

    Output, 20 bytes a slot: u32 slot, four u32 depths. The set is only looked at where its id changes.
    """
    multiplier, hashes, pipeline = _getu64(control + MULTIPLIER), _get64(control + INPUT), control + PIPELINE
    start, active = _get64(control + OUTPUT), _get64(control + ACTIVE)
    segments, bits = _get64(control + SEGMENTS), _get64(control + SEGMENT_BITS)
    output, last, num_begun, num_words, num_active, depth = start, -1, 0, 0, 0, 0
    while depth < num_hashes:
        num_ahead = min(_PREFETCH_AHEAD, num_hashes - depth)
        for index in range(num_ahead):
            key = _getu64(hashes + (depth + index) * 8) * multiplier
            row = _locate(segments, bits, key)
            _prefetch(row)
            _putu64(pipeline + index * 16, key)
            _put64(pipeline + index * 16 + 8, row)
        is_done = False
        for index in range(num_ahead):
            key = _getu64(pipeline + index * 16)
            set_id = _set_at(_seek(_get64(pipeline + index * 16 + 8), key), key)
            if set_id == last:
                depth += 1
                continue
            is_dense, record = False, 0
            if set_id != 0 and not set_id & INLINE:
                record = _record(control, set_id)
                is_dense = _get32(record + 20) != 0
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
            while num_words and _getu64(active + (num_words - 1) * 8) == np.uint64(0):
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
        _move(first - ROW_BYTES, cursor, ROW_BYTES)  # a vacant one is overwritten: no jump to mispredict
        first -= np.int64(_get32(cursor + 16) != 0) * ROW_BYTES
        fits = fits and (first == end or address + _home(_getu64(first), bits, capacity) * ROW_BYTES <= first)
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
    segment = _get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES
    bits, address, old_rows = _get64(control + SEGMENT_BITS), _get64(segment), _get32(segment + 12)
    read, read_end, result = address, address + old_rows * ROW_BYTES, 0
    if rows > old_rows:
        read_end = address + rows * ROW_BYTES
        _vacate(address + old_rows * ROW_BYTES, read_end)
        read = _pack(address, address + old_rows * ROW_BYTES, read_end - GUARD_ROWS * ROW_BYTES, bits, capacity)
        _put32(segment + 12, rows)
        if read < 0:
            return 0
    end, clean, count = address, read, 0  # rows in [end, clean) are vacant, and so read already
    while read < read_end:
        old = _get32(read + 16)
        if old != 0:
            new = _purged(control, old) if is_purge else old
            if new < 0:
                new, result = old, NEEDS_HELP
            key, parent = _getu64(read), _getu64(read + 8)
            if new != old:
                _add_references(control, new, 1)
                _add_references(control, old, -1)
            if new != 0:
                row = max(address + _home(key, bits, capacity) * ROW_BYTES, end)
                if row >= clean:
                    limit = min(row + _CLEAN_ROWS * ROW_BYTES, read)
                    _vacate(clean, limit)
                    clean = max(limit, row + ROW_BYTES)
                _putu64(row, key)
                _putu64(row + 8, parent)
                _put32(row + 16, new)
                end = row + ROW_BYTES
                count += 1
        read += ROW_BYTES
    _vacate(max(clean, end), read_end)
    _put64(control + NUM_ROWS, _get64(control + NUM_ROWS) + count - _get32(segment + 16))
    _put32(segment + 8, capacity)
    _put32(segment + 16, count)
    return result if result < 0 else (end - address) // ROW_BYTES + GUARD_ROWS


@_jit("void(i8)")
def split_buckets(control):
    """Open the next page of buckets, already zeroed and in the directory, and move to it what hashes there now."""
    num_buckets, span = _get64(control + NUM_BUCKETS), BUCKETS_PER_PAGE
    while span <= num_buckets:
        span <<= 1
    half = span >> 1  # bucket b of the new page takes from bucket b - half
    pages = _get64(control + BUCKETS)
    upper = _get64(pages + (num_buckets >> 12) * 8)
    lower = _get64(pages + ((num_buckets - half) >> 12) * 8)
    for index in range(BUCKETS_PER_PAGE):
        link, target = lower + index * 4, upper + index * 4
        set_id = _get32(link)
        while set_id != 0:
            record = _record(control, set_id)
            following = _get32(record + 12)
            if _get32(record + 8) & half:
                _put32(link, following)
                _put32(record + 12, _get32(target))
                _put32(target, set_id)
            else:
                link = record + 12
            set_id = following
    _put64(control + NUM_BUCKETS, num_buckets + BUCKETS_PER_PAGE)


@_jit("void(i8)")
def merge_buckets(control):
    """Undo the last `split_buckets`: empty the last page into the one it came from."""
    num_buckets, half = _get64(control + NUM_BUCKETS) - BUCKETS_PER_PAGE, BUCKETS_PER_PAGE
    while half << 1 <= num_buckets:
        half <<= 1
    pages = _get64(control + BUCKETS)
    upper = _get64(pages + (num_buckets >> 12) * 8)
    lower = _get64(pages + ((num_buckets - half) >> 12) * 8)
    for index in range(BUCKETS_PER_PAGE):
        link = lower + index * 4
        while _get32(link) != 0:
            link = _record(control, _get32(link)) + 12
        _put32(link, _get32(upper + index * 4))
        _put32(upper + index * 4, 0)
    _put64(control + NUM_BUCKETS, num_buckets)


# --- Snapshots ------------------------------------------------------------------------------------------------------


@_jit("void(i8,i8,i8,i8)")
def pin(control, address, num_rows, change):
    """Count the rows of a copy as references to their sets (change 1), or no longer (change -1)."""
    for row in range(address, address + num_rows * ROW_BYTES, ROW_BYTES):
        _add_references(control, _get32(row + 16), change)


@_jit("i8(i8,i8,i8)")
def _snapshot_rows(control, snapshot, segment_index):
    """Address of a segment's rows as they were."""
    copy = _get64(_get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES)
    return copy if copy else _get64(_get64(control + SEGMENTS) + segment_index * SEGMENT_BYTES)


@_jit("i8(i8,i8,i8,i8)")
def _push_if_new(control, snapshot, segment_index, row_index):
    """Put a row on the stack, unless it was there before; return its address, or 0."""
    entry = _get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
    mark = _get64(entry + 16) + (row_index & ~3)  # marks are bytes, read four at a time
    bit = 1 << ((row_index & 3) * 8)
    if _get32(mark) & bit:
        return 0
    _put32(mark, _get32(mark) | bit)
    depth = _get64(snapshot + 32)
    _put64(_get64(snapshot + 24) + depth * 8, segment_index << 32 | row_index)
    _put64(snapshot + 32, depth + 1)
    return _snapshot_rows(control, snapshot, segment_index) + row_index * ROW_BYTES


@_jit("void(i8,i8,i8)")
def _push_ancestors(control, snapshot, row):
    """Put the known ancestors of a row on the stack, as far as they are not there yet."""
    multiplier, bits = _getu64(control + MULTIPLIER), _get64(control + SEGMENT_BITS)
    while row:
        parent = _getu64(row + 8) * multiplier
        if parent == _getu64(row):
            return
        segment_index = np.int64((parent >> _U1) >> np.uint64(63 - bits))
        entry = _get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES
        address = _snapshot_rows(control, snapshot, segment_index)
        row = _seek(address + _home(parent, bits, _get32(entry + 8)) * ROW_BYTES, parent)
        if _set_at(row, parent) == 0:
            return
        row = _push_if_new(control, snapshot, segment_index, (row - address) // ROW_BYTES)


@_jit("i8(i8,i8,i8)")
def snapshot_next(control, snapshot, max_rows):
    """Write the next rows as they were, each after its parent; return how many, 0 at the end."""
    output, count = _get64(snapshot + 40), 0
    while count < max_rows:
        depth = _get64(snapshot + 32)
        if depth > 0:  # the top of the stack is the eldest
            top = _get64(_get64(snapshot + 24) + (depth - 1) * 8)
            row = _snapshot_rows(control, snapshot, top >> 32) + (top & 0xFFFF_FFFF) * ROW_BYTES
            _move(output + count * ROW_BYTES, row, ROW_BYTES)
            _put64(snapshot + 32, depth - 1)
            count += 1
            continue
        segment_index, row_index = _get64(snapshot + 8), _get64(snapshot + 16)
        if segment_index == 1 << _get64(control + SEGMENT_BITS):
            return count
        if row_index == _get32(_get64(snapshot) + segment_index * SNAPSHOT_ENTRY_BYTES + 12):
            _put64(snapshot + 8, segment_index + 1)
            _put64(snapshot + 16, 0)
            continue
        _put64(snapshot + 16, row_index + 1)
        row = _snapshot_rows(control, snapshot, segment_index) + row_index * ROW_BYTES
        if _get32(row + 16) != 0:
            _push_ancestors(control, snapshot, _push_if_new(control, snapshot, segment_index, row_index))
    return count
