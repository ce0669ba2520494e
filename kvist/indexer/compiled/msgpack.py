"""Reading msgpack at an address without trusting it: every length is checked against the end before it is believed.

Functions return where the value ends, or 0 for what they do not read: their caller then skips it or gives up. Up to
512 bytes beyond the end may be loaded, never used. **Trap:** a byte read by `get8` is an int64, a word a uint64.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.indexer.compiled.intrinsics import byteswap, constant_bytes
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get8, getu64, put32, putu64

NIL = 0xC0
_MAX_CONTAINERS = 256  # in one skipped value; deeper nesting is an error for a decoder that recurses
_U2, _U8 = np.uint64(2), np.uint64(8)
_CD, _NEITHER = np.uint64(0xCD), np.uint64(0xFE)  # of a first byte less 0xCD, the bits that are 0 for 0xCD and 0xCE

# For heads 0xC0 to 0xDF: the bytes of the value itself, and of the length that stands before it. 0xC1 is no head.
_FIXED = (1, 0, 1, 1, 2, 3, 5, 3, 4, 6, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18, 2, 3, 5, 3, 5, 3, 5)
_LENGTH = (0, 0, 0, 0, 1, 2, 4, 1, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4)
_sizes = constant_bytes("msgpack_sizes", bytes(_FIXED + _LENGTH))


@jit("i8(i8,i8)", is_inlined=True)
def big_endian(address, num_bytes):
    """Return an unsigned integer of 1, 2 or 4 bytes."""
    return np.int64(byteswap(getu64(address)) >> np.uint64(64 - 8 * num_bytes))


@jit("i8(i8,i8)")
def skip(at, end):
    """Return the end of a value of any type."""
    num_values, num_containers = 1, 0
    while num_values > 0:
        if at >= end:
            return 0
        head, length = get8(at), 0
        num_values -= 1
        if head < 0x80 or head >= 0xE0:
            at += 1
        elif head < 0xA0:
            length = (head & 15) << np.int64(head < 0x90)
            at += 1
        elif head < 0xC0:
            at += 1 + (head & 31)
        else:
            kind = head - 0xC0
            fixed, length_bytes = get8(_sizes() + kind), get8(_sizes() + 32 + kind)
            if fixed == 0:
                return 0
            length = big_endian(at + 1, length_bytes) if length_bytes else 0
            at += fixed
            if head < 0xDC:
                at += length
                length = 0
            elif head >= 0xDE:
                length *= 2
        if length:
            num_values += length
            num_containers += 1
        if at > end or num_values > end - at or num_containers > _MAX_CONTAINERS:
            return 0
    return at


@jit("UniTuple(i8,2)(i8,i8)", is_inlined=True)
def read_array(at, end):
    """Return the number of elements of an array and where they begin; (0, 0) for anything else."""
    head, start, count = get8(at), at + 1, 0
    if 0x90 <= head < 0xA0:
        count = head & 15
    elif head == 0xDC:
        start, count = at + 3, big_endian(at + 1, 2)
    elif head == 0xDD:
        start, count = at + 5, big_endian(at + 1, 4)
    else:
        return 0, 0
    return (count, start) if start <= end and count <= end - start else (0, 0)


@jit("UniTuple(i8,2)(i8,i8)", is_inlined=True)
def read_uint(at, end):
    """Return an integer from 0 to 2**63 - 1, however it is encoded, and its end; (0, 0) for anything else."""
    head = get8(at)
    if head < 0x80:
        return (head, at + 1) if at < end else (0, 0)
    if 0xCC <= head <= 0xCF or 0xD0 <= head <= 0xD3:
        num_bytes = 1 << (head & 3)
        word = byteswap(getu64(at + 1)) >> np.uint64(64 - 8 * num_bytes)
        is_negative = (head >= 0xD0 or num_bytes == 8) and (word >> np.uint64(8 * num_bytes - 1)) != np.uint64(0)
        if at + 1 + num_bytes <= end and not is_negative:
            return np.int64(word), at + 1 + num_bytes
    return 0, 0


@jit("i8(i8,i8,i8)", is_inlined=True)
def read_hash(at, end, output):
    """Write an engine's hash as u64, as `fold_hash` has it: of an integer the low 64 bits, of bytes the last eight."""
    head = get8(at)
    if head == 0xCF or head == 0xD3:
        putu64(output, byteswap(getu64(at + 1)))
        at += 9
    elif head < 0x80 or head >= 0xE0:
        putu64(output, np.uint64(head - ((head & 0x80) << 1)))
        at += 1
    elif 0xCC <= head <= 0xCE:
        num_bytes = 1 << (head & 3)
        putu64(output, np.uint64(big_endian(at + 1, num_bytes)))
        at += 1 + num_bytes
    elif 0xD0 <= head <= 0xD2:
        num_bits = 8 << (head & 3)
        number = big_endian(at + 1, num_bits >> 3)
        putu64(output, np.uint64(number - ((number >> (num_bits - 1)) << num_bits)))
        at += 1 + (num_bits >> 3)
    elif 0xC4 <= head <= 0xC6:
        length_bytes = 1 << (head & 3)
        length = big_endian(at + 1, length_bytes)
        at += 1 + length_bytes + length
        if at > end:
            return 0
        num_bytes = min(length, 8)
        word = byteswap(getu64(at - num_bytes)) >> np.uint64(64 - 8 * max(1, num_bytes))
        putu64(output, word if length else np.uint64(0))
    else:
        return 0
    return at if at <= end else 0


@jit("i8(i8,i8,i8,i8)")
def read_hashes(at, end, num_hashes, output):
    """Write hashes that follow one another as u64; returns 0 if one is none, such as nil."""
    for index in range(num_hashes):
        if at >= end:
            return 0
        at = read_hash(at, end, output + index * 8)
        if at == 0:
            return 0
    return at


@jit("i8(u8,i8)", is_inlined=True)
def _short_number(word, longer):
    """Return the number that is two bytes long, or four, behind the first byte of a word read from memory."""
    return np.int64((byteswap(word) << _U8) >> np.uint64(48 - 8 * longer))


@jit("i8(i8,i8,i8,i8)")
def read_tokens(at, end, num_tokens, output):
    """Write token ids that follow one another as u32; returns 0 if one is no integer of that range.

    Which of them take three bytes and which five is random, and a jump on it would be mispredicted every other time:
    four at a time are read without. Where the next begins, the word that holds the one before tells at half the delay.
    """
    index = 0
    while index < num_tokens:
        if index + 4 <= num_tokens and at + 20 <= end:
            first = getu64(at)
            a = np.int64(first & _U2)  # 0 for 0xCD, 2 for 0xCE
            second = first >> np.uint64(24 + 8 * a)
            b = np.int64(second & _U2)
            at_3 = at + 6 + a + b
            third = getu64(at_3)
            c = np.int64(third & _U2)
            fourth = third >> np.uint64(24 + 8 * c)
            d = np.int64(fourth & _U2)
            wrong = (first - _CD) | (second - _CD) | (third - _CD) | (fourth - _CD)
            if wrong & _NEITHER == np.uint64(0):
                put32(output + index * 4, _short_number(first, a))
                put32(output + index * 4 + 4, _short_number(getu64(at + 3 + a), b))
                put32(output + index * 4 + 8, _short_number(third, c))
                put32(output + index * 4 + 12, _short_number(getu64(at_3 + 3 + c), d))
                at = at_3 + 6 + c + d
                index += 4
                continue
        if at >= end:
            return 0
        token, at = read_uint(at, end)
        if at == 0 or token >> 32:
            return 0
        put32(output + index * 4, token)
        index += 1
    return at
