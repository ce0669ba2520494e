"""The words of engines' events, found by a perfect hash: keys, event types, media and kinds of cache.

A word's number says what it stands for; keys are fields, in whatever order an engine sends them.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import struct

import numpy as np

from kvist.indexer.compiled.intrinsics import constant_bytes
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get64, getu64

# Fields; 0 is one that nobody needs.
TYPE, BLOCK_HASHES, PARENT, TOKEN_IDS, BLOCK_SIZE, LORA_ID, LORA_NAME, CACHE_SALT = range(1, 9)
EXTRA_KEYS, GROUP, KIND, WINDOW, MEDIUM, LOCALITY = range(9, 15)
# Values: types, tiers from `TIERS` on, what a kind of cache says of the window, localities.
BLOCK_STORED, BLOCK_REMOVED = 32, 33
TIERS = 36
FULL_KIND, OTHER_KIND, NEVER_INDEXED = 40, 41, 42
LOCAL, REMOTE = 44, 45

FIELDS = {
    "type": TYPE,
    "block_hashes": BLOCK_HASHES,
    "parent_block_hash": PARENT,
    "token_ids": TOKEN_IDS,
    "block_size": BLOCK_SIZE,
    "lora_id": LORA_ID,
    "lora_name": LORA_NAME,
    "cache_salt": CACHE_SALT,
    "extra_keys": EXTRA_KEYS,
    "group_idx": GROUP,
    "kv_cache_spec_kind": KIND,
    "kv_cache_spec_sliding_window": WINDOW,
    "medium": MEDIUM,
    "locality": LOCALITY,
}
_VALUES = {
    "BlockStored": BLOCK_STORED,
    "BlockRemoved": BLOCK_REMOVED,
    "GPU": TIERS,
    "CPU": TIERS + 1,
    "CPU_PINNED": TIERS + 1,
    "DISK": TIERS + 2,
    "STORAGE": TIERS + 2,
    "EXTERNAL": TIERS + 3,
    "full_attention": FULL_KIND,
    "mla_attention": FULL_KIND,
    "sink_full_attention": FULL_KIND,
    "sliding_window": OTHER_KIND,
    "sliding_window_mla": OTHER_KIND,
    "chunked_local_attention": OTHER_KIND,
    "unknown": OTHER_KIND,
    "mamba": NEVER_INDEXED,
    "encoder_only_attention": NEVER_INDEXED,
    "cross_attention": NEVER_INDEXED,
    "LOCAL": LOCAL,
    "REMOTE": REMOTE,
}
_ENTRY_BYTES, _LONGEST = 64, 32
_MULTIPLIER = 0xDEBE_0F67_10A6_8B4D  # found by trial: it sends these words to 64 places of their own
_U58, _U64_MAX = np.uint64(58), np.uint64((1 << 64) - 1)


def _table() -> bytes:
    """The words by place: u64 length and number << 8, then the word itself."""
    table = bytearray(64 * _ENTRY_BYTES)
    for word, number in (FIELDS | _VALUES).items():
        text = word.encode().ljust(_LONGEST, b"\0")
        first = int.from_bytes(text[:8], "little")
        place = ((first + len(word)) * _MULTIPLIER >> 58) % 64 * _ENTRY_BYTES
        assert not any(table[place : place + 8]), f"the multiplier is no good any more: {word}"
        struct.pack_into("<Q32s", table, place, len(word) | number << 8, text)
    return bytes(table)


_words = constant_bytes("engine_words", _table())
_M = np.uint64(_MULTIPLIER)


@jit("u8(i8)", is_inlined=True)
def _first_bytes(num_bytes):
    """Mask of the first bytes of a word, 1 to 8 of them."""
    return _U64_MAX >> np.uint64(64 - 8 * num_bytes)


@jit("i8(i8,i8)")
def number_of(address, length):
    """Return the number of a word of the engines, 0 for any other."""
    if length == 0 or length > _LONGEST:
        return 0
    first = getu64(address) & _first_bytes(min(length, 8))
    entry = _words() + np.int64(((first + np.uint64(length)) * _M) >> _U58) * _ENTRY_BYTES
    if get64(entry) & 255 != length or first != getu64(entry + 8):
        return 0
    for offset in range(8, length, 8):
        if (getu64(address + offset) & _first_bytes(min(length - offset, 8))) != getu64(entry + 8 + offset):
            return 0
    return get64(entry) >> 8
