"""Snapshots: all that was held when one began, parents first, while the index goes on changing.

Rows are collected by ascending depth, some depths in each pass over the table, until about a million of them wait to be
told; so the memory needed does not depend on the size of the index. Before a segment changes, those of its rows that
are still to be told are copied, and a copy shrinks with each pass; what nobody writes to is read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.radix import compiled
from kvist.radix._slots import SlotTable
from kvist.radix.compiled import layout
from kvist.radix.memory import PAGE_BYTES, Heap
from kvist.radix.tables import SegmentTable
from kvist.radix.values import SnapshotChunk

_MAX_COLLECTED = 1 << 20  # rows of 16 bytes; each pass over ten million takes some 15 ms in all
_MAX_VISITS = 1 << 16  # rows looked at a step, if segments are not larger
_LOOSE_ROW = np.dtype([("key", "u8"), ("side", "u4"), ("set_id", "u4")])
_ENTRY = np.dtype([("copy", "i8"), ("count", "i8")])
_HEAD_FIELDS = "directory segment first end collected places num_collected counts deepest"
_HEAD = np.dtype([(name, "i8") for name in _HEAD_FIELDS.split()])
_NUM_DEPTHS = layout.MAX_DEPTH + 1


def member_rows(chunk: SnapshotChunk, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one row (hash, depth, slot << 4 | tiers) for each holder of each block of a chunk, `[num_rows, 3]`."""
    lengths: NDArray[np.int64] = (chunk.offsets[1:] - chunk.offsets[:-1]).astype(np.int64)[chunk.set_idx]
    block = np.repeat(np.arange(len(chunk.hashes)), lengths)
    within = np.arange(len(block)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    members = chunk.members[chunk.offsets[chunk.set_idx[block]] + within].astype(np.int64)
    rows = np.empty((len(block), 3), np.uint64)
    rows[:, 0], rows[:, 1] = chunk.hashes[block], chunk.depths[block]
    rows[:, 2] = slots[members >> 4] << 4 | members & 15
    return rows


def depth_ranges(counts: NDArray[np.uint32], max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of depths with together all rows: each has at most `max_rows`, or is of one depth."""
    depths = np.flatnonzero(counts)
    totals = np.cumsum(counts[depths], dtype=np.int64)
    at, before = 0, 0
    while at < len(depths):
        end = max(at + 1, int(np.searchsorted(totals, before + max_rows, "right")))
        yield int(depths[at]), int(depths[end - 1]) + 1
        at, before = end, int(totals[end - 1])


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
        closed: Callable[[dict[int, int]], None],
    ) -> None:
        self._heap, self._control, self._segments, self._slots = heap, control, segments, slots
        self._max_blocks, self._closed, self._is_open = max_blocks, closed, True
        self._ranks: list[WorkerRank] = list(slots.ranks)
        self._is_live: NDArray[np.bool_] = slots.table()["state"] == layout.LIVE
        self._inverse = np.uint64(control[layout.INVERSE >> 3] % (1 << 64))
        most_rows = max(_MAX_COLLECTED, _MAX_VISITS + int(segments.directory["count"].max()))
        self._state = heap.allocate(layout.SNAPSHOT_BYTES + segments.num_segments * layout.SNAPSHOT_ENTRY_BYTES)
        entries = np.frombuffer(heap.view(self._state)[layout.SNAPSHOT_BYTES :], _ENTRY, segments.num_segments)
        self._entries: NDArray[np.void] = entries
        self._collected = heap.allocate(min(most_rows, control[layout.NUM_ROWS >> 3]) * layout.LOOSE_ROW_BYTES)
        self._tables = heap.allocate(2 * _NUM_DEPTHS * 4)
        tables = np.frombuffer(heap.view(self._tables), np.uint32).reshape(2, -1)
        self._counts: NDArray[np.uint32] = tables[0]
        self._places: NDArray[np.uint32] = tables[1]
        self._head: NDArray[np.void] = np.frombuffer(heap.view(self._state), _HEAD, 1)[0]
        self._head["directory"], self._head["collected"] = self._state + layout.SNAPSHOT_BYTES, self._collected
        self._head["counts"] = self._tables
        self._ranges: list[tuple[int, int]] | None = None  # of depths, the next one last; None while they are counted
        self._is_through = True  # with the last pass begun
        self._num_ready = self._num_told = self._num_in_range = 0
        segments.directory["captured"] = 0
        control[layout.IS_CAPTURING >> 3] = 1

    def capture(self, index: int) -> None:
        """Copy what is still to be told of a segment that is about to change, if that was not done; O(its rows)."""
        if not self._is_open or self._segments.directory["captured"][index]:
            return
        self._segments.directory["captured"][index] = 1
        if num_rows := self._segments.count(index):
            self._entries["copy"][index] = self._heap.allocate(num_rows * layout.LOOSE_ROW_BYTES)
            self._entries["count"][index] = compiled.capture(self._control[layout.SELF >> 3], self._state, index)
            self._trim(index)

    def _trim(self, index: int) -> None:
        """Give back what a copy does not need any more."""
        copy, count = self._entries[index].tolist()
        if copy and not count:
            self._heap.free(copy)
            self._entries["copy"][index] = 0
        elif copy and self._heap.capacity_bytes(copy) > count * layout.LOOSE_ROW_BYTES + PAGE_BYTES:
            self._entries["copy"][index] = self._heap.resize(copy, count * layout.LOOSE_ROW_BYTES)

    def __iter__(self) -> Snapshot:
        return self

    def __next__(self) -> SnapshotChunk:
        if not self._is_open:
            raise StopIteration
        if self._num_told == self._num_ready and not self._collect():
            self.close()
            raise StopIteration
        address = self._control[layout.SELF >> 3]
        num_rows = min(self._max_blocks, self._num_ready - self._num_told)
        rows = np.frombuffer(self._heap.view(self._collected), _LOOSE_ROW)[self._num_told :][:num_rows]
        chunk = self._chunk(rows)
        del rows
        compiled.release(address, self._collected + self._num_told * layout.LOOSE_ROW_BYTES, num_rows)
        self._num_told += num_rows
        return chunk

    def _collect(self) -> bool:
        """Take a bounded step towards more rows that are ready to be told; return False if there are no more."""
        self._num_told = self._num_ready = 0
        address, head = self._control[layout.SELF >> 3], self._head
        if self._ranges is None:
            if compiled.count_depths(address, self._state, _MAX_VISITS):
                counts = self._counts[: int(head["deepest"]) + 1]
                self._ranges = list(depth_ranges(counts, _MAX_COLLECTED))[::-1]
            return True
        if self._is_through:
            if not self._ranges:
                return False
            self._begin_pass(*self._ranges.pop())
        before, head["num_collected"] = int(head["segment"]), 0
        self._is_through = compiled.collect(address, self._state, _MAX_VISITS)
        for index in np.flatnonzero(self._entries["copy"][before : int(head["segment"])]).tolist():
            self._trim(before + index)
        if not head["places"]:
            self._num_ready = int(head["num_collected"])
        elif self._is_through:
            self._num_ready = self._num_in_range
        return True

    def _begin_pass(self, first: int, end: int) -> None:
        """Begin to collect the rows of some depths: in order, or those of one depth bit by bit."""
        self._head["segment"], self._head["first"], self._head["end"] = 0, first, end
        counts = self._counts[first:end]
        self._num_in_range = int(counts.sum(dtype=np.int64))
        self._places[: end - first] = np.cumsum(counts) - counts
        self._head["places"] = self._tables + 4 * _NUM_DEPTHS if end - first > 1 else 0

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
            depths=rows["side"][is_held] & np.uint32(layout.MAX_DEPTH),
            set_idx=set_idx[is_held].astype(np.uint32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
            members=rank_idx.astype(np.uint32) << 4 | members & 15,
        )

    @property
    def loose_rows(self) -> dict[int, int]:
        """What still refers to sets: the address and number of copied rows, and of collected ones."""
        copies = {copy: count for copy, count in self._entries.tolist() if copy}
        num_collected = int(self._head["num_collected"]) if not self._head["places"] else self._num_in_range
        return copies | ({self._collected: num_collected} if self._num_told < num_collected else {})

    def close(self) -> None:
        """End the snapshot; the index copies nothing for it any more. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._control[layout.IS_CAPTURING >> 3] = 0
        leftovers = self.loose_rows
        del self._entries, self._head, self._counts, self._places
        for address in {self._state, self._tables, self._collected} - leftovers.keys():
            self._heap.free(address)
        self._closed(leftovers)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
