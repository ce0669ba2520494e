"""A running sequence's block tables, one a group, and the digests of its blocks in the prefix cache."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvist.kvcache.scratch import ScratchBlocks

ABSENT = -1  # in a block table: the block is stale, is in a scratch slot, or was never needed
_LOW_64_BITS = 0xFFFF_FFFF_FFFF_FFFF


def root_digest(lora_name: str | None, cache_salt: str | None) -> bytes:
    """Return the parent digest of first blocks: equal only for equal adapters and salts."""
    hasher = hashlib.sha256(b"kvist block chain")
    for part in (lora_name, cache_salt):
        encoded = b"" if part is None else part.encode()
        hasher.update(struct.pack("<?Q", part is not None, len(encoded)) + encoded)
    return hasher.digest()


def event_hash(digest: bytes) -> int:
    """Return the low 64 bits of a digest, which is a block's hash in events."""
    return int.from_bytes(digest, "big") & _LOW_64_BITS


class BlockHashChain:
    """The SHA-256 chain over a token sequence's full blocks; each block is hashed once.

    A digest covers its parent's digest and its tokens as little-endian u32. With 256 bits, nobody can craft a prompt
    whose digests collide with another's and so read another user's cache.
    """

    __slots__ = ("block_size", "cache_salt", "digests", "lora_name", "root")

    def __init__(self, block_size: int, lora_name: str | None = None, cache_salt: str | None = None) -> None:
        self.block_size = block_size
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.root = root_digest(lora_name, cache_salt)
        self.digests: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """Hash the full blocks of the sequence, or of its first `num_tokens` tokens, that are not hashed yet."""
        size = self.block_size
        end = len(token_ids) if num_tokens is None else num_tokens
        pack = struct.Struct(f"<{size}I").pack
        digest = self.digests[-1] if self.digests else self.root
        for start in range(len(self.digests) * size, end - size + 1, size):
            digest = hashlib.sha256(digest + pack(*token_ids[start : start + size])).digest()
            self.digests.append(digest)


@dataclass(slots=True)
class BlockTable:
    """One group's blocks of a sequence by absolute ordinal, int32; ABSENT below `first_held`.

    The blocks at the ordinals `adopted` were cached before with the same content: the next step must not write to them.
    Blocks in `scratch` slots are ABSENT in `block_ids`, and lost when the step is done.
    """

    block_ids: array[int]
    first_held: int
    adopted: list[int] = field(default_factory=list)
    scratch: ScratchBlocks | None = None

    def held(self) -> list[int]:
        """Return the blocks that the sequence holds, oldest first, without scratch slots."""
        return [block_id for block_id in self.block_ids[self.first_held :] if block_id != ABSENT]


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of a running sequence: a table a group, with slots for `num_tokens` tokens.

    The first `num_final_tokens` of them cannot be rewound, so their blocks are cached. Only the manager changes it.
    """

    tables: tuple[BlockTable, ...]
    chain: BlockHashChain
    num_tokens: int
    num_final_tokens: int
    is_scratch_allowed: bool
