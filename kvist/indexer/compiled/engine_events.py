"""The checking pass over one message of an engine: what it says, read in full before anything is done.

What is accepted here means the same to `kvist.events.dialects`; what is unusual, though well-formed, is left to it. An
event is a map with its type among the keys, in any order, or an array in the dialect's order.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled import names
from kvist.indexer.compiled.engine_layout import (
    CHECKED_END,
    CHECKED_RANK,
    DEFAULT_RANK,
    EVENT_BLOCK_SIZE,
    EVENT_BYTES,
    EVENT_HASHES,
    EVENT_KIND,
    EVENT_NUM_HASHES,
    EVENT_NUM_TOKENS,
    EVENT_PARENT,
    EVENT_START,
    EVENT_TIER,
    EVENT_TOKENS,
    EVENT_TYPE,
    EVENT_VERDICT,
    EVENTS,
    FIELD_ORDER,
    FULL_WINDOW,
    GROUP,
    HASHES,
    IGNORED,
    KIND,
    LIKELY_MAP,
    LOCALITY,
    MAX_FIELDS,
    MAX_GROUP,
    MIN_EVENT_BYTES,
    NEXT_HASH,
    NEXT_TOKEN,
    NUM_CHECKED,
    REMOVED,
    SEEN,
    STORED,
    TOKENS,
    UNUSUAL,
    WINDOW,
)
from kvist.indexer.compiled.intrinsics import byteswap
from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.msgpack import (
    NIL,
    read_array,
    read_hash,
    read_hashes,
    read_tokens,
    read_uint,
    skip,
)
from kvist.radix.compiled.intrinsics import get8, get64, getu64, prefetch, put64
from kvist.radix.compiled.layout import MULTIPLIER, SEGMENT_BITS, SEGMENTS
from kvist.radix.compiled.table import locate

_OF_ALL = 1 << names.TYPE | 1 << names.BLOCK_HASHES
_OF_STORED = _OF_ALL | 1 << names.TOKEN_IDS | 1 << names.BLOCK_SIZE
_MAX_PREFETCHED = 64  # more would push out what was asked for first
_EMPTY_STR, _EMPTY_ARRAY, _FLOAT_64 = 0xA0, 0x90, 0xCB
_INFINITE = np.uint64(0x7FF)
_U52 = np.uint64(52)


@jit("i8(i8,i8)")
def _word(at, end):
    """Number of the short string that is here, 0 for anything else; it ends `get8(at) - 0x9F` further on."""
    length = get8(at) - 0xA0
    if length < 0 or length > 31 or at + 1 + length > end:
        return 0
    return names.number_of(at + 1, length)


@jit("i8(i8,i8)")
def _skip_simple(at, end):
    """Return the end of a value that is nil, a boolean, a number or a short string in ASCII."""
    if at >= end:
        return 0
    head = get8(at)
    if 0xA0 <= head < 0xC0:
        for index in range(min(end - at, head - 0x9F)):
            if get8(at + index) >= 0x80 and index:
                return 0
    elif not (head < 0x80 or head >= 0xE0 or head == NIL or 0xC2 <= head <= 0xC3 or 0xCA <= head <= 0xD3):
        return 0
    return skip(at, end)


@jit("void(i8,i8,i8)")
def _prefetch_entries(engine_map, hashes, num_hashes):
    """Ask for the places of engine hashes in a map, if there is one."""
    if engine_map:
        segments, bits = get64(engine_map + SEGMENTS), get64(engine_map + SEGMENT_BITS)
        for at in range(hashes, hashes + min(num_hashes, _MAX_PREFETCHED) * 8, 8):
            prefetch(locate(segments, bits, getu64(at) * getu64(engine_map + MULTIPLIER)))


@jit("i8(i8,i8,i8,i8)")
def _read_hash_array(source, event, at, end):
    num_hashes, at = read_array(at, end)
    if at == 0:
        return 0
    output = get64(source + NEXT_HASH)
    put64(event + EVENT_HASHES, output)
    put64(event + EVENT_NUM_HASHES, num_hashes)
    put64(source + NEXT_HASH, output + num_hashes * 8)
    at = read_hashes(at, end, num_hashes, output)
    if at:
        _prefetch_entries(get64(source + LIKELY_MAP), output, num_hashes)
    return at


@jit("i8(i8,i8,i8,i8)")
def _read_token_array(source, event, at, end):
    num_tokens, at = read_array(at, end)
    if at == 0:
        return 0
    output = get64(source + NEXT_TOKEN)
    put64(event + EVENT_TOKENS, output)
    put64(event + EVENT_NUM_TOKENS, num_tokens)
    put64(source + NEXT_TOKEN, output + num_tokens * 4)
    return read_tokens(at, end, num_tokens, output)


@jit("i8(i8,i8)")
def _read_no_extra_keys(at, end):
    """Return the end of an array that has nothing for any block."""
    num_blocks, at = read_array(at, end)
    for index in range(num_blocks):
        head = get8(at + index)
        if head != NIL and head != _EMPTY_ARRAY:
            return 0
    return at + num_blocks if at else 0


@jit("i8(i8,i8,i8,i8,i8)")
def _read_word(source, event, field, at, end):
    """Read a field whose value is a word; return its end, 0 if it is not one of those expected."""
    number = _word(at, end)
    if field == names.TYPE and (number == names.BLOCK_STORED or number == names.BLOCK_REMOVED):
        put64(source + EVENT_TYPE, number)
    elif field == names.MEDIUM and names.TIERS <= number < names.TIERS + 4:
        put64(event + EVENT_TIER, number - names.TIERS)
    elif field == names.KIND and names.FULL_KIND <= number <= names.NEVER_INDEXED:
        put64(source + KIND, number)
    elif field == names.LOCALITY and names.LOCAL <= number <= names.REMOTE:
        put64(source + LOCALITY, number)
    else:
        return 0
    return at + get8(at) - 0x9F


@jit("i8(i8,i8,i8,i8,i8)")
def _read_number(source, event, field, at, end):
    """Read a field whose value is a number; return its end, 0 if it is not one of those expected."""
    number, at = read_uint(at, end)
    if field == names.BLOCK_SIZE:
        put64(event + EVENT_BLOCK_SIZE, number)
    elif field == names.GROUP and number < MAX_GROUP:
        put64(source + GROUP, number + 1)
    elif field == names.WINDOW and number < FULL_WINDOW:
        put64(source + WINDOW, number)
    elif field != names.LORA_ID or number != 0:
        return 0
    return at


@jit("i8(i8,i8,i8,i8,i8)")
def _read_field(source, event, field, at, end):
    """Read one known field into the event; return its end, 0 if it is unusual."""
    seen = get64(source + SEEN)
    put64(source + SEEN, seen | 1 << field)
    if at >= end or seen >> field & 1:
        return 0
    if field == names.BLOCK_HASHES:
        return _read_hash_array(source, event, at, end)
    if field == names.TOKEN_IDS:
        return _read_token_array(source, event, at, end)
    if field == names.BLOCK_SIZE:
        return _read_number(source, event, field, at, end)
    if field == names.TYPE:
        return _read_word(source, event, field, at, end)
    if get8(at) == NIL:  # the other fields may be absent
        return at + 1
    if field == names.PARENT:
        output = get64(source + NEXT_HASH)
        put64(event + EVENT_PARENT, output)
        put64(source + NEXT_HASH, output + 8)
        return read_hash(at, end, output)
    if field == names.LORA_NAME or field == names.CACHE_SALT:
        return at + 1 if get8(at) == _EMPTY_STR else 0
    if field == names.EXTRA_KEYS:
        return _read_no_extra_keys(at, end)
    if field == names.GROUP or field == names.WINDOW or field == names.LORA_ID:
        return _read_number(source, event, field, at, end)
    return _read_word(source, event, field, at, end)


@jit("i8(i8,i8,i8,i8)")
def _read_map(source, event, at, end):
    num_fields, at = get8(at) & 15, at + 1
    for _ in range(num_fields):
        if at >= end:
            return 0
        length = get8(at) - 0xA0
        if length < 0 or length > 31 or at + 1 + length > end:
            return 0
        field = names.number_of(at + 1, length)
        at += 1 + length
        at = _read_field(source, event, field, at, end) if 0 < field < MAX_FIELDS else skip(at, end)
        if at == 0:
            return 0
    return at


@jit("i8(i8,i8,i8,i8)")
def _read_positions(source, event, at, end):
    num_fields, at = read_array(at, end)
    if num_fields == 0:
        return 0
    at = _read_field(source, event, names.TYPE, at, end)
    if at == 0:
        return 0
    order = get64(source + FIELD_ORDER) + (get64(source + EVENT_TYPE) - names.BLOCK_STORED) * MAX_FIELDS
    for index in range(num_fields - 1):
        field = get8(order + index) if index < MAX_FIELDS else 0
        at = _read_field(source, event, field, at, end) if field else _skip_simple(at, end)
        if at == 0:
            return 0
    return at


@jit("i8(i8,i8)")
def _kind_of(source, event):
    """Say what a fully read event is, from the fields it had; note its tier, and what its verdict depends on."""
    seen, kind, group = get64(source + SEEN), get64(source + KIND), get64(source + GROUP)
    if get64(source + LOCALITY) == names.REMOTE:
        put64(event + EVENT_TIER, 3)
    if get64(source + EVENT_TYPE) == names.BLOCK_REMOVED and seen & _OF_ALL == _OF_ALL:
        put64(event + EVENT_VERDICT, group << 1 | 1)
        return REMOVED
    # A store without tokens is about blocks that another tier holds.
    if seen & _OF_STORED != _OF_STORED or get64(event + EVENT_NUM_TOKENS) == 0:
        return UNUSUAL
    window = FULL_WINDOW if kind == names.FULL_KIND else get64(source + WINDOW)
    put64(event + EVENT_VERDICT, group << 1 | window << 32)
    return IGNORED if kind == names.NEVER_INDEXED else STORED


@jit("i8(i8,i8,i8,i8)")
def _check_event(source, event, at, end):
    """Read one event; return its end, 0 if it is not even well-formed."""
    for field in range(EVENT_TIER, EVENT_BYTES, 8):
        put64(event + field, 0)
    for field in range(SEEN, LOCALITY + 8, 8):
        put64(source + field, 0)
    head, after, kind = get8(at), 0, UNUSUAL
    if 0x80 <= head < 0x90:
        after = _read_map(source, event, at, end)
    elif 0x90 <= head < 0xA0:
        after = _read_positions(source, event, at, end)
    if after:
        kind = _kind_of(source, event)
    put64(event + EVENT_KIND, kind)
    return after if after else skip(at, end)


@jit("i8(i8,i8,i8)", is_entry=True)
def check_message(source, payload, num_bytes):
    """Read a whole message, of at most SCRATCH_BYTES, into the scratch; return 1, or 0 for one that is not ordinary."""
    end, num_fields = payload + num_bytes, get8(payload) - 0x90
    if num_bytes < 11 or num_fields < 2 or num_fields > 3 or get8(payload + 1) != _FLOAT_64:
        return 0
    if (byteswap(getu64(payload + 2)) >> _U52) & _INFINITE == _INFINITE:
        return 0
    num_events, at = read_array(payload + 10, end)
    if at == 0 or num_events * MIN_EVENT_BYTES > num_bytes:
        return 0
    event = get64(source + EVENTS)
    put64(source + NEXT_HASH, get64(source + HASHES))
    put64(source + NEXT_TOKEN, get64(source + TOKENS))
    for _ in range(num_events):
        put64(event + EVENT_START, at - payload)
        at = _check_event(source, event, at, end) if at < end else 0
        if at == 0:
            return 0
        event += EVENT_BYTES
    put64(source + NUM_CHECKED, num_events)
    put64(source + CHECKED_END, at - payload)
    rank = get64(source + DEFAULT_RANK)
    if num_fields == 3:
        if at < end and get8(at) == NIL:
            at += 1
        else:
            rank, at = read_uint(at, end) if at < end else (0, 0)
    put64(source + CHECKED_RANK, rank)
    return np.int64(at == end and rank < MAX_RANKS)
