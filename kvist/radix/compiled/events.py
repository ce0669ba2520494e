"""Reads a batch as our own encoder writes it into operations that `updates.apply` carries out."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import get8, get64, move, put64, putu64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    CLEAR,
    INPUT,
    OPERATION_BYTES,
    OPERATIONS,
    REMOVE,
    STORE_CHILD,
    STORE_ROOT,
    UNREADABLE,
)

_NIL, _STORED_TAG, _REMOVED_TAG, _CLEARED_TAG, _HEARTBEAT_TAG = 0xC0, *b"srch"  # first letters are enough
_U8 = np.uint64(8)


@jit("u8(i8,i8)")
def _big_endian(address, num_bytes):
    number = np.uint64(0)
    for index in range(num_bytes):
        number = (number << _U8) | np.uint64(get8(address + index))
    return number


@jit("i8(i8)")
def _uint_bytes(head):
    """Bytes that follow the first one of an unsigned integer in msgpack; -1 if it begins something else."""
    if head < 0x80:
        return 0
    return 1 << (head - 0xCC) if 0xCC <= head <= 0xCF else -1


@jit("i8(i8,i8,i8,i8)")
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


@jit("i8(i8)", is_entry=True)
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
        elif tag == _HEARTBEAT_TAG and 3 <= fields <= 4:
            at += 1 + _uint_bytes(get8(at))
            at += 1 + _uint_bytes(get8(at))
            at += fields - 3  # whether it is complete, which not every version says
        else:
            return UNREADABLE
    return (operation - get64(control + OPERATIONS)) // OPERATION_BYTES
