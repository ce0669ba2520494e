"""From a rank's engine hashes to rows of the index: a table of its own for each rank, of prefixes of the rows' keys.

Only what is regular is found this way: one engine hash for one block, whose row its prefix names. The entry of a block
that left the index unnoticed (it evicts) says nothing any more, and is written over.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.indexer.compiled.engine_layout import IRREGULAR
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get32, get64, getu64, put32
from kvist.radix.compiled.layout import INVERSE, IS_CAPPED, MULTIPLIER, SECONDARY
from kvist.radix.compiled.layout import IRREGULAR as IRREGULAR_ROW
from kvist.radix.compiled.rows import find_primary, find_row
from kvist.radix.compiled.sets import tiers_of
from kvist.radix.compiled.table import delete_row, find, home_of, insert_row, key_of, segment_of, side_of

NOTHING, STORING, ACCOUNTING = range(3)
_U32 = np.uint64(32)


@jit("i8(i8,i8)")
def marks_of(index, row):
    """Address of the side word of a row, which says whether it is secondary or irregular."""
    return side_of(segment_of(index, key_of(row)), row)


@jit("i8(u8)", is_inlined=True)
def prefix_of(key):
    """What names the row of a key in engine maps."""
    return np.int64(key >> _U32)


@jit("u8(i8,i8)", is_inlined=True)
def hash_of(index, row):
    """Canonical hash of a row's block."""
    return key_of(row) * getu64(index + INVERSE)


@jit("i8(i8,u8)")
def entry_of(engine_map, engine_hash):
    """Address of what the map says of an engine hash, 0 if it says nothing."""
    key = engine_hash * getu64(engine_map + MULTIPLIER)
    return find(home_of(engine_map, segment_of(engine_map, key), key), key)


@jit("i8(i8,u8)", is_entry=True)
def look_up(engine_map, engine_hash):
    """Return what the map says of an engine hash: 0 if nothing."""
    entry = entry_of(engine_map, engine_hash)
    return get32(entry) if entry else 0


@jit("i8(i8,i8,i8)")
def row_named(index, slot, name):
    """Row of the block that an entry names, 0 if it is stale: a block this slot does not hold any more."""
    row = find_primary(index, np.uint64(name))
    return row if row and tiers_of(index, get32(row), slot) else 0


@jit("UniTuple(u8,2)(i8,i8,i8,u8)", is_entry=True)
def block_named(index, engine_map, slot, engine_hash):
    """Return (1, canonical hash) of the block that a regular engine hash names, (0, 0) if it names none."""
    entry = entry_of(engine_map, engine_hash)
    row = row_named(index, slot, get32(entry)) if entry and get32(entry) != IRREGULAR else 0
    return (np.uint64(1), hash_of(index, row)) if row else (np.uint64(0), np.uint64(0))


@jit("i8(i8,i8,u8)", is_entry=True)
def tiers_held(index, slot, block_hash):
    """Return in which tiers a slot holds a block, by bit."""
    row = find_row(index, block_hash)
    return tiers_of(index, get32(row), slot) if row else 0


@jit("i8(i8,u8)", is_entry=True)
def name_of(index, block_hash):
    """Return what names a block in engine maps, 0 if nothing can: it has no row, or one that is not the first."""
    row = find_row(index, block_hash)
    name = prefix_of(block_hash * getu64(index + MULTIPLIER))
    return name if row and get32(marks_of(index, row)) & SECONDARY == 0 and name > IRREGULAR else 0


@jit("void(i8,u8)", is_entry=True)
def mark_irregular(index, block_hash):
    """Have every event that touches a block's row left to Python from here on."""
    row = find_row(index, block_hash)
    if row:
        marks = marks_of(index, row)
        put32(marks, get32(marks) | IRREGULAR_ROW)


@jit("i8(i8,u8,i8)", is_entry=True)
def put_entry(engine_map, engine_hash, name):
    """Let an engine hash stand for something else from here on; return 0, or negative if the map must grow first."""
    key = engine_hash * getu64(engine_map + MULTIPLIER)
    segment = segment_of(engine_map, key)
    home = home_of(engine_map, segment, key)
    entry = find(home, key)
    if entry:
        put32(entry, name)
        return 0
    return min(insert_row(engine_map, segment, home, key, name), 0)


@jit("void(i8,u8)", is_entry=True)
def drop_entry(engine_map, engine_hash):
    """Forget an engine hash, if it is known."""
    key = engine_hash * getu64(engine_map + MULTIPLIER)
    segment = segment_of(engine_map, key)
    home = home_of(engine_map, segment, key)
    entry = find(home, key)
    if entry:
        delete_row(engine_map, segment, home, entry)


@jit("i8(i8,i8,i8,i8,u8,u8)", is_entry=True)
def outlook(index, engine_map, slot, tier, engine_hash, block_hash):
    """Say what it takes to hold a block in a tier under an engine hash: NOTHING, STORING, or ACCOUNTING.

    The last means that one of the two stands for something else already, or that no entry can name the block.
    """
    key, entry = block_hash * getu64(index + MULTIPLIER), entry_of(engine_map, engine_hash)
    segment = segment_of(index, key)
    row, name = find(home_of(index, segment, key), key), prefix_of(key)
    named = get32(entry) if entry else 0
    if named == IRREGULAR or name <= IRREGULAR:
        return ACCOUNTING
    tiers = tiers_of(index, get32(row), slot) if row else 0
    marks = get32(side_of(segment, row)) if row else 0
    if marks & SECONDARY or (tiers and (named != name or marks & IRREGULAR_ROW)):
        return ACCOUNTING
    if named and named != name and row_named(index, slot, named):
        return ACCOUNTING
    if named == name and row == 0 and row_named(index, slot, named):
        return ACCOUNTING
    return NOTHING if tiers >> tier & 1 and get64(index + IS_CAPPED) == 0 else STORING
