"""The compiled XXH3-64 is the `xxhash` package's, for every length from four bytes on and every seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvist.indexer.compiled.hashing import hash_chain

# Around each change of method, and of the blocks of the long one; whole ranges are in the test of every length.
_LENGTHS = (4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 256, 1024, 1025, 2048, 2049, 4096, 5000)


def _hash(content: bytes, seed: int) -> int:
    """Hash a copy that begins at an odd address."""
    block_hash = np.empty(1, np.uint64)
    buffer = np.frombuffer(b"?" + content + b"?", np.uint8)
    hash_chain(buffer[1:], len(content), len(content), np.uint64(seed), block_hash)
    return int(block_hash[0])


@pytest.mark.parametrize("first", range(4, 2048, 256))
def test_every_length_hashes_as_the_package_does(first: int) -> None:
    rng = random.Random(first)
    for length in range(first, first + 257):
        content = rng.randbytes(length)
        for seed in (1337, rng.getrandbits(64)):
            assert _hash(content, seed) == xxh3_64_intdigest(content, seed), length


@pytest.mark.parametrize("length", _LENGTHS)
@pytest.mark.parametrize("seed", [0, 1, 1337, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_seeds_of_any_size_hash_as_the_package_does(length: int, seed: int) -> None:
    for content in (bytes(length), b"\xff" * length, random.Random(length).randbytes(length)):
        assert _hash(content, seed) == xxh3_64_intdigest(content, seed)
