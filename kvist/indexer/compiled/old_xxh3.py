"""XXH3-64 with a seed, of bytes at an address, for every length; equal to the `xxhash` package.

Written from the XXH3 part of the xxHash specification (doc/xxhash_spec.md of the xxHash project, version 0.2). Short
inputs are mixed by their length's own formula; beyond 240 bytes eight lanes take 64 bytes at a time. The secret is
seeded as it is read, which costs nothing beside a load.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.indexer.compiled.intrinsics import (
    byteswap,
    constant_bytes,
    first_lanes,
    folded_product,
    mix_last_stripe,
    mix_stripe,
    scramble,
)
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get8, get32, getu64

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_secret = constant_bytes("xxh3_secret", _SECRET)


def _word(offset: int) -> np.uint64:
    """Eight bytes of the secret."""
    return np.uint64(int.from_bytes(_SECRET[offset : offset + 8], "little"))


_PRIME_1, _PRIME_2, _PRIME_3 = (
    np.uint64(n) for n in (0x9E37_79B1_85EB_CA87, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9)
)
_MX_1, _MX_2 = np.uint64(0x1656_6791_9E37_79F9), np.uint64(0x9FB2_1C65_1E98_DF25)
_FOR_0 = _word(56) ^ _word(64)
_FOR_1_TO_3 = (_word(0) ^ _word(4)) & np.uint64(0xFFFF_FFFF)
_FOR_4_TO_8 = _word(8) ^ _word(16)
_FOR_9_TO_16_LOW, _FOR_9_TO_16_HIGH = _word(24) ^ _word(32), _word(40) ^ _word(48)
_U8, _U15, _U24, _U28, _U29, _U32, _U33, _U35, _U37, _U40, _U49 = (
    np.uint64(n) for n in (8, 15, 24, 28, 29, 32, 33, 35, 37, 40, 49)
)
_STRIPE_BYTES, _STRIPES_A_BLOCK, _BLOCK_BYTES = 64, 16, 1024
_HASH_SEED = np.uint64(1337)


@jit("u8(u8)", is_inlined=True)
def _avalanche(h):
    h = (h ^ (h >> _U37)) * _MX_1
    return h ^ (h >> _U32)


@jit("u8(u8)", is_inlined=True)
def _avalanche_xxh64(h):
    h = (h ^ (h >> _U33)) * _PRIME_2
    h = (h ^ (h >> _U29)) * _PRIME_3
    return h ^ (h >> _U32)


@jit("u8(i8,i8,u8)")
def _hash_to_8(address, num_bytes, seed):
    """Hash 0 to 8 bytes."""
    length = np.uint64(num_bytes)
    if num_bytes == 0:
        return _avalanche_xxh64(seed ^ _FOR_0)
    if num_bytes < 4:
        first, middle, last = get8(address), get8(address + (num_bytes >> 1)), get8(address + num_bytes - 1)
        word = np.uint64(first << 16 | middle << 24 | last) | length << _U8
        return _avalanche_xxh64(word ^ (_FOR_1_TO_3 + seed))
    seed ^= byteswap(seed << _U32) << _U32
    word = np.uint64(get32(address + num_bytes - 4)) + (np.uint64(get32(address)) << _U32)
    h = word ^ (_FOR_4_TO_8 - seed)
    h ^= (h << _U49 | h >> _U15) ^ (h << _U24 | h >> _U40)
    h *= _MX_2
    h = (h ^ ((h >> _U35) + length)) * _MX_2
    return h ^ (h >> _U28)


@jit("u8(u8,u8,u8,u8)", is_inlined=True)
def hash_two_words(first, last, length, seed):
    """Hash 9 to 16 bytes, of which these are the first and the last eight."""
    low = first ^ (_FOR_9_TO_16_LOW + seed)
    high = last ^ (_FOR_9_TO_16_HIGH - seed)
    return _avalanche(length + byteswap(low) + high + folded_product(low, high))


@jit("u8(i8,i8,u8)", is_inlined=True)
def _mix_16(address, offset, seed):
    """Mix 16 bytes with the secret's at an offset."""
    secret = _secret() + offset
    return folded_product(getu64(address) ^ (getu64(secret) + seed), getu64(address + 8) ^ (getu64(secret + 8) - seed))


