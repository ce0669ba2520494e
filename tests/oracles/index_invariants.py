"""Checks that an index is what its layout says; slow."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from kvist.events.snapshot import block_digest
from kvist.radix import RadixIndex
from kvist.radix._slots import SlotTable
from kvist.radix.compiled.layout import FULLEST_128THS, INLINE, LIVE, RETIRED, Record, Records

_U64 = (1 << 64) - 1


def check_invariants(index: RadixIndex) -> None:
    """Raise AssertionError unless rows, sets and slots agree with the documented layout and with each other."""
    core, segments, slots, sweeper = index.core[0], index.segments, index._slots, index._sweeper
    is_sweeping_sets = sweeper._next_set < sweeper._end_of_sets or bool(core["captured_stamp"])
    references: Counter[int] = Counter()
    held: dict[int, tuple[int, int]] = {}
    num_rows = 0
    for number, segment in enumerate(segments):
        rows = _check_segment(core, number, segment)
        num_rows += len(rows)
        for block_hash, set_id in zip(rows["hash"].tolist(), rows["set_id"].tolist(), strict=True):
            references[set_id] += 1
            for member in _members(core, set_id):
                slot, tiers = member >> 4, member & 15
                assert tiers, "a member belongs to some tier"
                assert slots.table[slot]["state"] in (LIVE, RETIRED), f"slot {slot} is free, but in use"
                for tier in range(4):
                    if tiers >> tier & 1:
                        count, digest = held.get(slot, (0, 0))
                        held[slot] = count + 1, digest + block_digest(block_hash, tier) & _U64
    assert num_rows == core["table"]["num_rows"], "rows are counted"
    _check_slots(core, slots, held)
    _check_sets(core, {s: n for s, n in references.items() if not s & INLINE}, is_sweeping_sets=is_sweeping_sets)


def _check_segment(core: Record, number: int, segment: Record) -> Records:
    room, bits = int(segment["room"]), int(core["table"]["bits"])
    rows: Records = segment["rows"][:room]
    places = np.flatnonzero(rows["value"])
    is_held = np.zeros(room, bool)
    is_held[places] = True
    held = rows[places]
    assert len(held) == segment["count"], f"segment {number} counts its rows"
    assert len(held) * 128 <= room * (FULLEST_128THS + 1), f"segment {number} has vacant places"
    assert (held["set_id"] != 0).all(), "every row has holders"
    assert not segment["rows"]["value"][room : room + 300].any(), f"segment {number} ends where it says"
    assert len(np.unique(held["hash"])) == len(held), f"no hash has two rows in segment {number}"
    keys = held["hash"] * core["table"]["multiplier"]
    if bits:
        assert (keys >> np.uint64(64 - bits) == number).all(), f"segment {number} has its own hashes only"
    homes = ((keys << np.uint64(bits) >> np.uint64(32)).astype(np.int64) * room) >> 32
    for home, place in zip(homes.tolist(), places.tolist(), strict=True):
        passed = is_held[home:place] if home <= place else np.append(is_held[home:], is_held[:place])
        assert passed.all(), f"a search in segment {number} reaches place {place}"
    return held


def _members(core: Record, set_id: int) -> list[int]:
    if set_id & INLINE:
        return [set_id & (INLINE - 1)]
    record = core["sets"][set_id]
    start, num_members, num_words = (int(record[field]) for field in ("start", "num_members", "num_words"))
    if not num_words:
        words = core["words"][start : start + (num_members + 1) // 2].tolist()
        return [word >> shift & 0xFFFF_FFFF for word in words for shift in (0, 32)][:num_members]
    members = []
    for place, word in enumerate(core["words"][start : start + num_words].tolist()):
        tiers = [word >> shift & 15 for shift in range(0, 64, 4)]
        members += [(place * 16 + number) << 4 | each for number, each in enumerate(tiers) if each]
    return members


def _check_slots(core: Record, slots: SlotTable, held: dict[int, tuple[int, int]]) -> None:
    live = {*slots.by_rank.values()}
    table = slots.table[: len(slots.ranks)]
    for slot, (num_held, digest, state, _, _) in enumerate(table.tolist()):
        assert (state == LIVE) == (slot in live), f"slot {slot} is live exactly if a rank has it"
        if state == LIVE:
            assert held.get(slot, (0, 0)) == (num_held, digest), f"slot {slot} counts and digests what it holds"
    assert (table["state"] == RETIRED).sum() == core["num_retired"], "retired slots are counted"


def _check_sets(core: Record, references: dict[int, int], *, is_sweeping_sets: bool) -> None:
    records = core["sets"][: core["end_of_sets"]]
    living = np.flatnonzero(records["stamp"]).tolist()
    contents, runs = set(), []
    for set_id in living:
        record, members = records[set_id], _members(core, set_id)
        assert record["references"] == references.get(set_id, 0), f"set {set_id} counts the rows that refer to it"
        assert record["references"] or is_sweeping_sets, f"set {set_id} is gone once nothing refers to it"
        assert len(members) == record["num_members"], f"set {set_id} counts its members"
        assert members == sorted(members), "members ascend"
        contents.add(tuple(members))
        runs.append((int(record["start"]), int(record["num_words"]) or len(members) + 1 >> 1))
    assert references.keys() <= set(living), "the sets that rows refer to exist"
    assert len(contents) == len(living) == core["num_sets"], "equal sets have equal ids, and are counted"
    runs.sort()
    assert all(a + n <= b for (a, n), (b, _) in pairwise(runs)), "no two sets share words"
    found = set()
    for bucket in core["buckets"][core["buckets"] > 0].tolist():
        while bucket:
            assert bucket not in found, "a set is in one bucket"
            found.add(bucket)
            bucket = int(records[bucket]["next"])
    assert found == set(living), "every set can be found"
