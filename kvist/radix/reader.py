"""Matches in an index that another process writes, in the memory that both map."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvist.radix.compiled import matching
from kvist.radix.compiled.layout import CORE, QUERY, SEGMENT
from kvist.radix.index import is_half_full
from kvist.radix.memory import CORE_BYTES, reserved_array

_PATIENCE, _MATCH = 64, 32
"""Looks at a generation that is odd, half a microsecond each, and what a match that was disturbed counts as."""


class RadixReader:
    """Answers what `RadixIndex` in the other process would, or nothing while that writes without a pause.

    A match counts if the generation is the same before and after it, and even: nobody wrote meanwhile. That is so where
    stores are seen in the order they were made in, as on x86-64. The writer is never held up.

    Ranks are told by their slots' givings (`RadixIndex.clearing_of`): who has an older list of them takes nobody for
    another, and misses who came or was cleared since.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        """Map an index that is there: `memory` is what its `RadixIndex` was handed."""
        self._core = np.frombuffer(memory, CORE, 1)
        self._segments = np.frombuffer(memory, SEGMENT, 1 << int(self._core["table"]["bits"][0]), CORE_BYTES)
        self._generation, self._slots = self._core["generation"].data, self._core["slots"][0]
        self._query = reserved_array(QUERY, 1)
        self._holder_ids, self._holder_depths = self._query["holder_ids"][0], self._query["holder_depths"][0]

    def match(self, hashes: NDArray[np.uint64], num_usable: int) -> dict[int, tuple[int, ...]] | None:
        """Return what `RadixIndex.match` does, by giving, or None if every look was disturbed, for some 50 µs."""
        patience = _PATIENCE
        while patience > 0:
            generation = self._generation[0]
            patience -= _MATCH if generation % 2 == 0 else 1
            if generation % 2 == 0:
                num_holders = matching.match(self._core, self._segments, self._query, hashes, num_usable)
                givings = self._slots["giving"][self._holder_ids[:num_holders]]
                depths = self._holder_depths[:num_holders].copy()
                if self._generation[0] == generation:
                    return dict(zip(givings.tolist(), zip(*depths.T.tolist(), strict=True), strict=True))
            os.sched_yield()
        return None

    def num_held(self, slot: int, giving: int) -> int:
        """Return how many blocks the rank holds that was given this slot; 0 if it has it no more."""
        held = self._slots[slot]
        return int(held["num_held"]) if held["giving"] == giving else 0

    @property
    def wants_uses(self) -> bool:
        """Return whether the writer should be told what was matched (`RadixIndex.touch`)."""
        return is_half_full(self._core[0])
