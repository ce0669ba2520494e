"""The fast lane for engines' own streams: from the bytes of their messages to the index, in order.

A message is checked in full before any of it is applied. At a message or event that is not ordinary the call stops; the
caller applies it in Python, and the next call goes on behind it.
"""

from __future__ import annotations

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.events.hashing import HASH_SEED
from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START, SEQUENCE
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine_blocks import (
    ARRAYS_TYPE,
    Arrays,
    Held,
    hold,
    release_one,
    remove_from_group,
    row_named,
    store_in_group,
)
from kvist.indexer.compiled.engine_events import Tokens, check_message
from kvist.indexer.compiled.hashing import chained, xxh3_64
from kvist.indexer.compiled.jit import BYTES, TABLE, U32S, U64S, jit
from kvist.indexer.compiled.msgpack import read_time
from kvist.indexer.compiled.words import Bytes
from kvist.radix.compiled.blocks import depth_at, is_marked, row_at
from kvist.radix.compiled.jit import helper
from kvist.radix.compiled.layout import Record, Records, Words

_SEED, _U0 = np.uint64(HASH_SEED), np.uint64(0)


@helper
def _store_event(held: Held, stream: Record, event: Record, hashes: Words, tokens: Bytes, chain: Words) -> int:
    """Hold an event's blocks, if they are whole ones; return DONE or why it stopped. `chain` gets their names."""
    if event.block_size != stream.block_size or event.num_tokens != event.num_hashes * stream.block_size:
        return layout.DONE
    first, end, block_hash, depth = event.first_hash, event.first_hash + event.num_hashes, _U0, 0
    if event.has_parent:
        row = row_named(held, event.parent)
        if row < 0:
            return layout.DONE
        if is_marked(held.segments, row):
            return layout.UNUSUAL_EVENT
        for number in range(first, end):
            if hashes[number] == event.parent:
                return layout.UNUSUAL_EVENT
        block_hash, depth = row_at(held.segments, row).hash, depth_at(held.segments, row) + 1
    block_bytes = stream.block_size * 4
    start, num_bytes = event.first_token * 4, block_bytes + event.has_lookahead * 4
    for number in range(first, end):
        local = xxh3_64(tokens, start, num_bytes, _SEED)
        block_hash = chained(block_hash, local) if number > first or event.has_parent else local
        chain[number] = block_hash
        start += block_bytes
    hold(held, event.tier, hashes, chain, first, end, depth)
    return layout.DONE


@helper
def _count_event(held: Held, stream: Record, group: int, event: Record, hashes: Words) -> int:
    """Count an event's blocks as held or released by one of the other groups; return DONE or why it stopped."""
    is_stored, is_state = event.kind == layout.STORED, event.key >> 32 == layout.STATE_WINDOW
    if is_stored and not is_state and event.block_size > held.rank.strides[group] * stream.block_size:
        return layout.UNUSUAL_EVENT  # the group turns out to have larger blocks than its rule says
    first, end = event.first_hash, event.first_hash + (event.num_hashes if event.tier == 0 else 0)
    if is_stored and held.rank.counts_copies == 0:
        first = max(first, end - held.rank.num_trusted[group])
    for number in range(first, end):
        if is_stored:
            store_in_group(held, group, hashes[number])
        else:
            remove_from_group(held, group, hashes[number])
    return layout.DONE


@helper
def _verdict(rank: Record, key: int) -> int:
    """Return the verdict of a key (see `engine_layout`), -1 if it is not known."""
    for place in range(rank.num_verdicts):
        if rank.keys[place] == key:
            return np.int64(rank.passes[place])  # type: ignore[return-value]
    return -1


@helper
def _stop_at_event(stream: Record, events: Records) -> int:
    """Record where the current event is, which the caller must apply, and go past it; return UNUSUAL_EVENT."""
    stream.stop_start = events[stream.event_idx].start
    stream.event_idx += 1
    is_last = stream.event_idx == stream.num_checked
    stream.stop_end = stream.checked_end if is_last else events[stream.event_idx].start
    return layout.UNUSUAL_EVENT


