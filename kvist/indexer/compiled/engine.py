"""The fast path for engines' own streams: from the bytes of their messages to the index, in order and all or nothing.

A message is checked in full before any of it is done, and each event looked up in full before it changes anything.
What is not ordinary is left to the caller, and the place where it stands; the next call goes on behind it.
"""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.indexer.compiled.engine_blocks import hash_blocks, hold_slice, prefetch_named, release_slice
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
    IRREGULAR,
    IS_CHECKED,
    LAST_BLOCK,
    LAST_DEPTH,
    LAST_TIMESTAMP,
    LIKELY_MAP,
    MESSAGE_IDX,
    NOT_NEXT,
    NUM_BATCHES,
    NUM_CHECKED,
    NUM_EVENTS,
    NUM_IGNORED,
    NUM_SIZED,
    NUM_VERDICTS,
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
    entry_of,
    hash_of,
    marks_of,
    row_named,
)
from kvist.indexer.compiled.intrinsics import byteswap
from kvist.indexer.compiled.jit import jit
from kvist.indexer.compiled.old_xxh3 import xxh3_64
from kvist.radix.compiled.intrinsics import get32, get64, getu64, put64, putu64
from kvist.radix.compiled.layout import MAX_DEPTH

_EVENTS_AHEAD = 16
_REMOVAL_BYTES = 64  # on the wire, where a removal is an event of its own


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


@jit("i8(i8,i8,i8)")
def _store_event(source, rank, event):
    """Hold an event's blocks, if it is about whole ones, a slice at a time; return DONE or why it stopped."""
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
        last = hash_blocks(index, at, num_blocks, block_bytes, depth, before, chain)
        result = hold_slice(source, rank, event, hashes + start * 8, num_blocks, depth)
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
        if get64(event + EVENT_KIND) == REMOVED and get64(event + EVENT_NUM_HASHES) <= _EVENTS_AHEAD:
            prefetch_named(index, engine_map, get64(event + EVENT_HASHES), get64(event + EVENT_NUM_HASHES))
        event += EVENT_BYTES


@jit("i8(i8,i8,i8)")
def _remove_event(source, rank, event):
    """Release an event's blocks, a slice at a time; return DONE or why it stopped."""
    tier, num_hashes, start = get64(event + EVENT_TIER), get64(event + EVENT_NUM_HASHES), get64(source + BLOCK_IDX)
    while start < num_hashes:
        hashes, num_here = get64(event + EVENT_HASHES) + start * 8, min(SLICE_BLOCKS, num_hashes - start)
        if num_hashes > _EVENTS_AHEAD:
            prefetch_named(get64(source + INDEX), get64(rank + RANK_MAP), hashes, num_here)
        result = release_slice(source, rank, tier, hashes, num_here)
        if result != DONE:
            return result
        start += num_here
        put64(source + BLOCK_IDX, start)
        budget = get64(source + BUDGET) - num_here * _REMOVAL_BYTES
        put64(source + BUDGET, budget)
        if budget <= 0 and start < num_hashes:
            return PAUSED
    return DONE


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
        if get64(source + BUDGET) <= 0 and event_idx < num_events:
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
