"""What a running sequence holds: a block table a group, and the identities of its blocks in the prefix cache."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvist.kvcache.scratch import ScratchBlocks

ABSENT = -1  # what kernels read at ordinals whose block is stale, in scratch slots, or was never needed
_LOW_64_BITS = 0xFFFF_FFFF_FFFF_FFFF


def root_digest(lora_name: str | None, cache_salt: str | None) -> bytes:
    """Return the digest that first blocks chain from: equal only for equal adapters and salts."""
    hasher = hashlib.sha256(b"kvist block chain")
    for part in (lora_name, cache_salt):
        encoded = b"" if part is None else part.encode()
        hasher.update(struct.pack("<?Q", part is not None, len(encoded)) + encoded)
    return hasher.digest()


def event_hash(digest: bytes) -> int:
    """Return the low 64 bits of a digest: what events call a block."""
    return int.from_bytes(digest, "big") & _LOW_64_BITS


class BlockHashChain:
    """The SHA-256 chain over a token sequence's full blocks; each block is hashed once.

    A digest covers its parent's digest and its tokens as little-endian u32. At 256 bits, equal digests mean equal
    content also for prompts that somebody crafts: one user never reads another's cache by a collision.
    """

    __slots__ = ("block_size", "cache_salt", "digests", "lora_name", "root")

    def __init__(self, block_size: int, lora_name: str | None = None, cache_salt: str | None = None) -> None:
        self.block_size = block_size
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.root = root_digest(lora_name, cache_salt)
        self.digests: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """Hash the full blocks of the first `num_tokens` (or all) of the sequence's tokens that are not hashed yet."""
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

    The blocks at the ordinals `adopted` are another's with the same content: the coming step must not write to them.
    Those in `scratch` slots are ABSENT too, and nowhere once the step is done.
    """

    block_ids: array[int]
    first_held: int
    adopted: list[int] = field(default_factory=list)
    scratch: ScratchBlocks | None = None

    def held(self) -> list[int]:
        """Return the blocks the sequence holds, oldest first; scratch slots are not among them."""
        return [block_id for block_id in self.block_ids[self.first_held :] if block_id != ABSENT]


@dataclass(slots=True)
class SequenceBlocks:
    """A running sequence's hold on the memory: a table a group, with slots for `num_tokens` tokens.

    Only the first `num_final_tokens` of them are sure to stay, and can be found by others. Only the manager changes it.
    """

    tables: tuple[BlockTable, ...]
    chain: BlockHashChain
    num_tokens: int
    num_final_tokens: int
    is_scratch_allowed: bool
