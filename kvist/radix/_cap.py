"""Keeps an index to a number of blocks: beyond it, the least recently used go, a bounded slice at a time.

Time is counted in epochs, each of which ends once as many blocks were used as a 64th of the cap. A round of eviction
begins a sixteenth below the cap and goes to an eighth below it; what is stored meanwhile carries it on, at a pace at
which it ends in time. The oldest epoch goes first, and within an epoch the deepest blocks, by classes of depth that are
exact below 64: a chain that was stored at once goes from its end.

Matches count as uses once the index is half full: until then they cost what they cost without a cap, a fifth.
"""

from __future__ import annotations

import numpy as np

from kvist.radix.compiled.housekeeping import count_priorities, evict
from kvist.radix.compiled.layout import EPOCH_SHIFT, NUM_EPOCHS, OLDEST, ROUND, Record, Records
from kvist.radix.memory import reserved_array

_WORK_PER_ROW = 128  # rows looked at for each one stored; to evict one counts as 36, so two of them, and 43 looked at
_LEAST_WORK = 1 << 16  # rows looked at by a call that finds the index beyond its cap, or a round late; some 0.1 ms
_EPOCHS_A_ROUND = OLDEST // 8  # at most: a round must see rows before their epoch comes round again


def is_half_full(core: Record) -> bool:
    """Return whether matches count as uses: before, which blocks will be the least recently used is open."""
    return bool(0 < core["max_blocks"] <= core["table"]["num_rows"] * 2)


class Cap:
    """Evicts from one index."""

    def __init__(self, core: Records, segments: Records, max_blocks: int) -> None:
        self._arrays, self._core, self._max_blocks = (core, segments), core[0], max_blocks
        self._high, self._low = max_blocks - max_blocks // 16, max_blocks - max_blocks // 8
        self._epoch_blocks = max(1, max_blocks // 64)
        self._num_epochs = 0  # since the last round began
        self._num_rows = 0  # when the cap was last looked to
        self._rounds = reserved_array(ROUND, 1)
        self._round = self._rounds[0]
        self._is_under_way = self._is_counting = False
        self._core["max_blocks"] = max_blocks

    @property
    def is_exceeded(self) -> bool:
        """Return whether there are more blocks than there may be."""
        return bool(self._core["table"]["num_rows"] > self._max_blocks)

    def keep(self) -> None:
        """Do what is due after blocks were used or stored: work in proportion to what was stored since."""
        if self._core["num_stamped"] >= self._epoch_blocks:
            self._end_epoch()
        num_rows = self._core["table"]["num_rows"]
        is_late = num_rows > self._max_blocks or self._num_epochs >= _EPOCHS_A_ROUND
        work = max(_WORK_PER_ROW * (num_rows - self._num_rows), _LEAST_WORK if is_late else 0)
        if work > 0 and (is_late or num_rows > self._high or self._is_under_way):
            while self._step(work) and self._core["table"]["num_rows"] > self._max_blocks:
                pass
        self._num_rows = self._core["table"]["num_rows"]

    def _end_epoch(self) -> None:
        self._core["num_stamped"] = 0
        epoch = (self._core["epoch"] >> EPOCH_SHIFT) + 1
        self._core["epoch"] = epoch % NUM_EPOCHS << EPOCH_SHIFT
        self._num_epochs += 1

    def _step(self, work: int) -> bool:
        """Begin a round or carry it on, by about so much work; return whether that was enough for a part of it."""
        state, (core, segments) = self._round, self._arrays
        if not self._is_under_way:
            state["now"], state["segment"], state["highest"] = self._core["epoch"], 0, 0
            self._is_under_way, self._is_counting, self._num_epochs = True, True, 0
        if self._is_counting:
            if not count_priorities(segments, self._rounds, work):
                return False
            self._choose()
            return True
        self._is_under_way = not evict(core, segments, self._rounds, work)
        return not self._is_under_way

    def _choose(self) -> None:
        """Find the priority above which all rows go, and how many of those at it."""
        counts = self._round["counts"][: self._round["highest"] + 1]
        from_top = np.cumsum(counts[::-1], dtype=np.int64)
        num_excess = min(max(0, int(self._core["table"]["num_rows"]) - self._low), int(from_top[-1]))
        place = int(np.searchsorted(from_top, num_excess))
        self._round["threshold"] = len(counts) - 1 - place
        self._round["quota"] = num_excess - (int(from_top[place - 1]) if place else 0)
        self._round["segment"] = self._round["place"] = 0
        self._is_counting = False
        counts[:] = 0
