"""From a rank's engine hashes to blocks of the index: a table of its own for each rank, of canonical hashes.

Only what is regular is found this way: one engine hash for one block. The name of a block that left the index unnoticed
(it evicts) says nothing any more, and is written over. A table is its head and its segments, as the index's is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types, uint64

from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled import table
from kvist.radix.compiled.blocks import find, is_irregular, mark_irregular, tiers_at
from kvist.radix.compiled.jit import helper
from kvist.radix.compiled.layout import (
    CORE_TYPE,
    DONE,
    FULL,
    HASHES_TYPE,
    HEAD_TYPE,
    SEGMENTS_TYPE,
    Record,
    Records,
    Words,
)

TIER_STEP = 0x9E37_79B9_7F4A_7C15
IRREGULAR = 1
"""What a hash that Python keeps account of names."""
HELD, STORING, ACCOUNTING = range(3)
COPY, GROUPS = 64, 4
"""What a copy adds to the value of a row of copies. Its lowest six bits say of what: a tier, or GROUPS plus a group."""
MAX_ROWS = 1 << 22
"""Rows of copies beyond which other groups' blocks are not counted any more."""
_U0, _IRREGULAR, _COPY = np.uint64(0), np.uint64(IRREGULAR), np.uint64(COPY)
_TIER_STEP = np.uint64(TIER_STEP)
_WORDS: Any = types.Array(uint64, 1, "C")


@helper
def named(head: Record, names: Records, engine_hash: np.uint64) -> np.uint64:
    """Return what the map says of an engine hash: the block it names, IRREGULAR, or 0 for nothing."""
    number = table.segment_of(head, engine_hash)
    place = table.locate(head, names, number, engine_hash)
    return names[number].rows[place].value if place >= 0 else _U0


@helper
def put_name(head: Record, names: Records, engine_hash: np.uint64, block_hash: np.uint64) -> int:
    """Let an engine hash stand for something from here on; return DONE, or FULL if the map must grow first."""
    number = table.segment_of(head, engine_hash)
    segment = names[number]
    place = table.locate(head, names, number, engine_hash)
    if place >= 0:
        segment.rows[place].value = block_hash
        return DONE
    if table.is_full(segment) and segment.room:
        return FULL
    return min(table.insert(head, names, number, -1 - place, engine_hash, block_hash), DONE)


@helper
def drop_name(head: Record, names: Records, engine_hash: np.uint64) -> None:
    """Forget an engine hash, if it is known."""
    number = table.segment_of(head, engine_hash)
    place = table.locate(head, names, number, engine_hash)
    if place >= 0:
        table.delete(head, names[number], place)


@helper
def row_named(index: Record, segments: Records, slot: int, block_hash: np.uint64) -> int:
    """Return the row of a block that is named, -1 if that is stale: this slot does not hold it any more."""
    row = find(index, segments, block_hash)
    return row if row >= 0 and tiers_at(index, segments, row, slot) else -1


@helper
def outlook(
    index: Record,
    segments: Records,
    head: Record,
    names: Records,
    slot: int,
    tier: int,
    engine_hash: np.uint64,
    block_hash: np.uint64,
) -> int:
    """Say what it takes to hold a block in a tier under an engine hash: it is HELD so, or takes STORING, or ACCOUNTING.

    The last means that one of the two stands for something else already, or that the block cannot be named.
    """
    name, row = named(head, names, engine_hash), find(index, segments, block_hash)
    if name == _IRREGULAR or block_hash <= _IRREGULAR:
        return ACCOUNTING
    tiers = tiers_at(index, segments, row, slot) if row >= 0 else 0
    if tiers and (name != block_hash or is_irregular(segments, row)):
        return ACCOUNTING
    if name not in (_U0, block_hash) and row_named(index, segments, slot, name) >= 0:
        return ACCOUNTING
    return HELD if tiers >> tier & 1 else STORING


@helper
def copies_key(engine_hash: np.uint64, tier: int) -> np.uint64:
    """Return under what copies of an engine hash in a tier are counted; its own inverse."""
    return engine_hash ^ np.uint64(tier) * _TIER_STEP


@helper
def add_copy(head: Record, copies: Records, engine_hash: np.uint64, tier: int) -> int:
    """Count one more copy; return DONE, or FULL if the table must grow first."""
    key = copies_key(engine_hash, tier)
    value = named(head, copies, key)
    return put_name(head, copies, key, (value if value != _U0 else np.uint64(tier)) + _COPY)


@helper
def drop_copy(head: Record, copies: Records, engine_hash: np.uint64, tier: int, counts_copies: int) -> bool:
    """Count one copy less; return whether another is left. Where they are not counted, none is."""
    key = copies_key(engine_hash, tier)
    value = named(head, copies, key)
    if value >= _COPY + _COPY and counts_copies:
        put_name(head, copies, key, value - _COPY)
    elif value != _U0:
        drop_name(head, copies, key)
    return bool(value != _U0 and counts_copies)


