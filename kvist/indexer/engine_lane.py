"""The fast lane of one engine's stream: compiled code takes what is ordinary, many messages at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvist.events import EngineEvent, EngineRemoved, EngineStored, Tier, WorkerRank
from kvist.events.dialects.block_events import FIELD_ORDERS
from kvist.events.engine_events import FULL, STATE, UNKNOWN, UnsizedWindow
from kvist.events.restarts import RestartDetector
from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START, MessageBlock
from kvist.events.types import GroupRule
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine import take_messages
from kvist.indexer.compiled.engine_blocks import MAX_ROWS
from kvist.indexer.compiled.names import FIELDS
from kvist.indexer.residency import EngineResidency
from kvist.publisher.filter import FilterState, WindowFilter
from kvist.publisher.groups import GroupSplitter
from kvist.publisher.normaliser import Normaliser
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import HEAD, SEGMENT, Records

_MAX_BYTES = 1 << 17
"""Work of one call, in bytes of messages, each counted once when it is checked and once when it is done: 0.15 ms."""
_SCRATCH_BYTES = 1 << 15
"""Messages up to this size have room from the beginning; its memory is used as far as messages need it."""
_MAX_SCRATCH_BYTES = 1 << 20
"""What a larger message needed is given back after the block it was in."""
_NO_TABLE: tuple[Records, Records] = (np.zeros(1, HEAD), np.zeros(0, SEGMENT))


class Taken(NamedTuple):
    """What was done, and what is to be done in another way before the lane can go on.

    With `is_stopped` that is the message at `message_idx`, before which the lane stands; else `part`, if given: one of
    its events, as a batch of its own.
    """

    message_idx: int
    num_batches: int
    num_events: int
    num_ignored_events: int
    num_events_of_our_size: int
    timestamp_s: float
    is_stopped: bool
    part: bytes | None


class EngineRank:
    """Filters and normalises a rank's events, and lets compiled code know how it would go about others like them."""

    def __init__(
        self,
        source: WorkerRank,
        block_size: int,
        index: RadixIndex,
        num_ahead: int = 0,
        has_full_reports: bool = False,
    ) -> None:
        self._num_ahead, self._has_full_reports = num_ahead, has_full_reports
        self._source = source
        self._block_size = block_size
        self.residency = EngineResidency(index, source)
        """What the rank holds, and under which names."""
        self._begin()

    def admit(self, event: EngineEvent) -> None:
        """Take one event; what it amounts to is in the index when this returns."""
        self.is_offloading |= isinstance(event, EngineStored) and event.tier is not Tier.GPU
        before, counts_copies = (self.filter.state, self.splitter.rules), self.residency.counts_copies
        self.residency.counts_copies &= not self.splitter.is_report(event)
        passes, group = self.splitter.admit(event, self._normaliser.normalise)
        self.residency.counts_copies = counts_copies
        if self._normaliser.in_doubt or self._has_full_reports or before != (self.filter.state, self.splitter.rules):
            self._forget_verdicts()
        elif isinstance(event, EngineStored | EngineRemoved) and (
            passes or group is not None or self.splitter.is_expressible
        ):
            self._note_verdict(event, int(passes) if group is None else layout.OTHER_GROUPS + group)

    def clear(self) -> None:
        """Forget what the rank holds and how its groups differ: it restarted, or events were lost."""
        self.residency.clear()
        self._begin()

    @property
    def is_offloading(self) -> bool:
        """Return whether it ever stored anything beside the GPU."""
        return bool(self.residency.record["is_offloading"][0])

    @is_offloading.setter
    def is_offloading(self, is_offloading: bool) -> None:
        self.residency.record["is_offloading"] = is_offloading

    @property
    def is_short(self) -> bool:
        """Return whether hits need what is not accounted for."""
        is_overfull = len(self.residency.counts) >= MAX_ROWS
        return bool(self._normaliser.in_doubt) or is_overfull or not self.splitter.is_expressible

    @property
    def is_told(self) -> bool:
        """Return whether a dump tells all that another process must know to go on."""
        return not self.is_short and self.residency.is_told_by_names

    def resume(self, state: FilterState, others: Mapping[int, GroupRule], copies: bytes) -> None:
        self.residency.resume_copies(copies)
        self.splitter.resume(state, others)
        self._forget_verdicts()

    def _begin(self) -> None:
        self.filter = WindowFilter(self._source.rank)
        options = self._num_ahead, self._has_full_reports
        self.splitter = GroupSplitter(self.filter, self._block_size, self.residency, *options)
        self._forget_verdicts()
        # Partial blocks are never published, so nothing here depends on whether they are remembered.
        self._normaliser = Normaliser(self._block_size, rank=self._source.rank, holdings=self.residency)

    def _forget_verdicts(self) -> None:
        """Forget how events fare: the filter has changed, or which other groups there are."""
        self.residency.record["num_verdicts"] = 0

    def _note_verdict(self, event: EngineStored | EngineRemoved, verdict: int) -> None:
        """Let every event fare like this one that has its type, group and window."""
        key, record = _verdict_key(event), self.residency.record[0]
        num_verdicts = int(record["num_verdicts"])
        if key is None or key in record["keys"][:num_verdicts]:
            return
        place = num_verdicts % layout.NUM_VERDICTS  # of which there are never so many
        record["keys"][place], record["passes"][place], record["num_verdicts"] = key, verdict, place + 1


