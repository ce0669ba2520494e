"""Reading words from a buffer of bytes: LLVM makes one load of the eight that are written here."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.radix.compiled.jit import inlined, signed

Bytes: TypeAlias = NDArray[np.uint8]

_1, _2, _3, _4, _5, _6, _7 = (np.uint64(n) for n in range(1, 8))
_8, _16, _24, _32, _40, _48, _56 = (np.uint64(n) for n in range(8, 64, 8))
_LOW = np.uint64(0xFFFF_FFFF)


@inlined
def byte_at(data: Bytes, at: int) -> int:
    """Return a byte; `at` must not be negative, as nothing checks it."""
    return signed(data[np.uint64(at)])


@inlined
def word_at(data: Bytes, at: int) -> np.uint64:
    """Return eight bytes, of which the first is the lowest."""
    i = np.uint64(at)
    low = np.uint64(data[i]) | np.uint64(data[i + _1]) << _8
    low |= np.uint64(data[i + _2]) << _16 | np.uint64(data[i + _3]) << _24
    high = np.uint64(data[i + _4]) << _32 | np.uint64(data[i + _5]) << _40
    return low | high | np.uint64(data[i + _6]) << _48 | np.uint64(data[i + _7]) << _56


@inlined
def big_word_at(data: Bytes, at: int) -> np.uint64:
    """Return eight bytes, of which the first is the highest."""
    i = np.uint64(at)
    high = np.uint64(data[i]) << _56 | np.uint64(data[i + _1]) << _48
    high |= np.uint64(data[i + _2]) << _40 | np.uint64(data[i + _3]) << _32
    low = np.uint64(data[i + _4]) << _24 | np.uint64(data[i + _5]) << _16
    return high | low | np.uint64(data[i + _6]) << _8 | np.uint64(data[i + _7])


@inlined
def byteswap(word: np.uint64) -> np.uint64:
    word = (word >> _8) & np.uint64(0x00FF_00FF_00FF_00FF) | (word & np.uint64(0x00FF_00FF_00FF_00FF)) << _8
    word = (word >> _16) & np.uint64(0x0000_FFFF_0000_FFFF) | (word & np.uint64(0x0000_FFFF_0000_FFFF)) << _16
    return word >> _32 | word << _32


@inlined
def folded_product(left: np.uint64, right: np.uint64) -> np.uint64:
    """Return the low half of a 128-bit product XOR its high half."""
    low, high = (left & _LOW) * (right & _LOW), (left >> _32) * (right >> _32)
    cross = (left >> _32) * (right & _LOW)
    middle = (left & _LOW) * (right >> _32) + (low >> _32) + (cross & _LOW)
    return (left * right) ^ (high + (cross >> _32) + (middle >> _32))
