"""The KV memory of one rank: every group's pool, and the block tables of every running sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvist.errors import InvalidValueError
from kvist.events.engine_events import EventSink
from kvist.kvcache.plan import KvGroup
from kvist.kvcache.pool import BlockPool, PoolStatistics
from kvist.kvcache.scratch import ScratchBlocks, ScratchPolicy, StepNeed, need_of_step
from kvist.kvcache.sequences import ABSENT, BlockHashChain, BlockTable, SequenceBlocks
from kvist.kvcache.stale import num_blocks_for, num_stale_blocks, reusable_prefix


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The prefix of a sequence that the cache can serve: each group's blocks, and the ordinal of the first of them."""

    num_tokens: int
    block_ids: tuple[list[int], ...]
    first_held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvCacheStatistics:
    """The state of every pool, and since the start the tokens of admitted sequences and how many the cache served."""

    pools: tuple[PoolStatistics, ...]
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)


class KvCacheManager:
    """Gives sequences blocks in all groups or in none, and keeps their blocks in the prefix cache afterwards.

    A step is a number of `open` and `grow` calls, one a sequence, then the computation, then `settle` or `revoke`. The
    blocks that a step fills are in the prefix cache from `open` or `grow` on, also for sequences of the same step: in
    each layer the keys of all tokens are written before any are read. Blocks that no later query can see leave their
    sequence when the step is settled.

    With a scratch policy, sequences that allow it use scratch slots for blocks that a step both fills and makes stale;
    those are never cached or reported. The slots go to the next step's sequences: one stream computes all steps in
    order.

    For a sequence whose blocks another worker fills, `reserve` takes the place of `open`. Its blocks are not cached
    until `accept`; after that it is like any other. Knows tokens, not tensors or time.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: Sequence[int],
        block_size: int,
        sink: EventSink | None = None,
        has_prefix_cache: bool = True,
        scratch: ScratchPolicy | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidValueError("block_size", block_size, "at least 1")
        if len(num_blocks) != len(groups) or any(count < 1 for count in num_blocks):
            expected = f"{len(groups)} numbers from 1 on, one a group"
            raise InvalidValueError("num_blocks", tuple(num_blocks), expected)
        self.block_size = block_size
        self.pools = tuple(BlockPool(group, count, sink) for group, count in zip(groups, num_blocks, strict=True))
        self._sink = sink
        self._has_prefix_cache = has_prefix_cache
        self._scratch = scratch
        self._max_rewind_tokens = 0 if scratch is None else scratch.max_rewind_tokens
        self._stepped: list[SequenceBlocks] = []
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def has_scratch(self) -> bool:
        return self._scratch is not None

    @property
    def cache_size_tokens(self) -> int:
        """Return how many tokens the prefix cache can hold."""
        return max(pool.num_blocks for pool in self.pools) * self.block_size if self._has_prefix_cache else 0

    def match(self, chain: BlockHashChain, token_ids: Sequence[int], *, is_next_known: bool = False) -> PrefixHit:
        """Return the longest prefix of these tokens that the cache can serve, at most all but the last token.

        The last token must be computed for its logits, unless `is_next_known`: the token after it is known already.
        Takes no references: valid until the next call that changes the manager. Extends the chain over the sequence's
        full blocks.
        """
        chain.extend(token_ids)
        size = self.block_size
        num_wanted = len(token_ids) if is_next_known else len(token_ids) - 1
        num_full_blocks = num_wanted // size if self._has_prefix_cache else 0
        groups = [(pool.group.window, lambda i, pool=pool: chain.digests[i] in pool) for pool in self.pools]
        num_tokens = reusable_prefix(num_full_blocks, size, groups) * size
        first_held = tuple(num_stale_blocks(num_tokens, pool.group.window, size) for pool in self.pools)
        block_ids = tuple(
            pool.find_all(chain.digests[first : num_tokens // size])
            for pool, first in zip(self.pools, first_held, strict=True)
        )
        return PrefixHit(num_tokens, block_ids, first_held)

    def open(
        self,
        hit: PrefixHit,
        chain: BlockHashChain,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        is_scratch_allowed: bool = False,
    ) -> SequenceBlocks | None:
        """Return a sequence that holds the hit and slots up to `num_tokens`, or None, with nothing changed.

        None means that some group has too few free blocks now. `hit` and `chain` are those of `match`. Raises
        InvalidValueError when scratch slots are allowed to the sequence but not by the manager's policy.
        """
        if is_scratch_allowed and self._scratch is None:
            raise InvalidValueError("is_scratch_allowed", True, "False: this engine was started without scratch slots")
        tables = tuple(
            BlockTable(array("i", [ABSENT] * first_held + block_ids), first_held)
            for block_ids, first_held in zip(hit.block_ids, hit.first_held, strict=True)
        )
        sequence = SequenceBlocks(tables, chain, hit.num_tokens, hit.num_tokens, is_scratch_allowed)
        needs = self._needs(sequence, num_tokens)
        for pool, table, need in zip(self.pools, tables, needs, strict=True):
            if sum(map(pool.is_free, table.held())) + _num_missing(table, need) > pool.num_free:
                return None
        for pool, block_ids in zip(self.pools, hit.block_ids, strict=True):
            pool.acquire(block_ids)
        self._num_hit_tokens += hit.num_tokens
        self._num_queried_tokens += len(token_ids)
        self._allocate(sequence, needs)
        self._advance(sequence, token_ids, num_tokens)
        return sequence

    def reserve(
        self, hit: PrefixHit, chain: BlockHashChain, token_ids: Sequence[int], num_tokens: int
    ) -> SequenceBlocks | None:
        """Return a sequence with blocks for what a query at position `num_tokens` sees, or None, with nothing changed.

        Each group's table begins with the first block that the query sees. The blocks that the group has cached from
        there on, also beyond the hit, which all groups can serve, are `adopted`. The caller fills the others, then
        calls `accept` or `close`. `hit` and `chain` are those of `match`. None means that some group has too few free
        blocks now.
        """
        assert hit.num_tokens <= num_tokens <= len(token_ids), "reserve less than the hit, or more than there is"
        size, tables = self.block_size, []
        for pool in self.pools:
            first = num_stale_blocks(num_tokens, pool.group.window, size)
            wanted = chain.digests[first : num_tokens // size] if self._has_prefix_cache else ()
            cached = list(takewhile(pool.__contains__, wanted))
            adopted = list(range(first, first + len(cached)))
            tables.append(BlockTable(array("i", [ABSENT] * first + pool.find_all(cached)), first, adopted))
        missing = [num_blocks_for(num_tokens, size) - len(table.block_ids) for table in tables]
        for pool, table, num_missing in zip(self.pools, tables, missing, strict=True):
            if sum(map(pool.is_free, table.held())) + num_missing > pool.num_free:
                return None
        for pool, table, num_missing in zip(self.pools, tables, missing, strict=True):
            pool.acquire(table.held())
            table.block_ids.extend(pool.allocate(num_missing))
        return SequenceBlocks(tuple(tables), chain, num_tokens, hit.num_tokens, is_scratch_allowed=False)

    def open_empty(self, chain: BlockHashChain, num_tokens: int) -> SequenceBlocks:
        """Return a sequence without blocks, for `share`; its tables begin where a query at `num_tokens` sees."""
        stale = [num_stale_blocks(num_tokens, pool.group.window, self.block_size) for pool in self.pools]
        tables = tuple(BlockTable(array("i", [ABSENT] * first), first) for first in stale)
        return SequenceBlocks(tables, chain, num_tokens, 0, is_scratch_allowed=False)

    def share(self, holder: SequenceBlocks, sequence: SequenceBlocks, num_blocks: int) -> None:
        """Let `holder`, of `open_empty`, hold a sequence's first `num_blocks` blocks too, even after that is closed."""
        for pool, mine, theirs in zip(self.pools, holder.tables, sequence.tables, strict=True):
            more = theirs.block_ids[len(mine.block_ids) : num_blocks]
            pool.acquire(more)
            mine.block_ids.extend(more)

    def accept(self, sequence: SequenceBlocks, token_ids: Sequence[int]) -> None:
        """Put the blocks of a reserved sequence, which are filled now, into the prefix cache; called between steps."""
        assert not self._stepped, "accept within a step"
        num_cached = sequence.num_final_tokens // self.block_size
        self._num_hit_tokens += sequence.num_final_tokens
        self._num_queried_tokens += sequence.num_tokens
        sequence.num_final_tokens = sequence.num_tokens
        if not self._has_prefix_cache:
            return
        sequence.chain.extend(token_ids, sequence.num_tokens)
        num_final = sequence.num_tokens // self.block_size
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.cache(table.block_ids, num_cached, num_final, sequence.chain, token_ids)
            pool.settle()

    def grow(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> bool:
        """Give the sequence slots for the first `num_tokens` of `token_ids`; on False nothing has changed.

        Tokens that are not known yet may be missing at the end of `token_ids`. What they fill is cached by a later step
        that knows them, or by `catch_up`.
        """
        assert num_tokens >= sequence.num_tokens, "grow to fewer tokens than there are"
        if num_blocks_for(num_tokens, self.block_size) > num_blocks_for(sequence.num_tokens, self.block_size):
            needs = self._needs(sequence, num_tokens)
            for pool, table, need in zip(self.pools, sequence.tables, needs, strict=True):
                if _num_missing(table, need) > pool.num_free:
                    return False
            for pool, table, need in zip(self.pools, sequence.tables, needs, strict=True):
                _drop_stale(pool, table, need.num_stale)  # blocks that were kept for a rewind
            self._allocate(sequence, needs)
        self._advance(sequence, token_ids, num_tokens)
        return True

    def catch_up(self, sequence: SequenceBlocks, token_ids: Sequence[int]) -> None:
        """Cache what earlier steps filled before they knew the tokens; called between steps."""
        if sequence.num_final_tokens < sequence.num_tokens - self._max_rewind_tokens:
            self._advance(sequence, token_ids, sequence.num_tokens)
            self.settle()

    def rewind(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Remove the sequence's last tokens after the step that computed them, so that others can follow.

        For speculative decoding. Raises InvalidValueError for tokens of earlier steps, or for more than the scratch
        policy's `max_rewind_tokens`.
        """
        if not sequence.num_final_tokens <= num_tokens <= sequence.num_tokens:
            expected = f"{sequence.num_final_tokens} to {sequence.num_tokens}"
            raise InvalidValueError("num_tokens", num_tokens, expected)
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            assert table.scratch is None, "rewind before the step is settled"
            pool.release(table.block_ids[num_blocks:].tolist())
            del table.block_ids[num_blocks:]
        sequence.num_tokens = num_tokens

    def settle(self) -> None:
        """End a step that succeeded: release its scratch slots, and the blocks that are stale now."""
        for sequence in self._stepped:
            for pool, table in zip(self.pools, sequence.tables, strict=False):  # a closed sequence has no tables
                _release_scratch(pool, table)
                end = num_stale_blocks(sequence.num_final_tokens, pool.group.window, self.block_size)
                _drop_stale(pool, table, end)
        self._stepped.clear()
        for pool in self.pools:
            pool.settle()

    def revoke(self) -> None:
        """End a step that failed, after its sequences are closed: remove from the cache what it should have filled."""
        assert not any(sequence.tables for sequence in self._stepped), "revoke before the step's sequences are closed"
        self._stepped.clear()
        for pool in self.pools:
            pool.revoke()

    def close(self, sequence: SequenceBlocks) -> None:
        """Release all blocks of the sequence, the last to be reused first. The sequence must not be used again."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.held()[::-1])
            _release_scratch(pool, table)
        sequence.tables = ()

    def flush(self) -> None:
        """Remove from the cache every block that no sequence holds."""
        if any(pool.num_free < pool.num_blocks for pool in self.pools):
            for pool in self.pools:
                pool.forget_free()
            return
        for pool in self.pools:
            pool.forget_all_unreported()
        if self._sink is not None:
            self._sink.cleared()

    def statistics(self) -> KvCacheStatistics:
        pools = tuple(pool.statistics() for pool in self.pools)
        return KvCacheStatistics(pools, self._num_queried_tokens, self._num_hit_tokens)

    def _needs(self, sequence: SequenceBlocks, num_tokens: int) -> list[StepNeed]:
        step = (sequence.num_tokens, num_tokens)
        scratch = self._scratch if sequence.is_scratch_allowed else None
        return [
            need_of_step(*step, pool.group.window, self.block_size, len(pool.group.layer_indices), scratch)
            for pool in self.pools
        ]

    def _allocate(self, sequence: SequenceBlocks, needs: Sequence[StepNeed]) -> None:
        """Give the sequence the slots that its step needs; the caller has checked that they are free."""
        for pool, table, need in zip(self.pools, sequence.tables, needs, strict=True):
            if need.num_scratch_slots:
                assert need.scratch.start == len(table.block_ids), "scratch blocks are the first that a step begins"
                table.block_ids.extend([ABSENT] * len(need.scratch))
                table.scratch = ScratchBlocks(need.scratch, tuple(pool.allocate(need.num_scratch_slots)))
                pool.num_scratch += need.num_scratch_slots
            table.block_ids.extend(pool.allocate(need.num_blocks - len(table.block_ids)))

    def _advance(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """Record the coming step, and cache the blocks that it fills, except those that a rewind may change."""
        num_cached = sequence.num_final_tokens // self.block_size
        num_known = min(num_tokens, len(token_ids))
        sequence.num_final_tokens = max(min(sequence.num_tokens, num_known), num_known - self._max_rewind_tokens)
        sequence.num_tokens = num_tokens
        self._stepped.append(sequence)
        if not self._has_prefix_cache:
            return
        num_final = sequence.num_final_tokens // self.block_size
        sequence.chain.extend(token_ids, sequence.num_final_tokens)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            table.adopted = pool.cache(table.block_ids, num_cached, num_final, sequence.chain, token_ids)


def _num_missing(table: BlockTable, need: StepNeed) -> int:
    """Return how many slots must be allocated to the table for the step."""
    return need.num_blocks - len(table.block_ids) - len(need.scratch) + need.num_scratch_slots


def _drop_stale(pool: BlockPool, table: BlockTable, end: int) -> None:
    if end <= table.first_held:
        return
    leaving = table.block_ids[table.first_held : end]
    pool.release([block_id for block_id in leaving if block_id != ABSENT])
    table.block_ids[table.first_held : end] = array("i", [ABSENT]) * len(leaving)
    table.first_held = end


def _release_scratch(pool: BlockPool, table: BlockTable) -> None:
    if table.scratch is not None:
        pool.release(table.scratch.slot_ids)
        pool.num_scratch -= len(table.scratch.slot_ids)
        table.scratch = None