@helper
def _apply_events(held: Held, stream: Record, events: Records, hashes: Words, tokens: Bytes, chain: Words) -> int:
    """Apply the rest of a checked message; return DONE or UNUSUAL_EVENT."""
    while stream.event_idx < stream.num_checked:
        event, passes, result = events[stream.event_idx], 0, layout.DONE
        is_stored = event.kind == layout.STORED
        is_sized = is_stored and event.block_size == stream.block_size
        is_smaller = is_stored and event.tier == 0 and event.block_size < stream.block_size
        has_other_size = is_smaller or (is_stored and not is_sized and not stream.has_block_size)
        held.rank.is_offloading |= is_stored and event.tier != 0
        if event.kind == layout.IGNORED:
            stream.num_ignored += 1
        elif event.kind == layout.UNUSUAL or has_other_size:
            return _stop_at_event(stream, events)
        else:
            passes = _verdict(held.rank, event.key)
            if passes >= layout.OTHER_GROUPS:
                result = _count_event(held, stream, passes - layout.OTHER_GROUPS, event, hashes)
            elif passes > 0 and is_stored:
                result = _store_event(held, stream, event, hashes, tokens, chain)
            elif passes > 0:
                for number in range(event.first_hash, event.first_hash + event.num_hashes):
                    release_one(held, event.tier, hashes[number])
            if passes < 0 or result == layout.UNUSUAL_EVENT:
                return _stop_at_event(stream, events)
            stream.num_events += 1
            if is_sized:
                stream.has_block_size = 1
        stream.event_idx += 1
    return layout.DONE


@jit(
    (
        *(ARRAYS_TYPE, layout.STREAM_TYPE),
        *(BYTES, TABLE, int64, int64),  # messages
        *(layout.EVENTS_TYPE, U64S, U64S, U32S, BYTES),  # scratch
        *(U64S, U64S),  # fingerprints
    )
)
def apply_messages(
    arrays: Arrays,
    streams: Records,
    data: Bytes,
    messages: NDArray[np.int64],
    expected: int,
    max_bytes: int,
    events: Records,
    hashes: Words,
    chain: Words,
    tokens: Tokens,
    token_bytes: Bytes,
    sequences: Words,
    fingerprints: Words,
) -> int:
    """Apply messages of a block, from `message_idx` on, as long as their sequences go on from `expected`.

    Return why it stopped; DONE also after the message in which `max_bytes` of messages are exceeded. `token_bytes` is
    the memory of `tokens`. The length of `sequences` and `fingerprints`, a ring, is a power of two.
    """
    core, segments, names_heads, names, counts_heads, counts, ranks = arrays
    held = Held(core[0], segments, names_heads[0], names, counts_heads[0], counts, ranks[0])
    stream = streams[0]
    budget = max_bytes
    stream.num_batches = stream.num_events = stream.num_ignored = 0
    while stream.message_idx < len(messages):
        message = messages[stream.message_idx]
        payload, num_bytes = message[PAYLOAD_START], message[PAYLOAD_BYTES]
        if message[SEQUENCE] != expected:
            return layout.NOT_NEXT
        if not stream.is_checked:
            if budget <= 0:
                return layout.DONE
            is_small = num_bytes <= len(hashes)
            if not is_small or not check_message(stream, data, payload, num_bytes, events, hashes, tokens):
                return layout.UNUSUAL_MESSAGE
            stream.is_checked, stream.event_idx = 1, 0
            budget -= num_bytes
        if stream.checked_rank != held.rank.number:
            return layout.OTHER_RANK
        if held.rank.num_verdicts == 0 and stream.event_idx == 0:
            return layout.UNUSUAL_MESSAGE  # the first, whose windows Python compares
        result = _apply_events(held, stream, events, hashes, token_bytes, chain)
        if result != layout.DONE:
            return result
        place = expected & (len(sequences) - 1)
        sequences[place], fingerprints[place] = np.uint64(expected), xxh3_64(data, payload, num_bytes, _U0)
        stream.timestamp_s = read_time(data, payload + 1, payload + num_bytes)[0]
        stream.num_batches += 1
        stream.message_idx += 1
        stream.is_checked = 0
        expected += 1
    return layout.DONE
