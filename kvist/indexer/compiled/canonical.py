"""Canonical batches straight from the wire into the index; docs/wire-format.md says what their bytes are.

What is taken here means the same to `kvist.events.codec`. What is malformed, unknown, out of sequence or just unusual
is left as it lies to those who judge one message at a time, and nothing of such a message is applied. Operations of
many messages are gathered before they are carried out, so that the misses of the index overlap.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START, TOPIC_BYTES
from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled.intrinsics import byteswap
from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.msgpack import NIL, big_endian, read_array, read_uint, skip
from kvist.radix.compiled.intrinsics import get8, get64, getu64, move, put64, putu64
from kvist.radix.compiled.layout import (
    INPUT,
    NUM_INVALID,
    NUM_ORPHANS,
    OPERATION_BYTES,
    OPERATIONS,
    REMOVE,
    RESUME,
    RESUME_OPERATION,
    STORE_CHILD,
    STORE_ROOT,
)
from kvist.radix.compiled.updates import apply

# A lane, what one stream's messages are taken by. What it is told: the block size, ranks, a buffer of messages.
BLOCK_SIZE, RANKS, BUFFER = range(0, 24, 8)
# The next message; what it counts; and the timestamp of the last message, a float.
MESSAGE_IDX, NUM_BATCHES, NUM_EVENTS, NUM_REFUSED, TIMESTAMP = range(24, 64, 8)
# Operations gathered and not all carried out yet: how many, of how many hashes, whose, and where to go on.
NUM_OPERATIONS, NUM_HASHES, RANK, FIRST, START = range(64, 104, 8)
LANE_BYTES = 104

# A rank, by its number: its slot in the index plus one (0: take nothing of it), the epoch and sequence of its next
# message, and, plus one, the last message with a topic.
RANK_SLOT, RANK_EPOCH, RANK_SEQUENCE, RANK_TOPIC = range(0, 32, 8)
RANK_BYTES = 32

MAX_OPERATIONS, MAX_HASHES = 1024, 4096
"""What is gathered at most; a call carries out no more than twice as much, in half a millisecond."""

DONE, PAUSED, NOT_ORDINARY, HELP = range(4)
"""Why `take` stopped: no more messages; enough for one call; a message to be judged elsewhere; the index needs help."""

_OPERATION_COST = MAX_HASHES // MAX_OPERATIONS
_COLUMN_BYTES, _ROW_BYTES = 8, 40
_ARRAY, _MOST_FIELDS, _NUM_FIELDS = 0x90, 15, 8
_STR, _STR_8, _BIN_8, _BIN_32, _UINT_8, _UINT_64, _FLOAT_64 = 0xA0, 0xD9, 0xC4, 0xC6, 0xCC, 0xCF, 0xCB
_MARK, _STORED, _REMOVED = (
    np.uint64(int.from_bytes(bytes([_STR + len(text)]) + text, "little")) for text in (b"kvist1", b"stored", b"removed")
)
_SEVEN_BYTES, _NOT_ASCII = np.uint64((1 << 56) - 1), np.uint64(0x8080_8080_8080_8080)
_INFINITE = np.uint64(0x7FF)
_U52 = np.uint64(52)


@jit("i8(i8,i8)")
def _skip_name(at, end):
    """Return the end of a text in ASCII that is not empty, 0 for anything else, though it may be a name."""
    num_bytes = get8(at) - _STR
    start = at + 1
    if num_bytes == _STR_8 - _STR:
        num_bytes = get8(at + 1)
        start = at + 2
    elif num_bytes > 31:
        return 0
    after = start + num_bytes
    if num_bytes < 1 or after > end:
        return 0
    for offset in range(0, num_bytes, 8):
        num_beyond = max(0, offset + 8 - num_bytes)
        if ((getu64(start + offset) & _NOT_ASCII) << np.uint64(8 * num_beyond)) != np.uint64(0):
            return 0
    return after


@jit("i8(i8,i8,i8,i8)")
def _read_stored_fields(at, end, num_fields, operation):
    """Read what follows a stored event's hashes, up to its tier; return where that is, 0 if it is not ordinary."""
    put64(operation, STORE_ROOT)
    if num_fields < 3:
        return at
    head = get8(at)
    if head == NIL:
        return at + 1
    num_bytes = 0
    parent = np.uint64(head)
    if head >= 0x80:
        if head < _UINT_8 or head > _UINT_64:
            return 0
        num_bytes = 1 << (head - _UINT_8)
        parent = byteswap(getu64(at + 1)) >> np.uint64(64 - 8 * num_bytes)
    put64(operation, STORE_CHILD)
    putu64(operation + 16, parent)
    return at + 1 + num_bytes if at + 1 + num_bytes <= end else 0


