"""What one rank of an engine holds, and under which of the engine's own hashes: two tables beside the index.

The *names* table has the block that an engine hash names, by tier. A name whose block the index has evicted is void,
and is overwritten. The *counts* table has numbers that are nearly always 0: copies of a hash beyond the first, hashes
of a block beyond the first, copies in each of the rank's other groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import int64, types, uint64
from numpy.typing import NDArray

from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled import table
from kvist.radix.compiled.blocks import depth_at, find, mark, mark_used, remove_one, row_at, store_one, tiers_at
from kvist.radix.compiled.jit import helper, signed
from kvist.radix.compiled.layout import HASHES_TYPE, INDEX_TYPES, MAX_DEPTH, TABLE_TYPES, Record, Records, Words

STEP = 0x9E37_79B9_7F4A_7C15
GROUPS, ALIASES, PLACE_BITS = 4, 36, 6
"""A count's *place*, its lowest six bits, says what is counted: below GROUPS, copies of a hash in that tier; from
GROUPS on, copies of a hash in another group; from ALIASES on, hashes of a block in a tier."""
MAX_ROWS = 1 << 22
"""Counts beyond which other groups' blocks are not counted any more."""
HOLD, RELEASE, STORE_IN_GROUP, REMOVE_FROM_GROUP, STORE_IN_COMPANION = range(5)
_U0, _STEP, _PLACE_BITS = np.uint64(0), np.uint64(STEP), np.uint64(PLACE_BITS)
_0: Any = np.int64(0)  # typed: Numba compiles a function again for each literal
_MINUS_1: Any = np.int64(-1)


class Held(NamedTuple):
    """The index, the two tables, and the record of the rank whose names and counts they are."""

    index: Record
    segments: Records
    names_head: Record
    names: Records
    counts_head: Record
    counts: Records
    rank: Record


# --- Tables, of one part or several ---------------------------------------------------------------------------------


@helper
def _get(head: Record, rows: Records, part: int, key: np.uint64) -> np.uint64:
    """Return the value of a key in a part of a table, 0 for none."""
    number = part << head.bits | table.segment_of(head, key)
    place = table.locate(head, rows, number, key)
    return rows[number].rows[place].value if place >= 0 else _U0


@helper
def _put(head: Record, rows: Records, part: int, key: np.uint64, value: np.uint64) -> None:
    """Set the value of a key. Raises MemoryError."""
    number = part << head.bits | table.segment_of(head, key)
    place = table.locate(head, rows, number, key)
    if place >= 0:
        rows[number].rows[place].value = value
    else:
        table.insert(head, rows, number, -1 - place, key, value)


@helper
def _remove(head: Record, rows: Records, part: int, key: np.uint64) -> None:
    number = part << head.bits | table.segment_of(head, key)
    place = table.locate(head, rows, number, key)
    if place >= 0:
        table.delete(head, rows[number], place)


@helper
def _key(name: np.uint64, place: int) -> np.uint64:
    """Return the key of the count of a name in a place; its own inverse."""
    return name ^ np.uint64(place) * _STEP


@helper
def _count_of(held: Held, name: np.uint64, place: int) -> int:
    if held.counts_head.num_rows == 0:
        return 0
    return signed(_get(held.counts_head, held.counts, _0, _key(name, place)) >> _PLACE_BITS)


@helper
def _set_count(held: Held, name: np.uint64, place: int, count: int) -> None:
    if count > 0:
        _put(held.counts_head, held.counts, _0, _key(name, place), np.uint64(count << PLACE_BITS | place))
    elif held.counts_head.num_rows:
        _remove(held.counts_head, held.counts, _0, _key(name, place))


@helper
def _increment(held: Held, name: np.uint64, place: int) -> None:
    _set_count(held, name, place, _count_of(held, name, place) + 1)


# --- What else the rank's groups hold ---------------------------------------------------------------------------------


@helper
def _is_in(index: Record, segments: Records, slot: int, tier: int, block_hash: np.uint64) -> bool:
    row = find(index, segments, block_hash)
    return row >= 0 and tiers_at(index, segments, row, slot) >> tier & 1 == 1


@helper
def _gpu_block(held: Held, engine_hash: np.uint64) -> np.uint64:
    """Return the block that a hash names on the GPU, 0 for none."""
    name = _get(held.names_head, held.names, _0, engine_hash)
    is_there = name != _U0 and _is_in(held.index, held.segments, held.rank.slot, _0, name)
    return name if is_there else _U0


@helper
def _is_in_all(held: Held, engine_hash: np.uint64, kind: int, except_group: int) -> bool:
    """Return whether all groups of a kind hold a block, `except_group` perhaps not."""
    for group in range(held.rank.num_groups):
        is_needed = held.rank.kinds[group] == kind and group != except_group
        if is_needed and _count_of(held, engine_hash, GROUPS + group) == 0:
            return False
    return True


