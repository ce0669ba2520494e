"""Snapshots: who holds what at one moment, parents first, in chunks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.radix import _compiled as compiled
from kvist.radix._memory import Heap
from kvist.radix._segments import SegmentTable
from kvist.radix._slots import SlotTable
from kvist.radix.values import SnapshotChunk

ROW = np.dtype([("key", "u8"), ("parent", "u8"), ("set_id", "u4")])


def rows_of(heap: Heap, segments: SegmentTable, index: int) -> NDArray[np.void]:
    """Return a view of a segment's rows, the vacant ones as well; drop it before the segment is resized."""
    entry = segments.directory[index]
    return np.frombuffer(heap.view(int(entry["address"])), ROW, int(entry["rows"]))


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


def _depths(hashes: NDArray[np.uint64], parents: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return each block's number of ancestors that are known."""
    order = np.argsort(hashes)
    at = np.minimum(np.searchsorted(hashes[order], parents), len(hashes) - 1)
    above = np.where(hashes[order][at] == parents, order[at], np.arange(len(hashes)))
    depths: NDArray[np.int64] = (above != np.arange(len(hashes))).astype(np.int64)
    for _ in range(32):  # pointer doubling; parents that form a cycle never come to rest
        depths, above = depths + depths[above], above[above]
    return depths


def take(
    heap: Heap, control: memoryview, segments: SegmentTable, slots: SlotTable, max_blocks: int
) -> Iterator[SnapshotChunk]:
    """Copy what is held now; yield it in chunks."""
    tables = [rows_of(heap, segments, i) for i in range(segments.num_segments) if segments.is_allocated(i)]
    rows = np.concatenate([table[table["set_id"] != 0] for table in tables]) if tables else np.empty(0, ROW)
    inverse = np.uint64(control[compiled.INVERSE >> 3] % (1 << 64))
    hashes = rows["key"] * inverse
    ids = np.unique(rows["set_id"])
    is_live = slots.table()["state"] == compiled.LIVE
    sets = [np.frombuffer(slots.members_of(int(set_id)), np.uint32) for set_id in ids]
    sets = [members[is_live[members >> 4]] for members in sets]
    is_held = np.array([len(members) > 0 for members in sets], bool)[np.searchsorted(ids, rows["set_id"])]
    rows, hashes = rows[is_held], hashes[is_held]
    order = np.argsort(_depths(hashes, rows["parent"]), kind="stable") if len(rows) else np.empty(0, np.int64)
    ranks = slots.ranks
    return _chunks(
        hashes[order], rows["parent"][order], np.searchsorted(ids, rows["set_id"][order]), sets, list(ranks), max_blocks
    )


def _chunks(
    hashes: NDArray[np.uint64],
    parents: NDArray[np.uint64],
    set_index: NDArray[np.int64],
    sets: list[NDArray[np.uint32]],
    ranks: list[WorkerRank],
    max_blocks: int,
) -> Iterator[SnapshotChunk]:
    for start in range(0, len(hashes), max_blocks):
        here = slice(start, start + max_blocks)
        used, set_idx = np.unique(set_index[here], return_inverse=True)
        members = [sets[i] for i in used]
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in members])]).astype(np.uint32)
        joined = np.concatenate(members)
        present, position = np.unique(joined >> 4, return_inverse=True)
        yield SnapshotChunk(
            tuple(ranks[slot] for slot in present),
            hashes[here],
            parents[here],
            set_idx.astype(np.uint32),
            offsets,
            (position << 4).astype(np.uint32) | joined & 15,
        )
