"""Checks that an index is what its layout says; slow, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvist.events.digest import block_digest
from kvist.radix._sets import SetArena
from kvist.radix._slots import SlotTable
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap
from kvist.radix.tables import SegmentTable, buckets_at

_U64 = (1 << 64) - 1


def check(
    heap: Heap,
    control: memoryview,
    segments: SegmentTable,
    sets: SetArena,
    slots: SlotTable,
    loose_set_ids: Iterable[NDArray[np.uint32]],
) -> None:
    """Raise AssertionError unless rows, sets and slots agree with the documented layout and with each other."""
    references: Counter[int] = Counter()
    held: dict[int, tuple[int, int]] = {}
    inverse = control[layout.INVERSE >> 3] & _U64
    table = slots.table()
    num_rows = 0
    for index in filter(segments.is_allocated, range(segments.num_segments)):
        num_rows += _check_segment(heap, control, segments, index)
        buckets = _buckets(heap, segments, index)
        is_held = buckets["value"] != 0
        held_keys, set_ids = buckets["key"][is_held].tolist(), buckets["value"][is_held].tolist()
        for key, set_id in zip(held_keys, set_ids, strict=True):
            references[set_id] += 1
            for member in np.frombuffer(slots.members_of(set_id), np.uint32).tolist():
                slot, tiers = member >> 4, member & 15
                assert tiers, "a member belongs to some tier"
                assert table["state"][slot] in (layout.LIVE, layout.RETIRED), f"slot {slot} is free, but in use"
                for tier in range(4):
                    if tiers >> tier & 1:
                        count, digest = held.get(slot, (0, 0))
                        held[slot] = count + 1, digest + block_digest(key * inverse & _U64, tier) & _U64
    assert num_rows == control[layout.NUM_ROWS >> 3], "rows are counted"
    for set_ids_of_rows in loose_set_ids:
        references.update(set_ids_of_rows.tolist())
    _check_slots(slots, held, control)
    _check_sets(heap, control, sets, {s: n for s, n in references.items() if s and not s & layout.INLINE})


def _buckets(heap: Heap, segments: SegmentTable, index: int) -> NDArray[np.void]:
    entry = segments.directory[index]
    return buckets_at(heap, int(entry["address"]), int(entry["buckets"]))


def _check_segment(heap: Heap, control: memoryview, segments: SegmentTable, index: int) -> int:
    buckets = _buckets(heap, segments, index)
    is_held = buckets["value"] != 0
    entry, bits = segments.directory[index], control[layout.SEGMENT_BITS >> 3]
    positions, keys = np.nonzero(is_held)[0], buckets["key"][is_held]
    assert len(keys) == entry["count"], f"segment {index} counts its rows"
    assert len(np.unique(keys)) == len(keys), f"no key has two rows in segment {index}"
    if bits:
        assert (keys >> np.uint64(64 - bits) == index).all(), f"segment {index} holds its own keys only"
    prefixes = keys >> np.uint64(32)
    fraction = (prefixes << np.uint64(32 + bits)) >> np.uint64(32)
    homes = ((fraction * np.uint64(entry["capacity"])) >> np.uint64(32)).astype(np.int64)
    assert (homes <= positions).all(), f"no row of segment {index} lies before its home"
    sides = np.frombuffer(heap.view(int(entry["address"])), np.uint32)[len(buckets) * layout.BUCKET_BYTES // 4 :]
    is_primary = sides[: is_held.size].reshape(is_held.shape)[is_held] & layout.SECONDARY == 0
    primaries = prefixes[is_primary]
    assert len(np.unique(primaries)) == len(primaries), f"no prefix has two rows in segment {index} that are primary"
    passed = np.zeros(len(buckets) + 1, np.int64)
    np.add.at(passed, homes, 1)
    np.add.at(passed, positions, -1)
    assert (passed.cumsum()[:-1] == buckets["passed"]).all(), f"buckets of segment {index} count who passed them"
    return len(keys)


def _check_slots(slots: SlotTable, held: dict[int, tuple[int, int]], control: memoryview) -> None:
    table = slots.table()
    live = {slot for _, slot in slots.items()}
    for slot, (num_held, digest, state, *_) in enumerate(table.tolist()):
        assert (state == layout.LIVE) == (slot in live), f"slot {slot} is live exactly if a rank has it"
        if state == layout.LIVE:
            assert held.get(slot, (0, 0)) == (num_held, digest), f"slot {slot} counts and digests what it holds"
    assert (table["state"] == layout.RETIRED).sum() == control[layout.NUM_RETIRED >> 3], "retired slots are counted"


def _check_sets(heap: Heap, control: memoryview, sets: SetArena, references: dict[int, int]) -> None:
    living: dict[int, bytes] = {}
    stamps = set()
    slabs = sets.slabs()
    for slab_id, slab in enumerate(slabs):
        if not slab["address"]:
            continue
        num_used = 0
        for index in range(int(slab["fresh"])):
            at = index * int(slab["record_bytes"])
            raw = heap.view(int(slab["address"]))[at : at + int(slab["record_bytes"])].tobytes()
            count, stamp, _, _, num_members, num_words = np.frombuffer(raw[:24], np.uint32).tolist()
            if stamp == 0:
                continue
            set_id = slab_id << layout.RECORD_BITS | index
            assert count == references.get(set_id), f"set {set_id} counts the rows that refer to it"
            payload_bytes = num_words * 8 or num_members * 4
            living[set_id] = raw[16 : 24 + payload_bytes]
            stamps.add(stamp)
            num_used += 1
        assert num_used == slab["used"], f"slab {slab_id} counts its records"
    assert living.keys() == references.keys(), "the sets that rows refer to exist, and no others"
    assert len(stamps) == len(living), "stamps are unique"
    assert len(set(living.values())) == len(living), "equal sets have equal ids"
    assert len(living) == control[layout.NUM_SETS >> 3], "sets are counted"
    _check_buckets(heap, control, slabs, set(living))


def _check_buckets(heap: Heap, control: memoryview, slabs: NDArray[np.void], living: set[int]) -> None:
    num_buckets = control[layout.NUM_BUCKETS >> 3]
    pages = heap.view(control[layout.BUCKETS >> 3]).cast("q")
    found = set()
    for page in range(num_buckets // layout.BUCKETS_PER_PAGE):
        heads = np.frombuffer(heap.view(pages[page]), np.uint32)
        for index in np.flatnonzero(heads).tolist():
            set_id = int(heads[index])
            while set_id:
                assert set_id not in found, "a set is in one bucket"
                found.add(set_id)
                slab = slabs[set_id >> layout.RECORD_BITS]
                at = (set_id & ((1 << layout.RECORD_BITS) - 1)) * int(slab["record_bytes"])
                header = np.frombuffer(heap.view(int(slab["address"]))[at : at + 24], np.uint32).tolist()
                span = layout.BUCKETS_PER_PAGE
                while span < num_buckets:
                    span *= 2
                bucket = header[2] & (span - 1)
                bucket = bucket if bucket < num_buckets else bucket & (span // 2 - 1)
                assert bucket == page * layout.BUCKETS_PER_PAGE + index, f"set {set_id} is in its bucket"
                set_id = header[3]
    assert found == living, "every set can be found"
