"""Matches in an index that another process writes, in the memory that both map."""

from __future__ import annotations

import math
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvist.radix.compiled import matching
from kvist.radix.compiled.layout import CORE, QUERY, SEGMENT
from kvist.radix.memory import CORE_BYTES, reserved_array

_PATIENCE, _MATCH = 64, 32
"""Reads of a generation that is odd, half a microsecond each, and how many of them a disturbed match counts as."""


class RadixReader:
    """Matches as the `RadixIndex` in the other process would, or not at all while that writes without a pause.

    A match counts if the generation is the same before and after it, and even: then nobody wrote meanwhile. This needs
    a processor on which stores are seen in the order in which they were made, as x86-64. The writer is never held up.

    Ranks are named by `RadixIndex.clearing_of`: with an older list of these numbers no rank is taken for another, and
    ranks that came or were cleared since are missed.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        """Read an existing index from the `memory` that its `RadixIndex` was given."""
        self._core = np.frombuffer(memory, CORE, 1)
        self._segments = np.frombuffer(memory, SEGMENT, 1 << int(self._core["table"]["bits"][0]), CORE_BYTES)
        self._generation, self._slots = self._core["generation"].data, self._core["slots"][0]
        self._clearings = self._slots["clearing"]
        self._num_rows = self._core["table"]["num_rows"].data
        self._half_full = int(self._core["max_blocks"][0]) / 2 or math.inf
        self._query = reserved_array(QUERY, 1)
        self._holder_ids, self._holder_depths = self._query["holder_ids"][0], self._query["holder_depths"][0]

    def match(self, hashes: NDArray[np.uint64], num_usable: int) -> dict[int, tuple[int, ...]] | None:
        """Return the depths of each rank, by its clearing, or None if all attempts were disturbed, for some 50 µs."""
        patience = _PATIENCE
        while patience > 0:
            generation = self._generation[0]
            patience -= _MATCH if generation % 2 == 0 else 1
            if generation % 2 == 0:
                num_holders = matching.match(self._core, self._segments, self._query, hashes, num_usable)
                clearings = self._clearings[self._holder_ids[:num_holders]].tolist()
                if self._generation[0] == generation:
                    depths = self._holder_depths[:num_holders].T.tolist()
                    return dict(zip(clearings, zip(*depths, strict=True), strict=True))
            os.sched_yield()
        return None

    def num_held(self, slot: int, clearing: int) -> int:
        """Return how many blocks the rank of a slot holds; 0 if the slot is not that rank's any more."""
        held = self._slots[slot]
        return int(held["num_held"]) if held["clearing"] == clearing else 0

    @property
    def wants_uses(self) -> bool:
        """Return whether the writer needs to know what was matched (`RadixIndex.touch`)."""
        return bool(self._num_rows[0] >= self._half_full)
