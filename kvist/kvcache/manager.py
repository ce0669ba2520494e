"""The KV memory of one rank: every group's pool, and the block tables of every running sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvist.events.engine import EventSink
from kvist.kvcache.chain import BlockHashChain
from kvist.kvcache.groups import KvGroup
from kvist.kvcache.pool import BlockPool, PoolStatistics
from kvist.kvcache.prefix import Coverage, reusable_prefix
from kvist.kvcache.stale import num_blocks_for, stale_range

ABSENT = -1  # what kernels read at ordinals whose block is stale or was never needed


@dataclass(slots=True)
class BlockTable:
    """One group's blocks of a sequence by absolute ordinal, int32; ABSENT below `first_held`.

    The blocks at the ordinals `adopted` are another's with the same content: the coming step must not write to them.
    """

    block_ids: array[int]
    first_held: int
    adopted: list[int] = field(default_factory=list)

    def held(self) -> list[int]:
        """Return the blocks the sequence holds, oldest first."""
        return self.block_ids[self.first_held :].tolist()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """How much of a sequence the cache can serve: the blocks of each group, and the ordinal where they begin."""

    num_tokens: int
    num_queried_tokens: int
    block_ids: tuple[list[int], ...]
    first_held: tuple[int, ...]


@dataclass(slots=True)
class SequenceBlocks:
    """A running sequence's hold on the memory: a table a group, with slots for `num_tokens` tokens.

    Only the manager changes it.
    """

    tables: tuple[BlockTable, ...]
    chain: BlockHashChain
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvCacheStatistics:
    """Every pool now, and since the start: tokens of admitted sequences, and those the cache served."""

    pools: tuple[PoolStatistics, ...]
    num_queried_tokens: int
    num_hit_tokens: int


class KvCacheManager:
    """Gives sequences blocks in all groups or in none, and keeps what they leave behind findable.

    A step is a number of `open` and `grow` calls, one a sequence, then the computation, then `settle` or `revoke`. The
    blocks that a step fills can be found as soon as they are given, also by sequences of the same step: in each layer
    the keys of all tokens are written before any are read.

    Knows tokens, not tensors or time. Group ids, windows and hashes in the events it reports are those of `groups`.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: Sequence[int],
        block_size: int,
        sink: EventSink | None = None,
        has_prefix_cache: bool = True,
    ) -> None:
        self.block_size = block_size
        self.pools = tuple(BlockPool(group, count, sink) for group, count in zip(groups, num_blocks, strict=True))
        self._sink = sink
        self._has_prefix_cache = has_prefix_cache
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    def match(self, chain: BlockHashChain, token_ids: Sequence[int]) -> PrefixHit:
        """Return what the cache can serve of a sequence of these tokens, at most all but its last token.

        The last token is always computed, because its logits are wanted. Takes no references: valid until the next
        call that changes the manager. Extends the chain over the sequence's full blocks.
        """
        chain.extend(token_ids)
        size = self.block_size
        num_full_blocks = (len(token_ids) - 1) // size if self._has_prefix_cache else 0
        coverage = [(pool.group.window, self._coverage(pool, chain.digests)) for pool in self.pools]
        num_tokens = reusable_prefix(num_full_blocks * size, size, coverage)
        first_held = tuple(stale_range(num_tokens, pool.group.window, size).end for pool in self.pools)
        block_ids = tuple(
            pool.find_all(chain.digests[first : num_tokens // size])
            for pool, first in zip(self.pools, first_held, strict=True)
        )
        return PrefixHit(num_tokens, len(token_ids), block_ids, first_held)

    def open(
        self, hit: PrefixHit, chain: BlockHashChain, token_ids: Sequence[int], num_tokens: int
    ) -> SequenceBlocks | None:
        """Return a sequence that holds the hit and slots up to `num_tokens`, or None, with nothing changed.

        None means that some group has too few free blocks now. `hit` and `chain` are those of `match`.
        """
        num_new = num_blocks_for(num_tokens, self.block_size) - hit.num_tokens // self.block_size
        for pool, block_ids in zip(self.pools, hit.block_ids, strict=True):
            if sum(map(pool.is_free, block_ids)) + num_new > pool.num_free:
                return None
        tables = []
        for pool, block_ids, first_held in zip(self.pools, hit.block_ids, hit.first_held, strict=True):
            pool.acquire(block_ids)
            tables.append(
                BlockTable(array("i", [ABSENT] * first_held + block_ids + pool.allocate(num_new)), first_held)
            )
        self._num_hit_tokens += hit.num_tokens
        self._num_queried_tokens += hit.num_queried_tokens
        sequence = SequenceBlocks(tuple(tables), chain, hit.num_tokens)
        self._cache_filled(sequence, token_ids, num_tokens)
        return sequence

    def grow(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> bool:
        """Give the sequence slots for the first `num_tokens` of `token_ids`; on False no group gave any.

        First the blocks that the coming step cannot see leave the sequence, whatever the result.
        """
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            self._drop_stale(pool, table, sequence.num_tokens)
        missing = [num_blocks - len(table.block_ids) for table in sequence.tables]
        if any(count > pool.num_free for pool, count in zip(self.pools, missing, strict=True)):
            return False
        for pool, table, count in zip(self.pools, sequence.tables, missing, strict=True):
            table.block_ids.extend(pool.allocate(max(0, count)))
        self._cache_filled(sequence, token_ids, num_tokens)
        return True

    def settle(self) -> None:
        """Note that every slot given since the last call was filled: the step is done."""
        for pool in self.pools:
            pool.settle()

    def revoke(self) -> None:
        """Forget the blocks that should have been filled since `settle`: the step failed, its sequences are closed."""
        for pool in self.pools:
            pool.revoke()

    def close(self, sequence: SequenceBlocks) -> None:
        """Give back all blocks of the sequence; its last ones are reused first. The sequence must not be used again."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.held()[::-1])
        sequence.tables = ()

    def flush(self) -> None:
        """Forget every cached block that no sequence holds."""
        if any(pool.num_free < pool.num_blocks for pool in self.pools):
            for pool in self.pools:
                pool.forget_free()
            return
        for pool in self.pools:
            pool.forget_all_unreported()
        if self._sink is not None:
            self._sink.cleared()

    def statistics(self) -> KvCacheStatistics:
        """Return the counts of every pool and of prefix reuse."""
        pools = tuple(pool.statistics() for pool in self.pools)
        return KvCacheStatistics(pools, self._num_queried_tokens, self._num_hit_tokens)

    def check_invariants(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Assert that pools and tables agree, `sequences` being all that are open. O(blocks)."""
        counts = [[0] * pool.num_blocks for pool in self.pools]
        for sequence in sequences:
            for table, count in zip(sequence.tables, counts, strict=True):
                assert all(block_id == ABSENT for block_id in table.block_ids[: table.first_held])
                for block_id in table.held():
                    count[block_id] += 1
        for pool, count in zip(self.pools, counts, strict=True):
            pool.check_invariants(count)

    def _cache_filled(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """Put the blocks that the coming step fills into the cache."""
        start, end = sequence.num_tokens // self.block_size, num_tokens // self.block_size
        sequence.num_tokens = num_tokens
        if not self._has_prefix_cache:
            return
        sequence.chain.extend(token_ids)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            table.adopted = pool.cache(table.block_ids, start, end, sequence.chain, token_ids)

    def _drop_stale(self, pool: BlockPool, table: BlockTable, history: int) -> None:
        end = stale_range(history, pool.group.window, self.block_size).end
        if end <= table.first_held:
            return
        pool.release(table.block_ids[table.first_held : end].tolist())
        table.block_ids[table.first_held : end] = array("i", [ABSENT]) * (end - table.first_held)
        table.first_held = end

    def _coverage(self, pool: BlockPool, digests: Sequence[bytes]) -> Coverage:
        return lambda ordinal: self.block_size if digests[ordinal] in pool else 0