def _verdict_key(event: EngineStored | EngineRemoved) -> int | None:
    """Return what compiled code looks for, None for an event that it does not look at."""
    group = 0 if event.group is None else event.group + 1
    if isinstance(event.window, UnsizedWindow):
        window = {FULL: layout.FULL_WINDOW, STATE: layout.STATE_WINDOW, UNKNOWN: 0}[event.window]
    elif event.window < layout.STATE_WINDOW:
        window = event.window
    else:
        return None
    return isinstance(event, EngineRemoved) | group << 1 | window << 32 if group <= layout.MAX_GROUP else None


class EngineLane:
    """Takes what is ordinary: next in sequence, well-formed, of whole blocks that nothing but their tokens names."""

    def __init__(self, block_size: int, engine: str, index: RadixIndex, default_rank: int = 0) -> None:
        """Apply to `index` what `engine` says; `default_rank` is that of a batch which names none."""
        self._block_size = block_size
        self._index = index
        self.ranks: dict[int, EngineRank] = {}
        self._block = MessageBlock.of(())
        self._data = np.empty(0, np.uint8)
        self._streams = np.zeros(1, layout.STREAM)
        self._stream = stream = self._streams[0]
        stream["block_size"], stream["default_rank"] = block_size, default_rank
        for row, tag in enumerate(("BlockStored", "BlockRemoved")):
            order = [FIELDS.get(name, 0) for name in FIELD_ORDERS[engine][tag]]
            stream["field_order"][row, : len(order)] = order
        # Whose messages a call may take; of one that is not known yet, it tells what they say.
        self._rank_number = default_rank
        self._nobody = np.zeros(1, layout.RANK)
        self._make_room(_SCRATCH_BYTES)
        self._note_fingerprints(None)

    def add_rank(self, source: WorkerRank, num_ahead: int = 0, has_full_reports: bool = False) -> EngineRank:
        """Return a rank that takes single events and shares all that it knows with the lane."""
        rank = EngineRank(source, self._block_size, self._index, num_ahead, has_full_reports)
        self.ranks[source.rank] = rank
        return rank

    def begin(self, block: MessageBlock, restarts: RestartDetector | None) -> None:
        """Stand before the first message of a block, whose fingerprints are noted in `restarts`, if given."""
        if restarts is not self._restarts:
            self._note_fingerprints(restarts)
        self._block, self._data = block, np.frombuffer(block.buffer, np.uint8)
        if len(self._scratch[1]) > _MAX_SCRATCH_BYTES:
            self._make_room(_SCRATCH_BYTES)
        self._go_to(0)

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more; call it now and then."""
        for rank in self.ranks.values():
            rank.residency.tidy()

    def skip(self) -> int:
        """Stand behind the message that it stands before, which was taken in another way; return the one it is at."""
        return self._go_to(int(self._stream["message_idx"]) + 1)

    def take(self, next_sequence: int, has_our_block_size: bool) -> Taken:
        """Take messages, for a sixth of a millisecond, as long as they are ordinary and in sequence."""
        index, stream, rank = self._index, self._stream, self.ranks.get(self._rank_number)
        stream["has_block_size"] = has_our_block_size
        nobody = index.core, index.segments, *_NO_TABLE, *_NO_TABLE, self._nobody
        held = nobody if rank is None else rank.residency.settle()
        messages = self._data, self._block.table, next_sequence, _MAX_BYTES
        with index.writing:
            reason = take_messages(held, self._streams, *messages, *self._scratch, *self._fingerprints)
        part = self._unusual_event() if reason == layout.ANOTHER_WAY else None
        self._help_out(reason)
        index.keep_to_cap()
        return Taken(
            int(stream["message_idx"]),
            int(stream["num_batches"]),
            int(stream["num_events"]),
            int(stream["num_ignored"]),
            int(stream["num_sized"]),
            float(stream["timestamp_s"]),
            reason in (layout.NOT_NEXT, layout.WHOLE_MESSAGE),
            part,
        )

    def _help_out(self, reason: int) -> None:
        """Provide what compiled code needs before it can go on, if anything."""
        if reason == layout.TOO_LARGE:
            self._make_room(int(self._block.table[self._stream["message_idx"], PAYLOAD_BYTES]))
        elif reason == layout.OTHER_RANK:
            self._rank_number = int(self._stream["checked_rank"])
            self._nobody["number"], self._nobody["slot"] = self._rank_number, -1

    def _note_fingerprints(self, restarts: RestartDetector | None) -> None:
        """Have fingerprints written into a ring."""
        self._restarts = restarts
        if restarts is None:
            self._fingerprints = np.empty(1, np.uint64), np.empty(1, np.uint64)
        else:
            self._fingerprints = restarts.sequences, restarts.fingerprints

    def _unusual_event(self) -> bytes:
        """Return the event behind which the lane stands as a batch of its own."""
        stream, buffer = self._stream, self._block.buffer
        start, rank = int(self._block.table[stream["message_idx"], PAYLOAD_START]), int(stream["checked_rank"])
        event = bytes(buffer[start + int(stream["stop_start"]) : start + int(stream["stop_end"])])
        return b"\x93%b\x91%b\xcd%b" % (bytes(buffer[start + 1 : start + 10]), event, rank.to_bytes(2))

    def _make_room(self, size_bytes: int) -> None:
        """Have scratch for messages up to that size; what was checked is to be checked again."""
        events = np.empty(size_bytes // layout.MIN_EVENT_BYTES + 1, layout.EVENT)
        tokens = np.empty(size_bytes, np.uint32)
        self._scratch = events, np.empty(size_bytes, np.uint64), tokens, tokens.view(np.uint8)

    def _go_to(self, message_idx: int) -> int:
        self._stream["message_idx"], self._stream["is_checked"] = message_idx, 0
        return message_idx
