"""Holding and releasing a rank's blocks by their engine hashes, a slice at a time; only what is regular."""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.events.hashing import HASH_SEED
from kvist.indexer.compiled.engine_layout import (
    CHAIN,
    DONE,
    EVENT_TIER,
    INDEX,
    INDEX_NEEDS_HELP,
    IRREGULAR,
    MAP_NEEDS_HELP,
    OUTLOOKS,
    RANK_MAP,
    RANK_SLOT,
    SOME_EVENTS,
)
from kvist.indexer.compiled.engine_map import (
    ACCOUNTING,
    NOTHING,
    drop_entry,
    entry_of,
    hash_of,
    marks_of,
    outlook,
    prefix_of,
    put_entry,
    row_named,
)
from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.old_hashing import local_hash
from kvist.indexer.compiled.old_xxh3 import chained
from kvist.radix.compiled.intrinsics import get32, get64, getu64, prefetch, put32, put64, putu64
from kvist.radix.compiled.layout import BUCKET_SETS, MAX_DEPTH, MULTIPLIER, SECONDARY
from kvist.radix.compiled.layout import IRREGULAR as IRREGULAR_ROW
from kvist.radix.compiled.rows import find_row
from kvist.radix.compiled.sets import tiers_of
from kvist.radix.compiled.table import home_of, segment_of, side_of
from kvist.radix.compiled.updates import block_digest, credit, remove_one, store_one

_SEED = np.uint64(HASH_SEED)
_U32 = np.uint64(32)


@jit("void(i8,u8)", is_inlined=True)
def _prefetch_row(index, key):
    """Ask for the place where the row of a key is, or may be put, and for the side words there."""
    segment = segment_of(index, key)
    home = home_of(index, segment, key)
    prefetch(home)
    prefetch(side_of(segment, home + BUCKET_SETS))


@jit("u8(i8,i8,i8,i8,i8,u8,i8)")
def hash_blocks(index, tokens, num_blocks, block_bytes, has_parent, parent, chain):
    """Write the canonical hash of each block to the chain, ask for the place of its row, and return the last."""
    multiplier, last = getu64(index + MULTIPLIER), parent
    for number in range(num_blocks):
        local = local_hash(tokens + number * block_bytes, block_bytes, _SEED)
        last = chained(last, local) if has_parent or number else local
        putu64(chain + number * 8, last)
        _prefetch_row(index, last * multiplier)
    return last


@jit("i8(i8,i8,i8,i8,u8,u8,i8)")
def _hold(index, engine_map, slot, tier, engine_hash, block_hash, depth):
    """Hold one block; return 1 if it was not held before, 0 if it was, otherwise minus the reason to stop.

    The map first: should the index need help, the entry is stale until all of it is done again.
    """
    name, entry = prefix_of(block_hash * getu64(index + MULTIPLIER)), entry_of(engine_map, engine_hash)
    if entry == 0:
        if put_entry(engine_map, engine_hash, name) < 0:
            return -MAP_NEEDS_HELP
    elif get32(entry) != name:
        if row_named(index, slot, get32(entry)):  # the event has this engine hash twice
            return -SOME_EVENTS
        put32(entry, name)
    result = store_one(index, block_hash, depth, slot, tier)
    if result < 0:
        return -INDEX_NEEDS_HELP
    if result > 0 and get32(marks_of(index, find_row(index, block_hash))) & SECONDARY:
        remove_one(index, block_hash, slot, tier)
        drop_entry(engine_map, engine_hash)
        return -SOME_EVENTS
    return result


@jit("i8(i8,i8,i8,i8,i8,i8)")
def hold_slice(source, rank, event, hashes, num_blocks, depth):
    """Hold blocks whose canonical hashes stand in the chain, the first one at a depth; return DONE or why not."""
    index, engine_map, slot = get64(source + INDEX), get64(rank + RANK_MAP), get64(rank + RANK_SLOT)
    tier, chain, outlooks = get64(event + EVENT_TIER), get64(source + CHAIN), get64(source + OUTLOOKS)
    for offset in range(0, num_blocks * 8, 8):
        each = outlook(index, engine_map, slot, tier, getu64(hashes + offset), getu64(chain + offset))
        if each == ACCOUNTING:
            return SOME_EVENTS
        put64(outlooks + offset, each)
    num_stored, digest, result = 0, np.uint64(0), 0
    for offset in range(0, num_blocks * 8, 8):
        if get64(outlooks + offset) == NOTHING:
            continue
        block_hash = getu64(chain + offset)
        block_depth = min(depth + (offset >> 3), MAX_DEPTH)
        result = _hold(index, engine_map, slot, tier, getu64(hashes + offset), block_hash, block_depth)
        if result < 0:
            break
        if result > 0:
            num_stored += 1
            digest += block_digest(block_hash, tier)
    credit(index, slot, num_stored, digest)
    return -result if result < 0 else DONE


@jit("void(i8,i8,i8,i8)")
def prefetch_named(index, engine_map, hashes, num_hashes):
    """Ask for the rows of blocks that engine hashes name."""
    for at in range(hashes, hashes + num_hashes * 8, 8):
        entry = entry_of(engine_map, getu64(at))
        if entry:
            _prefetch_row(index, np.uint64(get32(entry)) << _U32)


@jit("i8(i8,i8,i8,i8,i8)")
def release_slice(source, rank, tier, hashes, num_hashes):
    """Release blocks by their engine hashes; those that name none are passed over. Return DONE or why it stopped."""
    index, engine_map, slot = get64(source + INDEX), get64(rank + RANK_MAP), get64(rank + RANK_SLOT)
    num_removed, digest, reason = 0, np.uint64(0), DONE
    for at in range(hashes, hashes + num_hashes * 8, 8):
        entry = entry_of(engine_map, getu64(at))
        if entry == 0:
            continue
        row = row_named(index, slot, get32(entry)) if get32(entry) != IRREGULAR else 0
        if get32(entry) == IRREGULAR or (row and get32(marks_of(index, row)) & IRREGULAR_ROW):
            reason = SOME_EVENTS
            break
        tiers = tiers_of(index, get32(row), slot) if row else 0
        if tiers >> tier & 1:
            block_hash = hash_of(index, row)
            if remove_one(index, block_hash, slot, tier) < 0:
                reason = INDEX_NEEDS_HELP
                break
            num_removed += 1
            digest += block_digest(block_hash, tier)
        if tiers & ~(1 << tier) == 0:
            drop_entry(engine_map, getu64(at))
    credit(index, slot, -num_removed, np.uint64(0) - digest)
    return reason