@jit("i8(i8,i8,i8,i8,i8)")
def _read_event(at, end, operation, target, num_free):
    """Read an event into an operation and its hashes to a target; return its end.

    0 for all but stored and removed blocks, for more hashes than there is room for, and for what is not ordinary.
    """
    num_fields, word = get8(at) - _ARRAY, getu64(at + 1)
    if num_fields < 2 or num_fields > _MOST_FIELDS:
        return 0
    is_stored = (word & _SEVEN_BYTES) == _STORED
    if not is_stored and word != _REMOVED:
        return 0
    at += 8 if is_stored else 9
    head = get8(at)
    if head < _BIN_8 or head > _BIN_32:
        return 0
    length_bytes = 1 << (head - _BIN_8)
    num_bytes = big_endian(at + 1, length_bytes)
    hashes = at + 1 + length_bytes
    at = hashes + num_bytes
    if at > end or num_bytes & 7 or num_bytes > num_free * 8:
        return 0
    num_read = 2
    put64(operation, REMOVE)
    if is_stored:
        at, num_read = _read_stored_fields(at, end, num_fields, operation), 3
        if at == 0:
            return 0
    tier = 0
    if num_fields > num_read:
        tier = get8(at)
        at += 1
        if tier > 3:
            return 0
    put64(operation + 8, tier)
    put64(operation + 24, num_bytes >> 3)
    for _ in range(num_read + 1, num_fields):
        at = skip(at, end)
        if at == 0:
            return 0
    move(target, hashes, num_bytes)
    return at if at <= end else 0


@jit("UniTuple(i8,2)(i8,i8,i8)")
def _read_header(lane, payload, end):
    """Return the rank of a batch and where its timestamp is, (0, 0) unless it is ordinary and the next of its rank."""
    if end - payload < _NUM_FIELDS or (getu64(payload + 1) & _SEVEN_BYTES) != _MARK:
        return 0, 0
    at = _skip_name(payload + 8, end)
    if at == 0:
        return 0, 0
    rank, at = read_uint(at, end)
    if at == 0 or rank >= MAX_RANKS:
        return 0, 0
    state = get64(lane + RANKS) + rank * RANK_BYTES
    epoch, at = read_uint(at, end)
    if at == 0 or epoch != get64(state + RANK_EPOCH) or get64(state + RANK_SLOT) == 0:
        return 0, 0
    sequence, at = read_uint(at, end)
    if at == 0 or sequence != get64(state + RANK_SEQUENCE):
        return 0, 0
    block_size, at = read_uint(at, end)
    if at == 0 or block_size != get64(lane + BLOCK_SIZE):
        return 0, 0
    return rank, at


