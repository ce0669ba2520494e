"""Message envelopes, decoded without the events inside, and the gaps that their sequence numbers show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from kvist.events import WorkerRank
from kvist.events.codec import DECODE_ERRORS, is_canonical, is_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.session import NO_REPLAY, Session, Step
from kvist.events.transports import Message
from kvist.events.types import Holding, RankEnvelope, SnapshotPart
from kvist.replay.recording import Record

T = TypeVar("T")

_HEARTBEAT_START = b"\xa9heartbeat"
_EMPTY, _NOT_EMPTY = Holding(0, 0), Holding(1, 0)


class CanonicalEnvelope(RankEnvelope, tag="kvist1", array_like=True, frozen=True, gc=False):
    """A canonical batch whose events are still bytes."""

    timestamp_s: float
    events: list[msgspec.Raw]

    @property
    def is_heartbeat(self) -> bool:
        """Return whether the batch takes no sequence number, but announces the next one."""
        return len(self.events) == 1 and bytes(self.events[0])[1:11] == _HEARTBEAT_START

    @property
    def is_empty_heartbeat(self) -> bool:
        """Return whether it is a heartbeat of a rank that holds no block."""
        return self.is_heartbeat and bytes(self.events[0])[11:12] == b"\x00"


Envelope: TypeAlias = CanonicalEnvelope | SnapshotPart | EngineEnvelope

_canonical_decoder = msgspec.msgpack.Decoder(CanonicalEnvelope)
_snapshot_decoder = msgspec.msgpack.Decoder(SnapshotPart)
_engine_decoder = msgspec.msgpack.Decoder(EngineEnvelope)


def read_envelope(payload: bytes) -> Envelope | None:
    """Return the envelope of a batch, or a snapshot part; None when the payload is neither."""
    try:
        if is_canonical(payload):
            return _canonical_decoder.decode(payload)
        return (_snapshot_decoder if is_snapshot_part(payload) else _engine_decoder).decode(payload)
    except DECODE_ERRORS:
        return None


def rank_of(envelope: Envelope) -> WorkerRank | None:
    """Return the rank whose sequence numbers a message has; None for an engine, which numbers all ranks together."""
    return None if isinstance(envelope, EngineEnvelope) else envelope.source


def believe_heartbeat(session: Session[T], envelope: CanonicalEnvelope, now_s: float) -> list[Step[T]]:
    """Return a session's steps for a heartbeat. Blocks are not followed: it is believed if nothing is missing.

    One that says that the rank holds nothing is believed in any case.
    """
    is_same = session.is_complete or envelope.is_empty_heartbeat
    published = _EMPTY if is_same else _NOT_EMPTY
    return session.on_heartbeat(envelope.epoch, envelope.sequence, published, _EMPTY, now_s)


class Numbering:
    """Follows the sequence numbers in a recording of one source, a session a rank; what is missing is lost."""

    def __init__(self) -> None:
        self.restarts = RestartDetector()
        self.sessions: dict[WorkerRank | None, Session[None]] = {}
        """By `rank_of` a message. A stream that is recorded from its middle has not lost what came before."""

    def on_message(self, envelope: Envelope, record: Record) -> list[Step[None]]:
        """Return what a message means for a copy of its rank: `Restore` for the last part of a snapshot."""
        (_, sequence, payload), now_s = record.message, record.time_ns * 1e-9
        if isinstance(envelope, EngineEnvelope):
            epoch = self.restarts.observe(sequence, payload)
        else:
            epoch, sequence = envelope.epoch, envelope.sequence
        key = rank_of(envelope)
        if (session := self.sessions.get(key)) is None:
            session = self.sessions[key] = Session(NO_REPLAY, has_snapshots=key is not None)
            session.resume(epoch, sequence, is_complete=sequence == 0)
        if isinstance(envelope, SnapshotPart):
            is_last = envelope.part_idx == envelope.num_parts - 1  # a recording that was cut off may lack it
            return session.on_answer(epoch, (), now_s, snapshot_sequence=sequence) if is_last else []
        if isinstance(envelope, CanonicalEnvelope) and envelope.is_heartbeat:
            steps = believe_heartbeat(session, envelope, now_s)
        else:
            steps = session.receive(epoch, sequence, None, now_s)
        if session.question(float("inf")) is not None:
            steps += session.on_answer(None, None, now_s)
        return steps


@dataclass(slots=True)
class SequenceTracker:
    """Follows one series of sequence numbers, and counts the messages that are missing, repeated or late."""

    num_messages: int = 0
    num_gaps: int = 0
    num_missing: int = 0
    num_duplicates: int = 0
    """Messages that came again, or late, or from an epoch that had ended."""
    num_restarts: int = 0
    num_snapshots: int = 0
    is_from_start: bool = True
    """Whether the first message was the publisher's first, or a snapshot of the state before it was recorded."""
    is_complete: bool = True
    """Whether nothing is missing before the next message, or a snapshot replaced what is."""
    epoch: int | None = None
    next_sequence: int = 0
    _bridged: range = range(0)  # the missing sequence numbers that the latest snapshot stands for
    _begins_with_snapshot: bool = False

    def on_message(self, epoch: int, sequence: int) -> bool:
        """Count a message; return whether it is new."""
        self.num_messages += 1
        if not self._enter_epoch(epoch, sequence) or sequence < self.next_sequence:
            if epoch != self.epoch or sequence not in self._bridged:
                self.num_duplicates += 1
            elif not self._begins_with_snapshot:
                self.num_missing -= 1  # it came after all, behind the snapshot that was asked for
            return False
        self._count_gap(sequence)
        self.next_sequence = sequence + 1
        return True

    def on_heartbeat(self, epoch: int, next_sequence: int) -> None:
        """Count what a heartbeat shows to be missing; it has no sequence number itself, but announces the next one."""
        if self._enter_epoch(epoch, next_sequence):
            self._count_gap(next_sequence)
            self.next_sequence = max(self.next_sequence, next_sequence)

    def on_snapshot(self, epoch: int, sequence: int) -> None:
        """Continue from a snapshot of the state before `sequence`, even if later messages were seen."""
        self.num_snapshots += 1
        self._begins_with_snapshot = self.epoch is None
        if self._enter_epoch(epoch, sequence):
            self._bridged = range(0 if self._begins_with_snapshot else self.next_sequence, sequence)
            self._count_gap(sequence)
            self.next_sequence, self.is_complete = sequence, True
            self.is_from_start |= self._begins_with_snapshot

    def is_outdated(self, epoch: int, next_sequence: int) -> bool:
        """Return whether a heartbeat was sent before messages that were already seen."""
        return epoch != self.epoch or next_sequence < self.next_sequence

    def _enter_epoch(self, epoch: int, sequence: int) -> bool:
        """Switch to a later epoch; return False for an earlier one, which is ignored."""
        if self.epoch is None:
            self.epoch, self.next_sequence = epoch, sequence
            self.is_from_start = self.is_complete = sequence == 0
        elif epoch > self.epoch:
            self.epoch, self.next_sequence, self._bridged, self.is_complete = epoch, 0, range(0), True
            self.num_restarts += 1
        return epoch == self.epoch

    def _count_gap(self, sequence: int) -> None:
        if sequence > self.next_sequence:
            self.num_gaps += 1
            self.num_missing += sequence - self.next_sequence
            self.is_complete = False


