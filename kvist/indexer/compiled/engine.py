"""The fast path for engines' own streams: from the bytes of their messages to the index, in order and all or nothing.

A message is checked in full before any of it is done, and each event looked up in full before it changes anything.
What is not ordinary is left to the caller, and the place where it stands; the next call goes on behind it.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.events.hashing import HASH_SEED
from kvist.indexer.compiled.engine_events import check_message
from kvist.indexer.compiled.engine_layout import (
    BLOCK_IDX,
    BLOCK_SIZE,
    BUDGET,
    CHAIN,
    CHECKED_END,
    CHECKED_RANK,
    DONE,
    DROPPED,
    EVENT_BLOCK_SIZE,
    EVENT_BYTES,
    EVENT_HASHES,
    EVENT_IDX,
    EVENT_KIND,
    EVENT_NUM_HASHES,
    EVENT_NUM_TOKENS,
    EVENT_PARENT,
    EVENT_START,
    EVENT_TIER,
    EVENT_TOKENS,
    EVENT_VERDICT,
    EVENTS,
    FINGERPRINTS,
    HAS_BLOCK_SIZE,
    IGNORED,
    INDEX,
    INDEX_NEEDS_HELP,
    IRREGULAR,
    IS_CHECKED,
    LAST_BLOCK,
    LAST_DEPTH,
    LAST_TIMESTAMP,
    LIKELY_MAP,
    MAP_NEEDS_HELP,
    MESSAGE_IDX,
    NOT_NEXT,
    NUM_BATCHES,
    NUM_CHECKED,
    NUM_EVENTS,
    NUM_IGNORED,
    NUM_SIZED,
    NUM_VERDICTS,
    OUTLOOKS,
    PAUSED,
    RANK_MAP,
    RANK_SLOT,
    RANK_VERDICTS,
    RANKS,
    REMOVED,
    RING_MASK,
    SCRATCH_BYTES,
    SCRATCH_NEEDS_HELP,
    SEQUENCES,
    SLICE_BLOCKS,
    SOME_EVENTS,
    STOP_END,
    STOP_EVENT_END,
    STOP_START,
    STORED,
    UNUSUAL,
    VERDICT_BYTES,
    WHOLE_MESSAGE,
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
from kvist.indexer.compiled.hashing import local_hash
from kvist.indexer.compiled.intrinsics import byteswap
from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.xxh3 import chained, xxh3_64
from kvist.radix.compiled.intrinsics import get32, get64, getu64, prefetch, put32, put64, putu64
from kvist.radix.compiled.layout import BUCKET_SETS, MAX_DEPTH, MULTIPLIER, SECONDARY
from kvist.radix.compiled.layout import IRREGULAR as IRREGULAR_ROW
from kvist.radix.compiled.rows import find_row
from kvist.radix.compiled.sets import tiers_of
from kvist.radix.compiled.table import home_of, segment_of, side_of
from kvist.radix.compiled.updates import block_digest, credit, remove_one, store_one

_SEED = np.uint64(HASH_SEED)
_EVENTS_AHEAD = 16
_U32 = np.uint64(32)


@jit("i8(i8,i8)")
def _verdict(rank, key):
    """What the window filter said of an event like this one, 0 if that is not known."""
    for place in range(rank + RANK_VERDICTS, rank + RANK_VERDICTS + NUM_VERDICTS * VERDICT_BYTES, VERDICT_BYTES):
        known = get64(place)
        if known == key + 1:
            return get64(place + 8)
        if known == 0:
            break
    return 0


@jit("void(i8,u8)", is_inlined=True)
def _prefetch_row(index, key):
    """Ask for the place where the row of a key is, or may be put, and for the side words there."""
    segment = segment_of(index, key)
    home = home_of(index, segment, key)
    prefetch(home)
    prefetch(side_of(segment, home + BUCKET_SETS))


@jit("u8(i8,i8,i8,i8,i8,u8,i8)")
def _hash_blocks(index, tokens, num_blocks, block_bytes, has_parent, parent, chain):
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
def _hold_slice(source, rank, event, hashes, num_blocks, depth):
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


@jit("i8(i8,i8,i8)")
def _store_event(source, rank, event):
    num_hashes, num_tokens = get64(event + EVENT_NUM_HASHES), get64(event + EVENT_NUM_TOKENS)
    block_size, parent_at, start = get64(source + BLOCK_SIZE), get64(event + EVENT_PARENT), get64(source + BLOCK_IDX)
    if get64(event + EVENT_BLOCK_SIZE) != block_size or num_tokens != num_hashes * block_size:
        return DONE
    if parent_at and start == 0:
        entry = entry_of(get64(rank + RANK_MAP), getu64(parent_at))
        if entry and get32(entry) == IRREGULAR:
            return SOME_EVENTS
        row = row_named(get64(source + INDEX), get64(rank + RANK_SLOT), get32(entry)) if entry else 0
        if row == 0:
            return DONE
        putu64(source + LAST_BLOCK, hash_of(get64(source + INDEX), row))
        put64(source + LAST_DEPTH, get32(marks_of(get64(source + INDEX), row)) & MAX_DEPTH)
    elif start == 0:
        put64(source + LAST_DEPTH, -1)
    index, hashes, tokens = get64(source + INDEX), get64(event + EVENT_HASHES), get64(event + EVENT_TOKENS)
    block_bytes, chain = block_size * 4, get64(source + CHAIN)
    while start < num_hashes:
        num_blocks, depth = min(SLICE_BLOCKS, num_hashes - start), get64(source + LAST_DEPTH) + 1
        at, before = tokens + start * block_bytes, getu64(source + LAST_BLOCK)
        last = _hash_blocks(index, at, num_blocks, block_bytes, depth, before, chain)
        result = _hold_slice(source, rank, event, hashes + start * 8, num_blocks, depth)
        if result != DONE:
            return result
        start += num_blocks
        put64(source + BLOCK_IDX, start)
        putu64(source + LAST_BLOCK, last)
        put64(source + LAST_DEPTH, depth + num_blocks - 1)
        budget = get64(source + BUDGET) - num_blocks * block_bytes
        put64(source + BUDGET, budget)
        if budget <= 0 and start < num_hashes:
            return PAUSED
    return DONE


@jit("void(i8,i8,i8,i8)")
def _prefetch_removed(source, rank, event, num_events):
    """Ask for the rows of what the next events remove: most of them have one hash each."""
    index, engine_map = get64(source + INDEX), get64(rank + RANK_MAP)
    for _ in range(min(num_events, _EVENTS_AHEAD)):
        if get64(event + EVENT_KIND) == REMOVED:
            hashes = get64(event + EVENT_HASHES)
            for at in range(hashes, hashes + min(get64(event + EVENT_NUM_HASHES), _EVENTS_AHEAD) * 8, 8):
                entry = entry_of(engine_map, getu64(at))
                if entry:
                    _prefetch_row(index, np.uint64(get32(entry)) << _U32)
        event += EVENT_BYTES


@jit("i8(i8,i8,i8)")
def _remove_event(source, rank, event):
    """Release the event's blocks; what is not held is passed over."""
    index, engine_map, slot = get64(source + INDEX), get64(rank + RANK_MAP), get64(rank + RANK_SLOT)
    tier, hashes = get64(event + EVENT_TIER), get64(event + EVENT_HASHES)
    end = hashes + get64(event + EVENT_NUM_HASHES) * 8
    num_removed, digest, stop = 0, np.uint64(0), DONE
    for at in range(hashes + get64(source + BLOCK_IDX) * 8, end, 8):
        entry = entry_of(engine_map, getu64(at))
        if entry == 0:
            continue
        if get32(entry) == IRREGULAR:
            stop = SOME_EVENTS
            break
        row = row_named(index, slot, get32(entry))
        if row == 0:
            drop_entry(engine_map, getu64(at))
            continue
        if get32(marks_of(index, row)) & IRREGULAR_ROW:
            stop = SOME_EVENTS
            break
        tiers, block_hash = tiers_of(index, get32(row), slot), hash_of(index, row)
        result = remove_one(index, block_hash, slot, tier)
        if result < 0:
            stop = INDEX_NEEDS_HELP
            break
        if result > 0:
            num_removed += 1
            digest += block_digest(block_hash, tier)
            if tiers == 1 << tier:
                drop_entry(engine_map, getu64(at))
    credit(index, slot, -num_removed, np.uint64(0) - digest)
    return stop


