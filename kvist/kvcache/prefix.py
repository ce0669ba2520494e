"""How much of a prompt the caches of all groups can serve together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.events.windows import KnownWindow
from kvist.kvcache.stale import num_blocks_for, stale_range

Coverage = Callable[[int], int]  # block ordinal -> tokens of that block that are cached


def reusable_prefix(num_tokens: int, block_size: int, groups: Sequence[tuple[KnownWindow, Coverage]]) -> int:
    """Return the longest usable prefix of at most `num_tokens` tokens among those the misses leave possible.

    A prefix of n tokens is usable when every group holds what the query at position n sees: full attention all of it, a
    window only the blocks from `stale_range(n).end` on. The first block missed at ordinal i rules out every length that
    reaches past it, because a shorter prefix needs older blocks, never fewer of the old ones; so the search goes on at
    what i covers, until no group objects. O(blocks) lookups for full attention, and a window's worth a retry.
    """
    candidate = num_tokens
    while True:
        shorter = min((_first_miss(candidate, block_size, window, covered) for window, covered in groups), default=0)
        if shorter == candidate:
            return candidate
        candidate = shorter


def _first_miss(num_tokens: int, block_size: int, window: KnownWindow, covered: Coverage) -> int:
    """Return `num_tokens` if the group can serve it, else the tokens up to where its first miss begins."""
    for ordinal in range(stale_range(num_tokens, window, block_size).end, num_blocks_for(num_tokens, block_size)):
        start = ordinal * block_size
        have = covered(ordinal)
        if have < min(block_size, num_tokens - start):
            return start + have
    return num_tokens
