"""An order-free digest of what a rank holds, so that publisher and subscriber can compare without sending it.

The digest is the sum modulo 2**64, over every held (block, tier), of the splitmix64 finaliser (Steele et al. 2014) of
the block's hash XORed with a constant of its tier. Adding and removing are both O(1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_TIER_STEP = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB
# Below this many blocks numpy's fixed cost of some 20 µs is the larger one.
_MIN_VECTOR_BLOCKS = 32


def block_digest(block_hash: int, tier: int) -> int:
    """Return the u64 that one held (block, tier) contributes to its rank's digest."""
    x = block_hash ^ (tier * _TIER_STEP & _MASK)
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def blocks_digest(block_hashes: Sequence[int] | NDArray[np.uint64], tier: int) -> int:
    """Return the u64 that these blocks, held in one tier, contribute together."""
    if len(block_hashes) < _MIN_VECTOR_BLOCKS:
        block_hashes = block_hashes.tolist() if isinstance(block_hashes, np.ndarray) else block_hashes
        return sum(block_digest(block_hash, tier) for block_hash in block_hashes) & _MASK
    x = np.array(block_hashes, dtype=np.uint64) ^ np.uint64(tier * _TIER_STEP & _MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
