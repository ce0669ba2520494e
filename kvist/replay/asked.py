"""One numbering that a recorder follows, to know when to ask what is missing and whether an answer has it. No I/O."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvist.errors import MalformedMessageError
from kvist.events import Heartbeat, WorkerRank
from kvist.events.codec import decode_batch, encode_snapshot_part, is_snapshot_part
from kvist.events.restarts import RestartDetector
from kvist.events.session import Holding, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import SnapshotPart
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, read_envelope
from kvist.replay.snapshots import RecordedSnapshot, SnapshotCollector

# Messages wait meanwhile: a publisher is asked once more at once, if the answer has a hole, and then at a heartbeat.
_LIMITS = SessionLimits(max_asks=2, jitter_s=0.0, retry_s=0.1)
_NOTHING = Holding(0, 0)


class Numbered(NamedTuple):
    """A message of an answer."""

    epoch: int
    sequence: int
    message: Message


@dataclass(slots=True)
class Answer:
    """What is believed of an answer: a snapshot or none, and the messages behind it."""

    snapshot: RecordedSnapshot | None = None
    numbered: list[Numbered] = field(default_factory=list)

    @property
    def epoch(self) -> int | None:
        """Return the epoch that it tells of, None if it is empty."""
        if self.snapshot is not None:
            return self.snapshot.snapshot.epoch
        return self.numbered[0].epoch if self.numbered else None


Steps: TypeAlias = list[Step[Message | None]]
"""What is to be done with an answer's messages, and with live ones, which are written in any case and may be None."""


class CanonicalAsked:
    """One rank of a publisher's."""

    def __init__(self, rank: WorkerRank, topic: bytes) -> None:
        self.session: Session[Message | None] = Session(_LIMITS, has_snapshots=True)
        self._rank = rank
        self._topic = topic

    @property
    def is_waiting(self) -> bool:
        """Return whether something is asked for."""
        return self.session.state is SourceState.RESYNCING

    def received(self, envelope: CanonicalEnvelope, message: Message, now_s: float) -> None:
        """Take a live message."""
        if not envelope.is_heartbeat:
            self.session.received(envelope.epoch, envelope.sequence, None, now_s)
            return
        # Blocks are not followed here: a rank that is whole is what its publisher says it is, another one is not.
        published = _NOTHING if self.session.is_complete else _published(message)
        self.session.heartbeat(envelope.epoch, envelope.sequence, published, _NOTHING, now_s)

    def question(self, now_s: float) -> ReplayRequest | None:
        """Return what to ask now."""
        start_sequence = self.session.question(now_s)
        return None if start_sequence is None else ReplayRequest(self._topic, start_sequence, self.session.epoch)

    def read(self, messages: Sequence[Message]) -> Generator[None, None, Answer | None]:
        """Return what is believed of an answer, None for nothing; yields between messages."""
        answer, collector, has_parts = Answer(), SnapshotCollector(), False
        for message in messages:
            if is_snapshot_part(message.payload):
                has_parts = True
                snapshot = collector.add(message, self._rank.worker)
                if snapshot is not None and snapshot.rank == self._rank:
                    answer.snapshot = snapshot
            else:
                self._add(answer, message)
            yield
        return None if has_parts and answer.snapshot is None else answer

    def steps(self, request: ReplayRequest, answer: Answer, now_s: float) -> Steps:  # noqa: ARG002 - an engine's does
        """Return what an answer amounts to."""
        epoch = self.session.epoch if answer.epoch is None else answer.epoch
        frames = [(each.sequence, each.message) for each in answer.numbered if each.epoch == epoch]
        snapshot_sequence = None if answer.snapshot is None else answer.snapshot.snapshot.sequence
        return self.session.replayed(epoch, frames, now_s, snapshot_sequence=snapshot_sequence)

    def _add(self, answer: Answer, message: Message) -> None:
        envelope = read_envelope(message.payload)
        if not isinstance(envelope, CanonicalEnvelope) or envelope.is_heartbeat:
            return
        if (envelope.worker, envelope.rank) == self._rank:
            answer.numbered.append(Numbered(envelope.epoch, envelope.sequence, message))


class EngineAsked:
    """An engine's own stream, with all its ranks."""

    def __init__(self, topic: bytes) -> None:
        self.session: Session[Message | None] = Session(_LIMITS)
        self._topic = topic
        self._restarts = RestartDetector()

    @property
    def is_waiting(self) -> bool:
        """Return whether something is asked for."""
        return self.session.state is SourceState.RESYNCING

    def received(self, message: Message, now_s: float) -> None:
        """Take a live message."""
        epoch = self._restarts.received(message.sequence, message.payload)
        self.session.received(epoch, message.sequence, message, now_s)

    def question(self, now_s: float) -> ReplayRequest | None:
        """Ask from the last message on: if it comes back with the same bytes, it is the same process."""
        start_sequence = self.session.question(now_s)
        return None if start_sequence is None else ReplayRequest(None, max(0, start_sequence - 1))

    def read(self, messages: Sequence[Message]) -> Generator[None, None, Answer | None]:
        """Return what is believed of an answer; yields between messages. Replies have no topic: the stream's is put."""
        answer = Answer()
        for message in messages:
            if isinstance(read_envelope(message.payload), EngineEnvelope):
                live = message if message.topic else message._replace(topic=self._topic)
                answer.numbered.append(Numbered(0, message.sequence, live))
            yield
        return answer

    def steps(self, request: ReplayRequest, answer: Answer, now_s: float) -> Steps:
        """Return what an answer amounts to."""
        frames: list[tuple[int, Message | None]] = [(each.sequence, each.message) for each in answer.numbered]
        last_sequence = request.start_sequence if self.session.expected_sequence else None
        payloads = [(each.sequence, each.message.payload) for each in answer.numbered]
        epoch = self._restarts.replayed(payloads, last_sequence)
        return self.session.replayed(epoch, frames, now_s)


def nothing_before(first: Message) -> Message:
    """Return the snapshot of what a rank held before its publisher's first message: what was heard until now goes."""
    of = read_envelope(first.payload)
    assert isinstance(of, CanonicalEnvelope)
    part = SnapshotPart(of.worker, of.rank, of.epoch, of.sequence, of.block_size, 0, 1, 0, 0, b"", b"", b"")
    return Message(first.topic, of.sequence, encode_snapshot_part(part))


def _published(message: Message) -> Holding:
    try:
        (heartbeat,) = decode_batch(message.payload, "").batch.events
    except (MalformedMessageError, ValueError):
        return _NOTHING
    return Holding(heartbeat.num_blocks, heartbeat.digest) if isinstance(heartbeat, Heartbeat) else _NOTHING
