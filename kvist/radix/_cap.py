"""Keeps an index to a number of blocks: beyond it, the least recently used go, a bounded slice at a time.

Time is counted in epochs, each of which ends once as many blocks were used as a 64th of the cap. A round of eviction
begins a sixteenth below the cap and goes to an eighth below it; what is stored meanwhile carries it on, at a pace at
which it ends in time. The oldest epoch goes first, and within an epoch the deepest blocks, by classes of depth that are
exact below 64: a chain that was stored at once goes from its end.

Matches count as uses once the index is half full: until then they cost what they cost without a cap, a fifth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvist.radix import compiled
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap

_WORK_PER_ROW = 128  # rows looked at for each one stored; to evict one counts as 36, so two of them, and 43 looked at
_LEAST_WORK = 1 << 16  # rows looked at by a call that finds the index beyond its cap, or a round late; some 0.1 ms
_EPOCHS_A_ROUND = layout.OLDEST // 8  # at most: a round must see rows before their epoch comes round again
_NUM_PRIORITIES = layout.EPOCHS * layout.DEPTH_CLASSES
_NEXT_SEGMENT, _NEXT_BUCKET, _NOW, _THRESHOLD, _QUOTA, _COUNTS, _HIGHEST = range(7)


class Cap:
    """Evicts from one index."""

    def __init__(self, heap: Heap, control: memoryview, max_blocks: int) -> None:
        self._heap, self._control, self._max_blocks = heap, control, max_blocks
        self._high, self._low = max_blocks - max_blocks // 16, max_blocks - max_blocks // 8
        self._epoch_blocks = max(1, max_blocks // 64)
        self._num_epochs = 0  # since the last round began
        self._num_rows = 0  # when the cap was last looked to
        self._state = heap.allocate(layout.EVICTION_BYTES)
        self._head = heap.view(self._state).cast("q")
        self._counts: int | None = None  # of a round under way
        self._is_counting = False
        control[layout.IS_CAPPED >> 3] = 1

    @property
    def is_half_full(self) -> bool:
        """Return whether matches count as uses: before, which blocks will be the least recently used is open."""
        is_half_full: bool = self._control[layout.NUM_ROWS >> 3] * 2 >= self._max_blocks
        return is_half_full

    def keep(self, help_out: Callable[[], None]) -> None:
        """Do what is due after blocks were used or stored: work in proportion to what was stored since."""
        control = self._control
        if control[layout.NUM_STAMPED >> 3] >= self._epoch_blocks:
            self._end_epoch()
        num_rows = control[layout.NUM_ROWS >> 3]
        is_late = num_rows > self._max_blocks or self._num_epochs >= _EPOCHS_A_ROUND
        work = max(_WORK_PER_ROW * (num_rows - self._num_rows), _LEAST_WORK if is_late else 0)
        if work > 0 and (is_late or num_rows > self._high or self._counts is not None):
            while self._step(work, help_out) and control[layout.NUM_ROWS >> 3] > self._max_blocks:
                pass
        self._num_rows = control[layout.NUM_ROWS >> 3]

    def _end_epoch(self) -> None:
        self._control[layout.NUM_STAMPED >> 3] = 0
        epoch = (self._control[layout.EPOCH >> 3] >> layout.EPOCH_SHIFT) + 1
        self._control[layout.EPOCH >> 3] = epoch % layout.EPOCHS << layout.EPOCH_SHIFT
        self._num_epochs += 1

    def _step(self, work: int, help_out: Callable[[], None]) -> bool:
        """Begin a round or carry it on, by about so much work; return whether that was enough for a part of it."""
        address = self._control[layout.SELF >> 3]
        if self._counts is None:
            self._counts = self._head[_COUNTS] = self._heap.allocate(_NUM_PRIORITIES * 4)
            self._head[_NOW], self._is_counting, self._num_epochs = self._control[layout.EPOCH >> 3], True, 0
            self._head[_NEXT_SEGMENT] = self._head[_NEXT_BUCKET] = self._head[_HIGHEST] = 0
        if self._is_counting:
            if not compiled.count_priorities(address, self._state, work):
                return False
            self._choose(self._counts)
            return True
        while (result := compiled.evict(address, self._state, work)) == layout.NEEDS_HELP:
            help_out()
        if result:
            self._heap.free(self._counts)
            self._counts = None
        return bool(result)

    def _choose(self, address: int) -> None:
        """Find the priority above which all rows go, and how many of those at it."""
        counts: NDArray[np.uint32] = np.frombuffer(self._heap.view(address), np.uint32, self._head[_HIGHEST] + 1)
        from_top = np.cumsum(counts[::-1], dtype=np.int64)
        num_excess = min(max(0, self._control[layout.NUM_ROWS >> 3] - self._low), int(from_top[-1]))
        place = int(np.searchsorted(from_top, num_excess))
        self._head[_THRESHOLD] = len(counts) - 1 - place
        self._head[_QUOTA] = num_excess - (int(from_top[place - 1]) if place else 0)
        self._head[_NEXT_SEGMENT], self._is_counting = 0, False
