"""Snapshots: all that was held when one began, parents first, while the index goes on changing.

Rows are collected by ascending depth, some depths in each pass over the table, until about a million of them wait to be
told. Before a segment changes, those of its rows that are still to be told are copied to a temporary file, by ascending
depth, so that each pass reads on where the one before ended; what nobody writes to is read in place. So the memory
needed depends neither on the size of the index nor on how much of it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvist.errors import KvistError
from kvist.events import WorkerRank
from kvist.radix import compiled
from kvist.radix._slots import SlotTable
from kvist.radix._spill import Leftovers, Spill
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap
from kvist.radix.tables import SegmentTable
from kvist.radix.values import SnapshotChunk

_MAX_COLLECTED = 1 << 20  # rows of 16 bytes; each pass over ten million takes some 15 ms in all
_MAX_VISITS = 1 << 16  # rows looked at a step, if segments are not larger
_LOOSE_ROW = np.dtype([("key", "u8"), ("side", "u4"), ("set_id", "u4")])
_HEAD_FIELDS = "segment first end collected places num_collected counts deepest order"
_HEAD = np.dtype([(name, "i8") for name in _HEAD_FIELDS.split()])
_NUM_DEPTHS = layout.MAX_DEPTH + 1


class SnapshotLostError(KvistError):
    """What a snapshot had still to tell could not be kept, in spite of the changes since it began."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the snapshot is lost: {reason}")
        self.reason = reason


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

    Raises SnapshotLostError where it would have to leave something out: the temporary file could not be written, or not
    be read. Close it, or use it as a context, unless it is read to its end.
    """

    def __init__(
        self,
        heap: Heap,
        control: memoryview,
        segments: SegmentTable,
        slots: SlotTable,
        max_blocks: int,
        closed: Callable[[Leftovers], None],
    ) -> None:
        self._heap, self._control, self._segments, self._slots = heap, control, segments, slots
        self._max_blocks, self._closed, self._is_open = max_blocks, closed, True
        self._ranks: list[WorkerRank] = list(slots.ranks)
        self._is_live: NDArray[np.bool_] = slots.table()["state"] == layout.LIVE
        self._inverse = np.uint64(control[layout.INVERSE >> 3] % (1 << 64))
        most_rows = max(_MAX_COLLECTED, _MAX_VISITS + int(segments.directory["count"].max()))
        self._failure: str | None = None
        self._spill = Spill(heap)
        self._state = heap.allocate(layout.SNAPSHOT_BYTES)
        self._collected = heap.allocate(min(most_rows, control[layout.NUM_ROWS >> 3]) * layout.LOOSE_ROW_BYTES)
        self._tables = heap.allocate(3 * _NUM_DEPTHS * 4)
        tables = np.frombuffer(heap.view(self._tables), np.uint32).reshape(3, -1)
        self._counts: NDArray[np.uint32] = tables[0]
        self._places: NDArray[np.uint32] = tables[1]
        self._head: NDArray[np.void] = np.frombuffer(heap.view(self._state), _HEAD, 1)[0]
        self._head["collected"], self._head["counts"] = self._collected, self._tables
        self._head["order"] = self._tables + 2 * 4 * _NUM_DEPTHS
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
        num_rows = self._segments.count(index)
        if not num_rows:
            return
        control, rows = self._control[layout.SELF >> 3], self._heap.scratch(num_rows * layout.LOOSE_ROW_BYTES)
        num_copied = compiled.capture(control, self._state, index, rows)
        try:
            self._spill.put(index, rows, num_copied)
        except OSError as error:
            num_put = self._spill.num_rows(index)
            compiled.release(control, rows + num_put * layout.LOOSE_ROW_BYTES, num_copied - num_put)
            self._failure = str(error)
            self.close()

    def __iter__(self) -> Snapshot:
        return self

    def __next__(self) -> SnapshotChunk:
        if self._is_open and self._num_told == self._num_ready and not self._collect():
            self.close()
        if self._failure is not None:
            self.close()
            raise SnapshotLostError(self._failure)
        if not self._is_open:
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
                head["num_collected"] = self._num_in_range = 0
                return False
            self._begin_pass(*self._ranges.pop())
        head["num_collected"] = 0
        self._is_through = self._pass_on(address)
        if not head["places"]:
            self._num_ready = int(head["num_collected"])
        elif self._is_through:
            self._num_ready = self._num_in_range
        return True

    def _pass_on(self, address: int) -> bool:
        """Collect from some more segments, or from what was copied of them; return whether those were the last."""
        head, num_segments, num_visited = self._head, self._segments.num_segments, 0
        is_captured = self._segments.directory["captured"]
        while num_visited < _MAX_VISITS and (index := int(head["segment"])) < num_segments and self._failure is None:
            if is_captured[index]:
                num_visited += 1 + self._collect_captured(index)
                head["segment"] = index + 1
            else:
                num_visited += compiled.collect(address, self._state, _MAX_VISITS - num_visited)
        return int(head["segment"]) == num_segments

    def _collect_captured(self, index: int) -> int:
        """Collect those of a segment's copied rows whose turn it is; return how many."""
        num_collected, is_more = 0, True
        while is_more:
            try:
                rows, num_rows = self._spill.read(index)
            except OSError as error:
                self._failure = str(error)
                break
            num_taken = compiled.collect_captured(self._state, rows, num_rows)
            self._spill.take(index, num_taken)
            num_collected += num_taken
            is_more = 0 < num_taken == num_rows
        return num_collected

    def _begin_pass(self, first: int, end: int) -> None:
        """Begin to collect the rows of some depths: in order, or those of one depth bit by bit."""
        self._head["segment"], self._head["first"], self._head["end"] = 0, first, end
        counts = self._counts[first:end]
        self._num_in_range = int(counts.sum(dtype=np.int64))
        self._places[: end - first] = np.cumsum(counts) - counts
        self._head["places"] = self._tables + 4 * _NUM_DEPTHS if end - first > 1 else 0

    def _chunk(self, rows: NDArray[np.void]) -> SnapshotChunk:
        ids, set_idx = np.unique(rows["set_id"], return_inverse=True)
        members, lengths = self._members(ids)
        is_held = lengths[set_idx] > 0
        slots, rank_idx = np.unique(members >> 4, return_inverse=True)
        return SnapshotChunk(
            ranks=tuple(self._ranks[slot] for slot in slots.tolist()),
            hashes=rows["key"][is_held] * self._inverse,
            depths=rows["side"][is_held] & np.uint32(layout.MAX_DEPTH),
            set_idx=set_idx[is_held].astype(np.uint32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
            members=rank_idx.astype(np.uint32) << 4 | members & 15,
        )

    def _members(self, ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the members of some sets side by side, as far as they are of ranks that were there, and how many."""
        is_record = ids < layout.INLINE
        records = [self._slots.members_of(set_id) for set_id in ids[is_record].tolist()]
        lengths = np.ones(len(ids), np.int64)
        lengths[is_record] = [len(record) // 4 for record in records]
        members, is_of_record = np.empty(lengths.sum(), np.uint32), np.repeat(is_record, lengths)
        members[is_of_record] = np.frombuffer(b"".join(records), np.uint32)
        members[~is_of_record] = ids[~is_record] & np.uint32(layout.INLINE - 1)
        is_live = self._is_live[members >> 4]
        set_idx = np.repeat(np.arange(len(ids)), lengths)[is_live]
        return members[is_live], np.bincount(set_idx, minlength=len(ids))

    @property
    def untold(self) -> Leftovers:
        """What still refers to sets: rows that were collected, and copied ones."""
        end = int(self._head["num_collected"]) if not self._head["places"] else self._num_in_range
        return Leftovers(self._heap, self._collected, self._num_told, end, self._spill)

    def close(self) -> None:
        """End the snapshot; the index copies nothing for it any more. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._control[layout.IS_CAPTURING >> 3] = 0
        untold = self.untold
        del self._head, self._counts, self._places
        self._heap.free(self._state)
        self._heap.free(self._tables)
        self._closed(untold)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
