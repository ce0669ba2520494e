"""Blocks of prompts that were dispatched: where they run they are as good as cached, before any event tells of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS: Final = 4096
MARK_TOKENS: Final = 256
NUM_MARKS_OF_A_STRIDE: Final = 64
LONGEST_PROMPT_TOKENS: Final = 1 << 22

IN_FLIGHT_S: Final = 300.0
"""How long a prompt that nothing is heard of counts."""
UNTIL_INDEXED_S: Final = 5.0
"""How long it counts after its first token: until the index knows of it."""

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(64 - (NUM_SLOTS - 1).bit_length())
_MASK: Final = (1 << 64) - 1

Marks = NDArray[np.uint64]


class PromptsInFlight:
    """Marks at some of a prompt's blocks, a table of fixed size for each router; a decision looks at all tables.

    Not every block is marked: one in MARK_TOKENS, and from each 64th mark on one in four times as many as before, at
    the same places of each prompt. So a prompt has 15 marks at 4,000 tokens and 132 at 100,000, and of what it shares
    less than MARK_TOKENS or a fifth is missed. A newer mark takes the slot of an older one. Tables combine by the
    largest `until_s`.
    """

    def __init__(self, hashes: Marks, until_s: NDArray[np.float64], block_size: int, own_idx: int = 0) -> None:
        """Keep the tables where they lie: `[num_rows, NUM_SLOTS]` and `[num_rows, NUM_SLOTS, num_ranks]`, zeros."""
        self._hashes, self._until_s = hashes, until_s
        self._own_hashes, self._own_until_s = hashes[own_idx], until_s[own_idx]
        places, stride = [0], max(1, MARK_TOKENS // block_size)
        while places[-1] * block_size < LONGEST_PROMPT_TOKENS:
            places += range(places[-1] + stride, places[-1] + stride * NUM_MARKS_OF_A_STRIDE + 1, stride)
            stride *= 4
        self._depths_or_0 = np.array(places)
        self._depths, self._all_depths = self._depths_or_0[1:], places[1:]

    @classmethod
    def for_one(cls, num_ranks: int, block_size: int) -> PromptsInFlight:
        """Return the table of a router that is alone."""
        return cls(np.zeros((1, NUM_SLOTS), np.uint64), np.zeros((1, NUM_SLOTS, num_ranks)), block_size)

    def marks(self, block_hashes: Sequence[int] | Marks) -> Marks:
        """Return the hashes of a prompt that are marked, of all its full blocks from the first on."""
        depths = self._depths[: bisect_right(self._all_depths, len(block_hashes))]
        if isinstance(block_hashes, np.ndarray):
            marks: Marks = block_hashes[depths - 1].astype(np.uint64, copy=False)
            return marks
        return np.array([int(block_hashes[depth - 1]) & _MASK for depth in depths.tolist()], np.uint64)

    def depths(
        self, now_s: float, marks: Marks, held: NDArray[np.int64], ranks: NDArray[np.intp] | None = None
    ) -> NDArray[np.int64]:
        """Return how many leading blocks each rank holds or will have computed; `held` are those it holds by events."""
        if not len(marks):
            return held
        slots = (marks * _ODD) >> _SHIFT
        is_marked = self._hashes[:, slots] == marks
        last = len(marks) if is_marked[0, -1] else int(is_marked.any(0).nonzero()[0].max(initial=-1)) + 1
        if not last:
            return held
        until_s = self._until_s[:, slots[:last]] if ranks is None else self._until_s[:, slots[:last, None], ranks]
        is_there = ((until_s > now_s) & is_marked[:, :last, None]).any(0)
        is_there |= self._depths[:last, None] <= held
        num_there = np.where(is_there.all(0), last, is_there.argmin(0))
        depths: NDArray[np.int64] = np.maximum(held, self._depths_or_0[num_there])
        return depths

    def add(self, now_s: float, rank: int, marks: Marks) -> float:
        """Mark a prompt as in flight at this rank; return what `settle` wants to know it again by."""
        slots, until_s = (marks * _ODD) >> _SHIFT, now_s + IN_FLIGHT_S
        others = slots[self._own_hashes[slots] != marks]
        self._own_until_s[others] = 0.0
        self._own_hashes[slots] = marks
        self._own_until_s[slots, rank] = until_s
        return until_s

    def settle(self, now_s: float, rank: int, marks: Marks, until_s: float, *, is_computed: bool) -> None:
        """Leave the prompt to the index from soon on, or, if it was not computed, from now on.

        Marks that a later prompt renewed stay.
        """
        slots = (marks * _ODD) >> _SHIFT
        own = slots[(self._own_hashes[slots] == marks) & (self._own_until_s[slots, rank] == until_s)]
        self._own_until_s[own, rank] = now_s + UNTIL_INDEXED_S if is_computed else 0.0
