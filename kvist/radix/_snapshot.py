"""Snapshots: all that was held when one began, parents first, while the index goes on changing.

A segment is copied just before it is first written to; what nobody writes to is read in place. Rows are marked as they
are put out, and a row's ancestors go before it, whichever segments they are in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.radix import compiled
from kvist.radix._memory import Heap
from kvist.radix._segments import SegmentTable, segment_bytes
from kvist.radix._slots import SlotTable
from kvist.radix.compiled import layout
from kvist.radix.values import SnapshotChunk

_LOOSE_ROW = np.dtype([("key", "u8"), ("parent", "u8"), ("set_id", "u4")])
_ENTRY = np.dtype([("copy", "i8"), ("capacity", "u4"), ("buckets", "u4"), ("marks", "i8")])


def member_rows(chunk: SnapshotChunk, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one row (hash, parent, slot << 4 | tiers) for each holder of each block of a chunk, `[num_rows, 3]`."""
    lengths: NDArray[np.int64] = (chunk.offsets[1:] - chunk.offsets[:-1]).astype(np.int64)[chunk.set_idx]
    block = np.repeat(np.arange(len(chunk.hashes)), lengths)
    within = np.arange(len(block)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    members = chunk.members[chunk.offsets[chunk.set_idx[block]] + within].astype(np.int64)
    rows = np.empty((len(block), 3), np.uint64)
    rows[:, 0], rows[:, 1] = chunk.hashes[block], chunk.parents[block]
    rows[:, 2] = slots[members >> 4] << 4 | members & 15
    return rows


class Snapshot:
    """Iterates over the chunks of one moment, some of which may be empty, so that no step takes long.

    Close it, or use it as a context, unless it is read to its end.
    """

    def __init__(
        self,
        heap: Heap,
        control: memoryview,
        segments: SegmentTable,
        slots: SlotTable,
        max_blocks: int,
        closed: Callable[[Snapshot], None],
    ) -> None:
        self._heap, self._control, self._segments, self._slots = heap, control, segments, slots
        self._max_blocks, self._closed, self._is_open = max_blocks, closed, True
        self._ranks: list[WorkerRank] = list(slots.ranks)
        self._is_live: NDArray[np.bool_] = slots.table()["state"] == layout.LIVE
        self._inverse = np.uint64(control[layout.INVERSE >> 3] % (1 << 64))
        self.copies: dict[int, int] = {}  # address of a copy: its number of buckets
        directory = segments.directory
        mark_bytes = directory["buckets"].astype(np.int64) * layout.BUCKET_ROWS + 7 & ~3
        self._marks = heap.allocate(int(mark_bytes.sum()))
        self._stack = heap.allocate(8 * control[layout.NUM_ROWS >> 3] + 8)
        self._output = heap.allocate(max_blocks * layout.LOOSE_ROW_BYTES)
        self._state = heap.allocate(layout.SNAPSHOT_BYTES + segments.num_segments * layout.SNAPSHOT_ENTRY_BYTES)
        head = heap.view(self._state).cast("q")
        head[0], head[3], head[5] = self._state + layout.SNAPSHOT_BYTES, self._stack, self._output
        entries = np.frombuffer(heap.view(self._state)[layout.SNAPSHOT_BYTES :], _ENTRY, segments.num_segments)
        self._entries: NDArray[np.void] = entries
        entries["capacity"], entries["buckets"] = directory["capacity"], directory["buckets"]
        entries["marks"] = self._marks + np.cumsum(mark_bytes) - mark_bytes
        directory["captured"] = 0
        control[layout.IS_CAPTURING >> 3] = 1

    def capture(self, index: int) -> None:
        """Copy a segment that is about to be written to, if that was not done; O(rows of one segment)."""
        entry = self._segments.directory[index]
        if entry["captured"] or not self._is_open:
            return
        num_buckets = int(entry["buckets"])
        size_bytes = segment_bytes(num_buckets)
        copy = self._heap.allocate(size_bytes)
        self._heap.view(copy)[:size_bytes] = self._heap.view(int(entry["address"]))[:size_bytes]
        compiled.pin(self._control[layout.SELF >> 3], copy, num_buckets, 1)
        self.copies[copy] = num_buckets
        self._entries["copy"][index] = copy
        entry["captured"] = 1

    def __iter__(self) -> Snapshot:
        return self

    def __next__(self) -> SnapshotChunk:
        if not self._is_open:
            raise StopIteration
        num_rows = compiled.snapshot_next(self._control[layout.SELF >> 3], self._state, self._max_blocks)
        if num_rows < 0:
            self.close()
            raise StopIteration
        return self._chunk(np.frombuffer(self._heap.view(self._output), _LOOSE_ROW, num_rows))

    def _chunk(self, rows: NDArray[np.void]) -> SnapshotChunk:
        ids, set_idx = np.unique(rows["set_id"], return_inverse=True)
        sets = [np.frombuffer(self._slots.members_of(set_id), np.uint32) for set_id in ids.tolist()]
        sets = [members[self._is_live[members >> 4]] for members in sets]
        lengths = np.array([len(members) for members in sets], np.uint32)
        is_held = lengths[set_idx] > 0
        members = np.concatenate([np.empty(0, np.uint32), *sets])
        slots, rank_idx = np.unique(members >> 4, return_inverse=True)
        return SnapshotChunk(
            ranks=tuple(self._ranks[slot] for slot in slots.tolist()),
            hashes=rows["key"][is_held] * self._inverse,
            parents=rows["parent"][is_held],
            set_idx=set_idx[is_held].astype(np.uint32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
            members=rank_idx.astype(np.uint32) << 4 | members & 15,
        )

    def close(self) -> None:
        """End the snapshot; the index copies nothing for it any more. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._control[layout.IS_CAPTURING >> 3] = 0
        del self._entries
        for address in (self._marks, self._stack, self._output, self._state):
            self._heap.free(address)
        self._closed(self)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
