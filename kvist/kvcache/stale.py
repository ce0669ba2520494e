"""The one rule for which blocks of a sequence no later query can see, and which prefix the caches can serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.events.engine_events import FULL, KnownWindow


def num_stale_blocks(history: int, window: KnownWindow, block_size: int) -> int:
    """Return how many blocks, all at the front, no query at position `history` or later can read.

    `history` is the number of tokens in the cache *before* a step: the step's first query is at position `history` and
    sees back to `history + 1 - window`. Counting the step's own tokens as well would free keys that its first queries
    need. O(1).
    """
    return 0 if window is FULL else max(0, (history + 1 - window) // block_size)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def effective_window(window: KnownWindow, max_model_len: int) -> KnownWindow:
    """Return the window, or FULL if a sequence of `max_model_len` tokens fits into it."""
    return window if isinstance(window, int) and window < max_model_len else FULL


def reusable_prefix(
    num_blocks: int, block_size: int, groups: Sequence[tuple[KnownWindow, Callable[[int], bool]]]
) -> int:
    """Return how many of the first `num_blocks` blocks the caches of all groups can serve together.

    Each group is a window and a function that says whether the block at an ordinal is cached. A prefix is usable if
    every group has the blocks that the query after it sees. A missing block at ordinal i rules out every longer prefix,
    so the search continues with a prefix of i blocks. O(blocks) lookups for full attention, and a window's worth for
    each retry.
    """
    candidate = num_blocks
    while True:
        shorter = min((_first_missed(candidate, block_size, *group) for group in groups), default=0)
        if shorter == candidate:
            return candidate
        candidate = shorter


def _first_missed(num_blocks: int, block_size: int, window: KnownWindow, is_cached: Callable[[int], bool]) -> int:
    """Return the first block that the group needs for a prefix of `num_blocks` and lacks; `num_blocks` if none."""
    needed = range(num_stale_blocks(num_blocks * block_size, window, block_size), num_blocks)
    return next((ordinal for ordinal in needed if not is_cached(ordinal)), num_blocks)
