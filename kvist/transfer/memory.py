"""Where blocks lie: from pairs of blocks, here and at a peer, to the pieces of memory that a write moves.

A slot is `[layers, keys and values, heads of the rank, block_size, head_dim]`. Two ranks with the same heads exchange
slots whole; others, of each layer's keys and values, the heads that both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.events.engine_events import FULL
from kvist.transfer.heads import Part, heads_of, num_copies, written_heads
from kvist.transfer.messages import GroupShape, Hello, ReceiveRequest
from kvist.transfer.slices import BlockCountMismatchError, SliceGroup, pair_blocks, positional_block_ids

Int64s = npt.NDArray[np.int64]
BlockIds = Sequence[Sequence[int]]


class Share(NamedTuple):
    """What one of a sender's ranks writes of a transfer; the pieces before neighbours are joined."""

    num_bytes: int
    num_pieces: int


class _Pieces(NamedTuple):
    """The pieces of one slot: where they begin in it, here and at the peer, and how long each is."""

    local_offsets: Int64s
    remote_offsets: Int64s
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A rank's pools, and whose layers' heads are in their slots, as its greeting says."""

    hello: Hello

    def num_bytes(self, block_ids_per_group: BlockIds) -> int:
        """Return the bytes of these blocks, a list a group."""
        pools = self.hello.pools
        return sum(len(ids) * pool.slot_bytes for ids, pool in zip(block_ids_per_group, pools, strict=True))

    def extents(self, block_ids_per_group: BlockIds) -> Int64s:
        """Return where these blocks lie, `[num_extents, 2]`: address and bytes, sorted; neighbours are one piece."""
        extents = []
        for pool, ids in zip(self.hello.pools, block_ids_per_group, strict=True):
            addresses = pool.base_address + np.sort(np.array(ids, np.int64)) * pool.slot_bytes
            extents.append(_runs(addresses, addresses, pool.slot_bytes)[:, ::2])
        extents.sort(key=lambda pieces: pieces[:1].tolist())
        return np.concatenate(extents)

    def shares(self, block_ids_per_group: BlockIds, num_senders: int) -> tuple[Share, ...]:
        """Return what each of a sender's ranks writes into these blocks; together that is every byte of them once.

        Raises InvalidValueError for so many ranks as cannot split the heads.
        """
        return tuple(self._share(block_ids_per_group, Part(rank, num_senders)) for rank in range(num_senders))

    def has_equal_shares(self, shares: Sequence[Share]) -> bool:
        """Return whether the ranks that write can have equal parts of one bounce region."""
        sizes = [share.num_bytes for share in shares if share.num_bytes]
        copies = max(num_copies(group.num_kv_heads, len(shares)) for group in self.hello.groups)
        return len(set(sizes)) == 1 and (len(sizes) == 1 or copies == 1)

    def fragments(self, tables: BlockIds, num_tokens: int, request: ReceiveRequest, peer: Hello) -> Int64s:
        """Return what to write for a request, `[num_fragments, 3]`: local address, address at the peer, bytes.

        `tables` are a held prompt's, by ordinal. What touches on both sides is one piece. Raises
        BlockCountMismatchError when the peer has counted the prompt, its groups or its blocks differently, and
        InvalidValueError for a block that it does not have.
        """
        groups, block_size = self.hello.groups, self.hello.block_size
        if (request.token_end, request.prompt_len) != (num_tokens, num_tokens):
            raise BlockCountMismatchError(
                0, f"asked for {request.token_end} of {request.prompt_len} tokens, have {num_tokens}"
            )
        if len(request.block_ids_per_group) != len(groups):
            raise BlockCountMismatchError(len(request.block_ids_per_group), f"expected {len(groups)} groups")
        starts = request.dst_start_tokens or (None,) * len(groups)
        fragments = []
        for group_id, (group, ours, theirs) in enumerate(zip(groups, self.hello.pools, peer.pools, strict=True)):
            pairs = pair_blocks(
                SliceGroup(group_id, FULL if group.window is None else group.window, block_size, num_tokens),
                positional_block_ids(tables[group_id], num_tokens, block_size),
                request.block_ids_per_group[group_id],
                num_tokens,
                starts[group_id],
            )
            if pairs.destination_ids:
                theirs.block(max(pairs.destination_ids))
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

    def _share(self, block_ids_per_group: BlockIds, sender: Part) -> Share:
        num_bytes = num_pieces = 0
        for group, ids in zip(self.hello.groups, block_ids_per_group, strict=True):
            pieces = _pieces(group, self.hello.block_size, sender, self.hello.part)
            num_pieces += len(ids) * len(pieces.local_offsets)
            num_bytes += len(ids) * len(pieces.local_offsets) * pieces.size_bytes
        return Share(num_bytes, num_pieces)


def _pieces(group: GroupShape, block_size: int, sender: Part, receiver: Part) -> _Pieces:
    """Return what of a slot a sender's rank writes: all, or a piece of each plane, or nothing."""
    ours, theirs = heads_of(group.num_kv_heads, sender), heads_of(group.num_kv_heads, receiver)
    written = written_heads(group.num_kv_heads, sender, receiver)
    if not written.num_heads:
        return _Pieces(np.empty(0, np.int64), np.empty(0, np.int64), 0)
    if ours == theirs:
        return _Pieces(np.zeros(1, np.int64), np.zeros(1, np.int64), group.slot_bytes(block_size, sender))
    head_bytes = group.head_bytes(block_size)
    local, remote = (
        (np.arange(group.num_planes) * heads.num_heads + written.start - heads.start) * head_bytes
        for heads in (ours, theirs)
    )
    return _Pieces(local, remote, written.num_heads * head_bytes)


def _runs(local: Int64s, remote: Int64s, size: int) -> Int64s:
    """Return pieces that follow each other on both sides as one, `[num_runs, 3]`."""
    if not len(local):
        return np.empty((0, 3), np.int64)
    is_first = np.ones(len(local), np.bool_)
    is_first[1:] = (np.diff(local) != size) | (np.diff(remote) != size)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(local)))
    return np.stack([local[firsts], remote[firsts], counts * size], axis=1)
