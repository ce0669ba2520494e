"""The index: which rank holds which leading blocks of a prompt, exactly and now."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import Cleared, Event, Removed, Stored, Tier, WorkerRank
from kvist.radix import _compiled as compiled
from kvist.radix._invariants import check
from kvist.radix._memory import Heap
from kvist.radix._segments import SegmentTable
from kvist.radix._sets import SetArena
from kvist.radix._slots import SlotTable
from kvist.radix._snapshot import member_rows, take
from kvist.radix.values import ApplyResult, Match, RankDigest, SnapshotChunk, Statistics, StoreResult, StoreStatus

_U64_END = 1 << 64
_OPERATION = struct.Struct("=qqQq")
_PARENT_NOT_FOUND = StoreResult(StoreStatus.PARENT_BLOCK_NOT_FOUND, 0)
_INVALID = StoreResult(StoreStatus.INVALID_BLOCK_SEQUENCE, 0)
_COUNTERS = [
    field >> 3 for field in (compiled.NUM_APPLIED, compiled.NUM_NOT_FOUND, compiled.NUM_ORPHANS, compiled.NUM_INVALID)
]
_HASH_FORMAT: Any = np.dtype(np.uint64).char


class RadixIndex:
    """Scores every rank of a fleet by the number of leading blocks it holds now, exactly.

    Synchronous, without I/O, for one thread. A call costs time in proportion to the blocks it is given; growth and
    sweeping happen one segment at a time, so that no call stops its caller for more than a few milliseconds.
    Hashes are canonical sequence hashes (`kvist.events.hashing`): each names one block below one parent.
    """

    def __init__(self, *, initial_blocks: int = 0, segment_bits: int = 10, seed: int | None = None) -> None:
        """Reserve room for `initial_blocks`; the table is cut into `2**segment_bits` segments.

        `seed` fixes the odd number that hashes are multiplied with; by default it is secret, so that nobody who chooses
        prompts can choose where their blocks land.
        """
        if not 0 <= segment_bits <= 20:
            raise InvalidValueError("segment_bits", segment_bits, "0 to 20")
        if initial_blocks < 0:
            raise InvalidValueError("initial_blocks", initial_blocks, "0 or more")
        self._heap = Heap()
        self._address = self._heap.allocate(compiled.CONTROL_BYTES)
        self._control = control = self._heap.view(self._address).cast("q")
        control[compiled.SELF >> 3] = self._address
        multiplier = (secrets.randbits(64) if seed is None else seed * 2 + 0x9E37_79B9_7F4A_7C15) % _U64_END | 1
        for field, value in ((compiled.MULTIPLIER, multiplier), (compiled.INVERSE, pow(multiplier, -1, _U64_END))):
            control[field >> 3] = value - _U64_END if value >> 63 else value
        self._segments = SegmentTable(self._heap, control, segment_bits, initial_blocks)
        self._sets = SetArena(self._heap, control)
        self._slots = SlotTable(self._heap, control)
        self._input_address = self._heap.allocate(64 * 1024)
        self._operations_address = self._heap.allocate(4096)
        self._place_input()
        self._retired: list[int] = []  # waiting for a sweep to begin
        self._sweeping: list[int] = []  # free once the sweep under way is through
        self._cursor = 0

    # --- Events -----------------------------------------------------------------------------------------------------

    def store(self, source: WorkerRank, tier: Tier, parent_hash: int | None, hashes: NDArray[np.uint64]) -> StoreResult:
        """Note that a rank now holds a chain of blocks in a tier; a refused chain changes nothing.

        The parent must be held by that rank in some tier (None: the chain begins at the root). Storing what is held
        already is no error. A block known below another parent keeps the first one, and is counted.
        """
        if parent_hash is not None and not 0 <= parent_hash < _U64_END:
            raise InvalidValueError("parent_hash", parent_hash, "an unsigned 64-bit integer or None")
        num_hashes = self._load(hashes)
        slot = self._slots.get(source)
        is_new = slot is None
        if slot is None:
            slot = self._slots.add(source)
        control, address, is_child, start = self._control, self._address, parent_hash is not None, 0
        control[compiled.NUM_APPLIED >> 3] = 0
        while True:
            result = compiled.store(address, slot, tier, is_child, parent_hash or 0, num_hashes, start)
            if result != compiled.NEEDS_HELP:
                break
            self._help_out()
            start = control[compiled.RESUME >> 3]
        if result == 0:
            return StoreResult(StoreStatus.OK, control[compiled.NUM_APPLIED >> 3])
        if is_new:
            self._slots.remove(source)
        return _PARENT_NOT_FOUND if result == compiled.ORPHAN else _INVALID

    def remove(self, source: WorkerRank, tier: Tier, hashes: NDArray[np.uint64]) -> int:
        """Note that a rank no longer holds blocks in a tier, in any order; return how many of them it did not hold."""
        num_hashes = self._load(hashes)
        slot = self._slots.get(source)
        if slot is None:
            return num_hashes
        control, start = self._control, 0
        control[compiled.NUM_NOT_FOUND >> 3] = 0
        while compiled.remove(self._address, slot, tier, num_hashes, start) == compiled.NEEDS_HELP:
            self._help_out()
            start = control[compiled.RESUME >> 3]
        return control[compiled.NUM_NOT_FOUND >> 3]

    def apply(self, source: WorkerRank, events: Iterable[Event]) -> ApplyResult:
        """Apply a batch's events in order, as `store`, `remove` and `clear` would; heartbeats are passed over.

        The fast way in: one compiled call for all events between two `Cleared`.
        """
        result = _Tally()
        operations: list[tuple[int, int, int, int]] = []
        hashes: list[bytes] = []
        for event in events:
            if isinstance(event, Stored):
                parent, num_hashes = event.parent, len(event.hashes) // 8
                if len(event.hashes) % 8 or not (parent is None or 0 <= parent < _U64_END):
                    result.num_invalid += 1
                    continue
                kind = compiled.STORE_ROOT if parent is None else compiled.STORE_CHILD
                operations.append((kind, event.tier, parent or 0, num_hashes))
                hashes.append(event.hashes)
            elif isinstance(event, Removed):
                operations.append((compiled.REMOVE, event.tier, 0, len(event.hashes) // 8))
                hashes.append(event.hashes[: len(event.hashes) // 8 * 8])
            elif isinstance(event, Cleared):
                self._apply(source, operations, hashes, result)
                self.clear(source.worker, source.rank)
                operations, hashes = [], []
        self._apply(source, operations, hashes, result)
        return ApplyResult(result.num_stored, result.num_not_found, result.num_parent_not_found, result.num_invalid)

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
        num_hashes = self._load(hashes)
        num_rows = compiled.match(self._address, num_hashes)
        return Match(self._slots.ranks, bytes(self._slots.output[: num_rows * 20]), num_hashes)

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

    def statistics(self) -> Statistics:
        """Return the sizes and counters of this moment."""
        control = self._control
        return Statistics(
            num_blocks=control[compiled.NUM_ROWS >> 3],
            num_held=int(self._slots.table()["num_held"].sum()),
            num_ranks=len(self._slots.items()),
            num_retired=control[compiled.NUM_RETIRED >> 3],
            num_sets=control[compiled.NUM_SETS >> 3],
            num_parent_conflicts=control[compiled.NUM_CONFLICTS >> 3],
            size_bytes=self._heap.size_bytes,
            peak_bytes=self._heap.peak_bytes,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless all of the index's structure is as documented; O(index), for tests."""
        check(self._heap, self._control, self._segments, self._sets, self._slots)

    # --- Housekeeping -----------------------------------------------------------------------------------------------

    def sweep(self, max_rows: int = 50_000) -> bool:
        """Do a bounded slice of housekeeping, of about `max_rows` rows; return whether more is left to do.

        It frees the blocks of ranks that are gone, then memory that is no longer needed. Call it from the host's loop,
        now and then while it returns False.
        """
        num_rows = 0
        while num_rows < max_rows and (self._sweeping or self._retired):
            if not self._sweeping:
                self._sweeping, self._retired, self._cursor = self._retired, [], 0
            num_rows += 1 + int(self._segments.directory["rows"][self._cursor])
            self._segments.purge(self._cursor, self._help_out)
            self._cursor += 1
            if self._cursor == self._segments.num_segments:
                self._slots.free_swept(self._sweeping)
                self._sweeping = []
        if num_rows < max_rows:
            self._sets.release_spare()
        shrinkable = self._segments.shrinkable() if num_rows < max_rows else []
        while shrinkable and num_rows < max_rows:
            index = shrinkable.pop()
            num_rows += 1 + int(self._segments.directory["rows"][index])
            self._segments.shrink(index)
        return bool(num_rows >= max_rows or self._sweeping or self._retired or self._sets.has_spare_buckets)

    # --- Snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, max_blocks_per_chunk: int = 65_536) -> Iterator[SnapshotChunk]:
        """Yield all that is held at the time of the call, parents before children; later changes do not show."""
        return take(self._heap, self._control, self._segments, self._slots, max_blocks_per_chunk)

    def restore(self, chunk: SnapshotChunk) -> None:
        """Hold what a chunk of a snapshot holds, beside what is held already; chunks may come in any order."""
        known = [(source, self._slots.get(source)) for source in chunk.ranks]
        slots = [self._slots.add(source) if slot is None else slot for source, slot in known]
        rows = member_rows(chunk, np.array(slots, np.int64))
        num_rows, start = len(rows), 0
        self._load(rows.reshape(-1))
        while compiled.restore(self._address, num_rows, start) == compiled.NEEDS_HELP:
            self._help_out()
            start = self._control[compiled.RESUME >> 3]

    # --- Inside -----------------------------------------------------------------------------------------------------

    def _apply(
        self, source: WorkerRank, operations: list[tuple[int, int, int, int]], hashes: list[bytes], result: _Tally
    ) -> None:
        if not operations:
            return
        slot = self._slots.get(source)
        if slot is None:
            slot = self._slots.add(source)
        packed = b"".join(hashes)
        size_bytes = len(packed), len(operations) * compiled.OPERATION_BYTES
        if size_bytes[0] > len(self._input_bytes) or size_bytes[1] > len(self._operations):
            self._enlarge_input(*size_bytes)
        self._input_bytes[: len(packed)] = packed
        for index, operation in enumerate(operations):
            _OPERATION.pack_into(self._operations, index * compiled.OPERATION_BYTES, *operation)
        control, first, start = self._control, 0, 0
        fields = [
            f >> 3 for f in (compiled.NUM_APPLIED, compiled.NUM_NOT_FOUND, compiled.NUM_ORPHANS, compiled.NUM_INVALID)
        ]
        for field in fields:
            control[field] = 0
        while compiled.apply(self._address, slot, len(operations), first, start) == compiled.NEEDS_HELP:
            self._help_out()
            first, start = control[compiled.RESUME_OPERATION >> 3], control[compiled.RESUME >> 3]
        num_stored, num_not_found, num_parent_not_found, num_invalid = (control[field] for field in _COUNTERS)
        result.num_stored += num_stored
        result.num_not_found += num_not_found
        result.num_parent_not_found += num_parent_not_found
        result.num_invalid += num_invalid

    def _sources(self, worker: str, rank: int | None) -> list[WorkerRank]:
        if rank is not None:
            source = WorkerRank(worker, rank)
            return [] if self._slots.get(source) is None else [source]
        return [source for source, _ in self._slots.items() if source.worker == worker]

    def _retire(self, source: WorkerRank) -> None:
        slot = self._slots.remove(source)
        if slot is not None:
            self._retired.append(slot)

    def _help_out(self) -> None:
        """Provide what compiled code asked for before it can go on."""
        kind, argument = self._control[compiled.NEED_KIND >> 3], self._control[compiled.NEED_ARG >> 3]
        if kind == compiled.NEED_SEGMENT:
            self._segments.grow(argument)
        else:
            self._sets.add_slab(argument)

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
        self._operations.release()
        for name, needed in (("_input_address", input_bytes), ("_operations_address", operations_bytes)):
            address: int = getattr(self, name)
            if needed > self._heap.capacity_bytes(address):
                setattr(self, name, self._heap.resize(address, 2 * needed))
        self._place_input()

    def _place_input(self) -> None:
        self._control[compiled.INPUT >> 3] = self._input_address
        self._control[compiled.OPERATIONS >> 3] = self._operations_address
        self._input_bytes = self._heap.view(self._input_address)
        self._input: Any = self._input_bytes.cast(_HASH_FORMAT)
        self._operations = self._heap.view(self._operations_address)


class _Tally:
    """Counts over the compiled calls of one batch."""

    __slots__ = ("num_invalid", "num_not_found", "num_parent_not_found", "num_stored")

    def __init__(self) -> None:
        self.num_stored = self.num_not_found = self.num_parent_not_found = self.num_invalid = 0
