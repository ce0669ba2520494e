"""What a message says beside its events or blocks, read without those: whose it is, and its place in the order.

And what these places say of all messages of a stream: which are missing, came twice, or are of another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from kvist.events import WorkerRank
from kvist.events.codec import DECODE_ERRORS, RawBatch, is_canonical, is_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.transports import Message
from kvist.events.types import NonNegative, Positive, RankEnvelope

_HEARTBEAT_START = b"\xa9heartbeat"


class CanonicalEnvelope(RawBatch, tag="kvist1", array_like=True, frozen=True, gc=False):
    """A canonical batch around its events."""

    @property
    def is_heartbeat(self) -> bool:
        """Return whether the batch takes no sequence number, but announces the next one."""
        return len(self.events) == 1 and bytes(self.events[0])[1:11] == _HEARTBEAT_START

    @property
    def is_of_no_block(self) -> bool:
        """Return whether it is a heartbeat of a rank that holds no block."""
        return self.is_heartbeat and bytes(self.events[0])[11:12] == b"\x00"


class SnapshotEnvelope(RankEnvelope, tag="kvist-snapshot", array_like=True, frozen=True, gc=False):
    """A part of a snapshot without its blocks: what a rank held before the batch `sequence`."""

    part_idx: NonNegative
    num_parts: Positive
    num_blocks: NonNegative
    digest: NonNegative

    @property
    def is_last(self) -> bool:
        """Return whether no part follows: a recording that was cut off has none that is."""
        return self.part_idx == self.num_parts - 1


Envelope: TypeAlias = CanonicalEnvelope | SnapshotEnvelope | EngineEnvelope

_canonical_decoder = msgspec.msgpack.Decoder(CanonicalEnvelope)
_snapshot_decoder = msgspec.msgpack.Decoder(SnapshotEnvelope)
_engine_decoder = msgspec.msgpack.Decoder(EngineEnvelope)


def read_envelope(payload: bytes) -> Envelope | None:
    """Return the envelope of a batch, or of a part of a snapshot; None when the payload is neither."""
    try:
        if is_canonical(payload):
            return _canonical_decoder.decode(payload)
        return (_snapshot_decoder if is_snapshot_part(payload) else _engine_decoder).decode(payload)
    except DECODE_ERRORS:
        return None


@dataclass(slots=True)
class Numbering:
    """What one numbering tells of what is missing: a rank's in canonical streams, a whole stream's in an engine's."""

    num_messages: int = 0
    num_gaps: int = 0
    num_missing: int = 0
    """Messages that the numbers say there were."""
    num_duplicates: int = 0
    """Messages that came again, or late, or from an epoch that had ended."""
    num_restarts: int = 0
    num_snapshots: int = 0
    is_from_start: bool = True
    """Whether the first message was the publisher's first, or what it held before that one was recorded."""
    is_complete: bool = True
    """Whether nothing is missing before the next message, or a snapshot told what it did."""
    epoch: int | None = None
    next_sequence: int = 0
    _bridged: range = range(0)  # numbers that were not seen before a snapshot told what came of them
    _begins_with_snapshot: bool = False

    def note_message(self, epoch: int, sequence: int) -> bool:
        """Take the next message; return whether it is new."""
        self.num_messages += 1
        if not self._enter(epoch, sequence) or sequence < self.next_sequence:
            if epoch != self.epoch or sequence not in self._bridged:
                self.num_duplicates += 1
            elif not self._begins_with_snapshot:
                self.num_missing -= 1  # it came after all, behind the snapshot that was asked for
            return False
        self._miss(sequence)
        self.next_sequence = sequence + 1
        return True

    def note_heartbeat(self, epoch: int, next_sequence: int) -> None:
        """Take a heartbeat, which says what number comes next."""
        if self._enter(epoch, next_sequence):
            self._miss(next_sequence)
            self.next_sequence = max(self.next_sequence, next_sequence)

    def note_snapshot(self, epoch: int, sequence: int) -> None:
        """Take a snapshot of what was held before a number: that one is next, even if later ones were seen."""
        self.num_snapshots += 1
        self._begins_with_snapshot = self.epoch is None
        if self._enter(epoch, sequence):
            self._bridged = range(0 if self._begins_with_snapshot else self.next_sequence, sequence)
            self._miss(sequence)
            self.next_sequence, self.is_complete = sequence, True
            self.is_from_start |= self._begins_with_snapshot

    def is_behind(self, epoch: int, sequence: int) -> bool:
        """Return whether a heartbeat tells of less than was seen: it was sent before, and came later."""
        return epoch != self.epoch or sequence < self.next_sequence

    def _enter(self, epoch: int, sequence: int) -> bool:
        """Follow a later epoch; return False for an earlier one."""
        if self.epoch is None:
            self.epoch, self.next_sequence = epoch, sequence
            self.is_from_start = self.is_complete = sequence == 0
        elif epoch > self.epoch:
            self.epoch, self.next_sequence, self._bridged, self.is_complete = epoch, 0, range(0), True
            self.num_restarts += 1
        return epoch == self.epoch

    def _miss(self, sequence: int) -> None:
        if sequence > self.next_sequence:
            self.num_gaps += 1
            self.num_missing += sequence - self.next_sequence
            self.is_complete = False


class SourceNumbering:
    """Judges all that one source says, by its numbers; nothing is repaired."""

    def __init__(self) -> None:
        self.num_malformed = 0
        self.num_heartbeats = 0
        self.ranks: dict[WorkerRank, Numbering] = {}
        self.engine: Numbering | None = None
        self.restarts: RestartDetector | None = None

    def note_message(self, envelope: Envelope | None, message: Message) -> bool:
        """Take the next message; return whether it is a new batch, and no heartbeat."""
        if envelope is None:
            self.num_malformed += 1
            return False
        if isinstance(envelope, EngineEnvelope):
            if self.engine is None or self.restarts is None:
                self.restarts, self.engine = RestartDetector(), Numbering()
            epoch = self.restarts.observe(message.sequence, message.payload)
            return self.engine.note_message(epoch, message.sequence)
        numbering = self.ranks.setdefault(envelope.source, Numbering())
        if isinstance(envelope, SnapshotEnvelope):
            if envelope.is_last:
                numbering.note_snapshot(envelope.epoch, envelope.sequence)
            return False
        if envelope.is_heartbeat:
            self.num_heartbeats += 1
            numbering.note_heartbeat(envelope.epoch, envelope.sequence)
            return False
        return numbering.note_message(envelope.epoch, envelope.sequence)

    @property
    def numberings(self) -> list[Numbering]:
        return [*self.ranks.values(), *([self.engine] if self.engine is not None else [])]

    def total(self, name: str) -> int:
        return sum(getattr(numbering, name) for numbering in self.numberings)
