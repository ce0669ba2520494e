"""Canonical batches straight from the wire into the index; docs/wire-format.md says what their bytes are.

What is taken here means the same to `kvist.events.codec`. What is malformed, unknown, out of sequence or just unusual
is left as it lies to those who judge one message at a time, and nothing of such a message is applied.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START
from kvist.indexer.compiled.jit import BYTES, TABLE, U64S, helper, jit
from kvist.indexer.compiled.msgpack import NIL, big_endian, read_array, read_time, read_uint, skip
from kvist.indexer.compiled.words import Bytes, big_word_at, byte_at, word_at
from kvist.radix.compiled import layout
from kvist.radix.compiled.blocks import apply
from kvist.radix.compiled.jit import signed
from kvist.radix.compiled.layout import Record, Records, Words

RANK = np.dtype(layout.integers("slot epoch sequence"), align=True)
"""By a rank's number: its slot in the index plus one (0: take nothing of it), and what its next message has."""

MAX_OPERATIONS, MAX_HASHES = 1024, 4096
"""What a message that is taken here has at most."""
_MAX_BYTES = 1 << 15
"""Of messages in a call, which then takes half a millisecond at most."""

_ARRAY, _MOST_FIELDS, _NUM_FIELDS = 0x90, 15, 8
_STR, _STR_8, _BIN_8, _BIN_32, _UINT_8, _UINT_64 = 0xA0, 0xD9, 0xC4, 0xC6, 0xCC, 0xCF
_MARK, _STORED, _REMOVED = (
    np.uint64(int.from_bytes(bytes([_STR + len(text)]) + text, "little")) for text in (b"kvist1", b"stored", b"removed")
)
_SEVEN_BYTES, _NOT_ASCII, _U0 = np.uint64((1 << 56) - 1), np.uint64(0x8080_8080_8080_8080), np.uint64(0)


@helper
def _skip_name(data: Bytes, at: int, end: int) -> int:
    """Return the end of a text in ASCII that is not empty, 0 for anything else, though it may be a name."""
    num_bytes, start = byte_at(data, at) - _STR, at + 1
    if num_bytes == _STR_8 - _STR:
        num_bytes, start = byte_at(data, at + 1), at + 2
    elif num_bytes > 31:
        return 0
    if num_bytes < 1 or start + num_bytes > end:
        return 0
    for offset in range(0, num_bytes, 8):
        num_beyond = max(0, offset + 8 - num_bytes)
        if (word_at(data, start + offset) & _NOT_ASCII) << np.uint64(8 * num_beyond) != _U0:
            return 0
    return start + num_bytes


@helper
def _read_parent(data: Bytes, at: int, end: int, operation: Record) -> int:
    """Read what a stored event's first block stands below; return its end, 0 if it is not ordinary."""
    head = byte_at(data, at)
    if head == NIL:
        return at + 1
    num_bytes, parent = 0, np.uint64(head)
    if head >= 0x80:
        if head < _UINT_8 or head > _UINT_64:
            return 0
        num_bytes = 1 << (head - _UINT_8)
        parent = big_word_at(data, at + 1) >> np.uint64(64 - 8 * num_bytes)
    operation.kind, operation.parent = layout.STORE_CHILD, parent
    return at + 1 + num_bytes if at + 1 + num_bytes <= end else 0


@helper
def _read_event(data: Bytes, at: int, end: int, operation: Record, hashes: Words, num_hashes: int) -> int:
    """Read an event into an operation, its hashes behind others; return its end.

    0 for all but stored and removed blocks, for more hashes than there is room for, and for what is not ordinary.
    """
    num_fields, word = byte_at(data, at) - _ARRAY, word_at(data, at + 1)
    is_stored = word & _SEVEN_BYTES == _STORED
    if num_fields < 2 or num_fields > _MOST_FIELDS or not (is_stored or word == _REMOVED):
        return 0
    at += 8 if is_stored else 9
    head = byte_at(data, at)
    if head < _BIN_8 or head > _BIN_32:
        return 0
    length_bytes = 1 << (head - _BIN_8)
    num_bytes, at = big_endian(data, at + 1, length_bytes), at + 1 + length_bytes
    if at + num_bytes > end or num_bytes & 7 or num_bytes > (len(hashes) - num_hashes) * 8:
        return 0
    operation.num_hashes = num_bytes >> 3
    for place in range(num_bytes >> 3):
        hashes[np.uint64(num_hashes + place)] = word_at(data, at + place * 8)
    at, num_read = at + num_bytes, 2
    operation.kind = layout.STORE_ROOT if is_stored else layout.REMOVE
    if is_stored and num_fields > 2:
        at, num_read = _read_parent(data, at, end, operation), 3
        if at == 0:
            return 0
    operation.tier = 0
    if num_fields > num_read:
        operation.tier = byte_at(data, at)
        at, num_read = at + 1, num_read + 1
        if operation.tier > 3:
            return 0
    for _ in range(num_read, num_fields):
        at = skip(data, at, end)
        if at == 0:
            return 0
    return at if at <= end else 0


