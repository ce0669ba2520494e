"""The fast lane of one engine's stream: compiled code takes what is ordinary, many messages at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvist.events import Event, WorkerRank
from kvist.events.dialects import sglang, vllm
from kvist.events.restarts import RestartDetector
from kvist.events.transports import MessageBlock
from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START
from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine import take_messages
from kvist.indexer.compiled.names import FIELDS
from kvist.indexer.engine_rank import EngineRank
from kvist.radix import RadixIndex
from kvist.radix.memory import PAGE_BYTES, Heap

_MAX_BYTES = 1 << 17
"""Work of one call, in bytes of messages, each counted once when it is checked and once when it is done: 0.15 ms."""
_SCRATCH_BYTES = 1 << 15
"""Messages up to this size have room from the beginning; its memory is used as far as messages need it."""
_MAX_SCRATCH_BYTES = 1 << 20
"""What a larger message needed is given back after the block it was in."""
_FIELD_ORDERS = {"vllm": vllm.FIELD_ORDER, "sglang": sglang.FIELD_ORDER}
_ORDER_AT = layout.SOURCE_BYTES
_SPARE_AT = _ORDER_AT + 2 * layout.MAX_FIELDS
_CHAIN_AT = _SPARE_AT + 8
_HAS_BLOCK_SIZE, _MESSAGE_IDX, _IS_CHECKED, _SCRATCH = (
    field >> 3 for field in (layout.HAS_BLOCK_SIZE, layout.MESSAGE_IDX, layout.IS_CHECKED, layout.SCRATCH_BYTES)
)
_COUNTS = slice(layout.NUM_BATCHES >> 3, (layout.NUM_SIZED >> 3) + 1)
_LAST_TIMESTAMP = layout.LAST_TIMESTAMP >> 3
_REASONS_TO_GO_ON = frozenset((layout.DONE, layout.PAUSED, layout.NOT_NEXT, layout.WHOLE_MESSAGE))


class Taken(NamedTuple):
    """What was done, and what is to be done in another way before the lane can go on.

    With `is_stopped` that is the message at `message_idx`, before which the lane stands; else `part`, if given: some
    of its events, as a batch of their own.
    """

    message_idx: int
    num_batches: int
    num_events: int
    num_ignored_events: int
    num_events_of_our_size: int
    timestamp_s: float
    is_stopped: bool
    part: bytes | None


class EngineLane:
    """Takes what is ordinary: next in sequence, well-formed, of whole blocks that nothing but their tokens names."""

    def __init__(self, block_size: int, engine: str, index: RadixIndex, default_rank: int = 0) -> None:
        """Apply to `index` what `engine` says; `default_rank` is that of a batch which names none."""
        self._block_size = block_size
        self._index = index
        self._ranks: dict[int, EngineRank] = {}
        self._block = MessageBlock.of(())
        self._table_address = 0
        self._heap = heap = Heap()
        self._address = heap.allocate(_CHAIN_AT + 2 * layout.SLICE_BLOCKS * 8)
        self._fields, self._times = heap.view(self._address).cast("q"), heap.view(self._address).cast("d")
        self._set(layout.INDEX, index.address)
        self._set(layout.BLOCK_SIZE, block_size)
        self._set(layout.DEFAULT_RANK, default_rank)
        self._set(layout.CHAIN, self._address + _CHAIN_AT)
        self._set(layout.OUTLOOKS, self._address + _CHAIN_AT + layout.SLICE_BLOCKS * 8)
        self._set(layout.FIELD_ORDER, self._address + _ORDER_AT)
        order = heap.view(self._address)
        for row, tag in enumerate(("BlockStored", "BlockRemoved")):
            for place, name in enumerate(_FIELD_ORDERS[engine][tag]):
                order[_ORDER_AT + row * layout.MAX_FIELDS + place] = FIELDS.get(name, 0)
        self._set(layout.RANKS, heap.allocate(MAX_RANKS * 8))
        self._rank_addresses = heap.view(self._get(layout.RANKS)).cast("q")
        self._make_room(_SCRATCH_BYTES)
        self._note_fingerprints(None)

    @property
    def ranks(self) -> Mapping[int, EngineRank]:
        """Return each rank so far."""
        return self._ranks

    def add_rank(self, source: WorkerRank, apply: Callable[[Iterable[Event]], None]) -> EngineRank:
        """Return a rank that takes single events and shares all that it knows with the lane."""
        rank = EngineRank(source, self._block_size, self._index, apply)
        self._ranks[source.rank] = rank
        self._rank_addresses[source.rank] = rank.address
        return rank

    def begin(self, block: MessageBlock, restarts: RestartDetector | None) -> None:
        """Stand before the first message of a block, whose fingerprints are noted in `restarts`, if given."""
        if restarts is not self._restarts:
            self._note_fingerprints(restarts)
        self._block, self._table_address = block, block.table_address
        if self._fields[_SCRATCH] > _MAX_SCRATCH_BYTES:
            self._make_room(_SCRATCH_BYTES)
        self._go_to(0)

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more; call it now and then."""
        for rank in self._ranks.values():
            rank.tidy()

    def skip(self) -> int:
        """Stand behind the message that it stands before, which was taken in another way; return the one it is at."""
        self._go_to(self._get(layout.MESSAGE_IDX) + 1)
        return self._get(layout.MESSAGE_IDX)

    def take(self, next_sequence: int, has_our_block_size: bool) -> Taken:
        """Take messages, for a sixth of a millisecond, as long as they are ordinary and in sequence."""
        block, fields = self._block, self._fields
        for rank in self._ranks.values():
            rank.settle()
        fields[_HAS_BLOCK_SIZE] = has_our_block_size
        reason = take_messages(
            self._address, block.address, self._table_address, len(block.table), next_sequence, _MAX_BYTES
        )
        part = None
        if reason not in _REASONS_TO_GO_ON:
            if reason == layout.SOME_EVENTS:
                part = self._unusual_events(block)
            else:
                self._help_out(reason)
        self._index.keep_to_cap()
        num_batches, num_events, num_ignored, num_sized = fields[_COUNTS].tolist()
        is_stopped = reason == layout.NOT_NEXT or reason == layout.WHOLE_MESSAGE
        timestamp_s = self._times[_LAST_TIMESTAMP]
        return Taken(
            fields[_MESSAGE_IDX], num_batches, num_events, num_ignored, num_sized, timestamp_s, is_stopped, part
        )

    def _help_out(self, reason: int) -> None:
        """Provide what compiled code needs before it can go on."""
        if reason == layout.INDEX_NEEDS_HELP:
            self._index.help_out()
        elif reason == layout.MAP_NEEDS_HELP:
            self._ranks[self._get(layout.CHECKED_RANK)].enlarge_map()
        else:
            self._make_room(int(self._block.table[self._get(layout.MESSAGE_IDX), PAYLOAD_BYTES]))

    def _note_fingerprints(self, restarts: RestartDetector | None) -> None:
        """Have fingerprints written into a ring; it lives as long as its address is known here."""
        self._restarts = restarts
        if restarts is None:
            sequences = fingerprints = self._address + _SPARE_AT
            ring_mask = 0
        else:
            sequences, fingerprints = restarts.sequences.ctypes.data, restarts.fingerprints.ctypes.data
            ring_mask = len(restarts.sequences) - 1
        self._set(layout.SEQUENCES, sequences)
        self._set(layout.FINGERPRINTS, fingerprints)
        self._set(layout.RING_MASK, ring_mask)

    def _unusual_events(self, block: MessageBlock) -> bytes:
        """Return the events before which the lane stands as a batch of their own, and stand behind them."""
        start = int(block.table[self._get(layout.MESSAGE_IDX), PAYLOAD_START])
        timestamp = bytes(block.buffer[start + 1 : start + 10])
        events = bytes(block.buffer[start + self._get(layout.STOP_START) : start + self._get(layout.STOP_END)])
        end_idx, rank = self._get(layout.STOP_EVENT_END), self._get(layout.CHECKED_RANK)
        num_events = end_idx - self._get(layout.EVENT_IDX)
        self._set(layout.EVENT_IDX, end_idx)
        self._set(layout.BLOCK_IDX, 0)
        return b"\x93%b\xdd%b%b\xcd%b" % (timestamp, num_events.to_bytes(4), events, rank.to_bytes(2))

    def _make_room(self, size_bytes: int) -> None:
        """Have scratch for messages up to that size; what was checked is to be checked again."""
        size_bytes = max(PAGE_BYTES, size_bytes)
        max_events = size_bytes // layout.MIN_EVENT_BYTES
        for field, room_bytes in (
            (layout.EVENTS, (max_events + 1) * layout.EVENT_BYTES),
            (layout.HASHES, size_bytes * 8),
            (layout.TOKENS, size_bytes * 4),
        ):
            if self._get(field):
                self._heap.free(self._get(field))
            self._set(field, self._heap.allocate(room_bytes))
        self._set(layout.SCRATCH_BYTES, size_bytes)

    def _go_to(self, message_idx: int) -> None:
        self._fields[_MESSAGE_IDX] = message_idx
        self._fields[_IS_CHECKED] = 0

    def _get(self, field: int) -> int:
        value: int = self._fields[field >> 3]
        return value

    def _set(self, field: int, value: int) -> None:
        self._fields[field >> 3] = value
