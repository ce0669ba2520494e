"""What a recorder asks of a stream that it writes down, and where in the recording the answers stand. No I/O, no clock.

Whatever a rank held before it was heard, or lost on the way, is asked for as an index would: a publisher answers with
batches or with a snapshot, an engine with what its replay buffer has. Until the answer is here the rank's messages are
held back, so that it stands in front of the first that it explains. A source that does not answer in time, or with what
cannot be believed, is recorded as it comes; a publisher is asked again at a later heartbeat, more and more rarely.
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
from kvist.events.types import MAX_RANKS, Holding
from kvist.replay.blocks import RecordedSnapshot, SnapshotCollector, nothing_before
from kvist.replay.envelope import (
    CanonicalEnvelope,
    Envelope,
    SnapshotEnvelope,
    SourceNumbering,
    read_envelope,
)

MAX_HELD_BYTES = 64 << 20
"""What is held back of one source; if more comes before the answer, that is given up."""

# Messages wait meanwhile: a publisher is asked once more at once, if the answer has a hole, and then at a heartbeat.
_LIMITS = SessionLimits(max_asks=2, jitter_s=0.0, retry_s=0.1, max_held_messages=1 << 20)
_NOTHING, _SOMETHING = Holding(0, 0), Holding(1, 0)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timed:
    """A message to write, and when it came; an answer's came when the first message that it explains did."""

    message: Message
    mono_ns: int = field(compare=False)


class Question(NamedTuple):
    """What to ask about one rank, None for an engine's whole stream."""

    rank: WorkerRank | None
    request: ReplayRequest


