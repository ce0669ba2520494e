"""Where blocks lie: from pairs of blocks, here and at a peer, to the pieces of memory that a write moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.kvcache import KvGroup
from kvist.transfer.frames import Extent
from kvist.transfer.messages import PoolPlace, ReceiveRequest
from kvist.transfer.slices import BlockCountMismatchError, SliceGroup, pair_blocks, positional_block_ids

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A worker's pools, and whose layers' blocks are in their slots; a slot is one piece of memory."""

    groups: tuple[KvGroup, ...]
    block_size: int
    pools: tuple[PoolPlace, ...]

    def num_bytes(self, block_ids_per_group: Sequence[Sequence[int]]) -> int:
        """Return the bytes of these blocks, a list a group."""
        return sum(len(ids) * pool.slot_bytes for ids, pool in zip(block_ids_per_group, self.pools, strict=True))

    def extents(self, block_ids_per_group: Sequence[Sequence[int]]) -> tuple[Extent, ...]:
        """Return where these blocks lie, sorted by address; neighbours are one piece."""
        merged: list[Extent] = []
        places = zip(self.pools, block_ids_per_group, strict=True)
        for extent in sorted(pool.block(block_id) for pool, ids in places for block_id in ids):
            if merged and merged[-1].end == extent.base:
                merged[-1] = Extent(merged[-1].base, merged[-1].size_bytes + extent.size_bytes)
            else:
                merged.append(extent)
        return tuple(merged)

    def fragments(
        self, tables: Sequence[Sequence[int]], num_tokens: int, request: ReceiveRequest, peer_pools: Sequence[PoolPlace]
    ) -> Int64s:
        """Return what to write for a request, `[num_fragments, 3]`: local address, address at the peer, bytes.

        `tables` are a held prompt's, by ordinal. Blocks that are neighbours on both sides are one piece. Raises
        BlockCountMismatchError when the peer has counted the prompt, its groups or its blocks differently, and
        InvalidValueError for a block that it does not have.
        """
        if (request.token_end, request.prompt_len) != (num_tokens, num_tokens):
            raise BlockCountMismatchError(
                0, f"asked for {request.token_end} of {request.prompt_len} tokens, have {num_tokens}"
            )
        if len(request.block_ids_per_group) != len(self.groups):
            raise BlockCountMismatchError(len(request.block_ids_per_group), f"expected {len(self.groups)} groups")
        starts = request.dst_start_tokens or (None,) * len(self.groups)
        pieces = []
        for group_id, (group, ours, theirs) in enumerate(zip(self.groups, self.pools, peer_pools, strict=True)):
            pairs = pair_blocks(
                SliceGroup(group_id, group.window, self.block_size, num_tokens),
                positional_block_ids(tables[group_id], num_tokens, self.block_size),
                request.block_ids_per_group[group_id],
                num_tokens,
                starts[group_id],
            )
            if pairs.destination_ids:
                theirs.block(max(pairs.destination_ids))
            local = ours.base_address + np.array(pairs.source_ids, np.int64) * ours.slot_bytes
            remote = theirs.base_address + np.array(pairs.destination_ids, np.int64) * ours.slot_bytes
            pieces.append(_runs(local, remote, ours.slot_bytes))
        return np.concatenate(pieces)


def _runs(local: Int64s, remote: Int64s, size: int) -> Int64s:
    """Return pieces of one or more blocks, `[num_runs, 3]`."""
    if not len(local):
        return np.empty((0, 3), np.int64)
    is_first = np.ones(len(local), np.bool_)
    is_first[1:] = (np.diff(local) != size) | (np.diff(remote) != size)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(local)))
    return np.stack([local[firsts], remote[firsts], counts * size], axis=1)