@jit("u8(i8,i8,u8)", is_inlined=True)
def _hash_to_128(address, num_bytes, seed):
    """Hash 17 to 128 bytes."""
    end = address + num_bytes
    h = np.uint64(num_bytes) * _PRIME_1
    if num_bytes > 32:
        if num_bytes > 64:
            if num_bytes > 96:
                h += _mix_16(address + 48, 96, seed) + _mix_16(end - 64, 112, seed)
            h += _mix_16(address + 32, 64, seed) + _mix_16(end - 48, 80, seed)
        h += _mix_16(address + 16, 32, seed) + _mix_16(end - 32, 48, seed)
    return _avalanche(h + _mix_16(address, 0, seed) + _mix_16(end - 16, 16, seed))


@jit("u8(i8,i8,u8)")
def _hash_to_240(address, num_bytes, seed):
    """Hash 129 to 240 bytes."""
    h = np.uint64(num_bytes) * _PRIME_1
    for offset in range(0, 128, 16):
        h += _mix_16(address + offset, offset, seed)
    h = _avalanche(h)
    for offset in range(128, num_bytes - 15, 16):
        h += _mix_16(address + offset, offset - 125, seed)
    return _avalanche(h + _mix_16(address + num_bytes - 16, 119, seed))


@jit("u8(i8,u8)", is_inlined=True)
def _seeded(index, seed):
    """A word of the seeded secret."""
    word = getu64(_secret() + index * 8)
    return word - seed if index & 1 else word + seed


@jit("u8(i8,i8,u8)", is_inlined=True)
def _merge_pair(lanes, index, seed):
    """Fold two lanes with the seeded secret from byte 11 + 8 * index on, which lies across its words."""
    one, two, three = _seeded(index + 1, seed), _seeded(index + 2, seed), _seeded(index + 3, seed)
    low, high = one >> _U24 | two << _U40, two >> _U24 | three << _U40
    return folded_product(getu64(lanes + index * 8) ^ low, getu64(lanes + index * 8 + 8) ^ high)


@jit("u8(i8,i8,u8)", is_inlined=True)
def _hash_long(address, num_bytes, seed):
    """Hash more than 240 bytes."""
    lanes, secret, minus = first_lanes(), _secret(), np.uint64(0) - seed
    num_stripes = (num_bytes - 1) // _STRIPE_BYTES
    for stripe in range(num_stripes):
        in_block = stripe & (_STRIPES_A_BLOCK - 1)
        mix_stripe(lanes, address + stripe * _STRIPE_BYTES, secret + in_block * 8, minus if stripe & 1 else seed)
        if in_block == _STRIPES_A_BLOCK - 1:
            scramble(lanes, secret + 128, seed)
    mix_last_stripe(lanes, address + num_bytes - _STRIPE_BYTES, secret + 120, seed)
    h = np.uint64(num_bytes) * _PRIME_1
    for index in range(0, 8, 2):
        h += _merge_pair(lanes, index, seed)
    return _avalanche(h)


@jit("u8(i8,i8,u8)", is_entry=True)
def xxh3_64(address, num_bytes, seed):
    """Return XXH3-64 of bytes at an address; reads nothing beyond them."""
    if num_bytes <= 8:
        return _hash_to_8(address, num_bytes, seed)
    if num_bytes <= 16:
        return hash_two_words(getu64(address), getu64(address + num_bytes - 8), np.uint64(num_bytes), seed)
    if num_bytes <= 128:
        return _hash_to_128(address, num_bytes, seed)
    if num_bytes <= 240:
        return _hash_to_240(address, num_bytes, seed)
    return _hash_long(address, num_bytes, seed)


@jit("u8(i8,u8)", is_inlined=True)
def hash_64_bytes(address, seed):
    """XXH3-64 of 64 bytes: a block of 16 tokens."""
    return _hash_to_128(address, 64, seed)


@jit("u8(i8,u8)", is_inlined=True)
def hash_256_bytes(address, seed):
    """XXH3-64 of 256 bytes: a block of 64 tokens."""
    return _hash_long(address, 256, seed)


@jit("u8(u8,u8)", is_inlined=True)
def chained(parent, local):
    """The sequence hash of a block, by that of the block before it and its own local hash."""
    return hash_two_words(parent, local, np.uint64(16), _HASH_SEED)
