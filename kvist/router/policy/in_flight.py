"""Prompts in flight: their blocks are as good as cached where they run, before any event reports them.

Marks also count the requests for a prefix in the last seconds, as these share the computation of a copy.

A mark may be read while another process puts a new one in its place. A rank of the other prompt may then be taken for
one that has this one: that costs the request a hit, as if the prompt had just been evicted.
"""

from __future__ import annotations

import math
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
"""How long a prompt counts without any answer."""
UNTIL_INDEXED_S: Final = 5.0
"""How long it counts after its first token: until the index has its blocks."""
REQUESTS_WINDOW_S: Final = 5.0
"""A prefix's requests are counted over so long: each counts less by a factor e after this time. Over 10 s, hot prefixes
are copied for differences that pass by themselves (docs/decisions.md)."""

_LAST_SLOT: Final = np.uint64(NUM_SLOTS - 1)
_MASK: Final = (1 << 64) - 1

Marks = NDArray[np.uint64]
Depths = NDArray[np.int64]
Counts = NDArray[np.float64]

SLOT: Final = np.dtype(
    [
        ("hash", "u8"),
        ("num_requests", "f8"),
        ("counted_at_s", "f8"),
        ("until_s", "f8", NUM_RANKS_OF_A_MARK),
        ("rank", "i4", NUM_RANKS_OF_A_MARK),
    ]
)


def read_depths(
    tables: NDArray[np.void],
    marks: Marks,
    depths: Depths,
    now_s: float,
    columns: Depths,
    ranks: Depths,
    found: Depths,
    num_requests: Counts,
) -> None:
    """Raise what each of `ranks` holds, in `found`, to the depth of the deepest mark that it has.

    Each mark's requests of late, or those of a deeper one where its own were lost, are added to `num_requests`.
    `columns` is scratch space for the index of each rank of the tables among `ranks`; all are -1 before and after. This
    and the two functions below are plain loops, for `kvist.router.compiled` to compile.
    """
    for idx in range(len(ranks)):
        columns[ranks[idx]] = idx
    for idx in range(len(marks)):
        for row in range(len(tables)):
            entry = tables[row, marks[idx] & _LAST_SLOT]
            if entry["hash"] != marks[idx]:
                continue
            num_requests[idx] += entry["num_requests"] * math.exp((entry["counted_at_s"] - now_s) / REQUESTS_WINDOW_S)
            for way in range(NUM_RANKS_OF_A_MARK):
                column = columns[entry["rank"][way]]
                if column >= 0 and entry["until_s"][way] > now_s:
                    found[column] = max(found[column], depths[idx])
    for idx in range(len(ranks)):
        columns[ranks[idx]] = -1
    for idx in range(len(marks) - 1, 0, -1):
        num_requests[idx - 1] = max(num_requests[idx - 1], num_requests[idx])


def add_marks(
    table: NDArray[np.void], marks: Marks, rank: int, until_s: float, now_s: float, num_requests: float
) -> None:
    """Add the rank to each mark, in its own place or else in the one that expires first, and so many requests."""
    for mark in marks:
        entry = table[mark & _LAST_SLOT]
        if entry["hash"] != mark:
            entry["num_requests"] = 0.0
            entry["until_s"][:] = 0.0
            entry["hash"] = mark
        entry["num_requests"] *= math.exp((entry["counted_at_s"] - now_s) / REQUESTS_WINDOW_S)
        entry["num_requests"] += num_requests
        entry["counted_at_s"] = now_s
        chosen = 0
        for way in range(NUM_RANKS_OF_A_MARK):
            if entry["rank"][way] == rank:
                chosen = way
                break
            if entry["until_s"][way] < entry["until_s"][chosen]:
                chosen = way
        entry["rank"][chosen] = rank
        entry["until_s"][chosen] = until_s


def settle_marks(table: NDArray[np.void], marks: Marks, rank: int, until_s: float, then_s: float) -> None:
    """Change when the rank's marks expire from `until_s` to `then_s`; those that were renewed stay."""
    for mark in marks:
        entry = table[mark & _LAST_SLOT]
        for way in range(NUM_RANKS_OF_A_MARK if entry["hash"] == mark else 0):
            if entry["rank"][way] == rank and entry["until_s"][way] == until_s:
                entry["until_s"][way] = then_s


class PromptsInFlight:
    """Marks at some of a prompt's blocks, in a table of fixed size for each router; a decision reads all tables.

    Not every block is marked: one in MARK_TOKENS, and after each 64 marks one in four times as many as before, at the
    same places of each prompt. So a prompt has 15 marks at 4,000 tokens and 132 at 100,000, and of a shared prefix less
    than MARK_TOKENS or a fifth is missed. A mark lists the ranks that had it last; a newer mark takes the slot of an
    older one. A block's hash depends on all blocks before it, so the deepest mark that is found implies the others.
    A rank has what any of the tables says it has.
    """

    def __init__(self, tables: NDArray[np.void], num_ranks: int, block_size: int, own_idx: int = 0) -> None:
        """Keep the tables where they lie: `[num_rows, NUM_SLOTS]` of SLOT, zeros at first."""
        self._tables, self._own = tables, tables[own_idx]
        self._columns, self._all_ranks = np.full(num_ranks, -1), np.arange(num_ranks)
        depths, last, stride = list[int](), 0, max(1, MARK_TOKENS // block_size)
        while last * block_size < LONGEST_PROMPT_TOKENS:
            depths += range(last + stride, last + stride * NUM_MARKS_OF_A_STRIDE + 1, stride)
            last, stride = depths[-1], stride * 4
        self._all_depths, self._depths, self._idxs = depths, np.array(depths), np.array(depths) - 1

    def marks(self, block_hashes: Sequence[int] | Marks) -> Marks:
        """Return those hashes that are marked, of the hashes of all full blocks of a prompt."""
        idxs = self._idxs[: bisect_right(self._all_depths, len(block_hashes))]
        if isinstance(block_hashes, np.ndarray):
            marks: Marks = block_hashes[idxs].astype(np.uint64, copy=False)
            return marks
        return np.array([int(block_hashes[idx]) & _MASK for idx in idxs.tolist()], np.uint64)

    def read(
        self, now_s: float, marks: Marks, held: Depths, ranks: Depths | None = None
    ) -> tuple[Depths, Depths, Counts]:
        """Return how many leading blocks each rank holds or computes, and how often prefixes were requested of late.

        `held` are those in the index. The other two are how many blocks each mark's prefix has, and its requests.
        """
        depths, num_requests = held, np.zeros(len(marks))
        if len(marks):
            depths, ranks = held.copy(), self._all_ranks if ranks is None else ranks
            read_depths(self._tables, marks, self._depths, now_s, self._columns, ranks, depths, num_requests)
        return depths, self._depths[: len(marks)], num_requests

    def add(self, now_s: float, rank: int, marks: Marks) -> float:
        """Mark a prompt as in flight at this rank; return the time that `settle` needs to find its marks."""
        until_s = now_s + IN_FLIGHT_S
        if len(marks):
            add_marks(self._own, marks, rank, until_s, now_s, 1.0)
        return until_s

    def settle(self, now_s: float, rank: int, marks: Marks, until_s: float, *, is_computed: bool) -> None:
        """Let the prompt's marks expire: soon, once the index has its blocks, or at once if it was not computed.

        Marks that a later prompt renewed stay.
        """
        if len(marks):
            settle_marks(self._own, marks, rank, until_s, now_s + UNTIL_INDEXED_S if is_computed else 0.0)
