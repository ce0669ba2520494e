"""Parsing one message of an engine, in full before anything of it is applied.

Whatever is accepted here means the same to `kvist.events.dialects`; what is unusual, though well-formed, is left to
that. An event is a map with its type among the keys, in any order, or an array in the dialect's order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled import names
from kvist.indexer.compiled.msgpack import NIL, read_array, read_hash, read_time, read_tokens, read_uint, skip
from kvist.indexer.compiled.words import Bytes, byte_at
from kvist.radix.compiled.jit import helper, signed
from kvist.radix.compiled.layout import Record, Records, Words

Tokens = NDArray[np.uint32]

_OF_ALL = 1 << names.TYPE | 1 << names.BLOCK_HASHES
_OF_STORED = _OF_ALL | 1 << names.TOKEN_IDS | 1 << names.BLOCK_SIZE
_EMPTY_STR, _EMPTY_ARRAY, _STR8 = 0xA0, 0x90, 0xD9


@helper
def _skip_simple(data: Bytes, at: int, end: int) -> int:
    """Return the end of a value that is nil, a boolean, a number or a string in ASCII of less than 256 bytes."""
    if at >= end:
        return 0
    head, after = byte_at(data, at), skip(data, at, end)
    if 0xA0 <= head < 0xC0 or head == _STR8:
        for place in range(at + 1 + (head == _STR8), after):
            if byte_at(data, place) >= 0x80:
                return 0
    elif not (head < 0x80 or head >= 0xE0 or head == NIL or 0xC2 <= head <= 0xC3 or 0xCA <= head <= 0xD3):
        return 0
    return after


@helper
def _read_word(event: Record, field: int, data: Bytes, at: int, end: int) -> int:
    """Read a field whose value is a word; return its end, 0 if it is not one of those expected."""
    length = byte_at(data, at) - 0xA0
    after = at + 1 + length
    number = names.number_of(data, at + 1, length) if length <= 31 and after <= end else 0
    if field == names.TYPE and (number == names.BLOCK_STORED or number == names.BLOCK_REMOVED):
        event.type = number
    elif field == names.MEDIUM and names.TIERS <= number < names.TIERS + 4:
        event.tier = number - names.TIERS
    elif field == names.KIND and names.FULL_KIND <= number <= names.NEVER_INDEXED:
        event.spec_kind = number
    elif field == names.LOCALITY and names.LOCAL <= number <= names.REMOTE:
        event.locality = number
    else:
        return 0
    return after


@helper
def _read_number(event: Record, field: int, data: Bytes, at: int, end: int) -> int:
    """Read a field whose value is a number; return its end, 0 if it is not one of those expected."""
    number, at = read_uint(data, at, end)
    if field == names.BLOCK_SIZE:
        event.block_size = number
    elif field == names.GROUP and number < layout.MAX_GROUP:
        event.group = number + 1
    elif field == names.WINDOW and number < layout.STATE_WINDOW:
        event.window = number
    elif field != names.LORA_ID or number != 0:
        return 0
    return at


@helper
def _read_lookahead(stream: Record, event: Record, data: Bytes, at: int, end: int, tokens: Tokens, count: int) -> int:
    """Read the tokens that follow each block; the first one behind the last block is added to the event's tokens."""
    if count != event.num_hashes or count == 0 or event.seen >> names.TOKEN_IDS & 1 == 0:
        return 0
    for _ in range(count):
        num_tokens, at = read_array(data, at, end)
        if at == 0 or num_tokens == 0:
            return 0
        at = read_tokens(data, at, end, tokens, stream.num_tokens, num_tokens)
        if at == 0:
            return 0
    stream.num_tokens += 1
    event.has_lookahead = 1
    return at


@helper
def _read_array_field(
    stream: Record, event: Record, field: int, data: Bytes, at: int, end: int, hashes: Words, tokens: Tokens
) -> int:
    """Read hashes, tokens, or extra keys that are empty for every block; return their end, 0 for anything else."""
    count, at = read_array(data, at, end)
    if at == 0:
        return 0
    if field == names.TOKEN_IDS:
        event.first_token, event.num_tokens = stream.num_tokens, count
        stream.num_tokens += count
        return read_tokens(data, at, end, tokens, event.first_token, count)
    if field == names.BLOCK_HASHES:
        event.first_hash, event.num_hashes = stream.num_hashes, count
        stream.num_hashes += count
        for place in range(event.first_hash, event.first_hash + count):
            if at >= end:
                return 0
            hashes[np.uint64(place)], at = read_hash(data, at, end)
            if at == 0:
                return 0
        return at
    if field == names.LOOKAHEAD:
        return _read_lookahead(stream, event, data, at, end, tokens, count)
    for _ in range(count):
        head = byte_at(data, at)
        if head != NIL and head != _EMPTY_ARRAY:
            return 0
        at += 1
    return at


