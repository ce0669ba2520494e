"""What the sequence numbers in a recording show: what is new, what is missing, and which process sent it."""

from __future__ import annotations

from typing import TypeVar

from kvist.events import WorkerRank
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.session import NO_REPLAY, Session, Step
from kvist.events.types import Holding, SnapshotPart
from kvist.replay.blocks import RecordedSnapshot, SnapshotCollector
from kvist.replay.envelope import CanonicalEnvelope, Envelope, rank_of
from kvist.replay.recording import Record

T = TypeVar("T")

_EMPTY, _NOT_EMPTY = Holding(0, 0), Holding(1, 0)


class Numbering:
    """Follows the sequence numbers in a recording of one source, a session a rank; what is missing is lost."""

    def __init__(self) -> None:
        self.restarts = RestartDetector()
        self.sessions: dict[WorkerRank | None, Session[None]] = {}
        """By `rank_of` a message. A stream that is recorded from its middle has not lost what came before."""
        self.snapshots = SnapshotCollector()
        self.snapshot: RecordedSnapshot | None = None
        """The last whole snapshot."""
        self.is_from_start = True
        """Whether each rank was recorded from its first message on, or with a snapshot of the state before."""

    def on_message(self, envelope: Envelope, record: Record) -> list[Step[None]]:
        """Return what a message means for a copy of its rank: `Restore` if it completes `snapshot`."""
        (_, sequence, payload), now_s = record.message, record.time_ns * 1e-9
        if isinstance(envelope, EngineEnvelope):
            epoch = self.restarts.observe(sequence, payload)
        else:
            epoch, sequence = envelope.epoch, envelope.sequence
        key = rank_of(envelope)
        if (session := self.sessions.get(key)) is None:
            session = self.sessions[key] = Session(NO_REPLAY, has_snapshots=key is not None)
            session.resume(epoch, sequence, is_complete=sequence == 0)
            self.is_from_start &= sequence == 0 or isinstance(envelope, SnapshotPart)
        if isinstance(envelope, SnapshotPart):
            if (snapshot := self.snapshots.add(record.message, record.source.name)) is None:
                return []
            self.snapshot = snapshot
            return session.on_snapshot(epoch, sequence, now_s)
        if isinstance(envelope, CanonicalEnvelope) and envelope.is_heartbeat:
            steps = believe_heartbeat(session, envelope, now_s)
        else:
            steps = session.receive(epoch, sequence, None, now_s)
        if session.question(float("inf")) is not None:
            steps += session.on_answer(None, None, now_s)
        return steps

    def total(self, *names: str) -> int:
        """Return the sum of counts that each session has."""
        return sum(getattr(session, name) for session in self.sessions.values() for name in names)


def believe_heartbeat(session: Session[T], envelope: CanonicalEnvelope, now_s: float) -> list[Step[T]]:
    """Return a session's steps for a heartbeat. Blocks are not followed: it is believed if nothing is missing.

    One that says that the rank holds nothing is believed in any case.
    """
    is_same = session.is_complete or envelope.is_empty_heartbeat
    published = _EMPTY if is_same else _NOT_EMPTY
    return session.on_heartbeat(envelope.epoch, envelope.sequence, published, _EMPTY, now_s)