class SourceTracker:
    """Follows the sequence numbers of one source's ranks; it counts what is wrong, and repairs nothing."""

    def __init__(self) -> None:
        self.num_malformed = 0
        self.num_heartbeats = 0
        self.restarts = RestartDetector()
        self.ranks: dict[WorkerRank | None, SequenceTracker] = {}
        """By `rank_of` a message."""

    def on_message(self, envelope: Envelope | None, message: Message) -> bool:
        """Count a message; return whether it is a batch that is new, and no heartbeat."""
        if envelope is None:
            self.num_malformed += 1
            return False
        rank = self.ranks.setdefault(rank_of(envelope), SequenceTracker())
        if isinstance(envelope, EngineEnvelope):
            return rank.on_message(self.restarts.observe(message.sequence, message.payload), message.sequence)
        if isinstance(envelope, SnapshotPart):
            if envelope.part_idx == envelope.num_parts - 1:  # a recording that was cut off may lack the last one
                rank.on_snapshot(envelope.epoch, envelope.sequence)
            return False
        if envelope.is_heartbeat:
            self.num_heartbeats += 1
            rank.on_heartbeat(envelope.epoch, envelope.sequence)
            return False
        return rank.on_message(envelope.epoch, envelope.sequence)

    def total(self, name: str) -> int:
        return sum(getattr(rank, name) for rank in self.ranks.values())
