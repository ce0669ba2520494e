"""Block hashes: XXH3-64 with a seed, of four bytes or more, and the chain of a prompt's blocks.

XXH3 is written from its part of the xxHash specification (doc/xxhash_spec.md of the xxHash project, version 0.2), and
equal to the `xxhash` package: there is a formula for each range of lengths up to 240 bytes; beyond that, eight lanes
take 64 bytes at a time. The rule of the chain is that of `kvist.events.hashing`.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events.hashing import TokenIds, pack_tokens, scope_seed
from kvist.indexer.compiled.jit import BYTES, U64S, jit
from kvist.indexer.compiled.words import Bytes, byte_at, byteswap, folded_product, word_at
from kvist.radix.compiled.jit import helper, inlined

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _word(offset: int) -> np.uint64:
    """Return eight bytes of the secret."""
    return np.uint64(int.from_bytes(_SECRET[offset : offset + 8], "little"))


_WORDS = np.array([_word(offset) for offset in range(len(_SECRET) - 7)], np.uint64)
"""The word of the secret from each of its bytes on."""
_PRIME_1, _PRIME_2, _PRIME_3 = (
    np.uint64(n) for n in (0x9E37_79B1_85EB_CA87, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9)
)
_PRIME_32_1 = np.uint64(0x9E37_79B1)
_FIRST_LANES = np.array(
    [0xC2B2_AE3D, _PRIME_1, _PRIME_2, _PRIME_3, 0x85EB_CA77_C2B2_AE63, 0x85EB_CA77, 0x27D4_EB2F_1656_67C5, _PRIME_32_1],
    np.uint64,
)
_MX_1, _MX_2 = np.uint64(0x1656_6791_9E37_79F9), np.uint64(0x9FB2_1C65_1E98_DF25)
_FOR_4_TO_8 = _word(8) ^ _word(16)
_FOR_9_TO_16_LOW, _FOR_9_TO_16_HIGH = _word(24) ^ _word(32), _word(40) ^ _word(48)
_U0, _U8, _U15, _U24, _U28, _U32, _U35, _U37, _U40, _U47, _U49, _U64 = (
    np.uint64(n) for n in (0, 8, 15, 24, 28, 32, 35, 37, 40, 47, 49, 64)
)
_LOW = np.uint64(0xFFFF_FFFF)
_STRIPE_BYTES, _STRIPES_A_BLOCK = 64, 16
_HASH_SEED = np.uint64(1337)


@inlined
def _avalanche(h: np.uint64) -> np.uint64:
    h = (h ^ (h >> _U37)) * _MX_1
    return h ^ (h >> _U32)


@helper
def _hash_to_8(data: Bytes, start: int, num_bytes: int, seed: np.uint64) -> np.uint64:
    end, length = start + num_bytes, np.uint64(num_bytes)
    first_half = last_half = _U0
    for index in range(4):
        first_half |= np.uint64(byte_at(data, start + index) << 8 * index)
        last_half |= np.uint64(byte_at(data, end - 4 + index) << 8 * index)
    seed ^= byteswap(seed << _U32) << _U32
    h = (last_half + (first_half << _U32)) ^ (_FOR_4_TO_8 - seed)
    h ^= (h << _U49 | h >> _U15) ^ (h << _U24 | h >> _U40)
    h *= _MX_2
    h = (h ^ ((h >> _U35) + length)) * _MX_2
    return h ^ (h >> _U28)


@inlined
def _hash_two_words(first: np.uint64, last: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    """Hash 9 to 16 bytes, of which these are the first and the last eight."""
    low = first ^ (_FOR_9_TO_16_LOW + seed)
    high = last ^ (_FOR_9_TO_16_HIGH - seed)
    return _avalanche(length + byteswap(low) + high + folded_product(low, high))


@inlined
def _mix_16(data: Bytes, at: int, secret: int, seed: np.uint64) -> np.uint64:
    """Mix 16 bytes with the secret's at an offset."""
    key = np.uint64(secret)
    low, high = _WORDS[key] + seed, _WORDS[key + _U8] - seed
    return folded_product(word_at(data, at) ^ low, word_at(data, at + 8) ^ high)


