"""What one rank of an engine holds: its blocks are in the index already, and its names for them are kept beside it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.events import Removed, Tier, WorkerRank
from kvist.events.engine_events import EngineHash, fold_hash
from kvist.events.types import GroupRule
from kvist.indexer.compiled import engine_blocks as compiled
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine_blocks import ALIASES, GROUPS, PLACE_BITS, Arrays
from kvist.publisher.residency import NO_SCOPE, Held, Scope
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import HEAD, SEGMENT, Records
from kvist.radix.memory import TableMemory, reserved, reserved_array

_SEGMENT_BITS = 3
"""Few, for there may be thousands of tables: 32 KiB once each segment has a page. One of a million grows in 2 ms."""
_NAMES_AT_ONCE = 4096
"""Told by `names` in one go: each costs two or three cache misses, so that these take half a millisecond."""
_FEW_NAMES = 4096
_MAX_COPIES = 1 << 32
"""Believed of a hash that a dump tells of: more than any engine has blocks."""
_NO_BLOCKS = np.empty(0, np.uint64)


class Names(NamedTuple):
    """Engine hashes, as `fold_hash` has them, each with the block that it names in a tier."""

    tier: Tier
    engine_hashes: NDArray[np.uint64]
    blocks: NDArray[np.uint64]


class Table:
    """Leads from u64 to u64, in one or several parts, in compiled code, with memory of its own."""

    def __init__(self, num_parts: int = 1) -> None:
        self._num_segments = num_parts << _SEGMENT_BITS
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        memory = reserved(SEGMENT.itemsize * self._num_segments)
        self.segments: Records = np.frombuffer(memory, SEGMENT)
        self.head = reserved_array(HEAD, 1)
        self.head["multiplier"], self.head["bits"] = secrets.randbits(64) | 1, _SEGMENT_BITS
        self._table = TableMemory(self.head, self.segments, memory)
        self._most = 0  # rows since all segments were of the size they need

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes

    def __len__(self) -> int:
        return int(self.head["num_rows"][0])

    def get(self, key: int) -> int:
        """Return what stands under a key of the first part, 0 if nothing does."""
        return compiled.look(self.head, self.segments, key)

    def put(self, keys: NDArray[np.uint64], values: NDArray[np.uint64], part: int = 0) -> None:
        """Let something stand under each key, for 0 nothing."""
        compiled.put(self.head, self.segments, part, keys, values)

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more: a segment's, so call it now and then."""
        self._most = max(self._most, len(self))
        if len(self) * 2 >= self._most:
            return
        shrinkable = self._table.shrinkable()
        if shrinkable:
            self._table.shrink(shrinkable[0])
        else:
            self._most = len(self)

    def rows(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        rows = self.segments[number]["rows"][: self.segments[number]["room"]]
        rows = rows[rows["value"] > 0]
        return np.ascontiguousarray(rows["hash"]), np.ascontiguousarray(rows["value"])


class EngineResidency:
    """Implements `kvist.publisher.residency.Holdings` on an index, which it changes at once, in compiled code.

    So nothing is left to publish. A block that the index has evicted is not held any more; one whose hash is 0 never
    is.
    """

    def __init__(self, index: RadixIndex, source: WorkerRank) -> None:
        self._index = index
        self._source = source
        self.record: Records = np.zeros(1, layout.RANK)
        """What compiled code knows of the rank, true after `settle`."""
        self.record["number"] = source.rank
        self.names = Table(len(Tier))
        self.counts = Table()
        """Copies of engine hashes beyond the first, hashes of blocks beyond the first, copies in other groups."""
        # Of blocks with an adapter or a salt, some of them gone: two are looked at for each that comes, in turn.
        self._scopes: dict[int, Scope] = {}
        self._scoped: deque[int] = deque()
        self.counts_copies = False
        """Whether an engine hash that is stored again has one more copy, rather than being reported once more."""
        self._most_names = _FEW_NAMES  # beyond which those of evicted blocks are looked for, one segment at a time
        self._next_segment = 0
        self._clearing: int | None = None
        self._rules: list[GroupRule] = []

    def settle(self) -> Arrays:
        """Let compiled code know where the rank's blocks are now; return what it takes."""
        index, record = self._index, self.record[0]
        record["slot"], record["counts_copies"] = self.slot, self.counts_copies
        companion = index.slot_of(self._source.companion) if record["num_kinds"] else None
        record["companion"] = -1 if companion is None else companion
        names, counts = self.names, self.counts
        return index.core, index.segments, names.head, names.segments, counts.head, counts.segments, self.record

    @property
    def slot(self) -> int:
        """Return the slot that stands for the rank in the index."""
        slot = self._index.slot_of(self._source)
        if slot is None:
            self._index.apply(self._source, (Removed(b""),))  # which gives it one
            slot = self._index.slot_of(self._source)
            assert slot is not None
        clearing = self._index.clearing_of(self._source)
        if clearing != self._clearing:
            self._clearing = clearing
            if self._rules:
                self._index.set_groups(self._source, self._rules)
        return slot

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more; call it now and then."""
        if len(self.names) > self._most_names and self._index.evicted_from(self._source):
            self._drop_stale()
        self.names.tidy()
        self.counts.tidy()

    def clear(self) -> None:
        self._index.clear(*self._source)
        self._index.clear(*self._source.companion)
        self.names.clear()
        self.counts.clear()
        self._scopes.clear()
        self._scoped.clear()

    # --- Blocks -------------------------------------------------------------------------------------------------------

    def find(self, engine_hash: EngineHash) -> int | None:
        return compiled.block_named(self.settle(), fold_hash(engine_hash)) or None

    def holds(self, block_hash: int) -> bool:
        return self.tiers(block_hash) != 0

    def tiers(self, block_hash: int) -> int:
        return compiled.tiers_held(self._index.core, self._index.segments, self.slot, block_hash)

    def parent(self, block_hash: int) -> int | None:  # noqa: ARG002 - the index knows a block's place itself
        """Return None: where a block that is held has its place, the index knows itself."""
        return None

    def scope(self, block_hash: int) -> Scope:
        return self._scopes.get(block_hash, NO_SCOPE)

    def hold(
        self,
        engine_hashes: Sequence[EngineHash],
        block_hashes: Sequence[int],
        parent: int | None,
        tier: Tier,
        scope: Scope = NO_SCOPE,
    ) -> Held:
        """Hold a chain of blocks behind `parent` in a tier; an engine hash names what it was last stored for."""
        self._change(compiled.HOLD, tier, _folded(engine_hashes), np.array(block_hashes, np.uint64), parent or 0)
        if scope != NO_SCOPE:
            self._note_scope(block_hashes, scope)
        return Held([], [])

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> list[int]:
        self._change(compiled.RELEASE, tier, _folded(engine_hashes))
        return []

    def drop(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> list[int]:
        names, places, _ = self._told_counts().T
        self._forget_counts((places == tier) & np.isin(names, _folded(engine_hashes)))
        return self.release(engine_hashes, tier)

    def empty(self, tier: Tier) -> list[int]:
        """Hold nothing in a tier, nor in other groups, which are on the GPU alone."""
        self.drop(self.engine_hashes(tier), tier)
        _, places, _ = self._told_counts().T
        self._forget_counts((places >= GROUPS) & (places < ALIASES))
        self._index.clear(*self._source.companion)
        if self._rules:
            self._index.set_groups(self._source, self._rules)
        return []

    # --- Other groups -------------------------------------------------------------------------------------------------

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        kinds, record = [*dict.fromkeys(others)], self.record[0]
        record["num_groups"], record["num_kinds"] = len(others), len(kinds)
        record["kinds"][: len(others)] = [kinds.index(rule) for rule in others]
        record["believed"][: len(others)] = [rule.num_needed for rule in others]
        self._rules = [published, *kinds] if others or published != GroupRule(0) else []
        self._index.clear(*self._source.companion)
        if self._rules:
            self._index.set_groups(self._source, self._rules)
        self._change(compiled.PLACE, 0, _folded({name for name, _, _ in self.group_counts()}))

    def store_in_group(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> None:
        """Note that a group holds blocks, or a copy more of each.

        Where that may be a report of all of a prompt, only the last blocks are believed: others may have left since.
        """
        num_left_out = 0 if self.counts_copies else len(engine_hashes) - int(self.record["believed"][0, group])
        believed = [name for name in engine_hashes[max(0, num_left_out) :] if name is not None]
        self._change(compiled.STORE_IN_GROUP, group, _folded(believed))

    def remove_from_group(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        self._change(compiled.REMOVE_FROM_GROUP, group, _folded(engine_hashes))

    def are_held(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> bool:
        names = _folded(name for name in engine_hashes if name is not None).tolist()
        if group < 0:
            blocks = np.array([*map(self.names.get, names)], np.uint64)
            return bool(self._are_held(Tier.GPU, blocks).all())
        return all(self.counts.get(_key(name, GROUPS + group)) for name in names)

    def group_counts(self) -> list[tuple[int, int, int]]:
        told = self._told_counts().tolist()
        return [(name, place - GROUPS, number) for name, place, number in told if GROUPS <= place < ALIASES]

    def restore_group_counts(self, counts: Iterable[tuple[int, int, int]]) -> None:
        for name, group, number in counts:
            self._count(name, GROUPS + group, number)

    def engine_hashes(self, tier: Tier = Tier.GPU) -> list[int]:
        return [name for names in self._held_names(tier) for name in names.engine_hashes.tolist()]

    # --- For others to go on from here --------------------------------------------------------------------------------

    @property
    def is_told_by_names(self) -> bool:
        """Return whether `told_names` tells of all blocks."""
        has_aliases = bool((self._told_counts()[:, 1] >= ALIASES).any())
        return not has_aliases and not any(map(self.holds, self._scopes))

    def told_names(self) -> Iterator[Names]:
        """Yield the names of all blocks without an adapter or a salt that have one, some at a time.

        What is there throughout comes once.
        """
        told = self._told_counts()
        left_out = np.concatenate((told[told[:, 1] >= ALIASES, 0], np.array([*self._scopes], np.uint64)))
        for tier in Tier:
            for names in self._held_names(tier):
                is_told = ~np.isin(names.blocks, left_out)
                yield Names(tier, names.engine_hashes[is_told], names.blocks[is_told])

    def told_copies(self) -> bytes:
        """Return what engine hashes have more copies than one: each, its tier or group, and how many more, as u64."""
        told = self._told_counts()
        return told[told[:, 1] < ALIASES].astype("<u8", copy=False).tobytes()

    def resume_copies(self, told: bytes) -> None:
        """Count copies of blocks that `resume` is to account for."""
        for name, place, number in np.frombuffer(told[: len(told) // 24 * 24], "<u8").reshape(-1, 3).tolist():
            if place < ALIASES:
                self._count(name, place, min(number, _MAX_COPIES))

    def resume(self, names: Names) -> None:
        """Account for blocks that the index has already, put there by another way than `hold`."""
        is_held = self._are_held(names.tier, names.blocks)
        self.names.put(names.engine_hashes[is_held], names.blocks[is_held], names.tier)
        if names.tier is Tier.GPU:
            self._change(compiled.PLACE, 0, names.engine_hashes[is_held])

    # --- Inside -------------------------------------------------------------------------------------------------------

    def _change(
        self,
        what: int,
        place: int,
        engine_hashes: NDArray[np.uint64],
        blocks: NDArray[np.uint64] = _NO_BLOCKS,
        parent: int = 0,
    ) -> None:
        """Do one thing with each of the hashes, as `compiled.change` says."""
        arrays = self.settle()
        with self._index.writing:
            compiled.change(arrays, what, place, engine_hashes, blocks, parent)
        self._index.keep_to_cap()

    def _note_scope(self, block_hashes: Sequence[int], scope: Scope) -> None:
        for block_hash in block_hashes:
            compiled.mark_block(self._index.core, self._index.segments, block_hash)
            if block_hash not in self._scopes:
                self._scopes[block_hash] = scope
                self._scoped.append(block_hash)
        for _ in range(min(2 * len(block_hashes), len(self._scoped))):
            block_hash = self._scoped.popleft()
            if self.holds(block_hash):
                self._scoped.append(block_hash)
            else:
                del self._scopes[block_hash]

    def _count(self, name: int, place: int, number: int) -> None:
        key = _key(name, place)
        number += self.counts.get(key) >> PLACE_BITS
        value = number << PLACE_BITS | place if number else 0
        self.counts.put(np.array([key], np.uint64), np.array([value], np.uint64))

    def _told_counts(self) -> NDArray[np.uint64]:
        """Return names, places and numbers, as columns of `[num_rows, 3]`."""
        rows = [self.counts.rows(number) for number in range(len(self.counts.segments))]
        keys, values = (np.concatenate(column) for column in zip(*rows, strict=True))
        places = values % np.uint64(1 << PLACE_BITS)
        return np.stack((keys ^ places * np.uint64(compiled.STEP), places, values >> np.uint64(PLACE_BITS)), axis=1)

    def _forget_counts(self, is_gone: NDArray[np.bool_]) -> None:
        names, places, _ = self._told_counts()[is_gone].T
        keys = names ^ places * np.uint64(compiled.STEP)
        self.counts.put(keys, np.zeros_like(keys))

    def _held_names(self, tier: Tier) -> Iterator[Names]:
        """Yield what names blocks that are held in a tier, some at a time."""
        for number in range(tier << _SEGMENT_BITS, tier + 1 << _SEGMENT_BITS):
            engine_hashes, blocks = self.names.rows(number)
            for start in range(0, len(blocks), _NAMES_AT_ONCE):
                some = slice(start, start + _NAMES_AT_ONCE)
                is_held = self._are_held(tier, blocks[some])
                yield Names(tier, engine_hashes[some][is_held], blocks[some][is_held])

    def _drop_stale(self) -> None:
        """Forget names of blocks that were evicted, of the next segment; after the last, wait for half as many more."""
        engine_hashes, blocks = self.names.rows(self._next_segment)
        tier = self._next_segment >> _SEGMENT_BITS
        stale = engine_hashes[~self._are_held(tier, blocks)]
        self.names.put(stale, np.zeros_like(stale), tier)
        self._next_segment = (self._next_segment + 1) % len(self.names.segments)
        if self._next_segment == 0:
            self._most_names = max(_FEW_NAMES, len(self.names) * 3 // 2)

    def _are_held(self, tier: Tier | int, blocks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return compiled.are_held(self._index.core, self._index.segments, self.slot, tier, blocks)


def _key(name: int, place: int) -> int:
    return name ^ place * compiled.STEP % (1 << 64)


def _folded(engine_hashes: Iterable[EngineHash]) -> NDArray[np.uint64]:
    return np.array([*map(fold_hash, engine_hashes)], np.uint64)
