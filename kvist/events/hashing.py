"""Canonical block hashes: equal tokens behind equal prefixes have equal hashes, in every engine and on every machine.

A block has a *local* hash, of its own tokens, and a *sequence* hash, which chains the local hashes from the root; the
sequence hash is the block's canonical name. LoRA adapter, cache salt, images and EAGLE pairs enter the local hash. The
rule is Dynamo's (ai-dynamo 1.6.1), so that tools interoperate; `benchmarks/verify_hashing.py` compares the two.
The hashes are 64-bit hints for routing, never proof that two prompts are equal.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvist.errors import InvalidValueError

HASH_SEED = 1337

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

_U32_MAX = 0xFFFF_FFFF
_U64_MAX = 0xFFFF_FFFF_FFFF_FFFF
_TOKEN_BYTES = 4
_pack_pair = struct.Struct("<QQ").pack


class HashExtras(TypedDict, total=False):
    """What is hashed with a block's tokens. Empty names count as absent."""

    lora_name: str | None
    cache_salt: str | None
    mm_hashes: Sequence[Sequence[int]] | None
    """For each block, the hashes of the multimodal items in it; blocks past its end have none."""
    is_eagle: bool
    """Block i covers tokens [i*B, i*B + B + 1)."""


def local_block_hashes(
    token_ids: TokenIds,
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    mm_hashes: Sequence[Sequence[int]] | None = None,
    is_eagle: bool = False,
) -> list[int]:
    """Return the local hash of each full block; a partial last block has none.

    Local hash = XXH3-64 of the block's tokens as little-endian u32, then its `mm_hashes` sorted as little-endian u64.
    Raises InvalidValueError for a token id outside u32 or an mm hash outside u64.
    """
    if block_size <= 0:
        raise InvalidValueError("block_size", block_size, "a positive number of tokens")
    packed = pack_tokens(token_ids)
    stride = block_size * _TOKEN_BYTES
    overlap = _TOKEN_BYTES if is_eagle else 0
    num_blocks = max(0, len(packed) - overlap) // stride
    blocks = [packed[start : start + stride + overlap] for start in range(0, num_blocks * stride, stride)]
    if mm_hashes is not None:
        for idx, items in enumerate(mm_hashes[:num_blocks]):
            if items:
                blocks[idx] += _pack_mm_hashes(items)
    return list(map(xxh3_64_intdigest, blocks, repeat(scope_seed(lora_name, cache_salt))))


def sequence_hashes(local_hashes: Iterable[int], parent: int | None = None) -> list[int]:
    """Return the canonical hash of each block of a chain, given that of the block before it.

    S[i] = XXH3-64(LE64(S[i-1]) + LE64(L[i]), seed 1337); the first block of a prompt has S = L.
    """
    if parent is None:
        return list(accumulate(local_hashes, _chain))
    return list(accumulate(local_hashes, _chain, initial=parent))[1:]


def block_hashes(token_ids: TokenIds, block_size: int, **extras: Unpack[HashExtras]) -> NDArray[np.uint64]:
    """Return the canonical hash of each full block of a prompt; raises as `local_block_hashes` does."""
    return np.array(chain_hashes(token_ids, block_size, None, **extras), dtype=np.uint64)


def chain_hashes(token_ids: TokenIds, block_size: int, parent: int | None, **extras: Unpack[HashExtras]) -> list[int]:
    """Return the canonical hash of each full block behind `parent`."""
    return sequence_hashes(local_block_hashes(token_ids, block_size, **extras), parent)


def scope_seed(lora_name: str | None, cache_salt: str | None) -> int:
    """Return the seed of local hashes for an adapter and a salt; empty names count as absent."""
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(_utf8(lora_name), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(_utf8(cache_salt), 1)
    return seed & _U64_MAX


def pack_tokens(token_ids: TokenIds) -> bytes:
    """Return the token ids as little-endian u32; raises InvalidValueError for one outside u32."""
    if isinstance(token_ids, np.ndarray):
        return _pack_token_array(token_ids)
    try:
        # Four times as fast as np.array(token_ids, dtype=np.uint32), and checks the range.
        return array("I", token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        wrong = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t <= _U32_MAX), token_ids)
        raise InvalidValueError("token_ids", wrong, "integers from 0 to 2**32 - 1") from error


def _chain(parent: int, local: int) -> int:
    return xxh3_64_intdigest(_pack_pair(parent, local), HASH_SEED)


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _pack_token_array(token_ids: NDArray[np.integer[Any]]) -> bytes:
    if token_ids.dtype.kind not in "iu" or token_ids.ndim != 1:
        found = f"{token_ids.dtype}{token_ids.shape}"
        raise InvalidValueError("token_ids", found, "a one-dimensional array of integers")
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() > _U32_MAX):
        wrong = int(token_ids.min()) if token_ids.min() < 0 else int(token_ids.max())
        raise InvalidValueError("token_ids", wrong, "integers from 0 to 2**32 - 1")
    return token_ids.astype("<u4", copy=False).tobytes()


def _pack_mm_hashes(items: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(items)}Q", *sorted(items))
    except struct.error as error:
        raise InvalidValueError("mm_hashes", list(items), "integers from 0 to 2**64 - 1") from error
