"""Block hashes of tokens at an address; the rule is that of `kvist.events.hashing`."""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.old_xxh3 import chained, hash_64_bytes, hash_256_bytes, xxh3_64
from kvist.radix.compiled.intrinsics import putu64


@jit("u8(i8,i8,u8)", is_inlined=True)
def local_hash(block, block_bytes, seed):
    """Local hash of a block; the usual sizes, 16 and 64 tokens, without a call."""
    if block_bytes == 64:
        return hash_64_bytes(block, seed)
    if block_bytes == 256:
        return hash_256_bytes(block, seed)
    return xxh3_64(block, block_bytes, seed)


@jit("u8(i8,i8,i8,i8,u8,i8,u8,i8)", is_entry=True)
def hash_chain(tokens, num_blocks, stride_bytes, block_bytes, seed, has_parent, parent, output):
    """Write the sequence hash of each of at least one block to the output, as u64; return the last.

    `tokens` is the address of little-endian u32. A block begins `stride_bytes` after the one before and covers
    `block_bytes`: as much, or one token more for EAGLE. `parent` is the sequence hash before the first block, if any.
    """
    block_hash = local_hash(tokens, block_bytes, seed)
    if has_parent:
        block_hash = chained(parent, block_hash)
    putu64(output, block_hash)
    for index in range(1, num_blocks):
        block_hash = chained(block_hash, local_hash(tokens + index * stride_bytes, block_bytes, seed))
        putu64(output + index * 8, block_hash)
    return block_hash
