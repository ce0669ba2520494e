"""One rank of an engine's stream, and what it holds: blocks in the index, and the engine's hashes for them."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.events import EngineCleared, EngineEvent, EngineRemoved, EngineStored, Removed, Tier, WorkerRank
from kvist.events.engine_events import FULL, STATE, UNKNOWN, EngineHash, UnsizedWindow, fold_hash
from kvist.events.types import GroupRule
from kvist.indexer.compiled import engine_blocks as compiled
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine_blocks import ALIASES, GROUPS, MAX_ROWS, PLACE_BITS, Arrays
from kvist.publisher.filter import FilterState, WindowFilter
from kvist.publisher.groups import GroupSplitter
from kvist.publisher.normaliser import Normaliser
from kvist.publisher.residency import NO_SCOPE, Chain, Held, Scope
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import HEAD, SEGMENT, Records
from kvist.radix.memory import reserved_array

_SEGMENT_BITS = 3
"""Few, for there may be thousands of tables: 32 KiB once each segment has a page. With a million rows, one grows in
2 ms."""
_NAMES_AT_ONCE = 4096
"""Yielded at a time: each costs two or three cache misses, so that these take half a millisecond."""
_FEW_NAMES = 4096
_MAX_COPIES = 1 << 32
"""Accepted of a hash in a dump: more than any engine has blocks."""
_NO_BLOCKS = np.empty(0, np.uint64)


class Names(NamedTuple):
    """Engine hashes, as `fold_hash` has them, each with the block that it names in a tier."""

    tier: Tier
    engine_hashes: NDArray[np.uint64]
    blocks: NDArray[np.uint64]


class Table:
    """A compiled hash table from u64 to u64, in one or several parts, with memory of its own; 0 is no value."""

    def __init__(self, num_parts: int = 1) -> None:
        self._num_segments = num_parts << _SEGMENT_BITS
        self.clear()

    def clear(self) -> None:
        """Remove all rows and free their memory."""
        self.segments: Records = reserved_array(SEGMENT, self._num_segments)
        self.head = reserved_array(HEAD, 1)
        self._num_rows = self.head["num_rows"].data
        self.head["multiplier"], self.head["bits"] = secrets.randbits(64) | 1, _SEGMENT_BITS

    def __len__(self) -> int:
        return int(self._num_rows[0])

    def get(self, key: int) -> int:
        """Return the value of a key in the first part, 0 for none."""
        return compiled.get(self.head, self.segments, key)

    def put(self, keys: NDArray[np.uint64], values: NDArray[np.uint64], part: int = 0) -> None:
        """Set the value of each key; a value of 0 removes the key."""
        compiled.put(self.head, self.segments, part, keys, values)

    def rows(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        rows = self.segments[number]["rows"][: self.segments[number]["room"]]
        rows = rows[rows["value"] > 0]
        return np.ascontiguousarray(rows["hash"]), np.ascontiguousarray(rows["value"])


class EngineResidency:
    """Implements `kvist.publisher.residency.Holdings` on an index, which compiled code changes at once.

    So the methods return nothing to publish. A block that the index has evicted is no longer held; a block whose hash
    is 0 never is.
    """

    def __init__(self, index: RadixIndex, source: WorkerRank) -> None:
        self._index = index
        self._source = source
        self.record: Records = np.zeros(1, layout.RANK)
        """What compiled code reads of the rank, up to date after `sync`."""
        self.record["number"] = source.rank
        self.names = Table(len(Tier))
        self.counts = Table()
        """Copies of engine hashes beyond the first, hashes of blocks beyond the first, copies in other groups."""
        # Of blocks with an adapter or a salt. Some may be gone: for each new block, the next two in turn are checked.
        self._scopes: dict[int, Scope] = {}
        self._scoped: deque[int] = deque()
        self.counts_copies = False
        """Whether an engine hash that is stored again is one more copy, rather than the same one reported again."""
        self._max_names = _FEW_NAMES  # beyond it, names of evicted blocks are removed, one segment at a time
        self._next_segment = 0
        self._clearing: int | None = None
        self._rules: list[GroupRule] = []

    def sync(self) -> Arrays:
        """Bring `record` up to date; return the arrays that compiled code takes."""
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
            self._index.apply(self._source, (Removed(b""),))  # gives the rank a slot
            slot = self._index.slot_of(self._source)
            assert slot is not None
        clearing = self._index.clearing_of(self._source)
        if clearing != self._clearing:
            self._clearing = clearing
            if self._rules:
                self._index.set_groups(self._source, self._rules)
        return slot

    def clear(self) -> None:
        self._index.clear(*self._source)
        self._index.clear(*self._source.companion)
        self.names.clear()
        self.counts.clear()
        self._scopes.clear()
        self._scoped.clear()

    # --- Blocks -------------------------------------------------------------------------------------------------------

    def find(self, engine_hash: EngineHash) -> int | None:
        return compiled.block_named(self.sync(), fold_hash(engine_hash)) or None

    def holds(self, block_hash: int) -> bool:
        return self.tiers(block_hash) != 0

    def tiers(self, block_hash: int) -> int:
        return compiled.tiers_held(self._index.core, self._index.segments, self.slot, block_hash)

    def parent(self, block_hash: int) -> int | None:  # noqa: ARG002
        """Return None: the index itself knows a held block's depth."""
        return None

    def scope(self, block_hash: int) -> Scope:
        return self._scopes.get(block_hash, NO_SCOPE)

    def hold(self, chain: Chain) -> Held:
        """Hold a chain in its tier; an engine hash names the block it was last stored for."""
        engine_hashes, block_hashes, parent, tier, scope = chain
        self._change(compiled.HOLD, tier, _folded(engine_hashes), np.array(block_hashes, np.uint64), parent or 0)
        if scope != NO_SCOPE:
            self._record_scope(block_hashes, scope)
        return Held([], [])

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> list[int]:
        self._change(compiled.RELEASE, tier, _folded(engine_hashes))
        return []

    # --- Other groups -------------------------------------------------------------------------------------------------

    @property
    def trusts_stores(self) -> bool:
        return self.counts_copies

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        kinds, record = [*dict.fromkeys(others)], self.record[0]
        record["num_groups"], record["num_kinds"] = len(others), len(kinds)
        record["kinds"][: len(others)] = [kinds.index(rule) for rule in others]
        record["num_trusted"][: len(others)] = [rule.num_needed for rule in others]
        record["strides"][: len(others)] = [rule.stride for rule in others]
        self._rules = [published, *kinds] if others or published != GroupRule(0) else []
        self._index.clear(*self._source.companion)
        if self._rules:
            self._index.set_groups(self._source, self._rules)
        self._change(compiled.STORE_IN_COMPANION, 0, _folded({name for name, _, _ in self.group_counts()}))

    def store_in_group(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> None:
        # What reports a whole prompt anew is certain of its last blocks only: the group may have dropped the others.
        num_left_out = 0 if self.counts_copies else len(engine_hashes) - int(self.record["num_trusted"][0, group])
        counted = [name for name in engine_hashes[max(0, num_left_out) :] if name is not None]
        self._change(compiled.STORE_IN_GROUP, group, _folded(counted))

    def remove_from_group(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        self._change(compiled.REMOVE_FROM_GROUP, group, _folded(engine_hashes))

    def are_held(self, group: int, engine_hashes: Sequence[EngineHash]) -> bool:
        names = _folded(engine_hashes).tolist()
        if group < 0:
            blocks = np.array([*map(self.names.get, names)], np.uint64)
            return bool(self._are_held(Tier.GPU, blocks).all())
        return all(self.counts.get(_key(name, GROUPS + group)) for name in names)

    def group_counts(self) -> list[tuple[int, int, int]]:
        rows = self._count_rows().tolist()
        return [(name, place - GROUPS, number) for name, place, number in rows if GROUPS <= place < ALIASES]

    def restore_group_counts(self, counts: Iterable[tuple[int, int, int]]) -> None:
        rows = [(name, GROUPS + group, number) for name, group, number in counts]
        self._set_counts(np.array(rows, np.uint64).reshape(-1, 3))

    def engine_hashes(self) -> list[int]:
        return [name for names in self._held_names(Tier.GPU) for name in names.engine_hashes.tolist()]

    # --- Dumps --------------------------------------------------------------------------------------------------------

    @property
    def are_names_complete(self) -> bool:
        """Return whether `dump_names` yields all blocks."""
        has_aliases = bool((self._count_rows()[:, 1] >= ALIASES).any())
        return not has_aliases and not any(map(self.holds, self._scopes))

    def dump_names(self) -> Iterator[Names]:
        """Yield the names of all blocks that have exactly one name and no adapter or salt, some at a time.

        A name that is there from beginning to end is yielded once.
        """
        counts = self._count_rows()
        left_out = np.concatenate((counts[counts[:, 1] >= ALIASES, 0], np.array([*self._scopes], np.uint64)))
        for tier in Tier:
            for names in self._held_names(tier):
                is_dumped = ~np.isin(names.blocks, left_out)
                yield Names(tier, names.engine_hashes[is_dumped], names.blocks[is_dumped])

    def dump_copies(self) -> bytes:
        """Return the engine hashes that have a count: each hash, its tier or group, and the count, as u64."""
        counts = self._count_rows()
        return counts[counts[:, 1] < ALIASES].astype("<u8", copy=False).tobytes()

    def load_copies(self, copies: bytes) -> None:
        """Load the counts of another process's `dump_copies`; `load_names` comes after."""
        rows = np.frombuffer(copies[: len(copies) // 24 * 24], "<u8").astype(np.uint64).reshape(-1, 3)
        rows[:, 2] = np.minimum(rows[:, 2], _MAX_COPIES)
        self._set_counts(rows[rows[:, 1] < ALIASES])

    def load_names(self, names: Names) -> None:
        """Load names of blocks that the index holds already, put there by `RadixIndex.restore`."""
        is_held = self._are_held(names.tier, names.blocks)
        self.names.put(names.engine_hashes[is_held], names.blocks[is_held], names.tier)
        if names.tier is Tier.GPU:
            self._change(compiled.STORE_IN_COMPANION, 0, names.engine_hashes[is_held])

    # --- Inside -------------------------------------------------------------------------------------------------------

    def _change(
        self,
        operation: int,
        place: int,
        engine_hashes: NDArray[np.uint64],
        blocks: NDArray[np.uint64] = _NO_BLOCKS,
        parent: int = 0,
    ) -> None:
        """Apply one operation to each of the hashes, see `compiled.change`."""
        arrays = self.sync()
        with self._index.writing:
            compiled.change(arrays, operation, place, engine_hashes, blocks, parent)
        self._index.keep_to_cap()

    def _record_scope(self, block_hashes: Sequence[int], scope: Scope) -> None:
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

    def _set_counts(self, rows: NDArray[np.uint64]) -> None:
        """Set counts, `[num_rows, 3]`: name, place, number; 0 removes a count."""
        names, places, numbers = rows.T
        values = np.where(numbers, numbers << np.uint64(PLACE_BITS) | places, np.uint64(0))
        self.counts.put(names ^ places * np.uint64(compiled.STEP), values)

    def _count_rows(self) -> NDArray[np.uint64]:
        """Return all counts as `[num_rows, 3]`: name, place, number."""
        rows = [self.counts.rows(number) for number in range(len(self.counts.segments))]
        keys, values = (np.concatenate(column) for column in zip(*rows, strict=True))
        places = values % np.uint64(1 << PLACE_BITS)
        return np.stack((keys ^ places * np.uint64(compiled.STEP), places, values >> np.uint64(PLACE_BITS)), axis=1)

    def _held_names(self, tier: Tier) -> Iterator[Names]:
        """Yield the names of the blocks that are held in a tier, some at a time."""
        for number in range(tier << _SEGMENT_BITS, tier + 1 << _SEGMENT_BITS):
            engine_hashes, blocks = self.names.rows(number)
            for start in range(0, len(blocks), _NAMES_AT_ONCE):
                some = slice(start, start + _NAMES_AT_ONCE)
                is_held = self._are_held(tier, blocks[some])
                yield Names(tier, engine_hashes[some][is_held], blocks[some][is_held])

    def remove_stale_names(self) -> None:
        """Remove the next segment's names of evicted blocks, unless there are few more than after the last segment."""
        if len(self.names) <= self._max_names or not self._index.evicted_from(self._source):
            return
        engine_hashes, blocks = self.names.rows(self._next_segment)
        tier = self._next_segment >> _SEGMENT_BITS
        stale = engine_hashes[~self._are_held(tier, blocks)]
        self.names.put(stale, np.zeros_like(stale), tier)
        self._next_segment = (self._next_segment + 1) % len(self.names.segments)
        if self._next_segment == 0:
            self._max_names = max(_FEW_NAMES, len(self.names) * 3 // 2)

    def _are_held(self, tier: Tier | int, blocks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return compiled.are_held(self._index.core, self._index.segments, self.slot, tier, blocks)


def _key(name: int, place: int) -> int:
    return name ^ place * compiled.STEP % (1 << 64)


def _folded(engine_hashes: Iterable[EngineHash]) -> NDArray[np.uint64]:
    return np.array([*map(fold_hash, engine_hashes)], np.uint64)


class EngineRank:
    """Filters and normalises a rank's events one by one; records verdicts, by which compiled code treats the others."""

    def __init__(
        self, source: WorkerRank, block_size: int, index: RadixIndex, num_ahead: int = 0, has_full_reports: bool = False
    ) -> None:
        self._num_ahead, self._has_full_reports = num_ahead, has_full_reports
        self._source = source
        self._block_size = block_size
        self.residency = EngineResidency(index, source)
        """The rank's blocks in the index, and the engine's hashes for them."""
        self._reset()

    def admit(self, event: EngineEvent) -> None:
        self.is_new = False
        self.residency.record["is_offloading"] |= isinstance(event, EngineStored) and event.tier is not Tier.GPU
        if isinstance(event, EngineCleared):
            self._has_forgotten = event.tier is not None and self.is_offloading
        before, counts_copies = (self.filter.state, self.splitter.rules), self.residency.counts_copies
        self.residency.counts_copies &= not self.splitter.is_report(event)
        passes, group = self.splitter.admit(event, self._normaliser.normalise)
        self.residency.counts_copies = counts_copies
        if self._has_full_reports or before != (self.filter.state, self.splitter.rules):
            self._forget_verdicts()
        elif (
            isinstance(event, EngineStored | EngineRemoved)
            and (passes or group is not None or self.splitter.is_expressible)
            and not self.splitter.has_small_blocks(event)
        ):
            self._record_verdict(event, int(passes) if group is None else layout.OTHER_GROUPS + group)

    def clear(self) -> None:
        """Clear the rank's blocks and what is known of its groups: it restarted, or events were lost."""
        self.residency.clear()
        self._reset()

    @property
    def is_offloading(self) -> bool:
        """Return whether the rank ever stored a block in another tier than the GPU."""
        return bool(self.residency.record["is_offloading"][0])

    @property
    def is_inexact(self) -> bool:
        """Return whether some of what hits need is not known."""
        is_overfull = len(self.residency.counts) >= MAX_ROWS
        return is_overfull or self._has_forgotten or not self.splitter.is_expressible

    @property
    def is_dumpable(self) -> bool:
        """Return whether a dump has all that another process needs to continue from it."""
        return not self.is_inexact and not self.splitter.small and self.residency.are_names_complete

    def dump_copies(self) -> bytes:
        """Return the counts of `EngineResidency.dump_copies`, none if another process could not go on with them."""
        return b"" if self.splitter.small else self.residency.dump_copies()

    def resume(
        self, state: FilterState, others: Mapping[int, GroupRule], copies: bytes, *, is_offloading: bool
    ) -> None:
        self.residency.record["is_offloading"] = is_offloading
        self.residency.load_copies(copies)
        self.splitter.resume(state, others)
        self._forget_verdicts()

    def _reset(self) -> None:
        self.is_new = True
        """Whether no event was applied yet."""
        self._has_forgotten = False  # blocks beside the GPU that the engine may still hold, cleared with those on it
        self.filter = WindowFilter(self._source.rank)
        options = self._num_ahead, self._has_full_reports
        self.splitter = GroupSplitter(self.filter, self._block_size, self.residency, *options)
        self._forget_verdicts()
        # Partial blocks are never published, so nothing here depends on whether they are remembered.
        self._normaliser = Normaliser(self._block_size, rank=self._source.rank, holdings=self.residency)

    def _forget_verdicts(self) -> None:
        """Forget all verdicts: the filter, or the set of other groups, has changed."""
        self.residency.record["num_verdicts"] = 0

    def _record_verdict(self, event: EngineStored | EngineRemoved, verdict: int) -> None:
        """Let compiled code treat every event of the same type, group and window like this one."""
        key, record = _verdict_key(event), self.residency.record[0]
        num_verdicts = int(record["num_verdicts"])
        if key is None or key in record["keys"][:num_verdicts]:
            return
        place = num_verdicts % layout.NUM_VERDICTS  # of which there are never so many
        record["keys"][place], record["passes"][place], record["num_verdicts"] = key, verdict, place + 1


def _verdict_key(event: EngineStored | EngineRemoved) -> int | None:
    """Return the key of an event's verdict, None for an event that compiled code leaves to Python."""
    group = 0 if event.group is None else event.group + 1
    if isinstance(event.window, UnsizedWindow):
        window = {FULL: layout.FULL_WINDOW, STATE: layout.STATE_WINDOW, UNKNOWN: 0}[event.window]
    elif event.window < layout.STATE_WINDOW:
        window = event.window
    else:
        return None
    return isinstance(event, EngineRemoved) | group << 1 | window << 32 if group <= layout.MAX_GROUP else None
