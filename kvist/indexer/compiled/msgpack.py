"""Reading msgpack from outside: every length is checked against the end before it is used.

Functions return where the value ends, or 0 for what they do not read: the caller then skips it or gives up. Up to
512 bytes beyond the end may be loaded, never used. **Trap:** a byte and a count are int64, a word is a uint64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.indexer.compiled.words import Bytes, big_word_at, byte_at
from kvist.radix.compiled.jit import helper, inlined, signed

NIL, FLOAT_64 = 0xC0, 0xCB
_MAX_CONTAINERS = 256  # in one skipped value; deeper nesting is an error for a decoder that recurses
_U0 = np.uint64(0)

# For heads 0xC0 to 0xDF: the bytes of the value itself, and of the length that stands before it. 0xC1 is no head.
_FIXED = np.array(
    (1, 0, 1, 1, 2, 3, 5, 3, 4, 6, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18, 2, 3, 5, 3, 5, 3, 5), np.int64
)
_LENGTH = np.array(
    (0, 0, 0, 0, 1, 2, 4, 1, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4), np.int64
)


@inlined
def big_endian(data: Bytes, at: int, num_bytes: int) -> int:
    """Return an unsigned integer of 1, 2 or 4 bytes."""
    return signed(big_word_at(data, at) >> np.uint64(64 - 8 * num_bytes))


@helper
def skip(data: Bytes, at: int, end: int) -> int:
    """Return the end of a value of any type."""
    num_values, num_containers = 1, 0
    while num_values > 0:
        if at >= end:
            return 0
        head, length = byte_at(data, at), 0
        num_values -= 1
        if head < 0x80 or head >= 0xE0:
            at += 1
        elif head < 0xA0:
            length = (head & 15) * (2 if head < 0x90 else 1)
            at += 1
        elif head < 0xC0:
            at += 1 + (head & 31)
        else:
            fixed, length_bytes = _FIXED[np.uint64(head - 0xC0)], _LENGTH[np.uint64(head - 0xC0)]
            if fixed == 0:
                return 0
            if length_bytes > 0:
                length = big_endian(data, at + 1, length_bytes)
            at += fixed
            if head < 0xDC:
                at += length
                length = 0
            elif head >= 0xDE:
                length *= 2
        if length > 0:
            num_values += length
            num_containers += 1
        if at > end or num_values > end - at or num_containers > _MAX_CONTAINERS:
            return 0
    return at


@helper
def read_array(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number of elements of an array and where they begin; (0, 0) for anything else."""
    head, start = byte_at(data, at), at + 1
    if 0x90 <= head < 0xA0:
        count = head & 15
    elif head == 0xDC:
        start, count = at + 3, big_endian(data, at + 1, 2)
    elif head == 0xDD:
        start, count = at + 5, big_endian(data, at + 1, 4)
    else:
        return 0, 0
    return (count, start) if start <= end and count <= end - start else (0, 0)


@helper
def read_uint(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return an integer from 0 to 2**63 - 1, however it is encoded, and its end; (0, 0) for anything else."""
    head = byte_at(data, at)
    if head < 0x80:
        return (head, at + 1) if at < end else (0, 0)
    if 0xCC <= head <= 0xCF or 0xD0 <= head <= 0xD3:
        num_bytes = 1 << (head & 3)
        number = signed(big_word_at(data, at + 1) >> np.uint64(64 - 8 * num_bytes))
        is_negative = number < 0 or (head >= 0xD0 and number >> (8 * num_bytes - 1) != 0)
        if at + 1 + num_bytes <= end and not is_negative:
            return number, at + 1 + num_bytes
    return 0, 0


@helper
def read_time(data: Bytes, at: int, end: int) -> tuple[float, int]:
    """Return a finite float of 64 bits, and its end; (0, 0) for anything else."""
    number = np.uint64(big_word_at(data, at + 1)).view(np.float64)
    if byte_at(data, at) != FLOAT_64 or at + 9 > end or not np.isfinite(number):
        return 0.0, 0
    return number, at + 9


@helper
def read_hash(data: Bytes, at: int, end: int) -> tuple[np.uint64, int]:
    """Return an engine's hash as u64, as `fold_hash` has it, and its end; (0, 0) for anything else.

    Of an integer these are the low 64 bits, of bytes the last eight.
    """
    head, block_hash = byte_at(data, at), _U0
    if head < 0x80 or head >= 0xE0:
        block_hash = np.uint64(head - ((head & 0x80) << 1))
        at += 1
    elif 0xCC <= head <= 0xD3:
        num_bytes = 1 << (head & 3)
        block_hash = big_word_at(data, at + 1) >> np.uint64(64 - 8 * num_bytes)
        if head >= 0xD0 and num_bytes < 8:
            number = signed(block_hash)
            block_hash = np.uint64(number - (number >> (8 * num_bytes - 1) << (8 * num_bytes)))
        at += 1 + num_bytes
    elif 0xC4 <= head <= 0xC6:
        length_bytes = 1 << (head & 3)
        length = big_endian(data, at + 1, length_bytes)
        at += 1 + length_bytes + length
        if at > end:
            return _U0, 0
        if length > 0:
            num_bytes = min(length, 8)
            block_hash = big_word_at(data, at - num_bytes) >> np.uint64(64 - 8 * num_bytes)
    else:
        return _U0, 0
    return (block_hash, at) if at <= end else (_U0, 0)


@helper
def read_tokens(data: Bytes, at: int, end: int, tokens: NDArray[np.uint32], start: int, count: int) -> int:
    """Write token ids that follow one another from a place on; returns 0 if one is no integer of 32 bits.

    Which of them take three bytes and which five is random: there is no jump on it, which would be mispredicted.
    """
    for place in range(start, start + count):
        if at >= end:
            return 0
        head = byte_at(data, at)
        if head == 0xCD or head == 0xCE:
            num_more = head & 2  # of 0xCE
            token = signed(big_word_at(data, at + 1) >> np.uint64(48 - 8 * num_more))
            at += 3 + num_more
        else:
            token, at = read_uint(data, at, end)
            if at == 0 or token >> 32:
                return 0
        tokens[np.uint64(place)] = token
    return at if at <= end else 0