@helper
def _read_field(
    stream: Record, event: Record, field: int, data: Bytes, at: int, end: int, hashes: Words, tokens: Tokens
) -> int:
    """Read one known field into the event; return its end, 0 if it is unusual."""
    is_again = event.seen >> field & 1
    event.seen |= 1 << field
    if at >= end or is_again:
        return 0
    if field == names.BLOCK_HASHES or field == names.TOKEN_IDS:
        return _read_array_field(stream, event, field, data, at, end, hashes, tokens)
    if field == names.BLOCK_SIZE:
        return _read_number(event, field, data, at, end)
    if field == names.TYPE:
        return _read_word(event, field, data, at, end)
    if byte_at(data, at) == NIL:  # the other fields may be absent
        return at + 1
    if field == names.PARENT:
        event.parent, at = read_hash(data, at, end)
        event.has_parent = 1
        return at
    if field == names.LORA_NAME or field == names.CACHE_SALT:
        return at + 1 if byte_at(data, at) == _EMPTY_STR else 0
    if field == names.SESSION:  # a block that is reported anew is not one more copy
        is_report = names.number_of(data, at + 1, min(byte_at(data, at) - 0xA0, end - at - 1)) == names.REPORT
        return 0 if is_report else _skip_simple(data, at, end)
    if field == names.EXTRA_KEYS or field == names.LOOKAHEAD:
        return _read_array_field(stream, event, field, data, at, end, hashes, tokens)
    if field == names.GROUP or field == names.WINDOW or field == names.LORA_ID:
        return _read_number(event, field, data, at, end)
    return _read_word(event, field, data, at, end)


@helper
def _read_map(stream: Record, event: Record, data: Bytes, at: int, end: int, hashes: Words, tokens: Tokens) -> int:
    num_fields, at = byte_at(data, at) & 15, at + 1
    for _ in range(num_fields):
        if at >= end:
            return 0
        length = byte_at(data, at) - 0xA0
        if length < 0 or length > 31 or at + 1 + length > end:
            return 0
        field = names.number_of(data, at + 1, length)
        at += 1 + length
        if 0 < field < layout.MAX_FIELDS:
            at = _read_field(stream, event, field, data, at, end, hashes, tokens)
        else:
            at = skip(data, at, end)
        if at == 0:
            return 0
    return at


@helper
def _read_positions(
    stream: Record, event: Record, data: Bytes, at: int, end: int, hashes: Words, tokens: Tokens
) -> int:
    num_fields, at = read_array(data, at, end)
    if num_fields == 0:
        return 0
    at = _read_field(stream, event, names.TYPE, data, at, end, hashes, tokens)
    if at == 0:
        return 0
    order = stream.field_order[event.type - names.BLOCK_STORED]
    for place in range(num_fields - 1):
        field = signed(order[place]) if place < layout.MAX_FIELDS else 0
        if field == 0:
            at = _skip_simple(data, at, end)
        else:
            at = _read_field(stream, event, field, data, at, end, hashes, tokens)
        if at == 0:
            return 0
    return at


@helper
def _kind_of(event: Record) -> int:
    """Return the kind of an event whose fields are read; set its tier and the key of its verdict."""
    if event.locality == names.REMOTE:
        event.tier = 3
    if event.type == names.BLOCK_REMOVED and event.seen & _OF_ALL == _OF_ALL:
        event.key = event.group << 1 | 1
        return layout.REMOVED
    # A store without tokens names blocks that another tier holds.
    if event.seen & _OF_STORED != _OF_STORED or event.num_tokens == 0:
        return layout.UNUSUAL
    window = event.window
    if event.spec_kind == names.FULL_KIND:
        window = layout.FULL_WINDOW
    elif event.spec_kind == names.STATE_KIND:
        window = layout.STATE_WINDOW
    event.key = event.group << 1 | window << 32
    return layout.IGNORED if event.spec_kind == names.NEVER_INDEXED else layout.STORED


@helper
def _check_event(stream: Record, event: Record, data: Bytes, at: int, end: int, hashes: Words, tokens: Tokens) -> int:
    """Read one event; return its end, 0 if it is not even well-formed."""
    event.tier = event.key = event.num_hashes = event.num_tokens = event.block_size = event.has_parent = 0
    event.has_lookahead = 0
    event.seen = event.type = event.spec_kind = event.window = event.group = event.locality = 0
    head, after = byte_at(data, at), 0
    if 0x80 <= head < 0x90:
        after = _read_map(stream, event, data, at, end, hashes, tokens)
    elif 0x90 <= head < 0xA0:
        after = _read_positions(stream, event, data, at, end, hashes, tokens)
    event.kind = _kind_of(event) if after else layout.UNUSUAL
    return after if after else skip(data, at, end)


@helper
def check_message(
    stream: Record, data: Bytes, payload: int, num_bytes: int, events: Records, hashes: Words, tokens: Tokens
) -> bool:
    """Parse a whole message into the scratch memory, which is large enough; return False if it is not ordinary."""
    end, num_fields = payload + num_bytes, byte_at(data, payload) - 0x90
    if num_bytes < 11 or num_fields < 2 or num_fields > 3:
        return False
    _, at = read_time(data, payload + 1, end)
    if at == 0:
        return False
    num_events, at = read_array(data, at, end)
    if at == 0 or num_events * layout.MIN_EVENT_BYTES > num_bytes:
        return False
    stream.num_hashes = stream.num_tokens = 0
    for number in range(num_events):
        if at >= end:
            return False
        events[number].start = at - payload
        at = _check_event(stream, events[number], data, at, end, hashes, tokens)
        if at == 0:
            return False
    stream.num_checked, stream.checked_end, stream.checked_rank = num_events, at - payload, stream.default_rank
    if num_fields == 3:
        if at < end and byte_at(data, at) == NIL:
            at += 1
        else:
            stream.checked_rank, at = read_uint(data, at, end)
    return at == end and stream.checked_rank < MAX_RANKS
