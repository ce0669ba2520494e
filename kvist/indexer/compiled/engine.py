"""The fast path for engines' own streams: from the bytes of their messages to the index, in order and all or nothing.

A message is checked in full before any of it is done, and a slice of an event's blocks looked up in full before it
changes anything. What is not ordinary is left to the caller, and the place where it stands; the next call goes on
behind it. Only what is regular is done here: one engine hash for one block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.events.hashing import HASH_SEED
from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START, SEQUENCE
from kvist.indexer.compiled.engine_events import Tokens, check_message
from kvist.indexer.compiled.engine_layout import (
    COPIES_NEED_HELP,
    DONE,
    EVENTS_TYPE,
    IGNORED,
    INDEX_NEEDS_HELP,
    MAP_NEEDS_HELP,
    NOT_NEXT,
    OTHER_GROUPS,
    OTHER_RANK,
    PAUSED,
    RANK_TYPE,
    SLICE_BLOCKS,
    SOME_EVENTS,
    STORED,
    STREAM_TYPE,
    TOO_LARGE,
    UNUSUAL,
    WHOLE_MESSAGE,
)
from kvist.indexer.compiled.engine_map import (
    ACCOUNTING,
    COPY,
    GROUPS,
    HELD,
    IRREGULAR,
    MAX_ROWS,
    add_copy,
    copies_key,
    drop_copy,
    drop_name,
    is_in_all,
    named,
    outlook,
    put_name,
    row_named,
)
from kvist.indexer.compiled.hashing import chained, xxh3_64
from kvist.indexer.compiled.jit import BYTES, TABLE, U32S, U64S, helper, jit
from kvist.indexer.compiled.msgpack import read_time
from kvist.indexer.compiled.words import Bytes
from kvist.radix.compiled.blocks import block_digest, credit, depth_at, is_irregular, remove_one, store_one, tiers_at
from kvist.radix.compiled.layout import CORE_TYPE, FULL, HEAD_TYPE, MAX_DEPTH, SEGMENTS_TYPE, Record, Records, Words

_REMOVAL_BYTES = 64  # on the wire, where a removal is an event of its own
_SEED, _U0, _IRREGULAR, _COPY = (np.uint64(n) for n in (HASH_SEED, 0, IRREGULAR, COPY))
_1: Any = np.int64(1)  # typed: Numba compiles a function again for each literal


@helper
def _hash_slice(stream: Record, tokens: Bytes, start: int, num_blocks: int, num_more_bytes: int) -> None:
    """Write the canonical hash of each block, and so many bytes behind it, to the chain; tokens begin at a byte."""
    block_bytes, last = stream.block_size * 4, np.uint64(stream.last_block)
    for number in range(num_blocks):
        local = xxh3_64(tokens, start + number * block_bytes, block_bytes + num_more_bytes, _SEED)
        last = chained(last, local) if number > 0 or stream.last_depth >= 0 else local
        stream.chain[number] = last


@helper
def _place_one(index: Record, segments: Records, rank: Record, block_hash: np.uint64, depth: int, kind: int) -> int:
    """Let the companion hold a block in one kind; return DONE or FULL."""
    result = store_one(index, segments, block_hash, depth, rank.companion, kind)
    if result > 0:
        credit(index, rank.companion, _1, block_digest(block_hash, kind))
    return min(result, 0)


@helper
def _place(
    index: Record,
    segments: Records,
    copies_head: Record,
    copies: Records,
    rank: Record,
    engine_hash: np.uint64,
    block_hash: np.uint64,
    depth: int,
) -> int:
    """Let the companion hold a block in the kinds all of whose groups hold it; return DONE or FULL."""
    for kind in range(rank.num_kinds):
        is_held = is_in_all(rank, copies_head, copies, engine_hash, kind, -1)
        if is_held and _place_one(index, segments, rank, block_hash, depth, kind) < 0:
            return FULL
    return DONE


@helper
def _displace(index: Record, segments: Records, rank: Record, block_hash: np.uint64, first: int, end: int) -> int:
    """Let the companion cease to hold a block in some kinds; return DONE or FULL."""
    for kind in range(first, end):
        result = remove_one(index, segments, block_hash, rank.companion, kind)
        if result < 0:
            return FULL
        if result:
            credit(index, rank.companion, -_1, _U0 - block_digest(block_hash, kind))
    return DONE


@helper
def _hold_slice(
    index: Record,
    segments: Records,
    head: Record,
    names: Records,
    copies_head: Record,
    copies: Records,
    stream: Record,
    rank: Record,
    tier: int,
    hashes: Words,
    first: int,
    num_blocks: int,
) -> tuple[int, int]:
    """Hold blocks whose canonical hashes stand in the chain; return DONE or why not, and how many are held.

    The map first: should the index need help, the name is stale until the block is done again. Then the companion.
    """
    slot = rank.slot
    for number in range(num_blocks):
        each = outlook(index, segments, head, names, slot, tier, hashes[first + number], stream.chain[number])
        if each == ACCOUNTING:
            return SOME_EVENTS, 0
        stream.outlooks[number] = each
    num_stored, digest, reason, num_done = 0, _U0, DONE, num_blocks
    for number in range(num_blocks):
        engine_hash, block_hash = hashes[first + number], stream.chain[number]
        is_copy = stream.outlooks[number] == HELD and stream.counts_copies
        if is_copy and add_copy(copies_head, copies, engine_hash, tier) == FULL:
            reason, num_done = COPIES_NEED_HELP, number
            break
        if stream.outlooks[number] == HELD and not index.is_capped:
            continue
        name = named(head, names, engine_hash)
        if name != _U0 and name != block_hash and row_named(index, segments, slot, name) >= 0:
            reason, num_done = SOME_EVENTS, number  # the event has this engine hash twice
            break
        if name != block_hash and put_name(head, names, engine_hash, block_hash) == FULL:
            reason, num_done = MAP_NEEDS_HELP, number
            break
        depth, is_new = min(stream.last_depth + 1 + number, MAX_DEPTH), 0
        if tier == 0 and rank.num_groups:
            is_new = _place(index, segments, copies_head, copies, rank, engine_hash, block_hash, depth)
        if is_new >= 0:
            is_new = store_one(index, segments, block_hash, depth, slot, tier)
        if is_new < 0:
            reason, num_done = INDEX_NEEDS_HELP, number
            break
        if is_new:
            num_stored += 1
            digest += block_digest(block_hash, tier)
            if copies_head.num_rows:
                drop_name(copies_head, copies, copies_key(engine_hash, tier))  # of a block that was evicted
    credit(index, slot, num_stored, digest)
    return reason, num_done


@helper
def _store_event(
    index: Record,
    segments: Records,
    head: Record,
    names: Records,
    copies_head: Record,
    copies: Records,
    stream: Record,
    rank: Record,
    event: Record,
    hashes: Words,
    tokens: Bytes,
) -> int:
    """Hold an event's blocks, if it is about whole ones, a slice at a time; return DONE or why it stopped."""
    if event.block_size != stream.block_size or event.num_tokens != event.num_hashes * stream.block_size:
        return DONE
    if stream.block_idx == 0:
        stream.last_depth = -1
        if event.has_parent:
            name = named(head, names, event.parent)
            if name == _IRREGULAR:
                return SOME_EVENTS
            row = row_named(index, segments, rank.slot, name) if name != _U0 else -1
            if row < 0:
                return DONE
            stream.last_block, stream.last_depth = name, depth_at(segments, row)
    block_bytes = stream.block_size * 4
    while stream.block_idx < event.num_hashes:
        num_blocks = min(SLICE_BLOCKS, event.num_hashes - stream.block_idx)
        start = event.first_token * 4 + stream.block_idx * block_bytes
        _hash_slice(stream, tokens, start, num_blocks, event.has_lookahead * 4)
        first, tier = event.first_hash + stream.block_idx, event.tier
        result, num_done = _hold_slice(
            index, segments, head, names, copies_head, copies, stream, rank, tier, hashes, first, num_blocks
        )
        stream.block_idx += num_done
        stream.last_depth += num_done
        if num_done:
            stream.last_block = stream.chain[num_done - 1]
        if result != DONE:
            return result
        stream.budget -= num_blocks * block_bytes
        if stream.budget <= 0 and stream.block_idx < event.num_hashes:
            return PAUSED
    return DONE


