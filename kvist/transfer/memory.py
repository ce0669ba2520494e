"""Where blocks lie: from a prompt's blocks, here and at a peer, to the pieces of memory that a write moves.

Here a prompt's blocks are a table by ordinal, with holes where a window has slid on. A peer is told of a list that ends
at the prompt's end, so that both sides can tell where it starts from how long it is: what the receiver has cached, and
what is stale, shortens it (docs/disaggregation.md has an example).

A slot is `[layers, keys and values, heads of the rank, block_size, head_dim]`. Two ranks with the same heads exchange
slots whole; others, of each layer's keys and values, the heads that both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvist.errors import InvalidValueError, KvistError
from kvist.events.engine_events import FULL, KnownWindow
from kvist.kvcache import ABSENT, num_blocks_for, num_stale_blocks
from kvist.transfer.agents.base import Int64s
from kvist.transfer.heads import Part, heads_of, written_heads
from kvist.transfer.messages import GroupShape, Hello, ReceiveRequest

BlockIds = Sequence[Sequence[int]]


class BlockCountMismatchError(KvistError):
    """The blocks of sender and receiver do not match: the two have counted a prompt differently, nothing is sent."""

    def __init__(self, group_id: int, reason: str) -> None:
        super().__init__(f"block count mismatch in group {group_id}: {reason}")
        self.group_id = group_id
        self.reason = reason


class BlockPairs(NamedTuple):
    """Equally many blocks of either side, first to first."""

    source_ids: tuple[int, ...]
    destination_ids: tuple[int, ...]


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
) -> BlockPairs:
    """Return what to copy where of the blocks at these ordinals, for every one that the receiver will read.

    The source's list ends where the ordinals do, the destination's at the prompt's end. The receiver may ask for stale
    blocks, which are trimmed, and for less than the sender has, down to nothing. Raises BlockCountMismatchError for
    more blocks than the prompt has, and if the receiver needs a block that the sender does not have: it would decode
    from whatever is there.
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
    wanted = (ids[len(ids) - num_wanted :] for ids in (source_ids, destination_ids))
    return BlockPairs(*map(tuple, wanted))


class _Pieces(NamedTuple):
    """The pieces of one slot: where they begin in it, here and at the peer, and how long each is."""

    local_offsets: Int64s
    remote_offsets: Int64s
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A rank's pools, and whose layers' heads are in their slots, as its greeting says."""

    hello: Hello

    def missing(self, tables: BlockIds, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of a prompt to fill, a list a group."""
        return tuple(prompt_blocks(table, num_tokens, self.hello.block_size) for table in tables)

    def pieces_of(self, block_ids_per_group: BlockIds, sender: Part) -> Int64s:
        """Return where a sender's rank writes, `[num_pieces, 2]`: address and bytes, in the order of `fragments`.

        All of its ranks together write each byte once. Raises InvalidValueError for ranks that cannot split the heads.
        """
        pieces = []
        for group, pool, ids in zip(self.hello.groups, self.hello.pools, block_ids_per_group, strict=True):
            cut = _pieces(group, self.hello.block_size, sender, self.hello.part)
            starts = pool.base_address + np.array(ids, np.int64) * pool.slot_bytes
            targets = np.add.outer(starts, cut.remote_offsets).ravel()
            pieces.append(np.stack([targets, np.full_like(targets, cut.size_bytes)], axis=1))
        return np.concatenate(pieces)

    def fragments(self, tables: BlockIds, num_tokens: int, request: ReceiveRequest, num_written: int) -> Int64s:
        """Return what to write for a request, `[num_fragments, 3]`: local address, address at the peer, bytes.

        `tables` are an offered prompt's, by ordinal, as far as they are filled; of each, `num_written` blocks are done.
        What touches on both sides is one piece. Raises BlockCountMismatchError when the peer has counted the prompt,
        its groups or its blocks differently, and InvalidValueError for a block that it does not have.
        """
        groups, block_size, peer = self.hello.groups, self.hello.block_size, request.hello
        if request.num_tokens != num_tokens:
            raise BlockCountMismatchError(0, f"asked for {request.num_tokens} tokens, have {num_tokens}")
        if len(request.block_ids_per_group) != len(groups):
            raise BlockCountMismatchError(len(request.block_ids_per_group), f"expected {len(groups)} groups")
        fragments = []
        for group_id, (group, ours, theirs) in enumerate(zip(groups, self.hello.pools, peer.pools, strict=True)):
            window: KnownWindow = FULL if group.window is None else group.window
            held = prompt_blocks(tables[group_id], num_tokens, block_size)
            wanted = request.block_ids_per_group[group_id]
            ordinals = range(num_written, min(len(tables[group_id]), num_blocks_for(num_tokens, block_size)))
            pairs = pair_blocks(group_id, window, block_size, num_tokens, held, wanted, ordinals)
            largest = max(wanted, default=-1)
            if largest >= theirs.num_slots:
                raise InvalidValueError("block_id", largest, f"0 to {theirs.num_slots - 1}")
            pieces = _pieces(group, block_size, self.hello.part, peer.part)
            local = ours.base_address + np.array(pairs.source_ids, np.int64) * ours.slot_bytes
            remote = theirs.base_address + np.array(pairs.destination_ids, np.int64) * theirs.slot_bytes
            fragments.append(
                _runs(
                    np.add.outer(local, pieces.local_offsets).ravel(),
                    np.add.outer(remote, pieces.remote_offsets).ravel(),
                    pieces.size_bytes,
                )
            )
        return np.concatenate(fragments)


def _pieces(group: GroupShape, block_size: int, sender: Part, receiver: Part) -> _Pieces:
    """Return what of a slot a sender's rank writes: all, or a piece of each plane, or nothing."""
    ours, theirs = heads_of(group.num_kv_heads, sender), heads_of(group.num_kv_heads, receiver)
    written = written_heads(group.num_kv_heads, sender, receiver)
    if not written:
        return _Pieces(np.empty(0, np.int64), np.empty(0, np.int64), 0)
    if ours == theirs:
        return _Pieces(np.zeros(1, np.int64), np.zeros(1, np.int64), group.slot_bytes(block_size, sender))
    head_bytes = group.head_bytes(block_size)
    local, remote = (
        (np.arange(group.num_planes) * len(heads) + written.start - heads.start) * head_bytes
        for heads in (ours, theirs)
    )
    return _Pieces(local, remote, len(written) * head_bytes)


def _runs(local: Int64s, remote: Int64s, size: int) -> Int64s:
    """Return pieces that follow each other on both sides as one, `[num_runs, 3]`."""
    if not len(local):
        return np.empty((0, 3), np.int64)
    is_first = np.ones(len(local), np.bool_)
    is_first[1:] = (np.diff(local) != size) | (np.diff(remote) != size)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(local)))
    return np.stack([local[firsts], remote[firsts], counts * size], axis=1)
