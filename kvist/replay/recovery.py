"""Decides what a recorder asks the source of a stream, and where in the recording the answers go. No I/O, no clock.

The recorder asks, as an index would, for what a rank held before its first recorded message and for what was lost. A
publisher answers with batches or a snapshot, an engine with what its replay buffer has. Until then the rank's messages
are held back, so that the answer stands in front of the first message that needs it. If the answer is late or not
plausible, the source is recorded without it; a publisher is asked again at later heartbeats, at growing intervals.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvist.events import WorkerRank
from kvist.events.codec import is_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.session import Apply, Clear, ClearReason, Restore, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.base import MESSAGE_BYTES
from kvist.events.types import MAX_RANKS, Holding, SnapshotPart
from kvist.replay.blocks import RecordedSnapshot, SnapshotCollector, empty_snapshot
from kvist.replay.envelope import CanonicalEnvelope, SourceTracker, rank_of, read_envelope

MAX_HELD_BYTES = 64 << 20
"""The most that is held back of one source; if more arrives before the answer, it is written without the answer."""

# Messages are held back meanwhile: a publisher whose answer has a gap is asked once more at once, then at a heartbeat.
_LIMITS = SessionLimits(max_asks=2, jitter_s=0.0, retry_s=0.1, max_held_messages=1 << 20)
_EMPTY, _NOT_EMPTY = Holding(0, 0), Holding(1, 0)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A message to write, and when it arrived; an answer's messages have the time of the first that was held back."""

    message: Message
    mono_ns: int = field(compare=False)


class Question(NamedTuple):
    """What to ask about one rank; None is an engine's whole stream."""

    rank: WorkerRank | None
    request: ReplayRequest


