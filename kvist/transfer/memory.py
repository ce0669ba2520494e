"""Maps a prompt's blocks, here and at a peer, to the pieces of memory that a write moves.

Here a prompt's blocks are a table by ordinal, with holes where a window has slid on. The list in a message has no holes
and ends at the prompt's end, so its length shows where it starts: blocks that are stale, or cached by the receiver,
are left out in front (docs/disaggregation.md has an example).

A slot is `[layers, keys and values, heads of the rank, block_size, head_dim]`. Two ranks with the same heads exchange
slots whole; others, of each layer's keys and values, the heads that both have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvist.errors import InvalidValueError, KvistError
from kvist.events.engine_events import FULL, KnownWindow
from kvist.kvcache import ABSENT, num_blocks_for, num_stale_blocks
from kvist.transfer.agents.base import Int64s
from kvist.transfer.heads import Part, heads_of, written_heads
from kvist.transfer.messages import GroupShape, Hello, PoolPlace, ReceiveRequest

BlockIds = Sequence[Sequence[int]]


class BlockCountMismatchError(KvistError):
    """Sender and receiver count a prompt's blocks differently, so nothing is sent."""

    def __init__(self, group_id: int, reason: str) -> None:
        super().__init__(f"block count mismatch in group {group_id}: {reason}")
        self.group_id = group_id
        self.reason = reason


def prompt_blocks(table: Sequence[int], num_tokens: int, block_size: int) -> tuple[int, ...]:
    """Return the blocks of a prompt, without holes."""
    return tuple(block_id for block_id in table[: num_blocks_for(num_tokens, block_size)] if block_id != ABSENT)


def pair_blocks(
    group_id: int,
    window: KnownWindow,
    block_size: int,
    num_tokens: int,
    source_ids: Sequence[int],
    destination_ids: Sequence[int],
    ordinals: range,
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the source's and the destination's blocks at these ordinals that the receiver needs.

    The source's list ends where the ordinals do, the destination's at the prompt's end. The receiver may ask for stale
    blocks, which are trimmed, and for fewer than the sender has, down to none. Raises BlockCountMismatchError for more
    blocks than the prompt has, and if the receiver needs a block that the sender does not have: it would decode from
    uninitialised memory.
    """
    total, num_stale = num_blocks_for(num_tokens, block_size), num_stale_blocks(num_tokens, window, block_size)
    for block_ids in (source_ids, destination_ids):
        if len(block_ids) > total:
            reason = f"{len(block_ids)} blocks, but {num_tokens} tokens fill {total}"
            raise BlockCountMismatchError(group_id, reason)
    destination_ids = destination_ids[: max(0, len(destination_ids) - (total - ordinals.stop))]
    num_wanted = max(0, min(len(destination_ids), ordinals.stop - max(num_stale, ordinals.start)))
    if num_wanted > len(source_ids):
        reason = f"the destination needs {num_wanted} blocks, the source has {len(source_ids)}"
        raise BlockCountMismatchError(group_id, reason)
    return source_ids[len(source_ids) - num_wanted :], destination_ids[len(destination_ids) - num_wanted :]


def incoming_pieces(receiver: Hello, block_ids_per_group: BlockIds, sender: Part) -> Int64s:
    """Return the memory that a sender's rank writes, `[num_pieces, 2]`: address, bytes; in the order of its fragments.

    All ranks of the sender together write each byte once. Raises InvalidValueError if heads cannot be split so.
    """
    pieces = []
    for group, pool, block_ids in zip(receiver.groups, receiver.pools, block_ids_per_group, strict=True):
        _, offsets, size_bytes = _slot_pieces(group, receiver.block_size, sender, receiver.part)
        addresses = _addresses(pool, block_ids, offsets)
        pieces.append(np.stack([addresses, np.full_like(addresses, size_bytes)], axis=1))
    return np.concatenate(pieces)


def outgoing_fragments(
    sender: Hello, tables: BlockIds, num_tokens: int, request: ReceiveRequest, num_written: int
) -> Int64s:
    """Return what to write for a request, `[num_fragments, 3]`: local address, address at the peer, bytes.

    `tables` are an offered prompt's blocks by ordinal, as far as they are filled; the first `num_written` of each are
    done. Pieces that adjoin on both sides are merged. Raises BlockCountMismatchError if the peer counts the prompt's
    tokens, groups or blocks differently, InvalidValueError for a block id beyond its pool.
    """
    groups, block_size, receiver = sender.groups, sender.block_size, request.hello
    if request.num_tokens != num_tokens:
        raise BlockCountMismatchError(0, f"asked for {request.num_tokens} tokens, have {num_tokens}")
    if len(request.block_ids_per_group) != len(groups):
        raise BlockCountMismatchError(len(request.block_ids_per_group), f"expected {len(groups)} groups")
    fragments = []
    for group_id, (group, ours, theirs) in enumerate(zip(groups, sender.pools, receiver.pools, strict=True)):
        window: KnownWindow = FULL if group.window is None else group.window
        held = prompt_blocks(tables[group_id], num_tokens, block_size)
        wanted = request.block_ids_per_group[group_id]
        ordinals = range(num_written, min(len(tables[group_id]), num_blocks_for(num_tokens, block_size)))
        source_ids, target_ids = pair_blocks(group_id, window, block_size, num_tokens, held, wanted, ordinals)
        largest = max(wanted, default=-1)
        if largest >= theirs.num_slots:
            raise InvalidValueError("block_id", largest, f"0 to {theirs.num_slots - 1}")
        local_offsets, remote_offsets, size_bytes = _slot_pieces(group, block_size, sender.part, receiver.part)
        local, remote = _addresses(ours, source_ids, local_offsets), _addresses(theirs, target_ids, remote_offsets)
        fragments.append(_merge_adjoining(local, remote, size_bytes))
    return np.concatenate(fragments)


def _slot_pieces(group: GroupShape, block_size: int, sender: Part, receiver: Part) -> tuple[Int64s, Int64s, int]:
    """Return the pieces of a slot that a sender's rank writes: offsets in its own slot and in the receiver's, and size.

    It is the whole slot, one piece of each plane, or none.
    """
    ours, theirs = heads_of(group.num_kv_heads, sender), heads_of(group.num_kv_heads, receiver)
    written = written_heads(group.num_kv_heads, sender, receiver)
    if not written:
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    if ours == theirs:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), group.slot_bytes(block_size, sender)
    head_bytes = group.head_bytes(block_size)
    local, remote = (
        (np.arange(group.num_planes) * len(heads) + written.start - heads.start) * head_bytes
        for heads in (ours, theirs)
    )
    return local, remote, len(written) * head_bytes


def _addresses(pool: PoolPlace, block_ids: Sequence[int], offsets: Int64s) -> Int64s:
    """Return the addresses of all pieces of all blocks, block by block."""
    return np.add.outer(pool.base_address + np.array(block_ids, np.int64) * pool.slot_bytes, offsets).ravel()


def _merge_adjoining(local: Int64s, remote: Int64s, size: int) -> Int64s:
    """Merge pieces of one size that follow each other on both sides, into `[num_runs, 3]`."""
    if not len(local):
        return np.empty((0, 3), np.int64)
    is_first = np.ones(len(local), np.bool_)
    is_first[1:] = (np.diff(local) != size) | (np.diff(remote) != size)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(local)))
    return np.stack([local[firsts], remote[firsts], counts * size], axis=1)