class _RankRecovery:
    """One numbering that is followed: a publisher's rank, or an engine's stream with all its ranks if that is None."""

    def __init__(self, rank: WorkerRank | None, topic: bytes, restarts: RestartDetector | None = None) -> None:
        self.session: Session[Timed] = Session(_LIMITS, has_snapshots=rank is not None)
        self._rank = rank
        self._topic = topic
        self._restarts = restarts or RestartDetector()
        self._answered_before = 0  # what comes next below it was on its way when an answer brought it as well

    @property
    def is_waiting(self) -> bool:
        return self.session.state is SourceState.RESYNCING

    def receive(self, envelope: CanonicalEnvelope | EngineEnvelope, timed: Timed, now_s: float) -> list[Timed]:
        session, (_, sequence, payload) = self.session, timed.message
        if isinstance(envelope, EngineEnvelope):
            epoch = self._restarts.observe(sequence, payload)
        else:
            epoch, sequence = envelope.epoch, envelope.sequence
        ready = self._leave_epoch(epoch, now_s)
        if isinstance(envelope, CanonicalEnvelope) and envelope.is_heartbeat:
            # Blocks are not followed here: a rank that is whole is what its publisher says it is, another one is not.
            is_same = session.is_complete or envelope.is_of_no_block
            session.on_heartbeat(epoch, sequence, _NOTHING if is_same else _SOMETHING, _NOTHING, now_s)
            return ready if self.is_waiting else [*ready, timed]
        was_waiting = self.is_waiting
        applied = _applied(session.receive(epoch, sequence, timed, now_s))
        if applied:
            self._answered_before = 0
        elif not was_waiting and self._answered_before <= sequence < session.expected_sequence:
            ready.append(timed)  # what comes again, or too late, is written as it came
        return ready + applied

    def question(self, now_s: float) -> ReplayRequest | None:
        """Return what to ask now; an engine from the last message on, whose bytes tell if it is the same process."""
        start_sequence = self.session.question(now_s)
        if start_sequence is None:
            return None
        if self._rank is None:
            return ReplayRequest(None, max(0, start_sequence - 1))
        return ReplayRequest(self._topic, start_sequence, self.session.epoch)

    def answer(
        self, request: ReplayRequest, messages: Sequence[Message] | None, now_s: float
    ) -> Generator[None, None, list[Timed] | None]:
        """Take the answer, None for none; return what is to be written now, None if it is not to be believed."""
        snapshot: RecordedSnapshot | None = None
        answered: list[tuple[int, Message]] = []
        collector, has_parts = SnapshotCollector(), False
        for message in messages or ():
            if self._rank is not None and is_snapshot_part(message.payload):
                has_parts = True
                whole = collector.add(message, self._rank.worker)
                snapshot = whole if whole is not None and whole.rank == self._rank else snapshot
            envelope = read_envelope(message.payload)
            if self._rank is None and isinstance(envelope, EngineEnvelope):
                # Replies have no topic: the stream's is put.
                answered.append((0, message if message.topic else message._replace(topic=self._topic)))
            elif (
                isinstance(envelope, CanonicalEnvelope) and envelope.source == self._rank and not envelope.is_heartbeat
            ):
                answered.append((envelope.epoch, message))
            yield
        if messages is None or (has_parts and snapshot is None):
            return None
        if not self.is_waiting:  # that was given up meanwhile
            return []
        return self._believe(request, snapshot, answered, now_s)

    def _believe(
        self,
        request: ReplayRequest,
        snapshot: RecordedSnapshot | None,
        answered: list[tuple[int, Message]],
        now_s: float,
    ) -> list[Timed]:
        """Take a snapshot, or none, and the messages behind it with the epoch of each; return what is to be written."""
        session = self.session
        came_ns = session.held[0][1].mono_ns if session.held else round(now_s * 1e9)
        told_epoch = None if snapshot is None else snapshot.snapshot.epoch
        if self._rank is None:
            payloads = [(message.sequence, message.payload) for _, message in answered]
            last_sequence = request.start_sequence if session.expected_sequence else None
            epoch: int | None = self._restarts.observe_answer(payloads, last_sequence)
            messages = [message for _, message in answered]
        else:
            first_epoch = answered[0][0] if answered else session.epoch
            epoch = first_epoch if told_epoch is None else told_epoch
            messages = [message for each, message in answered if each == epoch]
        # What an engine's stream said before the answer of another process is that one's, and in the answer, too.
        ready = [] if self._rank is None else self._leave_epoch(epoch, now_s)
        numbered = [(message.sequence, Timed(message, came_ns)) for message in messages]
        told_sequence = None if snapshot is None else snapshot.snapshot.sequence
        steps = session.on_answer(epoch, numbered, now_s, snapshot_sequence=told_sequence)
        applied = _applied(steps)
        self._answered_before = session.expected_sequence
        if snapshot is not None and any(isinstance(step, Restore) for step in steps):
            ready += [Timed(message, came_ns) for message in snapshot.messages]
        elif applied and any(isinstance(step, Clear) and step.reason is ClearReason.INCOMPLETE for step in steps):
            first = applied[0].message
            envelope = read_envelope(first.payload)
            assert isinstance(envelope, CanonicalEnvelope)
            ready.append(Timed(nothing_before(envelope, first.topic), came_ns))
        return ready + applied

    def unanswered(self, now_s: float) -> list[Timed]:
        return _applied(self.session.on_answer(None, None, now_s))

    def give_up(self, now_s: float) -> list[Timed]:
        """Wait for no answer; return what was held back."""
        ready: list[Timed] = []
        while self.is_waiting and self.session.question(float("inf")) is not None:
            ready += self.unanswered(now_s)
        return ready

    def _leave_epoch(self, epoch: int | None, now_s: float) -> list[Timed]:
        """Return what was held back of an epoch that ends with this one: behind it, it would look like a step back."""
        last = self.session.epoch
        return self.give_up(now_s) if epoch is not None and last is not None and epoch > last else []


