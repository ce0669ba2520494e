"""The index: which rank holds which leading blocks of a prompt, exactly and now."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import Event, Removed, Stored, Tier, WorkerRank
from kvist.radix import compiled
from kvist.radix._cap import Cap
from kvist.radix._invariants import check
from kvist.radix._sets import SetArena
from kvist.radix._slots import SlotTable
from kvist.radix._snapshot import Snapshot, member_rows
from kvist.radix._spill import Leftovers
from kvist.radix._sweeper import Sweeper
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap
from kvist.radix.tables import INDEX, SegmentTable, signed
from kvist.radix.values import ApplyResult, Match, RankDigest, SnapshotChunk, Statistics, StoreResult, StoreStatus

_U64_END = 1 << 64
_HASH_BYTES = 8
_PARENT_NOT_FOUND = StoreResult(StoreStatus.PARENT_BLOCK_NOT_FOUND, 0)
_INVALID = StoreResult(StoreStatus.INVALID_BLOCK_SEQUENCE, 0)
_COUNTERS = [field >> 3 for field in (layout.NUM_APPLIED, layout.NUM_NOT_FOUND, layout.NUM_ORPHANS, layout.NUM_INVALID)]
_ENCODER = msgspec.msgpack.Encoder()
_HASH_FORMAT: Any = np.dtype(np.uint64).char


class RadixIndex:
    """Scores every rank of a fleet by the number of leading blocks it holds now, exactly.

    Synchronous, for one thread, without I/O but for what changes while a snapshot is open. A call costs time in
    proportion to the blocks it is given; growth and sweeping happen one segment at a time, so that no call stops its
    caller for more than a few milliseconds.
    Hashes are canonical sequence hashes (`kvist.events.hashing`): each names one block below one parent.
    """

    def __init__(
        self,
        *,
        max_blocks: int | None = None,
        initial_blocks: int = 0,
        segment_bits: int = 8,
        seed: int | None = None,
    ) -> None:
        """Reserve room for `initial_blocks`; the table is cut into `2**segment_bits` segments.

        Beyond `max_blocks` distinct blocks, the least recently matched or stored are evicted, whoever holds them: a
        sixteenth of the cap or so at a time, in slices of the calls that store. One large call may go beyond the cap;
        those after it come back to it.

        `seed` fixes the odd number that hashes are multiplied with; by default it is secret, so that nobody who chooses
        prompts can choose where their blocks land.
        """
        _check_sizes(max_blocks, initial_blocks, segment_bits)
        self._heap = Heap()
        self._address = self._heap.allocate(layout.CONTROL_BYTES)
        self._control = control = self._heap.view(self._address).cast("q")
        multiplier = (secrets.randbits(64) if seed is None else seed * 2 + 0x9E37_79B9_7F4A_7C15) % _U64_END | 1
        control[layout.INVERSE >> 3] = signed(pow(multiplier, -1, _U64_END))
        self._segments = SegmentTable(
            self._heap, control, self._address, INDEX, bits=segment_bits, multiplier=multiplier
        )
        self._segments.reserve(initial_blocks)
        self._sets = SetArena(self._heap, control)
        self._slots = SlotTable(self._heap, control)
        self._input_address = self._heap.allocate(64 * 1024)
        self._operations_address = self._heap.allocate(4096)
        self._place_input()
        self._cap = None if max_blocks is None else Cap(self._heap, control, max_blocks)
        self._sweeper = Sweeper(self._heap, self._address, self._segments, self._sets, self._slots)
        self._snapshot: weakref.ref[Snapshot] | None = None
        # A process's first call takes 10 ms, in which Numba makes the acquaintance of arrays: not when somebody waits.
        compiled.match(self._address, np.empty(0, np.uint64))

    # --- Events -----------------------------------------------------------------------------------------------------

    def store(self, source: WorkerRank, tier: Tier, parent_hash: int | None, hashes: NDArray[np.uint64]) -> StoreResult:
        """Note that a rank now holds a chain of blocks in a tier; a refused chain changes nothing.

        The parent must be held by that rank in some tier (None: the chain begins at the root). Storing what is held
        already is no error.
        """
        if parent_hash is not None and not 0 <= parent_hash < _U64_END:
            raise InvalidValueError("parent_hash", parent_hash, "an unsigned 64-bit integer or None")
        num_hashes = self._load(hashes)
        slot = self._slots.get(source)
        is_new = slot is None
        if slot is None:
            slot = self._slots.add(source)
        control, address, start = self._control, self._address, 0
        is_child, parent = (0, 0) if parent_hash is None else (1, signed(parent_hash))
        control[layout.NUM_APPLIED >> 3] = 0
        while True:
            result = compiled.store(address, slot, int(tier), is_child, parent, num_hashes, start)
            if result != layout.NEEDS_HELP:
                break
            self.help_out()
            start = control[layout.RESUME >> 3]
        if result == 0:
            num_stored = control[layout.NUM_APPLIED >> 3]
            self.keep_to_cap()
            return StoreResult(StoreStatus.OK, num_stored)
        if is_new:
            self._slots.remove(source)
        return _PARENT_NOT_FOUND if result == layout.ORPHAN else _INVALID

    def remove(self, source: WorkerRank, tier: Tier, hashes: NDArray[np.uint64]) -> int:
        """Note that a rank no longer holds blocks in a tier, in any order; return how many of them it did not hold."""
        num_hashes = self._load(hashes)
        slot = self._slots.get(source)
        if slot is None:
            return num_hashes
        control, start = self._control, 0
        control[layout.NUM_NOT_FOUND >> 3] = 0
        while compiled.remove(self._address, slot, int(tier), num_hashes, start) == layout.NEEDS_HELP:
            self.help_out()
            start = control[layout.RESUME >> 3]
        return control[layout.NUM_NOT_FOUND >> 3]

    def apply(self, source: WorkerRank, events: Iterable[Event]) -> ApplyResult:
        """Apply a batch's events in order, as `store`, `remove` and `clear` would; heartbeats are passed over.

        The fast way in: the batch is encoded at once and read by compiled code, so that no event costs Python anything.
        Raises InvalidValueError, with nothing applied, for what no decoder lets through: a parent that is no u64, half
        a hash.
        """
        try:
            message = _ENCODER.encode(events if isinstance(events, list | tuple) else [*events])
        except (OverflowError, TypeError):
            raise _unreadable(events) from None
        if len(message) > len(self._input_bytes) or len(message) * 4 > self._operations_bytes:
            self._enlarge_input(len(message), len(message) * 4)
        self._input_bytes[: len(message)] = message
        num_operations = compiled.read_events(self._address)
        if num_operations <= 0:
            if num_operations:
                raise _unreadable(events)
            return ApplyResult()
        slot = self._slots.get(source)
        if slot is None:
            slot = self._slots.add(source)
        control, first, start = self._control, 0, 0
        for field in _COUNTERS:
            control[field] = 0
        while result := compiled.apply(self._address, slot, num_operations, first, start):
            if result == layout.NEEDS_CLEAR:
                self.clear(source.worker, source.rank)
                slot = self._slots.get(source)
            else:
                self.help_out()
            first, start = control[layout.RESUME_OPERATION >> 3], control[layout.RESUME >> 3]
        self.keep_to_cap()
        return ApplyResult(*[control[field] for field in _COUNTERS])

    def clear(self, worker: str, rank: int | None = None) -> None:
        """Note that a rank, or every rank of a worker, holds nothing any more; at once, whatever it held."""
        for source in self._sources(worker, rank):
            self._retire(source)
            self._slots.add(source)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and all its ranks; at once, whatever they held. A sweep gives the memory back."""
        for source in self._sources(worker, None):
            self._retire(source)

    # --- Queries ----------------------------------------------------------------------------------------------------

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        """Return, for each rank that holds the first block, how many leading blocks it holds now, by tier."""
        try:
            holder_ids, depths = compiled.match(self._address, hashes)
        except TypeError:  # not as compiled code takes them
            num_hashes = self._load(hashes)
            holder_ids, depths = compiled.match(self._address, np.frombuffer(self._input_bytes, np.uint64, num_hashes))
        if self._cap is not None and self._cap.is_half_full:
            compiled.touch(self._address, self._load(hashes))
            self._cap.keep(self.help_out)
        return Match(self._slots.ranks, holder_ids, depths, len(hashes))

    def ranks(self) -> list[WorkerRank]:
        """Return the ranks the index knows."""
        return [source for source, _ in self._slots.items()]

    def digest(self, source: WorkerRank) -> RankDigest:
        """Return what a publisher that holds the same would put in its heartbeat; O(1)."""
        slot = self._slots.get(source)
        if slot is None:
            return RankDigest(0, 0)
        entry = self._slots.table()[slot]
        return RankDigest(int(entry["num_held"]), int(entry["digest"]))

    def evicted_from(self, source: WorkerRank) -> bool:
        """Tell whether blocks of a rank were evicted since it was last cleared, so that its digest tells nothing."""
        slot = self._slots.get(source)
        return slot is not None and bool(self._slots.table()["has_lost"][slot])

    def statistics(self) -> Statistics:
        """Return the sizes and counters of this moment."""
        control = self._control
        return Statistics(
            num_blocks=control[layout.NUM_ROWS >> 3],
            num_held=int(self._slots.table()["num_held"].sum()),
            num_ranks=len(self._slots.items()),
            num_retired=control[layout.NUM_RETIRED >> 3],
            num_evicted=control[layout.NUM_EVICTED >> 3],
            num_sets=control[layout.NUM_SETS >> 3],
            size_bytes=self._heap.size_bytes,
            peak_bytes=self._heap.peak_bytes,
        )

    @property
    def num_evicted(self) -> int:
        """Return how many distinct blocks went because of the cap."""
        num_evicted: int = self._control[layout.NUM_EVICTED >> 3]
        return num_evicted

    def check_invariants(self) -> None:
        """Raise AssertionError unless all of the index's structure is as documented; O(index), for tests."""
        snapshot = self._open_snapshot()
        loose_rows = [*self._sweeper.leftovers, *([] if snapshot is None else [snapshot.untold])]
        set_ids = (ids for rows in loose_rows for ids in rows.set_ids())
        check(self._heap, self._control, self._segments, self._sets, self._slots, set_ids)

    # --- Housekeeping -----------------------------------------------------------------------------------------------

    def sweep(self, max_rows: int = 50_000) -> bool:
        """Do a bounded slice of housekeeping, of about `max_rows` rows; return whether more is left to do.

        It frees the blocks of ranks that are gone, then memory that is no longer needed. Call it from the host's loop,
        now and then while it returns False.
        """
        has_snapshot = self._open_snapshot() is not None
        return self._sweeper.sweep(max_rows, self._capture, self.help_out, has_snapshot=has_snapshot)

    # --- Snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, max_blocks_per_chunk: int = 4096) -> Snapshot:
        """Return an iterator over all that is held now, parents before children; later changes do not show.

        One snapshot at a time. While it is open, the first change to each segment copies what is still to be told of
        it into a temporary file; where that fails, the snapshot is lost and says so, and nothing else. Blocks come by
        ascending depth, which is wrong only for what corrupt peers stored below a wrong parent.
        """
        if max_blocks_per_chunk < 1:
            raise InvalidValueError("max_blocks_per_chunk", max_blocks_per_chunk, "1 or more")
        if self._open_snapshot() is not None:
            raise InvalidValueError("snapshot", "a second one", "the open one to be read to its end or closed first")
        snapshot = Snapshot(
            self._heap, self._control, self._segments, self._slots, max_blocks_per_chunk, self._forget_snapshot
        )
        self._snapshot = weakref.ref(snapshot)
        return snapshot

    def restore(self, chunk: SnapshotChunk) -> None:
        """Hold what a chunk of a snapshot holds, beside what is held already; chunks may come in any order."""
        known = [(source, self._slots.get(source)) for source in chunk.ranks]
        slots = [self._slots.add(source) if slot is None else slot for source, slot in known]
        rows = member_rows(chunk, np.array(slots, np.int64))
        num_rows, start = len(rows), 0
        self._load(rows.reshape(-1))
        while compiled.restore(self._address, num_rows, start) == layout.NEEDS_HELP:
            self.help_out()
            start = self._control[layout.RESUME >> 3]
        self.keep_to_cap()

    # --- For compiled code that builds on the index's own -------------------------------------------------------------

    @property
    def address(self) -> int:
        """Return the address of the control block, which functions of `kvist.radix.compiled` take."""
        return self._address

    @property
    def heap(self) -> Heap:
        """Return where the memory comes from; tables beside the index may share the scratch, which `sweep` frees."""
        return self._heap

    def slot_of(self, source: WorkerRank) -> int | None:
        """Return the slot that stands for a rank until it is cleared or forgotten, None while it has none."""
        return self._slots.get(source)

    def clearing_of(self, source: WorkerRank) -> int | None:
        """Return a number for the last clearing of a rank, another one each time; None while it has no slot."""
        return self._slots.giving_of(source)

    @property
    def ranks_by_slot(self) -> list[WorkerRank]:
        """Return the rank of each slot; a list that may grow, but is replaced once a slot stands for another rank."""
        return self._slots.ranks

    def reserve_operations(self, num_operations: int, num_hashes: int) -> None:
        """Have room for as many operations, with as many hashes in all, where `compiled.apply` reads them."""
        input_bytes, operations_bytes = num_hashes * _HASH_BYTES, num_operations * layout.OPERATION_BYTES
        if input_bytes > len(self._input_bytes) or operations_bytes > self._operations_bytes:
            self._enlarge_input(input_bytes, operations_bytes)

    def keep_to_cap(self) -> None:
        """Evict what is due; to be called after compiled code stored or touched blocks. Does nothing without a cap."""
        if self._cap is not None:
            self._cap.keep(self.help_out)

    def help_out(self) -> None:
        """Provide what compiled code asked for, when it said NEEDS_HELP, before it can go on."""
        kind, argument = self._control[layout.NEED_KIND >> 3], self._control[layout.NEED_ARG >> 3]
        if kind == layout.NEED_SEGMENT:
            self._segments.grow(argument)
        elif kind == layout.NEED_CAPTURE:
            self._capture(argument)
        else:
            self._sets.add_slab(argument)

    # --- Inside -----------------------------------------------------------------------------------------------------

    def _sources(self, worker: str, rank: int | None) -> list[WorkerRank]:
        if rank is not None:
            source = WorkerRank(worker, rank)
            return [] if self._slots.get(source) is None else [source]
        return self._slots.ranks_of(worker)

    def _retire(self, source: WorkerRank) -> None:
        slot = self._slots.remove(source)
        if slot is not None:
            self._sweeper.retired.append(slot)

    def _open_snapshot(self) -> Snapshot | None:
        return None if self._snapshot is None else self._snapshot()

    def _capture(self, index: int) -> None:
        """Let an open snapshot copy a segment that is about to change."""
        snapshot = self._open_snapshot()
        if snapshot is not None:
            snapshot.capture(index)

    def _forget_snapshot(self, untold: Leftovers) -> None:
        if untold:
            self._sweeper.leftovers.append(untold)
        else:
            untold.close()
        self._snapshot = None

    def _load(self, hashes: NDArray[np.uint64]) -> int:
        """Copy hashes to where compiled code reads them; return how many."""
        num_hashes = len(hashes)
        if num_hashes > len(self._input):
            self._enlarge_input(num_hashes * 8, 0)
        try:
            self._input[:num_hashes] = hashes  # a copy between buffers, which must agree in format
        except (TypeError, ValueError, NotImplementedError):
            raise InvalidValueError("hashes", hashes, "a one-dimensional array of uint64") from None
        return num_hashes

    def _enlarge_input(self, input_bytes: int, operations_bytes: int) -> None:
        self._input.release()
        self._input_bytes.release()
        for name, needed in (("_input_address", input_bytes), ("_operations_address", operations_bytes)):
            address: int = getattr(self, name)
            if needed > self._heap.capacity_bytes(address):
                setattr(self, name, self._heap.resize(address, 2 * needed))
        self._place_input()

    def _place_input(self) -> None:
        self._control[layout.INPUT >> 3] = self._input_address
        self._control[layout.OPERATIONS >> 3] = self._operations_address
        self._input_bytes = self._heap.view(self._input_address)
        self._input: Any = self._input_bytes.cast(_HASH_FORMAT)
        self._operations_bytes = self._heap.capacity_bytes(self._operations_address)


def _unreadable(events: Iterable[Event]) -> InvalidValueError:
    """Return an error that names the first event the compiled code cannot read."""
    for event in events:
        if isinstance(event, Stored) and event.parent is not None and not 0 <= event.parent < _U64_END:
            return InvalidValueError("parent", event.parent, "an unsigned 64-bit integer or None")
        if isinstance(event, Stored | Removed) and len(event.hashes) % 8:
            return InvalidValueError("hashes", event.hashes, "a multiple of 8 bytes")
    return InvalidValueError("events", events, "events, with fields of the types they are declared with")


def _check_sizes(max_blocks: int | None, initial_blocks: int, segment_bits: int) -> None:
    if not 0 <= segment_bits <= 20:
        raise InvalidValueError("segment_bits", segment_bits, "0 to 20")
    if max_blocks is not None and max_blocks < 1:
        raise InvalidValueError("max_blocks", max_blocks, "1 or more, or None")
    if initial_blocks < 0:
        raise InvalidValueError("initial_blocks", initial_blocks, "0 or more")
