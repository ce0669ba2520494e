"""Snapshots: all that was held when one began, while the index goes on changing.

Each segment is copied before it changes, or when its turn comes. So a snapshot takes up to 16 bytes a block until it is
closed. Until then no set is freed that was there when it began.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.radix._slots import SlotTable
from kvist.radix.compiled.housekeeping import members_of, read_copies
from kvist.radix.compiled.layout import LIVE, MAX_DEPTH, ROW, Records
from kvist.radix.values import Residencies

_MAX_VISITS = 1 << 16  # rows looked at in a step, if segments are not larger


class Snapshot:
    """Iterates over what was held at one moment, in small parts, some of them empty, so that no step takes long.

    Close it, or use it as a context, unless it is read to its end.
    """

    def __init__(
        self, core: Records, segments: Records, slots: SlotTable, max_blocks: int, closed: Callable[[], None]
    ) -> None:
        self._core, self._segments, self._closed = core, segments, closed
        self._ranks: list[WorkerRank] = list(slots.ranks)
        self._is_live: NDArray[np.bool_] = slots.table["state"][: len(self._ranks)] == LIVE
        self._rows = np.empty(max_blocks, ROW)
        self._number = self._first = 0  # the segment, and which of its copied rows comes next
        self._is_open = True
        is_captured = segments["is_captured"] != 0
        for field in ("num_copied", "is_captured"):
            segments[field][is_captured] = 0
        core["captured_stamp"] = core["last_stamp"]

    def __iter__(self) -> Snapshot:
        return self

    def __next__(self) -> Residencies:
        if not self._is_open or self._number == len(self._segments):
            self.close()
            raise StopIteration
        where = self._number, self._first
        num_rows, self._number, self._first = read_copies(self._segments, *where, self._rows, _MAX_VISITS)
        return self._residencies(self._rows[:num_rows])

    def _residencies(self, rows: NDArray[np.void]) -> Residencies:
        """Return which of the ranks that were there hold some rows."""
        members, lengths = members_of(self._core, np.ascontiguousarray(rows["set_id"]))
        is_live = self._is_live[members >> 4]
        row, members = np.repeat(np.arange(len(rows)), lengths)[is_live], members[is_live]
        slots, rank_idx = np.unique(members >> 4, return_inverse=True)
        return Residencies(
            ranks=tuple(self._ranks[slot] for slot in slots.tolist()),
            hashes=rows["hash"][row],
            depths=rows["marks"][row] & np.uint32(MAX_DEPTH),
            members=rank_idx.astype(np.uint32) << np.uint32(4) | members & np.uint32(15),
        )

    def close(self) -> None:
        """End the snapshot: the index copies nothing for it any more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._core["captured_stamp"] = 0
            self._closed()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