@helper
def _hash_to_240(data: Bytes, start: int, num_bytes: int, seed: np.uint64) -> np.uint64:
    end = start + num_bytes
    h = np.uint64(num_bytes) * _PRIME_1
    if num_bytes <= 128:
        for index in range((num_bytes - 1) // 32, -1, -1):
            h += _mix_16(data, start + index * 16, index * 32, seed)
            h += _mix_16(data, end - 16 - index * 16, index * 32 + 16, seed)
        return _avalanche(h)
    for offset in range(0, 128, 16):
        h += _mix_16(data, start + offset, offset, seed)
    h = _avalanche(h)
    for offset in range(128, num_bytes - 15, 16):
        h += _mix_16(data, start + offset, offset - 125, seed)
    return _avalanche(h + _mix_16(data, end - 16, 119, seed))


@inlined
def _secret_at(offset: int, seed: np.uint64) -> np.uint64:
    """Return the word at an offset of the seeded secret, in which the seed is added to every other word."""
    first, shift = offset & ~7, np.uint64((offset & 7) * 8)
    one: np.uint64 = _WORDS[np.uint64(first)] + (_U0 - seed if first & 8 else seed)
    if shift == _U0:
        return one
    two: np.uint64 = _WORDS[np.uint64(first + 8)] + (seed if first & 8 else _U0 - seed)
    return one >> shift | two << (_U64 - shift)


@inlined
def _mix_lane(mixed: np.uint64, lane: int, data: Bytes, at: int, secret: int, seed: np.uint64) -> np.uint64:
    """Mix a stripe into a lane: its neighbour's data, and the product of the halves of its own, keyed."""
    keyed = word_at(data, at + lane * 8) ^ _secret_at(secret + lane * 8, seed)
    return mixed + word_at(data, at + (lane ^ 1) * 8) + (keyed & _LOW) * (keyed >> _U32)


@helper
def _hash_long(data: Bytes, start: int, num_bytes: int, seed: np.uint64) -> np.uint64:
    """Hash more than 240 bytes, one lane after the other, so that the lanes need no memory."""
    h, before = np.uint64(num_bytes) * _PRIME_1, _U0
    for lane in range(8):
        mixed = _FIRST_LANES[lane]
        for stripe in range((num_bytes - 1) // _STRIPE_BYTES):
            in_block = stripe & (_STRIPES_A_BLOCK - 1)
            mixed = _mix_lane(mixed, lane, data, start + stripe * _STRIPE_BYTES, in_block * 8, seed)
            if in_block == _STRIPES_A_BLOCK - 1:
                mixed = (mixed ^ (mixed >> _U47) ^ _secret_at(128 + lane * 8, seed)) * _PRIME_32_1
        mixed = _mix_lane(mixed, lane, data, start + num_bytes - _STRIPE_BYTES, 121, seed)
        mixed ^= _secret_at(11 + lane * 8, seed)
        if lane & 1:
            h += folded_product(before, mixed)
        before = mixed
    return _avalanche(h)


@helper
def xxh3_64(data: Bytes, start: int, num_bytes: int, seed: np.uint64) -> np.uint64:
    """Return XXH3-64 of four bytes or more; reads nothing beyond them."""
    if num_bytes > 240:
        return _hash_long(data, start, num_bytes, seed)
    if num_bytes > 16:
        return _hash_to_240(data, start, num_bytes, seed)
    if num_bytes > 8:
        last = word_at(data, start + num_bytes - 8)
        return _hash_two_words(word_at(data, start), last, np.uint64(num_bytes), seed)
    return _hash_to_8(data, start, num_bytes, seed)


@helper
def chained(parent: np.uint64, local: np.uint64) -> np.uint64:
    """Return the sequence hash of a block, by that of the block before it and its own local hash."""
    return _hash_two_words(parent, local, np.uint64(16), _HASH_SEED)


@jit((BYTES, int64, int64, uint64, U64S))
def hash_chain(tokens: Bytes, block_bytes: int, stride_bytes: int, seed: np.uint64, hashes: NDArray[np.uint64]) -> None:
    """Write the sequence hash of as many blocks as there is room for.

    `tokens` is little-endian u32. A block begins `stride_bytes` after the one before and covers `block_bytes`: as much,
    or one token more for EAGLE.
    """
    for number in range(len(hashes)):
        block_hash = xxh3_64(tokens, number * stride_bytes, block_bytes, seed)
        hashes[number] = chained(hashes[number - 1], block_hash) if number > 0 else block_hash


def token_array(token_ids: TokenIds) -> NDArray[np.uint32]:
    """Return the token ids as contiguous u32, a view where they are that already.

    Raises InvalidValueError for a token id outside u32.
    """
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.uint32 and token_ids.flags.c_contiguous:
        return token_ids.view(np.uint32)
    return np.frombuffer(pack_tokens(token_ids), np.uint32)


def block_hashes(
    token_ids: TokenIds,
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
) -> NDArray[np.uint64]:
    """Return what `kvist.events.hashing.block_hashes` returns for a prompt without images.

    Fastest from an array of u32 (`token_array`): packing a list takes most of the time.
    """
    if block_size <= 0:
        raise InvalidValueError("block_size", block_size, "a positive number of tokens")
    tokens = token_array(token_ids)
    num_blocks = max(0, len(tokens) - is_eagle) // block_size
    hashes = np.empty(num_blocks, np.uint64)
    stride_bytes = block_size * 4
    block_bytes = stride_bytes + is_eagle * 4
    hash_chain(tokens.view(np.uint8), block_bytes, stride_bytes, np.uint64(scope_seed(lora_name, cache_salt)), hashes)
    return hashes