@helper
def _store_in_companion(held: Held, engine_hash: np.uint64, block_hash: np.uint64, depth: int) -> None:
    """Let the companion hold a block in each kind of which all groups hold it."""
    for kind in range(held.rank.num_kinds):
        if _is_in_all(held, engine_hash, kind, _MINUS_1):
            store_one(held.index, held.segments, block_hash, depth, held.rank.companion, kind)


# --- One block --------------------------------------------------------------------------------------------------------


@helper
def row_named(held: Held, engine_hash: np.uint64) -> int:
    """Return the row of the block that a hash names in the fastest tier, -1 for none."""
    index, segments, head, names = held.index, held.segments, held.names_head, held.names
    for tier in range(4):
        name = _get(head, names, tier, engine_hash)
        row = find(index, segments, name) if name != _U0 else -1
        if row >= 0 and tiers_at(index, segments, row, held.rank.slot) >> tier & 1:
            return row
    return -1


@helper
def _release_name(held: Held, tier: int, block_hash: np.uint64) -> None:
    """Take one hash from a block in a tier; the block leaves the tier with its last hash."""
    num_aliases = _count_of(held, block_hash, ALIASES + tier)
    if num_aliases:
        _set_count(held, block_hash, ALIASES + tier, num_aliases - 1)
        return
    for kind in range(held.rank.num_kinds if tier == 0 else _0):
        remove_one(held.index, held.segments, block_hash, held.rank.companion, kind)
    remove_one(held.index, held.segments, block_hash, held.rank.slot, tier)


@helper
def hold(held: Held, tier: int, hashes: Words, blocks: Words, first: int, end: int, depth: int) -> None:
    """Hold a chain of blocks, those from `first` to `end`, in a tier under its hashes, or one more copy of each.

    A hash that named another block in this tier names the new one now. If the other block is in this chain, the chain
    ends there. A block whose hash is 0 cannot be named and is left out.
    """
    index, segments, head, names, rank = held.index, held.segments, held.names_head, held.names, held.rank
    for number in range(first, end):
        engine_hash, block_hash, own_depth = hashes[number], blocks[number], depth + number - first
        name, row = _get(head, names, tier, engine_hash), find(index, segments, block_hash)
        tiers = tiers_at(index, segments, row, rank.slot) if row >= 0 else 0
        if tiers >> tier & 1 and name == block_hash:
            if index.max_blocks:
                mark_used(index, row_at(segments, row))
            if rank.counts_copies:
                _increment(held, engine_hash, tier)
            continue
        if name != _U0 and name != block_hash and _is_in(index, segments, rank.slot, tier, name):
            place = first + depth_at(segments, find(index, segments, name)) - depth
            if first <= place < number and hashes[place] == engine_hash:
                return
            _release_name(held, tier, name)
            _remove(head, names, tier, engine_hash)
        if block_hash == _U0:
            continue
        if held.counts_head.num_rows:
            _set_count(held, engine_hash, tier, _0)
        if tier == 0 and rank.num_groups:
            _store_in_companion(held, engine_hash, block_hash, own_depth)
        if name != block_hash:
            _put(head, names, tier, engine_hash, block_hash)
        if tiers >> tier & 1:
            _increment(held, block_hash, ALIASES + tier)
            continue
        store_one(index, segments, block_hash, min(own_depth, MAX_DEPTH), rank.slot, tier)
        if held.counts_head.num_rows:
            _set_count(held, block_hash, ALIASES + tier, _0)  # counted before the block was evicted


@helper
def release_one(held: Held, tier: int, engine_hash: np.uint64) -> None:
    """Remove a hash, or one copy of it, from a tier."""
    name = _get(held.names_head, held.names, tier, engine_hash)
    if name == _U0:
        return
    if _is_in(held.index, held.segments, held.rank.slot, tier, name):
        num_copies = _count_of(held, engine_hash, tier)
        if num_copies and held.rank.counts_copies:
            _set_count(held, engine_hash, tier, num_copies - 1)
            return
        if num_copies:
            _set_count(held, engine_hash, tier, _0)
        _release_name(held, tier, name)
    _remove(held.names_head, held.names, tier, engine_hash)


@helper
def store_in_group(held: Held, group: int, engine_hash: np.uint64) -> None:
    """Count a block as held by one of the other groups, or one more copy of it."""
    kind, count = held.rank.kinds[group], _count_of(held, engine_hash, GROUPS + group)
    if held.counts_head.num_rows >= MAX_ROWS if count == 0 else not held.rank.counts_copies:
        return
    block_hash = _gpu_block(held, engine_hash) if count == 0 else _U0
    if block_hash != _U0 and _is_in_all(held, engine_hash, kind, group):
        depth = depth_at(held.segments, find(held.index, held.segments, block_hash))
        store_one(held.index, held.segments, block_hash, depth, held.rank.companion, kind)
    _set_count(held, engine_hash, GROUPS + group, count + 1)


