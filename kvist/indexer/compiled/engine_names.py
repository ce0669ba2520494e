"""Engine hashes by the thousand, out of one index's engine maps and into another's."""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

from kvist.indexer.compiled.engine_layout import IRREGULAR
from kvist.indexer.compiled.engine_map import drop_entry, hash_of, look_up, name_of, put_entry, row_named, tiers_held
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get64, getu64, put64, putu64


@jit("i8(i8,i8,i8,i8,i8,i8)", is_entry=True)
def read_names(index, engine_map, slot, names, num_names, blocks):
    """Keep those of the engine hashes, u64, that regularly name a block which the slot holds; return how many.

    They stay side by side at `names`, each with its block at the same place of `blocks`.
    """
    num_kept = 0
    for position in range(num_names):
        engine_hash = getu64(names + position * 8)
        name = look_up(engine_map, engine_hash)
        row = row_named(index, slot, name) if name > IRREGULAR else 0
        if row:
            putu64(names + num_kept * 8, engine_hash)
            putu64(blocks + num_kept * 8, hash_of(index, row))
            num_kept += 1
    return num_kept


@jit("i8(i8,i8,i8,i8,i8,i8,i8,i8)", is_entry=True)
def put_names(index, engine_map, slot, names, blocks, start, end, others):
    """Let engine hashes name the blocks beside them, from `start` on; return how far: short of `end` it must grow.

    Where the slot does not hold the block, nothing is named. The positions of blocks that no entry can lead to are
    written to `others`, as i64, behind their number, which must be there before.
    """
    for position in range(start, end):
        block_hash = getu64(blocks + position * 8)
        if tiers_held(index, slot, block_hash) == 0:
            continue
        name = name_of(index, block_hash)
        if name == 0:
            num_others = get64(others)
            put64(others + 8 + num_others * 8, position)
            put64(others, num_others + 1)
        elif put_entry(engine_map, getu64(names + position * 8), name) < 0:
            return position
    return end


@jit("i8(i8,i8,i8,i8,i8)", is_entry=True)
def drop_stale(index, engine_map, slot, names, num_names):
    """Forget which of the engine hashes, u64, regularly name a block that the slot does not hold; return how many."""
    num_dropped = 0
    for position in range(num_names):
        engine_hash = getu64(names + position * 8)
        name = look_up(engine_map, engine_hash)
        if name > IRREGULAR and row_named(index, slot, name) == 0:
            drop_entry(engine_map, engine_hash)
            num_dropped += 1
    return num_dropped