@helper
def _remove_event(
    index: Record,
    segments: Records,
    head: Record,
    names: Records,
    copies_head: Record,
    copies: Records,
    stream: Record,
    rank: Record,
    event: Record,
    hashes: Words,
) -> int:
    """Release an event's blocks; those that name none are passed over. Return DONE or why it stopped."""
    num_removed, digest, reason, tier, slot = 0, _U0, DONE, event.tier, rank.slot
    num_kinds = rank.num_kinds if tier == 0 else 0
    while stream.block_idx < event.num_hashes:
        if stream.budget <= 0 and stream.block_idx > 0:
            reason = PAUSED
            break
        engine_hash = hashes[event.first_hash + stream.block_idx]
        name = named(head, names, engine_hash)
        row = row_named(index, segments, slot, name) if name > _IRREGULAR else -1
        if name == _IRREGULAR or (row >= 0 and is_irregular(segments, row)):
            reason = SOME_EVENTS
            break
        tiers = tiers_at(index, segments, row, slot) if row >= 0 else 0
        is_held = tiers >> tier & 1
        has_copy = is_held and copies_head.num_rows
        if not has_copy or not drop_copy(copies_head, copies, engine_hash, tier, stream.counts_copies):
            if is_held:
                is_gone = _displace(index, segments, rank, name, 0, num_kinds)
                if is_gone < 0 or remove_one(index, segments, name, slot, tier) < 0:
                    reason = INDEX_NEEDS_HELP
                    break
                num_removed += 1
                digest += block_digest(name, tier)
            if name != _U0 and tiers & ~(1 << tier) == 0:
                drop_name(head, names, engine_hash)
        stream.block_idx += 1
        stream.budget -= _REMOVAL_BYTES
    credit(index, slot, -num_removed, _U0 - digest)
    return reason


