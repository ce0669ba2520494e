"""Checks that KV memory, and an engine that computes in it, agree with themselves; O(blocks)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvist.kvcache import ABSENT, KvCacheManager, SequenceBlocks, num_blocks_for
from kvist.kvcache.pool import BlockPool

if TYPE_CHECKING:
    from kvist.engine.core import EngineCore


def check_memory(
    manager: KvCacheManager, sequences: Iterable[SequenceBlocks], kept: Iterable[SequenceBlocks] = ()
) -> None:
    """Raise AssertionError unless pools and tables agree, `sequences` being all that are open, beside those `kept`."""
    counts = [[0] * pool.num_blocks for pool in manager.pools]
    for each in kept:
        for table, count in zip(each.tables, counts, strict=True):
            for block_id in table.held():
                count[block_id] += 1
    for sequence in sequences:
        for pool, table, count in zip(manager.pools, sequence.tables, counts, strict=True):
            assert len(table.block_ids) == num_blocks_for(sequence.num_tokens, manager.block_size)
            assert all(block_id == ABSENT for block_id in table.block_ids[: table.first_held])
            for block_id in table.held():
                count[block_id] += 1
            for slot_id in () if table.scratch is None else table.scratch.slot_ids:
                assert pool._digests[slot_id] is None, "a scratch slot can be found"
                assert count[slot_id] == 0, "a scratch slot is somebody's block"
                count[slot_id] += 1
    for pool, count in zip(manager.pools, counts, strict=True):
        _check_pool(pool, count)


def check_engine(core: EngineCore) -> None:
    """Raise AssertionError unless requests, scheduler and memory agree."""
    counts, scheduler, handoffs = core._scheduler.statistics(), core._scheduler, core.handoffs
    num_known = counts.num_running + counts.num_waiting + counts.num_receiving + len(core._unreserved)
    assert len(core._requests) == num_known
    assert all(request.blocks is None for request in scheduler._waiting)
    held = [request.blocks for request in scheduler._running]
    held += [request.blocks for request in scheduler.receiving.values()]
    held += handoffs._abandoned.values()
    kept = [each.blocks for each in handoffs._held.values()]
    check_memory(core.kv_cache, [blocks for blocks in held if blocks is not None], kept)


def _check_pool(pool: BlockPool, num_references: Sequence[int]) -> None:
    assert list(pool._num_references) == list(num_references), "reference counts differ from the tables"
    assert set(pool._free) == {i for i, count in enumerate(num_references) if count == 0}, "free list is wrong"
    named = {digest: i for i, digest in enumerate(pool._digests) if digest is not None}
    assert named == pool._cached, "a digest and its block disagree"
