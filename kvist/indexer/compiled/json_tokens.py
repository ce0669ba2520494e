"""Reading one array of unsigned integers out of a JSON object, ten times as fast as a JSON parser makes a list of it.

The object's own keys are walked, whatever lies between is passed over loosely: the caller still gives the rest, with an
empty array in place of this one, to a parser. Only if that accepts it, this was the object's value. Nothing beyond the
text is read.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.json_blocks import number, read_blocks
from kvist.radix.compiled.intrinsics import get8, get64, getu64, lowest_bit, put32, put64, putu64

START, END, COUNT, INTEGERS = range(0, 32, 8)
"""What `find_integers` writes: where the array begins and ends in the text, and the number of integers, before them."""

_SPACE, _TAB, _NEWLINE, _RETURN, _QUOTE, _COMMA, _COLON, _BACKSLASH = b' \t\n\r",:\\'
_OPEN_ARRAY, _CLOSE_ARRAY, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_ZERO = ord("0")
_ZEROS, _SIXES, _HIGH = (np.uint64(n * 0x0101_0101_0101_0101) for n in (0x30, 0x06, 0xF0))
_LAST_U32, _LAST_U64 = np.uint64(2**32 - 1), np.uint64(2**64 - 1)
_TENS = 10 ** np.arange(9, dtype=np.uint64)


@jit("i8(i8,i8)", is_inlined=True)
def _skip_space(at, end):
    while at < end and get8(at) in (_SPACE, _NEWLINE, _RETURN, _TAB):
        at += 1
    return at


@jit("i8(i8,i8)")
def _skip_string(at, end):
    """End of the string whose opening quote is here, 0 if it has none."""
    at += 1
    while at < end:
        if get8(at) == _QUOTE:
            return at + 1
        at += 2 if get8(at) == _BACKSLASH else 1
    return 0


@jit("i8(i8,i8)")
def _skip_value(at, end):
    """End of the value that begins here, 0 if it has none; brackets are counted, not matched."""
    depth = 0
    while at < end:
        byte = get8(at)
        if byte == _QUOTE:
            at = _skip_string(at, end)
            if at == 0 or depth == 0:
                return at
            continue
        if byte in (_OPEN_ARRAY, _OPEN_OBJECT):
            depth += 1
        elif byte in (_CLOSE_ARRAY, _CLOSE_OBJECT):
            if depth <= 1:
                return at + depth
            depth -= 1
        elif byte == _COMMA and depth == 0:
            return at
        at += 1
    return 0


@jit("b1(i8,i8,i8,i8)")
def _is_key(at, end, key, key_bytes):
    """Whether the string between quotes here is the key, to the letter."""
    num_same = 0
    if end - at - 2 == key_bytes:
        while num_same < key_bytes and get8(at + 1 + num_same) == get8(key + num_same):
            num_same += 1
    return end - at - 2 == key_bytes == num_same


@jit("b1(i8,i8)")
def _has_backslash(at, end):
    while at < end and get8(at) != _BACKSLASH:
        at += 1
    return at < end


@jit("u8(i8,i8)", is_inlined=True)
def _eight_bytes(at, end):
    """The next eight bytes of the text, zeros beyond its end."""
    if end - at >= 8:
        return getu64(at)
    word = np.uint64(0)
    for index in range(end - at):
        word |= np.uint64(get8(at + index)) << np.uint64(index * 8)
    return word


@jit("i8(u8)", is_inlined=True)
def _num_digits(word):
    """How many of the first of eight bytes are digits."""
    digits = word ^ _ZEROS
    others = (digits | (digits + _SIXES)) & _HIGH
    return lowest_bit(others) >> 3 if others != np.uint64(0) else 8


@jit("i8(u8,i8,i8,i8)")
def _read_long(word, at, end, output):
    """Read an integer whose first eight digits are given to the output, as u64; return its end, 0 beyond u64."""
    value = number(word, 8)
    at += 8
    word = _eight_bytes(at, end)
    num_digits = _num_digits(word)
    if num_digits == 0:
        putu64(output, value)
        return at
    value = value * _TENS[num_digits] + number(word, num_digits)
    at += num_digits
    if num_digits == 8:
        word = _eight_bytes(at, end)
        num_digits = _num_digits(word)
        if num_digits > 4:
            return 0
        if num_digits > 0:
            last = number(word, num_digits)
            if num_digits == 4 and value > (_LAST_U64 - last) // _TENS[4]:
                return 0
            value = value * _TENS[num_digits] + last
            at += num_digits
    putu64(output, value)
    return at


@jit("i8(i8,i8,i8,i8)")
def _read_array(at, end, item_bytes, result):
    """Read an array and say how many integers it has; return its end, 0 if it is not plain."""
    if at >= end or get8(at) != _OPEN_ARRAY:
        return 0
    at = read_blocks(at + 1, end, item_bytes, result + INTEGERS, result + COUNT)
    count = get64(result + COUNT)
    output = result + INTEGERS + count * item_bytes
    at = _skip_space(at, end)
    is_done = at < end and get8(at) == _CLOSE_ARRAY
    while not is_done:
        if count > 0:
            if at >= end or get8(at) != _COMMA:
                return 0
            at = _skip_space(at + 1, end)
        word = _eight_bytes(at, end)
        num_digits = _num_digits(word)
        if num_digits == 0 or (num_digits > 1 and get8(at) == _ZERO):
            return 0
        value = number(word, num_digits)
        if num_digits == 8:
            at = _read_long(word, at, end, output)
            if at == 0:
                return 0
            value = getu64(output)
            if item_bytes == 4 and value > _LAST_U32:
                return 0
        else:
            at += num_digits
        if item_bytes == 4:
            put32(output, np.int64(value))
        else:
            putu64(output, value)
        output += item_bytes
        count += 1
        at = _skip_space(at, end)
        is_done = at < end and get8(at) == _CLOSE_ARRAY
    put64(result + COUNT, count)
    return at + 1


@jit("b1(i8,i8,i8,i8,i8,i8)", is_entry=True)
def find_integers(text, num_bytes, key, key_bytes, item_bytes, result):
    """Read the array of integers under a key of the object that the text is; false unless it is there and plain.

    Plain is an array of integers from 0 to what `item_bytes` (4 or 8) hold, written without sign, fraction, exponent or
    leading zeros, under a key that the object has once, where no key is written with a backslash. The result has room
    for what stands before the integers (see `START`), for half as many as the text has bytes, and for 8 bytes more.
    """
    end, is_found = text + num_bytes, False
    at = _skip_space(text, end)
    if at >= end or get8(at) != _OPEN_OBJECT:
        return False
    at = _skip_space(at + 1, end)
    while at < end and get8(at) == _QUOTE:
        name, at = at, _skip_string(at, end)
        if at == 0 or _has_backslash(name, at):
            return False
        is_ours = _is_key(name, at, key, key_bytes)
        at = _skip_space(at, end)
        if at >= end or get8(at) != _COLON:
            return False
        at = _skip_space(at + 1, end)
        if is_ours:
            if is_found:
                return False
            is_found = True
            put64(result + START, at - text)
            at = _read_array(at, end, item_bytes, result)
            put64(result + END, at - text)
        else:
            at = _skip_value(at, end)
        if at == 0:
            return False
        at = _skip_space(at, end)
        if at >= end or get8(at) != _COMMA:
            break
        at = _skip_space(at + 1, end)
    return is_found and at < end and get8(at) == _CLOSE_OBJECT and _skip_space(at + 1, end) == end