@jit("i8(i8,i8,i8)")
def _hand_over(source, event, num_more):
    """Stop before an event, and all those behind it that are unusual, too."""
    put64(source + STOP_START, get64(event + EVENT_START))
    event_idx = get64(source + EVENT_IDX) + 1
    while num_more > 0 and get64(event + EVENT_BYTES + EVENT_KIND) == UNUSUAL:
        event += EVENT_BYTES
        event_idx += 1
        num_more -= 1
    put64(source + STOP_EVENT_END, event_idx)
    put64(source + STOP_END, get64(event + EVENT_BYTES + EVENT_START) if num_more else get64(source + CHECKED_END))
    return SOME_EVENTS


@jit("i8(i8,i8,i8)")
def _take_event(source, rank, event):
    """Do what one event says; return DONE, or why it stopped."""
    kind = get64(event + EVENT_KIND)
    if kind == IGNORED:
        put64(source + NUM_IGNORED, get64(source + NUM_IGNORED) + 1)
        return DONE
    if kind == UNUSUAL or rank == 0:
        return SOME_EVENTS
    is_sized = kind == STORED and get64(event + EVENT_BLOCK_SIZE) == get64(source + BLOCK_SIZE)
    if kind == STORED and not is_sized and get64(source + HAS_BLOCK_SIZE) == 0:
        return SOME_EVENTS
    verdict = _verdict(rank, get64(event + EVENT_VERDICT))
    if verdict == 0:
        return SOME_EVENTS
    if verdict != DROPPED:
        result = _store_event(source, rank, event) if kind == STORED else _remove_event(source, rank, event)
        if result != DONE:
            return result
    if is_sized:
        put64(source + HAS_BLOCK_SIZE, 1)
        put64(source + NUM_SIZED, get64(source + NUM_SIZED) + 1)
    put64(source + NUM_EVENTS, get64(source + NUM_EVENTS) + 1)
    return DONE


