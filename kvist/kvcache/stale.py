"""The one rule for which blocks of a sequence no later query can see, and what the caches can serve by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.events.engine_events import FULL, KnownWindow


def num_stale_blocks(history: int, window: KnownWindow, block_size: int) -> int:
    """Return how many blocks, all at the front, no query at position `history` or later can read.

    `history` counts the tokens in the cache *before* a step, whatever the step adds: its first query sits at position
    `history` and still sees back to `history + 1 - window`. Counting the step's own tokens in would free keys that its
    first queries need. O(1).
    """
    return 0 if window is FULL else max(0, (history + 1 - window) // block_size)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks `num_tokens` tokens occupy."""
    return -(-num_tokens // block_size)


def effective_window(window: KnownWindow, max_model_len: int) -> KnownWindow:
    """Return FULL for a window that no sequence of `max_model_len` tokens can outgrow, else the window."""
    return window if isinstance(window, int) and window < max_model_len else FULL


def reusable_prefix(
    num_blocks: int, block_size: int, groups: Sequence[tuple[KnownWindow, Callable[[int], bool]]]
) -> int:
    """Return how many of the first `num_blocks` blocks the caches of all groups can serve together.

    Each group tells by ordinal whether it has a block. A prefix is usable when every group holds what the query behind
    it sees, which is older the shorter the prefix: so a block missed at ordinal i rules out every length beyond it, and
    the search goes on at i. O(blocks) lookups for full attention, and a window's worth a retry.
    """
    candidate = num_blocks
    while True:
        shorter = min((_first_missed(candidate, block_size, *group) for group in groups), default=0)
        if shorter == candidate:
            return candidate
        candidate = shorter


def _first_missed(num_blocks: int, block_size: int, window: KnownWindow, is_cached: Callable[[int], bool]) -> int:
    """Return the first block that the group lacks of what it must serve, `num_blocks` if it lacks none."""
    needed = range(num_stale_blocks(num_blocks * block_size, window, block_size), num_blocks)
    return next((ordinal for ordinal in needed if not is_cached(ordinal)), num_blocks)