@helper
def is_in_all(rank: Record, head: Record, copies: Records, engine_hash: np.uint64, kind: int, without: int) -> bool:
    """Return whether all groups of a kind, but for one perhaps, hold a block."""
    for group in range(rank.num_groups):
        is_asked = rank.kinds[group] == kind and group != without
        if is_asked and named(head, copies, copies_key(engine_hash, GROUPS + group)) == _U0:
            return False
    return True


# --- For Python -----------------------------------------------------------------------------------------------------


@jit((HEAD_TYPE, SEGMENTS_TYPE, uint64))
def look_up(heads: Records, names: Records, engine_hash: int) -> int:
    """Return what `named` says."""
    return named(heads[0], names, np.uint64(engine_hash))  # type: ignore[return-value]


@jit((HEAD_TYPE, SEGMENTS_TYPE, uint64, uint64))
def put_one(heads: Records, names: Records, engine_hash: int, block_hash: int) -> int:
    """Do as `put_name` does."""
    return put_name(heads[0], names, np.uint64(engine_hash), np.uint64(block_hash))


@jit((HEAD_TYPE, SEGMENTS_TYPE, uint64))
def drop_one(heads: Records, names: Records, engine_hash: int) -> None:
    """Do as `drop_name` does."""
    drop_name(heads[0], names, np.uint64(engine_hash))


@jit((CORE_TYPE, SEGMENTS_TYPE, HEAD_TYPE, SEGMENTS_TYPE, int64, uint64, uint64))
def needs_account(
    core: Records, segments: Records, heads: Records, names: Records, slot: int, engine_hash: int, block_hash: int
) -> bool:
    """Return whether `outlook` says ACCOUNTING."""
    hashes = np.uint64(engine_hash), np.uint64(block_hash)
    return outlook(core[0], segments, heads[0], names, slot, 0, hashes[0], hashes[1]) == ACCOUNTING


@jit((CORE_TYPE, SEGMENTS_TYPE, int64, uint64))
def tiers_held(core: Records, segments: Records, slot: int, block_hash: int) -> int:
    """Return in which tiers a slot holds a block, by bit."""
    row = find(core[0], segments, np.uint64(block_hash))
    return tiers_at(core[0], segments, row, slot) if row >= 0 else 0


@jit((CORE_TYPE, SEGMENTS_TYPE, uint64))
def can_name(core: Records, segments: Records, block_hash: int) -> bool:
    """Return whether a block can be named: it is in the index, and no number that means something else."""
    return bool(block_hash > IRREGULAR and find(core[0], segments, np.uint64(block_hash)) >= 0)


@jit((CORE_TYPE, SEGMENTS_TYPE, uint64))
def mark_block(core: Records, segments: Records, block_hash: int) -> None:
    """Have every event that touches a block left to Python from here on."""
    row = find(core[0], segments, np.uint64(block_hash))
    if row >= 0:
        mark_irregular(segments, row)


@jit((CORE_TYPE, SEGMENTS_TYPE, HEAD_TYPE, SEGMENTS_TYPE, int64, _WORDS, _WORDS))
def read_names(
    core: Records, segments: Records, heads: Records, names: Records, slot: int, engine_hashes: Words, blocks: Words
) -> int:
    """Keep those of the engine hashes that regularly name a block which the slot holds; return how many.

    They stay side by side, each with its block at the same place of `blocks`.
    """
    num_kept = 0
    for engine_hash in engine_hashes:
        name = named(heads[0], names, engine_hash)
        if name > _IRREGULAR and row_named(core[0], segments, slot, name) >= 0:
            engine_hashes[num_kept], blocks[num_kept] = engine_hash, name
            num_kept += 1
    return num_kept


@jit((CORE_TYPE, SEGMENTS_TYPE, HEAD_TYPE, SEGMENTS_TYPE, int64, HASHES_TYPE, HASHES_TYPE, int64))
def put_names(
    core: Records,
    segments: Records,
    heads: Records,
    names: Records,
    slot: int,
    engine_hashes: Words,
    blocks: Words,
    start: int,
) -> int:
    """Let engine hashes name the blocks beside them, from `start` on; return how far: short of the end it must grow.

    Where the slot does not hold the block, or the block cannot be named, nothing is.
    """
    for number in range(start, len(blocks)):
        if blocks[number] <= _IRREGULAR or row_named(core[0], segments, slot, blocks[number]) < 0:
            continue
        if put_name(heads[0], names, engine_hashes[number], blocks[number]) == FULL:
            return number
    return len(blocks)


@jit((CORE_TYPE, SEGMENTS_TYPE, HEAD_TYPE, SEGMENTS_TYPE, int64, HASHES_TYPE))
def drop_stale(
    core: Records, segments: Records, heads: Records, names: Records, slot: int, engine_hashes: Words
) -> int:
    """Forget which of the engine hashes regularly name a block that the slot does not hold; return how many."""
    num_dropped = 0
    for engine_hash in engine_hashes:
        name = named(heads[0], names, engine_hash)
        if name > _IRREGULAR and row_named(core[0], segments, slot, name) < 0:
            drop_name(heads[0], names, engine_hash)
            num_dropped += 1
    return num_dropped
