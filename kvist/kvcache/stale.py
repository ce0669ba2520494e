"""The one rule for which blocks of a sequence no later query can see."""

from __future__ import annotations

from typing import NamedTuple

from kvist.events.windows import FULL, KnownWindow


class BlockRange(NamedTuple):
    """Block ordinals [start, end); empty when they are equal."""

    start: int
    end: int

    @property
    def num_blocks(self) -> int:
        """Return how many blocks these are."""
        return self.end - self.start


def stale_range(history: int, window: KnownWindow, block_size: int, sink: int = 0) -> BlockRange:
    """Return the blocks that no query at position `history` or later can read.

    `history` counts the tokens in the cache *before* a step, whatever the step adds: its first query sits at position
    `history` and still sees back to `history + 1 - window`. Counting the step's own tokens in would free keys that its
    first queries need. The first `sink` tokens are kept for ever. O(1).
    """
    start = min(-(-history // block_size), -(-sink // block_size))
    if window is FULL:
        return BlockRange(start, start)
    return BlockRange(start, max(start, (history + 1 - window) // block_size))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks `num_tokens` tokens occupy."""
    return -(-num_tokens // block_size)


def effective_window(window: KnownWindow, max_model_len: int) -> KnownWindow:
    """Return FULL for a window that no sequence of `max_model_len` tokens can outgrow, else the window."""
    return window if isinstance(window, int) and window < max_model_len else FULL