@helper
def _has_irregular(
    index: Record, segments: Records, head: Record, names: Records, rank: Record, event: Record, hashes: Words
) -> bool:
    """Return whether Python keeps account of any of an event's blocks."""
    for place in range(event.first_hash, event.first_hash + event.num_hashes):
        name = named(head, names, hashes[place])
        row = row_named(index, segments, rank.slot, name) if name > _IRREGULAR else -1
        if name == _IRREGULAR or (row >= 0 and is_irregular(segments, row)):
            return True
    return False


@helper
def _count_event(
    index: Record,
    segments: Records,
    head: Record,
    names: Records,
    copies_head: Record,
    copies: Records,
    stream: Record,
    rank: Record,
    group: int,
    event: Record,
    hashes: Words,
) -> int:
    """Count an event's blocks as held or released by one of the other groups; return DONE or why it stopped.

    The index first: should the table of copies need room, it is done again.
    """
    kind, is_stored, has_room = rank.kinds[group], event.kind == STORED, copies_head.num_rows < MAX_ROWS
    if event.tier != 0:
        return DONE
    if stream.block_idx == 0 and _has_irregular(index, segments, head, names, rank, event, hashes):
        return SOME_EVENTS
    if is_stored and stream.counts_copies == 0:
        stream.block_idx = max(stream.block_idx, event.num_hashes - rank.believed[group])
    while stream.block_idx < event.num_hashes:
        if stream.budget <= 0 and stream.block_idx > 0:
            return PAUSED
        engine_hash = hashes[event.first_hash + stream.block_idx]
        name, key = named(head, names, engine_hash), copies_key(engine_hash, GROUPS + group)
        row = row_named(index, segments, rank.slot, name) if name != _U0 else -1
        is_published = row >= 0 and tiers_at(index, segments, row, rank.slot) & 1
        value = named(copies_head, copies, key)
        if is_stored and (stream.counts_copies or value == _U0) and (has_room or value != _U0):
            is_last = is_published and value == _U0 and is_in_all(rank, copies_head, copies, engine_hash, kind, group)
            if is_last and _place_one(index, segments, rank, name, depth_at(segments, row), kind) < 0:
                return INDEX_NEEDS_HELP
            if add_copy(copies_head, copies, engine_hash, GROUPS + group) == FULL:
                return COPIES_NEED_HELP
        elif not is_stored and value >= _COPY + _COPY and stream.counts_copies:
            put_name(copies_head, copies, key, value - _COPY)
        elif not is_stored and value != _U0:
            if is_published and _displace(index, segments, rank, name, kind, kind + 1) < 0:
                return INDEX_NEEDS_HELP
            drop_name(copies_head, copies, key)
        stream.block_idx += 1
        stream.budget -= _REMOVAL_BYTES
    return DONE


@helper
def _verdict(rank: Record, key: int) -> int:
    """What is known of events like this one: 1 if they pass, OTHER_GROUPS or more, 0, or -1 if that is not known."""
    for place in range(rank.num_verdicts):
        if rank.keys[place] == key:
            return np.int64(rank.passes[place])  # type: ignore[return-value]
    return -1


@helper
def _hand_over(stream: Record, events: Records) -> int:
    """Stop before an event, and all those behind it that are unusual, too."""
    stream.stop_start = events[stream.event_idx].start
    end = stream.event_idx + 1
    while end < stream.num_checked and events[end].kind == UNUSUAL:
        end += 1
    stream.stop_event_end = end
    stream.stop_end = events[end].start if end < stream.num_checked else stream.checked_end
    return SOME_EVENTS