@helper
def _read_header(ranks: Records, block_size: int, data: Bytes, payload: int, end: int) -> tuple[int, int]:
    """Return the rank of a batch and where its timestamp is, (0, 0) unless it is ordinary and the next of its rank."""
    if end - payload < _NUM_FIELDS or word_at(data, payload + 1) & _SEVEN_BYTES != _MARK:
        return 0, 0
    at = _skip_name(data, payload + 8, end)
    if at == 0:
        return 0, 0
    rank, at = read_uint(data, at, end)
    if at == 0 or rank >= len(ranks):
        return 0, 0
    epoch, at = read_uint(data, at, end)
    if at == 0 or epoch != ranks[rank].epoch or ranks[rank].slot == 0:
        return 0, 0
    sequence, at = read_uint(data, at, end)
    if at == 0 or sequence != ranks[rank].sequence:
        return 0, 0
    size, at = read_uint(data, at, end)
    return (rank, at) if at > 0 and size == block_size else (0, 0)


@helper
def _read_message(
    ranks: Records, block_size: int, data: Bytes, payload: int, end: int, operations: Records, hashes: Words
) -> tuple[int, int, float]:
    """Read a message into operations; return its rank, how many they are and its timestamp, (-1, 0, 0) for another."""
    num_fields = byte_at(data, payload) - _ARRAY
    rank, at = _read_header(ranks, block_size, data, payload, end)
    if at == 0 or num_fields < _NUM_FIELDS or num_fields > _MOST_FIELDS:
        return -1, 0, 0.0
    timestamp_s, at = read_time(data, at, end)
    if at == 0:
        return -1, 0, 0.0
    num_events, at = read_array(data, at, end)
    if at == 0 or num_events > len(operations):
        return -1, 0, 0.0
    num_hashes = 0
    for number in range(num_events):
        at = _read_event(data, at, end, operations[number], hashes, num_hashes)
        if at == 0:
            return -1, 0, 0.0
        num_hashes += signed(operations[number].num_hashes)
    for _ in range(_NUM_FIELDS, num_fields):
        at = skip(data, at, end)
        if at == 0:
            return -1, 0, 0.0
    return (rank, num_events, timestamp_s) if at == end else (-1, 0, 0.0)


_typeof: Any = numba.typeof
_RANKS_TYPE, _SCRATCH_TYPE = _typeof(np.empty(0, RANK)), _typeof(np.empty(0, layout.OPERATION))


@jit((*layout.INDEX_TYPES, _RANKS_TYPE, int64, BYTES, TABLE, int64, _SCRATCH_TYPE, U64S))
def take(
    core: Records,
    segments: Records,
    ranks: Records,
    block_size: int,
    data: Bytes,
    messages: NDArray[np.int64],
    start: int,
    operations: Records,
    hashes: Words,
) -> tuple[bool, int, int, int, float]:
    """Apply messages from `start` on, for as long as they are ordinary and it does not take long. Raises MemoryError.

    Return whether it stopped at one that is not ordinary, and where; the number of events and of those that the index
    refused; and the last timestamp. `messages` is the table of a `MessageBlock`, `data` its buffer.
    """
    num_events = num_refused = num_bytes = 0
    last_s = 0.0
    for message_idx in range(start, len(messages)):
        payload, size = messages[message_idx, PAYLOAD_START], messages[message_idx, PAYLOAD_BYTES]
        if num_bytes >= _MAX_BYTES:
            return False, message_idx, num_events, num_refused, last_s
        rank, num, timestamp_s = _read_message(ranks, block_size, data, payload, payload + size, operations, hashes)
        if rank < 0:
            return True, message_idx, num_events, num_refused, last_s
        if num:
            slot = ranks[rank].slot - 1
            _, _, num_orphans, num_invalid = apply(core, segments, slot, operations[:num], hashes)
            num_refused += num_orphans + num_invalid
        ranks[rank].sequence += 1
        num_events, num_bytes, last_s = num_events + num, num_bytes + size, timestamp_s
    return False, len(messages), num_events, num_refused, last_s