class _RankRecovery:
    """Recovers one series of sequence numbers: a publisher's rank, or an engine's stream if the rank is None."""

    def __init__(self, rank: WorkerRank | None, topic: bytes, restarts: RestartDetector | None = None) -> None:
        self.session: Session[TimedMessage] = Session(_LIMITS, has_snapshots=rank is not None)
        self._rank = rank
        self._topic = topic
        self._restarts = restarts or RestartDetector()
        self._answered_before = 0  # live messages before this number that arrive next are in the answer, too

    @property
    def is_waiting(self) -> bool:
        return self.session.state is SourceState.RESYNCING

    def receive(
        self, envelope: CanonicalEnvelope | EngineEnvelope, timed: TimedMessage, now_s: float
    ) -> list[TimedMessage]:
        """Return what to write now, after a live message."""
        session, (_, sequence, payload) = self.session, timed.message
        if isinstance(envelope, EngineEnvelope):
            epoch = self._restarts.observe(sequence, payload)
        else:
            epoch, sequence = envelope.epoch, envelope.sequence
        ready = self._release_older_epoch(epoch, now_s)
        if isinstance(envelope, CanonicalEnvelope) and envelope.is_heartbeat:
            # The recorder does not follow blocks: of a complete rank it believes the heartbeat, of another it does not.
            is_same = session.is_complete or envelope.is_empty_heartbeat
            session.on_heartbeat(epoch, sequence, _EMPTY if is_same else _NOT_EMPTY, _EMPTY, now_s)
            return ready if self.is_waiting else [*ready, timed]
        was_waiting = self.is_waiting
        applied = _applied(session.receive(epoch, sequence, timed, now_s))
        if applied:
            self._answered_before = 0
        elif not was_waiting and self._answered_before <= sequence < session.expected_sequence:
            ready.append(timed)  # duplicates and late messages are recorded, too
        return ready + applied

    def question(self, now_s: float) -> ReplayRequest | None:
        """Return what to ask now; of an engine also the last message, whose bytes show whether it restarted."""
        start_sequence = self.session.question(now_s)
        if start_sequence is None:
            return None
        if self._rank is None:
            return ReplayRequest(None, max(0, start_sequence - 1))
        return ReplayRequest(self._topic, start_sequence, self.session.epoch)

    def on_answer(
        self, request: ReplayRequest, messages: Sequence[Message] | None, now_s: float
    ) -> Generator[None, None, list[TimedMessage] | None]:
        """Return what to write after an answer; None if there was none, or it has only a part of a snapshot.

        Yields between messages.
        """
        snapshot: RecordedSnapshot | None = None
        answered: list[tuple[int, Message]] = []  # with their epochs, which engines do not name
        collector, has_parts = SnapshotCollector(), False
        for message in messages or ():
            if self._rank is not None and is_snapshot_part(message.payload):
                has_parts = True
                whole = collector.add(message, self._rank.worker)
                snapshot = whole if whole is not None and whole.rank == self._rank else snapshot
            envelope = read_envelope(message.payload)
            if self._rank is None and isinstance(envelope, EngineEnvelope):
                answered.append((0, message if message.topic else message._replace(topic=self._topic)))
            elif (
                isinstance(envelope, CanonicalEnvelope) and envelope.source == self._rank and not envelope.is_heartbeat
            ):
                answered.append((envelope.epoch, message))
            yield
        if messages is None or (has_parts and snapshot is None):
            return None
        if not self.is_waiting:  # it was given up meanwhile
            return []
        return self._apply_answer(request, snapshot, answered, now_s)

    def _apply_answer(
        self,
        request: ReplayRequest,
        snapshot: RecordedSnapshot | None,
        answered: list[tuple[int, Message]],
        now_s: float,
    ) -> list[TimedMessage]:
        session = self.session
        arrived_ns = session.held[0][1].mono_ns if session.held else round(now_s * 1e9)
        ready: list[TimedMessage] = []
        if self._rank is None:
            payloads = [(message.sequence, message.payload) for _, message in answered]
            last_sequence = request.start_sequence if session.expected_sequence else None
            epoch: int | None = self._restarts.observe_answer(payloads, last_sequence)
            messages = [message for _, message in answered]
        else:
            epoch = answered[0][0] if answered else session.epoch
            epoch = epoch if snapshot is None else snapshot.snapshot.epoch
            messages = [message for each, message in answered if each == epoch]
            # Of an engine nothing is released: what it sent before a new process answered is in the answer, too.
            ready = self._release_older_epoch(epoch, now_s)
        numbered = [(message.sequence, TimedMessage(message, arrived_ns)) for message in messages]
        snapshot_sequence = None if snapshot is None else snapshot.snapshot.sequence
        steps = session.on_answer(epoch, numbered, now_s, snapshot_sequence=snapshot_sequence)
        applied = _applied(steps)
        self._answered_before = session.expected_sequence
        if snapshot is not None and any(isinstance(step, Restore) for step in steps):
            ready += [TimedMessage(message, arrived_ns) for message in snapshot.messages]
        elif applied and any(isinstance(step, Clear) and step.reason is ClearReason.INCOMPLETE for step in steps):
            first = applied[0].message
            envelope = read_envelope(first.payload)
            assert isinstance(envelope, CanonicalEnvelope)
            ready.append(TimedMessage(empty_snapshot(envelope, first.topic), arrived_ns))
        return ready + applied

    def on_no_answer(self, now_s: float) -> list[TimedMessage]:
        return _applied(self.session.on_answer(None, None, now_s))

    def give_up(self, now_s: float) -> list[TimedMessage]:
        """Wait for no answer; return what was held back."""
        ready: list[TimedMessage] = []
        while self.session.question(float("inf")) is not None:
            ready += self.on_no_answer(now_s)
        return ready

    def _release_older_epoch(self, epoch: int | None, now_s: float) -> list[TimedMessage]:
        """Return what was held back of an epoch that this one ends: written later, it would look like a step back."""
        last = self.session.epoch
        return self.give_up(now_s) if epoch is not None and last is not None and epoch > last else []


