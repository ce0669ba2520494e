"""Snapshots: all that was held when one began, while the index goes on changing.

Each segment is copied before it changes, or when its turn comes. So a snapshot takes up to 16 bytes a block until it is
closed. Until then no set is freed that was there when it began.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray

from kvist.radix._slots import SlotTable
from kvist.radix.compiled.housekeeping import members_of, read_copies
from kvist.radix.compiled.layout import LIVE, MAX_DEPTH, ROW, Records
from kvist.radix.values import Residencies

_MAX_VISITS = 1 << 16  # rows looked at in a step, if segments are not larger


def begin_snapshot(
    core: Records, segments: Records, slots: SlotTable, max_blocks: int, on_closed: Callable[[], None]
) -> Generator[Residencies]:
    """Return what is held now, in parts of at most `max_blocks`, some of them empty, so that no step takes long."""
    ranks = list(slots.ranks)
    is_live: NDArray[np.bool_] = slots.table["state"][: len(ranks)] == LIVE
    rows = np.empty(max_blocks, ROW)
    is_captured = segments["is_captured"] != 0
    for field in ("num_copied", "is_captured"):
        segments[field][is_captured] = 0
    core["captured_stamp"] = core["last_stamp"]

    def residencies(rows: NDArray[np.void]) -> Residencies:
        """Return which of the ranks that were there hold some rows."""
        members, lengths = members_of(core, np.ascontiguousarray(rows["set_id"]))
        is_of_live = is_live[members >> 4]
        row, members = np.repeat(np.arange(len(rows)), lengths)[is_of_live], members[is_of_live]
        slots, rank_idx = np.unique(members >> 4, return_inverse=True)
        return Residencies(
            ranks=tuple(ranks[slot] for slot in slots.tolist()),
            hashes=rows["hash"][row],
            depths=rows["marks"][row] & np.uint32(MAX_DEPTH),
            members=rank_idx.astype(np.uint32) << np.uint32(4) | members & np.uint32(15),
        )

    def parts() -> Generator[Residencies]:
        number = first = 0  # the segment, and which of its copied rows comes next
        try:
            yield residencies(rows[:0])  # to whoever begins it: so that it ends even if nothing is read
            while number < len(segments):
                num_rows, number, first = read_copies(segments, number, first, rows, _MAX_VISITS)
                yield residencies(rows[:num_rows])
        finally:
            core["captured_stamp"] = 0
            on_closed()

    begun = parts()
    next(begun)
    return begun
