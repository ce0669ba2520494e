"""One group's blocks: free ones in LRU order, and the prefix cache that lives in them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.events.engine_events import EventSink, KnownWindow
from kvist.kvcache.plan import KvGroup
from kvist.kvcache.sequences import ABSENT, BlockHashChain, event_hash


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A pool's counts now: `num_scratch` of the `num_used` blocks are scratch slots; `num_cached` have a digest."""

    group_id: int
    window: KnownWindow
    num_blocks: int
    num_used: int
    num_cached: int
    num_scratch: int

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used


class BlockPool:
    """The blocks of one group; a digest names at most one of them.

    A block is used while references to it are held, else free. A free block with a digest can be found and taken again
    until its slot is needed for something else: least recently freed first, and blocks without a digest before all.
    Only then is it reported as removed. All operations are O(1) a block.
    """

    def __init__(self, group: KvGroup, num_blocks: int, sink: EventSink | None = None) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self._sink = sink
        self._num_references = array("q", bytes(8 * num_blocks))
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._fresh: list[int] = []
        self.num_scratch = 0
        """How many of the used blocks are scratch slots; the manager's count."""
        if sink is not None:
            sink.created(window=group.window, group=group.group_id)

    @property
    def num_free(self) -> int:
        """Return how many blocks `allocate` can give, cached ones included."""
        return len(self._free)

    def statistics(self) -> PoolStatistics:
        """Return the pool's counts. Any thread may call it."""
        used, cached = self.num_blocks - len(self._free), len(self._cached)
        return PoolStatistics(self.group.group_id, self.group.window, self.num_blocks, used, cached, self.num_scratch)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether a block with this digest is cached; its place in the LRU order stays."""
        return digest in self._cached

    def find_all(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks with these digests, all of which are cached."""
        return [self._cached[digest] for digest in digests]

    def is_free(self, block_id: int) -> bool:
        return self._num_references[block_id] == 0

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; their old content is forgotten and reported removed.

        The caller checks `num_free` first: running out in here is a bug.
        """
        assert count <= len(self._free), "allocate more blocks than are free"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        self._forget(block_ids)
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Take one more reference to each block; a free one leaves the LRU order."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                del self._free[block_id]
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block; those without any become free in this order, the first reused first."""
        for block_id in block_ids:
            assert self._num_references[block_id] > 0, "release of a block that nobody holds"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                self._free[block_id] = None
                if self._digests[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def cache(
        self, table: array[int], start: int, end: int, chain: BlockHashChain, token_ids: Sequence[int]
    ) -> list[int]:
        """Put the blocks at ordinals [start, end) of a table into the cache; return the ordinals of adopted blocks.

        Where a block with the same digest is cached already, the table adopts that and releases its own. So equal
        content takes one block, and in a full group a cached block's parents stay cached as long as it does. ABSENT
        ordinals are skipped.
        """
        adopted = []
        run = start
        for ordinal in range(start, end):
            if table[ordinal] == ABSENT:
                self._report_stored(chain, token_ids, run, ordinal)
                run = ordinal + 1
                continue
            digest = chain.digests[ordinal]
            cached = self._cached.get(digest)
            if cached is None:
                self._cached[digest] = table[ordinal]
                self._digests[table[ordinal]] = digest
                self._fresh.append(table[ordinal])
                continue
            self._report_stored(chain, token_ids, run, ordinal)
            run = ordinal + 1
            self.acquire((cached,))
            self.release((table[ordinal],))
            table[ordinal] = cached
            adopted.append(ordinal)
        self._report_stored(chain, token_ids, run, end)
        return adopted

    def settle(self) -> None:
        """Confirm that the blocks cached since the last call are filled."""
        self._fresh.clear()

    def revoke(self) -> None:
        """Remove the blocks cached since `settle`, and report them removed; free ones are reused first."""
        self._forget(self._fresh)
        for block_id in filter(self.is_free, self._fresh):
            self._free.move_to_end(block_id, last=False)
        self._fresh.clear()

    def forget_free(self) -> None:
        """Remove every block that no sequence holds from the cache, and report them removed. O(free)."""
        self._forget(list(self._free))

    def forget_all_unreported(self) -> None:
        """Remove all blocks from the cache without an event: the caller reports the cache cleared. O(free)."""
        assert len(self._free) == self.num_blocks, "blocks are in use"
        self._cached.clear()
        self._digests = [None] * self.num_blocks

    def _forget(self, block_ids: Sequence[int]) -> None:
        removed: list[int] = []
        for block_id in block_ids:
            digest = self._digests[block_id]
            if digest is not None:
                self._digests[block_id] = None
                del self._cached[digest]
                removed.append(event_hash(digest))
        if removed and self._sink is not None:
            self._sink.removed(removed, window=self.group.window, group=self.group.group_id)

    def _report_stored(self, chain: BlockHashChain, token_ids: Sequence[int], start: int, end: int) -> None:
        if start == end or self._sink is None:
            return
        self._sink.stored(
            [event_hash(digest) for digest in chain.digests[start:end]],
            token_ids[start * chain.block_size : end * chain.block_size],
            parent_block_hash=event_hash(chain.digests[start - 1]) if start else None,
            window=self.group.window,
            group=self.group.group_id,
            lora_name=chain.lora_name,
            cache_salt=chain.cache_salt,
        )
