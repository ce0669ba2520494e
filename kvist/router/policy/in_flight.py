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
NUM_RANKS_OF_A_MARK: Final = 8
LONGEST_PROMPT_TOKENS: Final = 1 << 22

IN_FLIGHT_S: Final = 300.0
"""How long a prompt that nothing is heard of counts."""
UNTIL_INDEXED_S: Final = 5.0
"""How long it counts after its first token: until the index knows of it."""

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(64 - (NUM_SLOTS - 1).bit_length())
_MASK: Final = (1 << 64) - 1

Marks = NDArray[np.uint64]

SLOT: Final = np.dtype([("hash", "u8"), ("until_s", "f8", NUM_RANKS_OF_A_MARK), ("rank", "i4", NUM_RANKS_OF_A_MARK)])


class PromptsInFlight:
    """Marks at some of a prompt's blocks, a table of fixed size for each router; a decision looks at all tables.

    Not every block is marked: one in MARK_TOKENS, and from each 64th mark on one in four times as many as before, at
    the same places of each prompt. So a prompt has 15 marks at 4,000 tokens and 132 at 100,000, and of what it shares
    less than MARK_TOKENS or a fifth is missed. A mark names the ranks that have had it last; a newer mark takes the
    slot of an older one. A block's hash names all before it, too: the deepest mark that is found tells of the others.
    A rank has what any of the tables says it has.
    """

    def __init__(self, tables: NDArray[np.void], num_ranks: int, block_size: int, own_idx: int = 0) -> None:
        """Keep the tables where they lie: `[num_rows, NUM_SLOTS]` of SLOT, zeros at first."""
        self._hashes, self._until_s, self._ranks = tables["hash"], tables["until_s"], tables["rank"]
        self._own_hashes, self._own_until_s, self._own_ranks = (
            each[own_idx] for each in (self._hashes, self._until_s, self._ranks)
        )
        self._place_of_rank = np.full(num_ranks, -1)
        depths, last, stride = list[int](), 0, max(1, MARK_TOKENS // block_size)
        while last * block_size < LONGEST_PROMPT_TOKENS:
            depths += range(last + stride, last + stride * NUM_MARKS_OF_A_STRIDE + 1, stride)
            last, stride = depths[-1], stride * 4
        self._all_depths, self._depths = depths, np.array(depths)

    @classmethod
    def for_one(cls, num_ranks: int, block_size: int) -> PromptsInFlight:
        """Return the table of a router that is alone."""
        return cls(np.zeros((1, NUM_SLOTS), SLOT), num_ranks, block_size)

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
        slots = _slots(marks)
        is_marked = self._hashes[:, slots] == marks
        if not is_marked.any():
            return held
        is_there = self._until_s[:, slots] > now_s
        is_there &= is_marked[:, :, None]
        marked, places = is_there.nonzero()[1], self._ranks[:, slots][is_there]
        if ranks is not None:
            self._place_of_rank[ranks] = np.arange(len(ranks))
            places = self._place_of_rank[places]
            self._place_of_rank[ranks] = -1
            marked, places = marked[places >= 0], places[places >= 0]
        depths = held.copy()
        np.maximum.at(depths, places, self._depths[marked])
        return depths

    def add(self, now_s: float, rank: int, marks: Marks) -> float:
        """Mark a prompt as in flight at this rank; return what `settle` wants to know it again by."""
        until_s = now_s + IN_FLIGHT_S
        if not len(marks):
            return until_s
        slots = _slots(marks)
        self._own_until_s[slots[self._own_hashes[slots] != marks]] = 0.0
        self._own_hashes[slots] = marks
        # The rank's own entry, else that which counts for the shortest time.
        ways = np.where(self._own_ranks[slots] == rank, -1.0, self._own_until_s[slots]).argmin(1)
        self._own_ranks[slots, ways] = rank
        self._own_until_s[slots, ways] = until_s
        return until_s

    def settle(self, now_s: float, rank: int, marks: Marks, until_s: float, *, is_computed: bool) -> None:
        """Leave the prompt to the index from soon on, or, if it was not computed, from now on.

        Marks that a later prompt renewed stay.
        """
        if not len(marks):
            return
        slots = _slots(marks)
        slots = slots[self._own_hashes[slots] == marks]
        found, ways = ((self._own_ranks[slots] == rank) & (self._own_until_s[slots] == until_s)).nonzero()
        self._own_until_s[slots[found], ways] = now_s + UNTIL_INDEXED_S if is_computed else 0.0


def _slots(marks: Marks) -> NDArray[np.intp]:
    return ((marks * _ODD) >> _SHIFT).astype(np.intp)
