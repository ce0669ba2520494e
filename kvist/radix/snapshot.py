"""Snapshots: all that is held at one moment, copied at once and told in parts while the index goes on changing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvist.radix._slots import SlotTable
from kvist.radix.compiled.housekeeping import copy_rows, members_of
from kvist.radix.compiled.layout import CORE, LIVE, MAX_DEPTH, ROW, Record, Records
from kvist.radix.memory import reserved_array
from kvist.radix.values import Residencies


def take_snapshot(core: Record, segments: Records, slots: SlotTable, max_blocks: int) -> Iterator[Residencies]:
    """Copy what is held, 16 bytes a block; return an iterator over it, up to so many blocks at a time, in no order."""
    rows, sets = np.empty(int(core["table"]["num_rows"]), ROW), reserved_array(CORE, 1)
    copy_rows(segments, rows)
    for field, end in (("sets", "end_of_sets"), ("words", "end_of_words")):
        sets[field][0, : core[end]] = core[field][: core[end]]
    ranks = list(slots.ranks)
    is_live = slots.table["state"][: len(ranks)] == LIVE

    def residencies(first: int) -> Residencies:
        some = rows[first : first + max_blocks]
        members, lengths = members_of(sets, np.ascontiguousarray(some["set_id"]))
        is_held = is_live[members >> 4]
        row, members = np.repeat(np.arange(len(some)), lengths)[is_held], members[is_held]
        held_by, rank_idx = np.unique(members >> 4, return_inverse=True)
        return Residencies(
            ranks=tuple(ranks[slot] for slot in held_by.tolist()),
            hashes=some["hash"][row],
            depths=some["marks"][row] & np.uint32(MAX_DEPTH),
            members=rank_idx.astype(np.uint32) << np.uint32(4) | members & np.uint32(15),
        )

    return map(residencies, range(0, len(rows), max_blocks))
