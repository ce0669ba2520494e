"""The index: which rank holds which leading blocks of a prompt, exactly and now."""

from __future__ import annotations

import math
import mmap
import operator
import secrets
import struct
from collections.abc import Generator, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import Cleared, Event, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.types import GroupRule, Holding
from kvist.radix._slots import SlotTable
from kvist.radix.compiled import blocks, housekeeping, layout, matching
from kvist.radix.compiled.layout import Records
from kvist.radix.memory import CORE_BYTES, Sweeper, index_bytes, reserved, reserved_array, segment_bits_for
from kvist.radix.snapshot import begin_snapshot
from kvist.radix.values import ApplyResult, Match, Residencies, Statistics

_U64_END = 1 << 64
_OPERATION = struct.Struct("=4Q")
_MAX_SEGMENT_BITS = 12
_EPOCHS_A_CAP = 64


class _Writing:
    """Makes the generation odd while somebody writes, so that others who read the same memory can tell."""

    def __init__(self, core: Records) -> None:
        self._generation = core["generation"].data

    def __enter__(self) -> None:
        self._generation[0] += 1

    def __exit__(self, *_: object) -> None:
        self._generation[0] += 1


class RadixIndex:
    """Scores every rank of a fleet by the number of leading blocks it holds now, exactly.

    Synchronous, for one thread, without I/O. A call costs time in proportion to the blocks it is given; growth and
    sweeping happen one segment at a time, so that no call stops its caller for more than a few milliseconds.
    Hashes are canonical sequence hashes (`kvist.events.hashing`): each names one block below one parent.
    """

    def __init__(
        self,
        *,
        max_blocks: int | None = None,
        segment_bits: int | None = None,
        seed: int | None = None,
        memory: mmap.mmap | None = None,
    ) -> None:
        """Make an empty index whose table has `2**segment_bits` segments, each with room for some 370,000 blocks.

        By default there are 256 segments, and more if `max_blocks` needs them; when there is no room for another block,
        methods that store raise MemoryError.

        Beyond `max_blocks` distinct blocks, those that were matched or stored about least recently are evicted, whoever
        holds them. Matches count as uses once the index is half full: until then they cost what they cost without a
        cap, a fifth. Time is counted in epochs, each of which ends once as many blocks were used as a 64th of the cap.

        `seed` fixes the odd number that hashes are multiplied with; by default it is secret, so that nobody who chooses
        prompts can choose where their blocks land.

        All of the index but what only its one writer needs lies in `memory`: shared memory of
        `index_bytes(segment_bits)` zeros (`kvist.radix.memory`), by default private.
        """
        if max_blocks is not None and max_blocks < 1:
            raise InvalidValueError("max_blocks", max_blocks, "1 or more, or None")
        if segment_bits is None:
            segment_bits = segment_bits_for(max_blocks or 0)
        if not 0 <= segment_bits <= _MAX_SEGMENT_BITS:
            raise InvalidValueError("segment_bits", segment_bits, f"0 to {_MAX_SEGMENT_BITS}")
        advice = mmap.MADV_DONTNEED if memory is None else mmap.MADV_REMOVE
        memory = reserved(index_bytes(segment_bits)) if memory is None else memory
        self.core: Records = np.frombuffer(memory, layout.CORE, 1)
        self.segments: Records = np.frombuffer(memory, layout.SEGMENT, 1 << segment_bits, CORE_BYTES)
        self._core = self.core[0]
        multiplier = (secrets.randbits(64) if seed is None else seed * 2 + 0x9E37_79B9_7F4A_7C15) % _U64_END | 1
        self._core["table"]["multiplier"], self._core["table"]["bits"] = multiplier, segment_bits
        self._core["last_stamp"] = self._core["end_of_sets"] = 1
        self.writing = _Writing(self.core)
        self._slots = SlotTable(self._core)
        self._query = reserved_array(layout.QUERY, 1)
        self._holder_ids, self._holder_depths = self._query["holder_ids"][0], self._query["holder_depths"][0]
        self._core["max_blocks"] = max_blocks or 0
        self._num_rows = self.core["table"]["num_rows"].data
        self._half_full = max_blocks / 2 if max_blocks else math.inf  # until then, what to evict first is open
        self._sweeper = Sweeper(self.core, self.segments, self._slots, memory, advice)
        # A process's first call takes Numba 10 ms: not when somebody waits.
        matching.match(self.core, self.segments, self._query, np.empty(0, np.uint64), 0)

    # --- Events -----------------------------------------------------------------------------------------------------

    def store(self, source: WorkerRank, tier: Tier, parent_hash: int | None, hashes: NDArray[np.uint64]) -> ApplyResult:
        """Record that a rank now holds a chain of blocks in a tier; a refused chain changes nothing.

        The parent must be held by that rank in some tier (None: the chain begins at the root). Storing what is held
        already is no error.
        """
        return self.apply(source, (Stored(_contiguous(hashes).tobytes(), parent_hash, tier),))

    def remove(self, source: WorkerRank, tier: Tier, hashes: NDArray[np.uint64]) -> ApplyResult:
        """Record that a rank no longer holds blocks in a tier, in any order."""
        return self.apply(source, (Removed(_contiguous(hashes).tobytes(), tier),))

    def apply(self, source: WorkerRank, events: Iterable[Event]) -> ApplyResult:
        """Apply a batch's events in order, as `store`, `remove` and `clear` would; heartbeats are passed over.

        Raises InvalidValueError, with nothing applied, for what no decoder lets through: a parent that is no u64, half
        a hash.
        """
        runs: list[tuple[list[bytes], list[bytes]]] = [([], [])]
        for event in events:
            if isinstance(event, Cleared):
                runs.append(([], []))
            elif not isinstance(event, Heartbeat):
                _encode(event, *runs[-1])
        result = ApplyResult()
        for number, (operations, parts) in enumerate(runs):
            if number:
                self.clear(*source)
            if operations:
                records = np.frombuffer(b"".join(operations), layout.OPERATION)
                hashes = np.frombuffer(b"".join(parts), np.uint64)
                slot = self._slots.get_or_add(source)
                with self.writing:
                    counts = blocks.apply(self.core, self.segments, slot, records, hashes)
                result = ApplyResult(*map(operator.add, result, counts))
        self.keep_to_cap()
        return result

    def set_groups(self, source: WorkerRank, rules: Sequence[GroupRule]) -> None:
        """Let a match of a rank be the longest hit that all its layer groups allow: the one that `source` holds first.

        The blocks of the others are held by `source.companion`, those of each kind in a tier of its own. The rules
        apply until the rank is cleared. A companion is in no match. Raises InvalidValueError for more than 5 rules.
        """
        if not 1 <= len(rules) <= 1 + layout.NUM_KINDS:
            raise InvalidValueError("rules", rules, f"1 to {1 + layout.NUM_KINDS} of them")
        slot, companion = self._slots.get_or_add(source), self._slots.get_or_add(source.companion)
        rule, companion_rule = np.zeros(2, layout.RULE)
        rule["role"], rule["companion"] = layout.GROUPED, companion
        rule["step"] = math.lcm(*[each.stride for each in rules])
        for field, values in (
            ("needed", [each.num_needed for each in rules]),
            ("stride", [each.stride for each in rules]),
            ("ahead", [each.num_ahead * each.stride for each in rules]),
        ):
            rule[field][: len(rules)] = values
        companion_rule["role"], companion_rule["step"] = layout.COMPANION, 1
        with self.writing:
            self._slots.set_rule(companion, companion_rule)
            self._slots.set_rule(slot, rule)

    def clear(self, worker: str, rank: int | None = None) -> None:
        """Record that a rank, or every rank of a worker, holds nothing any more; at once, whatever it held."""
        for source in self._sources(worker, rank):
            self._retire(source)
            self._slots.get_or_add(source)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and all its ranks, whatever they held. A sweep gives the memory back."""
        for source in self._sources(worker, None):
            self._retire(source)

    # --- Queries ----------------------------------------------------------------------------------------------------

    def match(self, hashes: NDArray[np.uint64], num_usable: int | None = None) -> Match:
        """Return, for each rank that holds the first block, how many leading blocks it holds now, by tier.

        Only the first `num_usable` blocks count, if given. Those behind are needed for engines that compute a hit's
        last block again: one may be the block of a prompt's last token. Raises InvalidValueError for more than all.
        """
        num_usable = len(hashes) if num_usable is None else num_usable
        if not 0 <= num_usable <= len(hashes):
            raise InvalidValueError("num_usable", num_usable, f"0 to {len(hashes)}")
        try:
            num_holders = matching.match(self.core, self.segments, self._query, hashes, num_usable)
        except TypeError:  # another type or layout than compiled code takes
            hashes = _contiguous(hashes)
            num_holders = matching.match(self.core, self.segments, self._query, hashes, num_usable)
        holder_ids, depths = self._holder_ids[:num_holders].copy(), self._holder_depths[:num_holders].copy()
        if num_holders and self._num_rows[0] >= self._half_full:
            self.touch(hashes)
        return Match(self._slots.ranks, holder_ids, depths, num_usable)

    def touch(self, hashes: NDArray[np.uint64]) -> None:
        """Record that blocks are used now, up to the first that nobody holds, so that others are evicted first."""
        if self._core["max_blocks"]:
            with self.writing:
                matching.touch(self.core, self.segments, hashes)
            self.keep_to_cap()

    def ranks(self) -> list[WorkerRank]:
        return [*self._slots.by_rank]

    def slot_of(self, source: WorkerRank) -> int | None:
        """Return the slot that stands for a rank until it is cleared or removed, None if it has none."""
        return self._slots.by_rank.get(source)

    def clearing_of(self, source: WorkerRank) -> int | None:
        """Return a number that only this rank has, up to its next clearing; None while it has no slot."""
        slot = self.slot_of(source)
        return None if slot is None else int(self._slots.table[slot]["clearing"])

    @property
    def num_clearings(self) -> int:
        """Return a number that changes whenever a rank comes or is cleared."""
        return self._slots.num_clearings

    def digest(self, source: WorkerRank) -> Holding:
        """Return what a publisher that holds the same would put in its heartbeat; O(1)."""
        slot = self.slot_of(source)
        if slot is None:
            return Holding(0, 0)
        entry = self._slots.table[slot]
        return Holding(int(entry["num_held"]), int(entry["digest"]))

    def evicted_from(self, source: WorkerRank) -> bool:
        """Return whether blocks of a rank were evicted since it was last cleared, so that its digest is of no use."""
        slot = self.slot_of(source)
        return slot is not None and bool(self._slots.table[slot]["has_lost"])

    def statistics(self) -> Statistics:
        core = self._core
        return Statistics(
            num_blocks=int(core["table"]["num_rows"]),
            num_held=int(self._slots.table["num_held"][: len(self._slots.ranks)].sum()),
            num_ranks=len(self._slots.by_rank),
            num_retired=int(core["num_retired"]),
            num_evicted=int(core["num_evicted"]),
            num_sets=int(core["num_sets"]),
            size_bytes=self._sweeper.size_bytes,
        )

    # --- Housekeeping -----------------------------------------------------------------------------------------------

    def sweep(self, max_rows: int = 50_000) -> bool:
        """Do a bounded slice of housekeeping, of about `max_rows` rows; return whether more is left to do.

        It frees the blocks of ranks that are gone, then memory that is no longer needed. Call it from the host's loop,
        now and then while it returns False.
        """
        with self.writing:
            return self._sweeper.sweep(max_rows)

    # --- Snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, max_blocks_per_chunk: int = 4096) -> Generator[Residencies]:
        """Return an iterator over all that is held now, in no order; later changes do not show.

        One snapshot at a time. It takes up to 16 bytes a block until it is read to its end, closed or forgotten.
        """
        if max_blocks_per_chunk < 1:
            raise InvalidValueError("max_blocks_per_chunk", max_blocks_per_chunk, "1 or more")
        if self._core["captured_stamp"]:
            raise InvalidValueError("snapshot", "a second one", "the open one to be read to its end or closed first")
        with self.writing:
            on_closed = self._sweeper.on_snapshot_closed
            return begin_snapshot(self.core, self.segments, self._slots, max_blocks_per_chunk, on_closed)

    def restore(self, residencies: Residencies) -> None:
        """Record that ranks hold these blocks, too, for instance a part of a snapshot; parts may come in any order."""
        ranks, hashes, depths, members = residencies
        rank_idx, slots = members.astype(np.int64) >> 4, np.zeros(len(ranks), np.uint64)
        for idx in np.unique(rank_idx).tolist():
            slots[idx] = self._slots.get_or_add(ranks[idx])
        words = depths.astype(np.uint64), slots[rank_idx] << np.uint64(4) | members & np.uint64(15)
        with self.writing:
            blocks.restore(self.core, self.segments, hashes, *words)
        self.keep_to_cap()

    # --- For compiled code that builds on the index's own -------------------------------------------------------------

    def keep_to_cap(self) -> None:
        """Evict blocks beyond the cap, if there is one; to be called after compiled code stored or touched blocks."""
        core = self._core
        max_blocks = int(core["max_blocks"])
        if not max_blocks:
            return
        if core["num_used"] * _EPOCHS_A_CAP >= max_blocks:
            core["num_used"] = 0
            core["epoch"] = core["epoch"] + (1 << layout.EPOCH_SHIFT) & blocks.EPOCH_MARKS
        num_excess = int(core["table"]["num_rows"]) - max_blocks
        if num_excess > 0:
            with self.writing:
                housekeeping.evict(self.core, self.segments, num_excess)

    # --- Inside -----------------------------------------------------------------------------------------------------

    def _sources(self, worker: str, rank: int | None) -> list[WorkerRank]:
        return [source for source in self._slots.ranks_of.get(worker, ()) if rank in (None, source.rank)]

    def _retire(self, source: WorkerRank) -> None:
        with self.writing:
            slot = self._slots.retire(source)
        if slot is not None:
            self._sweeper.retired.append(slot)


def _encode(event: Stored | Removed, operations: list[bytes], parts: list[bytes]) -> None:
    """Append an event to operations, as `layout.OPERATION` has them, and to their hashes."""
    if isinstance(event, Stored):
        kind, parent = (layout.STORE_ROOT, 0) if event.parent is None else (layout.STORE_CHILD, event.parent)
    elif isinstance(event, Removed):
        kind, parent = layout.REMOVE, 0
    else:
        raise InvalidValueError("events", event, "an event")
    if len(event.hashes) % 8:
        raise InvalidValueError("hashes", event.hashes, "a multiple of 8 bytes")
    if not 0 <= event.tier < len(Tier):
        raise InvalidValueError("events", event, f"a tier below {len(Tier)}")
    try:
        operations.append(_OPERATION.pack(kind, event.tier, parent, len(event.hashes) // 8))
    except struct.error:
        raise InvalidValueError("parent", parent, "an unsigned 64-bit integer or None") from None
    parts.append(event.hashes)


def _contiguous(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes as compiled code takes them."""
    array = np.asarray(hashes)
    if array.dtype != np.uint64 or array.ndim != 1:
        raise InvalidValueError("hashes", hashes, "a one-dimensional array of uint64")
    return np.require(array, requirements=("C", "A"))