@jit("b1(i8,i8,i8)")
def _gather_message(control, lane, message):
    """Add the operations of a message to those gathered; false, and nothing is changed, if it is not to be taken now.

    That may also be because it is another rank's than those before it, or because there is no room for it.
    """
    payload = get64(lane + BUFFER) + get64(message + PAYLOAD_START * _COLUMN_BYTES)
    end = payload + get64(message + PAYLOAD_BYTES * _COLUMN_BYTES)
    num_fields = get8(payload) - _ARRAY
    num_operations, num_hashes = get64(lane + NUM_OPERATIONS), get64(lane + NUM_HASHES)
    rank, at = _read_header(lane, payload, end)
    if at == 0 or num_fields < _NUM_FIELDS or num_fields > _MOST_FIELDS:
        return False
    if num_operations > 0 and rank != get64(lane + RANK):
        return False
    timestamp = byteswap(getu64(at + 1))
    if get8(at) != _FLOAT_64 or (timestamp >> _U52) & _INFINITE == _INFINITE:
        return False
    num_events, at = read_array(at + 9, end)
    if at == 0 or num_operations + num_events > MAX_OPERATIONS:
        return False
    operation = get64(control + OPERATIONS) + num_operations * OPERATION_BYTES
    for _ in range(num_events):
        at = _read_event(at, end, operation, get64(control + INPUT) + num_hashes * 8, MAX_HASHES - num_hashes)
        if at == 0:
            return False
        num_hashes += get64(operation + 24)
        operation += OPERATION_BYTES
    for _ in range(_NUM_FIELDS, num_fields):
        at = skip(at, end)
        if at == 0:
            return False
    if at != end:
        return False
    put64(lane + NUM_OPERATIONS, num_operations + num_events)
    put64(lane + NUM_HASHES, num_hashes)
    put64(lane + RANK, rank)
    put64(lane + NUM_BATCHES, get64(lane + NUM_BATCHES) + 1)
    put64(lane + NUM_EVENTS, get64(lane + NUM_EVENTS) + num_events)
    putu64(lane + TIMESTAMP, timestamp)
    state = get64(lane + RANKS) + rank * RANK_BYTES
    put64(state + RANK_SEQUENCE, get64(state + RANK_SEQUENCE) + 1)
    if get64(message + TOPIC_BYTES * _COLUMN_BYTES) > 0:
        put64(state + RANK_TOPIC, get64(lane + MESSAGE_IDX) + 1)
    return True


@jit("b1(i8,i8)")
def _carry_out(control, lane):
    """Carry out what is gathered; false if the index needs help first."""
    num_operations, first, start = get64(lane + NUM_OPERATIONS), get64(lane + FIRST), get64(lane + START)
    if first == 0 and start == 0:
        put64(control + NUM_ORPHANS, 0)
        put64(control + NUM_INVALID, 0)
    slot = get64(get64(lane + RANKS) + get64(lane + RANK) * RANK_BYTES + RANK_SLOT) - 1
    if num_operations > 0 and apply(control, slot, num_operations, first, start) != 0:
        put64(lane + FIRST, get64(control + RESUME_OPERATION))
        put64(lane + START, get64(control + RESUME))
        return False
    num_refused = get64(control + NUM_ORPHANS) + get64(control + NUM_INVALID)
    put64(lane + NUM_REFUSED, get64(lane + NUM_REFUSED) + num_refused)
    for field in (NUM_OPERATIONS, NUM_HASHES, FIRST, START):
        put64(lane + field, 0)
    return True


@jit("i8(i8,i8,i8[:,::1])", is_entry=True)
def take(control, lane, messages):
    """Apply messages, from MESSAGE_IDX on, for as long as they are ordinary; return why it stopped, and there.

    `messages` is the table of a `MessageBlock`. After HELP, give it and call again, before anything else is done with
    the index.
    """
    table, num_messages, cost = np.int64(messages.ctypes.data), len(messages), 0
    while True:
        cost += get64(lane + NUM_HASHES) + get64(lane + NUM_OPERATIONS) * _OPERATION_COST
        if not _carry_out(control, lane):
            return HELP
        message_idx = get64(lane + MESSAGE_IDX)
        if message_idx == num_messages:
            return DONE
        if cost >= MAX_HASHES:
            return PAUSED
        message = table + message_idx * _ROW_BYTES
        while get64(lane + MESSAGE_IDX) < num_messages and _gather_message(control, lane, message):
            put64(lane + MESSAGE_IDX, get64(lane + MESSAGE_IDX) + 1)
            message += _ROW_BYTES
        if get64(lane + MESSAGE_IDX) == message_idx:
            return NOT_ORDINARY
