"""An order-free digest of what a rank holds, so that publisher and subscriber can compare without sending it.

The digest is the sum modulo 2**64, over every held (block, tier), of the splitmix64 finaliser (Steele et al. 2014) of
the block's hash XORed with a constant of its tier. Adding and removing are both O(1).
"""

from __future__ import annotations

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_TIER_STEP = 0x9E37_79B9_7F4A_7C15


def block_digest(block_hash: int, tier: int) -> int:
    """Return the u64 that one held (block, tier) contributes to its rank's digest."""
    x = block_hash ^ (tier * _TIER_STEP & _MASK)
    x = (x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB & _MASK
    return x ^ (x >> 31)