@helper
def _take_events(
    index: Record,
    segments: Records,
    head: Record,
    names: Records,
    copies_head: Record,
    copies: Records,
    stream: Record,
    rank: Record,
    events: Records,
    hashes: Words,
    tokens: Bytes,
) -> int:
    """Do what is left of a checked message; return DONE, or why it stopped."""
    while stream.event_idx < stream.num_checked:
        event, passes, result = events[stream.event_idx], 0, DONE
        is_stored = event.kind == STORED
        is_sized = is_stored and event.block_size == stream.block_size
        rank.is_offloading |= is_stored and event.tier != 0
        if event.kind == IGNORED:
            stream.num_ignored += 1
        elif event.kind == UNUSUAL or rank.slot < 0 or (is_stored and not is_sized and not stream.has_block_size):
            return _hand_over(stream, events)
        else:
            passes = _verdict(rank, event.key)
            if passes >= OTHER_GROUPS:
                group = passes - OTHER_GROUPS
                result = _count_event(
                    index, segments, head, names, copies_head, copies, stream, rank, group, event, hashes
                )
            elif passes > 0 and is_stored:
                result = _store_event(
                    index, segments, head, names, copies_head, copies, stream, rank, event, hashes, tokens
                )
            elif passes > 0:
                result = _remove_event(index, segments, head, names, copies_head, copies, stream, rank, event, hashes)
            if passes < 0 or result == SOME_EVENTS:
                return _hand_over(stream, events)
            if result != DONE:
                return result
            stream.num_events += 1
            if is_sized:
                stream.has_block_size = 1
                stream.num_sized += 1
        stream.event_idx += 1
        stream.block_idx = 0
        if stream.budget <= 0 and stream.event_idx < stream.num_checked:
            return PAUSED
    return DONE


@jit(
    (
        *(CORE_TYPE, SEGMENTS_TYPE),  # the index
        *(HEAD_TYPE, SEGMENTS_TYPE, HEAD_TYPE, SEGMENTS_TYPE),  # a map, and copies
        *(STREAM_TYPE, RANK_TYPE),
        *(BYTES, TABLE, int64, int64),  # messages
        *(EVENTS_TYPE, U64S, U32S, BYTES),  # scratch
        *(U64S, U64S),  # fingerprints
    )
)
def take_messages(
    core: Records,
    segments: Records,
    heads: Records,
    names: Records,
    copies_heads: Records,
    copies: Records,
    streams: Records,
    ranks: Records,
    data: Bytes,
    messages: NDArray[np.int64],
    expected: int,
    max_bytes: int,
    events: Records,
    hashes: Words,
    tokens: Tokens,
    token_bytes: Bytes,
    sequences: Words,
    fingerprints: Words,
) -> int:
    """Take messages of a block, from `message_idx` on, as long as their sequences go on from `expected`.

    Return DONE, or why it stopped before; a call does about as much work as `max_bytes` of messages are. `token_bytes`
    is the memory of `tokens`. The rings of fingerprints have a power of two of places.
    """
    index, head, copies_head, stream, rank = core[0], heads[0], copies_heads[0], streams[0], ranks[0]
    stream.budget = max_bytes
    stream.num_batches = stream.num_events = stream.num_ignored = stream.num_sized = 0
    while stream.message_idx < len(messages):
        message = messages[stream.message_idx]
        payload, num_bytes = message[PAYLOAD_START], message[PAYLOAD_BYTES]
        if message[SEQUENCE] != expected:
            return NOT_NEXT
        if not stream.is_checked:
            if stream.budget <= 0:
                return PAUSED
            if num_bytes > len(hashes):
                return TOO_LARGE
            if not check_message(stream, data, payload, num_bytes, events, hashes, tokens):
                return WHOLE_MESSAGE
            stream.is_checked, stream.event_idx, stream.block_idx = 1, 0, 0
            stream.budget -= num_bytes
        if stream.checked_rank != rank.number:
            return OTHER_RANK
        result = _take_events(
            index, segments, head, names, copies_head, copies, stream, rank, events, hashes, token_bytes
        )
        if result != DONE:
            return result
        place = expected & (len(sequences) - 1)
        sequences[place], fingerprints[place] = np.uint64(expected), xxh3_64(data, payload, num_bytes, _U0)
        stream.timestamp_s = read_time(data, payload + 1, payload + num_bytes)[0]
        stream.num_batches += 1
        stream.message_idx += 1
        stream.is_checked = 0
        expected += 1
    return DONE