@helper
def remove_from_group(held: Held, group: int, engine_hash: np.uint64) -> None:
    """Count a block as no longer held by one of the other groups, or one copy less of it."""
    count = _count_of(held, engine_hash, GROUPS + group)
    is_gone = count == 1 or (count > 1 and not held.rank.counts_copies)
    block_hash = _gpu_block(held, engine_hash) if is_gone else _U0
    if block_hash != _U0:
        remove_one(held.index, held.segments, block_hash, held.rank.companion, held.rank.kinds[group])
    _set_count(held, engine_hash, GROUPS + group, 0 if is_gone else count - 1)


# --- For Python -------------------------------------------------------------------------------------------------------

Arrays: TypeAlias = tuple[Records, Records, Records, Records, Records, Records, Records]
"""The fields of a `Held` as arrays, which is how Python hands them to compiled code."""
ARRAYS_TYPE: Any = types.Tuple((*INDEX_TYPES, *TABLE_TYPES, *TABLE_TYPES, layout.RANK_TYPE))


@jit((ARRAYS_TYPE, int64, int64, HASHES_TYPE, HASHES_TYPE, uint64))
def change(arrays: Arrays, operation: int, place: int, engine_hashes: Words, blocks: Words, parent: int) -> None:
    """Apply one operation to each of the hashes. Raises MemoryError.

    HOLD a chain of blocks behind a parent, if any, in a tier, or RELEASE hashes from a tier: `place` is the tier. For
    STORE_IN_GROUP and REMOVE_FROM_GROUP, `place` is the group. STORE_IN_COMPANION what all groups hold of the blocks.
    """
    core, segments, names_heads, names, counts_heads, counts, ranks = arrays
    held = Held(core[0], segments, names_heads[0], names, counts_heads[0], counts, ranks[0])
    if operation == HOLD:
        row = find(held.index, segments, np.uint64(parent)) if parent else _MINUS_1
        depth = depth_at(segments, row) + 1 if row >= 0 else _0
        hold(held, place, engine_hashes, blocks, _0, len(blocks), depth)
        return
    for engine_hash in engine_hashes:
        if operation == RELEASE:
            release_one(held, place, engine_hash)
        elif operation == STORE_IN_GROUP:
            store_in_group(held, place, engine_hash)
        elif operation == REMOVE_FROM_GROUP:
            remove_from_group(held, place, engine_hash)
        else:
            block_hash = _gpu_block(held, engine_hash)
            if block_hash != _U0:
                depth = depth_at(segments, find(held.index, segments, block_hash))
                _store_in_companion(held, engine_hash, block_hash, depth)


@jit((ARRAYS_TYPE, uint64))
def block_named(arrays: Arrays, engine_hash: int) -> int:
    """Return the block that a hash names in the fastest tier, 0 for none."""
    core, segments, names_heads, names, counts_heads, counts, ranks = arrays
    held = Held(core[0], segments, names_heads[0], names, counts_heads[0], counts, ranks[0])
    row = row_named(held, np.uint64(engine_hash))
    return row_at(held.segments, row).hash if row >= 0 else _U0  # type: ignore[return-value]


@jit((*INDEX_TYPES, int64, uint64))
def tiers_held(core: Records, segments: Records, slot: int, block_hash: int) -> int:
    """Return the tiers in which a slot holds a block, one bit each."""
    row = find(core[0], segments, np.uint64(block_hash))
    return tiers_at(core[0], segments, row, slot) if row >= 0 else 0


@jit((*INDEX_TYPES, uint64))
def mark_block(core: Records, segments: Records, block_hash: int) -> None:
    """Mark a block, as long as anybody holds it, so that chains behind it are left to Python."""
    row = find(core[0], segments, np.uint64(block_hash))
    if row >= 0:
        mark(segments, row)


@jit((*TABLE_TYPES, uint64))
def get(heads: Records, rows: Records, key: int) -> int:
    """Return the value of a key in the first part of a table, 0 for none."""
    return _get(heads[0], rows, _0, np.uint64(key))  # type: ignore[return-value]


@jit((*TABLE_TYPES, int64, HASHES_TYPE, HASHES_TYPE))
def put(heads: Records, rows: Records, part: int, keys: Words, values: Words) -> None:
    """Set the value of each key in a part of a table; 0 removes the key. Raises MemoryError."""
    for number in range(len(keys)):
        if values[number] == _U0:
            _remove(heads[0], rows, part, keys[number])
        else:
            _put(heads[0], rows, part, keys[number], values[number])


@jit((*INDEX_TYPES, int64, int64, HASHES_TYPE))
def are_held(core: Records, segments: Records, slot: int, tier: int, blocks: Words) -> NDArray[np.bool_]:
    """Return for each block whether a slot holds it in a tier."""
    is_held = np.empty(len(blocks), np.bool_)
    for number in range(len(blocks)):
        is_held[number] = _is_in(core[0], segments, slot, tier, blocks[number])
    return is_held
