"""Reading many integers of a JSON array at once: 64 bytes are classified by a few vector comparisons, as 64 bits each.

Where a number begins and ends is then a matter of shifts, so that no number waits for the one before to be read: 2 ns
a number, where a loop that goes from one to the next takes 5.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.indexer.compiled.intrinsics import classify, trailing_zeros
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import getu64, put32, put64, putu64

BLOCK_BYTES = 64
_WORD_BYTES = 8
_U0, _U1, _U8, _U16, _U32, _U63 = (np.uint64(n) for n in (0, 1, 8, 16, 32, 63))
_ALL = np.uint64(2**64 - 1)
_ZEROS = np.uint64(0x30 * 0x0101_0101_0101_0101)
_BYTES, _PAIRS, _QUADS = (np.uint64(n) for n in (0x00FF_00FF_00FF_00FF, 0x0000_FFFF_0000_FFFF, 0xFFFF_FFFF))
_TEN_AND_1, _HUNDRED_AND_1, _MYRIAD_AND_1 = (np.uint64(n) for n in (10 << 8 | 1, 100 << 16 | 1, 10_000 << 32 | 1))


@jit("u8(u8,i8)", is_inlined=True)
def number(word, num_digits):
    """The number that the first one to eight bytes spell: halves, quarters and eighths are added at once."""
    digits = (word ^ _ZEROS) << np.uint64(64 - num_digits * 8)
    pairs = (digits * _TEN_AND_1 >> _U8) & _BYTES
    quads = (pairs * _HUNDRED_AND_1 >> _U16) & _PAIRS
    return (quads * _MYRIAD_AND_1 >> _U32) & _QUADS


@jit("i8(i8,i8,i8,i8,i8)")
def read_blocks(at, end, item_bytes, output, to_count):
    """Read what stands behind `[` for as long as it is plain, in whole blocks; return the end of the last number.

    Plain is one comma, and any space, between numbers of one to eight digits without leading zeros. With no number
    read, that is where it began. The numbers go to the output, how many they are to `to_count`. Reads nothing beyond
    the text's end.
    """
    count, last_end, start = 0, at, at
    # What the end of a block leaves open for the next one: each of these is its lowest bit.
    is_in_number, is_in_zero, awaits_comma, awaits_number = _U0, _U0, _U0, _U1
    while at + BLOCK_BYTES + _WORD_BYTES <= end:
        digits, zeros, commas, spaces = classify(at)
        before = digits << _U1 | is_in_number
        starts, ends = digits & ~before, ~digits & before
        leading_zeros = starts & zeros
        # A sum carries each bit to the end of the spaces that it stands before.
        behind_number, behind_comma = ends | awaits_comma, commas << _U1 | awaits_number
        spaces_to_comma = spaces + (behind_number & spaces)
        spaces_to_number = spaces + (behind_comma & spaces)
        not_comma = (spaces_to_comma | behind_number) & ~spaces & ~commas
        not_number = (spaces_to_number | behind_comma) & ~spaces & ~digits
        has_leading_zero = (leading_zeros << _U1 | is_in_zero) & digits
        if (not_comma | not_number | has_leading_zero | ~(digits | commas | spaces)) != _U0:
            break
        num_in_block, excess, last_end_before = 0, 0, last_end
        if is_in_number == _U0:
            start = at + trailing_zeros(starts)
            starts &= starts - _U1
        while ends != _U0:
            last_end = at + trailing_zeros(ends)
            num_digits = last_end - start
            excess |= num_digits - 1
            value = number(getu64(start), num_digits)
            if item_bytes == 4:
                put32(output + num_in_block * 4, np.int64(value))
            else:
                putu64(output + num_in_block * 8, value)
            num_in_block += 1
            start = at + trailing_zeros(starts)
            ends &= ends - _U1
            starts &= starts - _U1
        if excess >= _WORD_BYTES:
            last_end = last_end_before
            break
        output += num_in_block * item_bytes
        count += num_in_block
        is_in_number, is_in_zero = digits >> _U63, leading_zeros >> _U63
        awaits_comma = np.uint64(spaces_to_comma < spaces)
        awaits_number = np.uint64(spaces_to_number < spaces) | commas >> _U63
        at += BLOCK_BYTES
    put64(to_count, count)
    return last_end
