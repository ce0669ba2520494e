"""A sequence's pages as kernels walk them: from the first that is left in the table.

Two coordinates: masks and rotary embeddings are absolute, only where a page is found and how many there are is local.
"""

from __future__ import annotations

from typing import NamedTuple

from kvist.events.windows import KnownWindow
from kvist.kvcache.stale import num_blocks_for, stale_range


class LocalPages(NamedTuple):
    """One sequence in one group: `offset` pages are gone at the front, and `num_tokens` tokens lie behind them."""

    offset: int
    num_tokens: int
    block_size: int

    @property
    def num_pages(self) -> int:
        """Return how many pages hold the tokens that are left."""
        return num_blocks_for(self.num_tokens, self.block_size)

    @property
    def last_page_len(self) -> int:
        """Return how many tokens are in the last page; 0 when there are none."""
        return (self.num_tokens - 1) % self.block_size + 1 if self.num_tokens else 0

    @property
    def spill_ordinal(self) -> int:
        """Return the absolute ordinal of the page after the last one, for engines that reserve a step ahead."""
        return self.offset + self.num_pages

    def locate(self, position: int) -> tuple[int, int]:
        """Return the local page of an absolute position and the place in it; a negative page is gone."""
        ordinal, place = divmod(position, self.block_size)
        return ordinal - self.offset, place


def local_pages(history: int, num_tokens: int, window: KnownWindow, block_size: int) -> LocalPages:
    """Return the pages of a step that takes a sequence from `history` to `num_tokens` tokens.

    What is gone goes by the history, so that the step's first query finds its keys: of a window, at most
    `window + block_size - 2` tokens and the step's own are left once any are gone.
    """
    offset = stale_range(history, window, block_size).end
    return LocalPages(offset, num_tokens - offset * block_size, block_size)