class SourceRecovery:
    """Decides about one source: what to ask it, and what to write in which order."""

    def __init__(self, name: str, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.numbering = SourceNumbering()
        self._name = name
        self._max_held_bytes = max_held_bytes
        self._ranks: dict[WorkerRank | None, _RankRecovery] = {}
        self._held_bytes = 0
        self._recorded = SourceNumbering()
        self._recorded_topics: dict[WorkerRank | None, bytes] = {}
        self.num_unanswered = 0
        """Questions without an answer that could be believed."""

    def total(self, name: str) -> int:
        """Return the sum of a count that each numbering's session has."""
        return sum(getattr(rank.session, name) for rank in self._ranks.values())

    @property
    def partial(self) -> list[str]:
        """Return of which ranks something is missing in the recording, as things are; an engine's by its source."""
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
        """Take what an earlier part of the recording has: it is not written again, and asked for no more."""
        envelope = read_envelope(message.payload)
        self._recorded.note_message(envelope, message)
        if envelope is not None:
            self._recorded_topics[_rank_of(envelope)] = message.topic

    def resume(self) -> None:
        """Go on behind all that was skipped; to be called before anything is received."""
        for key, topic in self._recorded_topics.items():
            numbering = self._recorded.engine if key is None else self._recorded.ranks[key]
            if numbering is not None and numbering.epoch is not None:
                rank = self._ranks[key] = _RankRecovery(key, topic, self._recorded.restarts)
                rank.session.resume(numbering.epoch, numbering.next_sequence, is_complete=numbering.is_complete)

    def on_reconnect(self, now_s: float) -> list[Timed]:
        """Take note that a peer connected: an engine may be another process, which only its answer tells."""
        if (engine := self._ranks.get(None)) is None:
            return []
        ready = engine.give_up(now_s)
        engine.session.doubt(now_s)
        return ready

    def receive(self, messages: Sequence[Message], mono_ns: int) -> list[Timed]:
        """Take live messages; return what is to be written now."""
        ready: list[Timed] = []
        now_s = mono_ns * 1e-9
        self._held_bytes = self._held_bytes if self.is_waiting else 0
        for message in messages:
            envelope, timed = read_envelope(message.payload), Timed(message, mono_ns)
            self.numbering.note_message(envelope, message)
            rank = self._rank(envelope, message)
            if rank is None or envelope is None or isinstance(envelope, SnapshotEnvelope):
                ready.append(timed)
                continue
            ready += rank.receive(envelope, timed, now_s)
            if rank.is_waiting:
                self._held_bytes += MESSAGE_BYTES + len(message.topic) + len(message.payload)
                if self._held_bytes > self._max_held_bytes:
                    ready += self.give_up(now_s)
        return ready

    def question(self, now_s: float) -> Question | None:
        """Return what to ask now, the same until it is answered or given up."""
        requests = ((key, rank.question(now_s)) for key, rank in self._ranks.items() if rank.is_waiting)
        return next((Question(key, request) for key, request in requests if request is not None), None)

    def answer(
        self, question: Question, messages: Sequence[Message] | None, now_s: float
    ) -> Generator[None, None, list[Timed]]:
        """Take the answer, None for none; return what is to be written before all else. Yields between messages."""
        rank = self._ranks[question.rank]
        ready = yield from rank.answer(question.request, messages, now_s)
        if ready is None and rank.is_waiting:  # or it was given up meanwhile
            self._count_unanswered(question.rank)
            return rank.unanswered(now_s)
        return ready or []

    def give_up(self, now_s: float) -> list[Timed]:
        """Wait for no answer; return what was held back."""
        ready: list[Timed] = []
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

    def _rank(self, envelope: Envelope | None, message: Message) -> _RankRecovery | None:
        if envelope is None or isinstance(envelope, SnapshotEnvelope):
            return None
        key = _rank_of(envelope)
        # Of names that a stranger makes up so many are recorded, and not asked about.
        if key not in self._ranks and len(self._ranks) <= MAX_RANKS:
            self._ranks[key] = _RankRecovery(key, message.topic)
        return self._ranks.get(key)


def _rank_of(envelope: Envelope) -> WorkerRank | None:
    return None if isinstance(envelope, EngineEnvelope) else envelope.source


def _applied(steps: Sequence[Step[Timed]]) -> list[Timed]:
    return [step.body for step in steps if isinstance(step, Apply)]