class SourceRecovery:
    """Decides what to ask one source, and what to write in which order."""

    def __init__(self, name: str, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.live = SourceTracker()
        """What live messages show to be missing, before any recovery."""
        self._name = name
        self._max_held_bytes = max_held_bytes
        self._ranks: dict[WorkerRank | None, _RankRecovery] = {}
        self._held_bytes = 0
        self._recorded = SourceTracker()
        self._recorded_topics: dict[WorkerRank | None, bytes] = {}
        self.num_unanswered = 0
        """Questions without a plausible answer."""

    def total(self, name: str) -> int:
        """Return the sum of a count that each rank's session has."""
        return sum(getattr(rank.session, name) for rank in self._ranks.values())

    @property
    def partial(self) -> list[str]:
        """Return the ranks of which the recording lacks something at present; for an engine, the source's name."""
        return [
            self._name if key is None else f"{key.worker}/{key.rank}"
            for key, rank in self._ranks.items()
            if rank.session.state is not SourceState.LIVE
        ]

    @property
    def is_waiting(self) -> bool:
        """Return whether messages are held back for an answer."""
        return any(rank.is_waiting for rank in self._ranks.values())

    def skip(self, message: Message) -> None:
        """Note a message that an earlier part of the recording has: it is neither written again nor asked for."""
        envelope = read_envelope(message.payload)
        self._recorded.on_message(envelope, message)
        if envelope is not None:
            self._recorded_topics[rank_of(envelope)] = message.topic

    def resume(self) -> None:
        """Continue behind all that was skipped; call it before anything is received."""
        for key, topic in self._recorded_topics.items():
            recorded = self._recorded.ranks[key]
            if recorded.epoch is not None:
                rank = self._ranks[key] = _RankRecovery(key, topic, self._recorded.restarts)
                rank.session.resume(recorded.epoch, recorded.next_sequence, is_complete=recorded.is_complete)

    def on_reconnect(self, now_s: float) -> list[TimedMessage]:
        """Return what to write after a reconnect: an engine may be another process, which only its answer shows."""
        if (engine := self._ranks.get(None)) is None:
            return []
        ready = engine.give_up(now_s)
        engine.session.doubt(now_s)
        return ready

    def receive(self, messages: Sequence[Message], mono_ns: int) -> list[TimedMessage]:
        """Return what to write now, after live messages."""
        ready: list[TimedMessage] = []
        now_s = mono_ns * 1e-9
        self._held_bytes = self._held_bytes if self.is_waiting else 0
        for message in messages:
            envelope, timed = read_envelope(message.payload), TimedMessage(message, mono_ns)
            self.live.on_message(envelope, message)
            if envelope is None or isinstance(envelope, SnapshotPart):
                ready.append(timed)
                continue
            key = rank_of(envelope)
            if (rank := self._ranks.get(key)) is None:
                if len(self._ranks) > MAX_RANKS:  # a stranger may make up names: further ones are only recorded
                    ready.append(timed)
                    continue
                rank = self._ranks[key] = _RankRecovery(key, message.topic)
            ready += rank.receive(envelope, timed, now_s)
            if rank.is_waiting:
                self._held_bytes += MESSAGE_BYTES + len(message.topic) + len(message.payload)
                if self._held_bytes > self._max_held_bytes:
                    ready += self.give_up(now_s)
        return ready

    def question(self, now_s: float) -> Question | None:
        """Return what to ask now, the same until it is answered or given up."""
        requests = ((key, rank.question(now_s)) for key, rank in self._ranks.items())
        return next((Question(key, request) for key, request in requests if request is not None), None)

    def on_answer(
        self, question: Question, messages: Sequence[Message] | None, now_s: float
    ) -> Generator[None, None, list[TimedMessage]]:
        """Return what to write before all else, after an answer or None for none. Yields between messages."""
        rank = self._ranks[question.rank]
        ready = yield from rank.on_answer(question.request, messages, now_s)
        if ready is None and rank.is_waiting:  # or it was given up meanwhile
            self._count_unanswered(question.rank)
            return rank.on_no_answer(now_s)
        return ready or []

    def give_up(self, now_s: float) -> list[TimedMessage]:
        """Wait for no answer; return what was held back."""
        ready: list[TimedMessage] = []
        for key, rank in self._ranks.items():
            if rank.is_waiting:
                self._count_unanswered(key)
                ready += rank.give_up(now_s)
        self._held_bytes = 0
        return ready

    def _count_unanswered(self, rank: WorkerRank | None) -> None:
        self.num_unanswered += 1
        if self.num_unanswered == 1:
            _logger.warning("what came before is not answered: recorded without source=%s rank=%s", self._name, rank)


def _applied(steps: Sequence[Step[TimedMessage]]) -> list[TimedMessage]:
    return [step.body for step in steps if isinstance(step, Apply)]