@jit("i8(i8)")
def _take_events(source):
    """Do what is left of a checked message; return DONE, or why it stopped."""
    num_events, event_idx = get64(source + NUM_CHECKED), get64(source + EVENT_IDX)
    rank = get64(get64(source + RANKS) + get64(source + CHECKED_RANK) * 8)
    event = get64(source + EVENTS) + event_idx * EVENT_BYTES
    ahead = event_idx
    while event_idx < num_events:
        if event_idx == ahead and rank:
            _prefetch_removed(source, rank, event, num_events - event_idx)
            ahead += _EVENTS_AHEAD
        result = _take_event(source, rank, event)
        if result == SOME_EVENTS:
            return _hand_over(source, event, num_events - event_idx - 1)
        if result != DONE:
            return result
        event_idx += 1
        event += EVENT_BYTES
        put64(source + EVENT_IDX, event_idx)
        put64(source + BLOCK_IDX, 0)
        budget = get64(source + BUDGET) - get64(event - EVENT_BYTES + EVENT_NUM_HASHES) * 64
        put64(source + BUDGET, budget)
        if budget <= 0 and event_idx < num_events:
            return PAUSED
    return DONE


@jit("void(i8,i8,i8,i8)")
def _finish(source, payload, num_bytes, sequence):
    """Count a message that is done, and note its fingerprint."""
    place = (sequence & get64(source + RING_MASK)) * 8
    put64(get64(source + SEQUENCES) + place, sequence)
    putu64(get64(source + FINGERPRINTS) + place, xxh3_64(payload, num_bytes, np.uint64(0)))
    putu64(source + LAST_TIMESTAMP, byteswap(getu64(payload + 2)))
    put64(source + NUM_BATCHES, get64(source + NUM_BATCHES) + 1)
    put64(source + MESSAGE_IDX, get64(source + MESSAGE_IDX) + 1)
    put64(source + IS_CHECKED, 0)


@jit("i8(i8,i8,i8,i8,i8,i8)", is_entry=True)
def take_messages(source, buffer, table, num_messages, expected, max_bytes):
    """Take messages of a block, from `MESSAGE_IDX` on, as long as their sequences go on from `expected`.

    Return DONE, or why it stopped before; a call does about as much work as `max_bytes` of messages are.
    """
    put64(source + BUDGET, max_bytes)
    for field in (LIKELY_MAP, NUM_BATCHES, NUM_EVENTS, NUM_IGNORED, NUM_SIZED):
        put64(source + field, 0)
    while get64(source + MESSAGE_IDX) < num_messages:
        message = table + get64(source + MESSAGE_IDX) * 40
        payload, num_bytes = buffer + get64(message + 24), get64(message + 32)
        if get64(message + 16) != expected:
            return NOT_NEXT
        if get64(source + IS_CHECKED) == 0:
            if get64(source + BUDGET) <= 0:
                return PAUSED
            if num_bytes > get64(source + SCRATCH_BYTES):
                return SCRATCH_NEEDS_HELP
            if check_message(source, payload, num_bytes) == 0:
                return WHOLE_MESSAGE
            rank = get64(get64(source + RANKS) + get64(source + CHECKED_RANK) * 8)
            put64(source + LIKELY_MAP, get64(rank + RANK_MAP) if rank else 0)
            put64(source + IS_CHECKED, 1)
            put64(source + EVENT_IDX, 0)
            put64(source + BLOCK_IDX, 0)
            put64(source + BUDGET, get64(source + BUDGET) - num_bytes)
        result = _take_events(source)
        if result != DONE:
            return result
        _finish(source, payload, num_bytes, expected)
        expected += 1
    return DONE
