"""Decides what a recorder asks the source of a stream, and where in the recording the answers go. No I/O, no clock.

The recorder asks, as an index would, for what a rank held before its first recorded message and for what was lost. A
publisher answers with batches or a snapshot, an engine with what its replay buffer has. What was received with the
message that revealed the loss is held back meanwhile, so that the answer stands in front of it. An answer is final;
what it lacks is asked for again at a publisher's later heartbeats. A source that does not answer is recorded as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from kvist.events import WorkerRank
from kvist.events.codec import is_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.follow import Question
from kvist.events.restarts import RestartDetector
from kvist.events.session import Apply, Clear, ClearReason, Restore, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.base import MAX_DRAIN
from kvist.events.types import MAX_RANKS, SnapshotPart
from kvist.replay.blocks import RecordedSnapshot, SnapshotCollector, empty_snapshot
from kvist.replay.envelope import CanonicalEnvelope, rank_of, read_envelope
from kvist.replay.numbering import Numbering, believe_heartbeat
from kvist.replay.recording import Record

SILENCE_S = 30.0
"""How long a source that did not answer is asked nothing, unless it reconnects: nothing is received during a question,
and each rank may have one."""

# Held back is what one receive brought; of two if the first answer shows a restart.
_LIMITS = SessionLimits(max_asks=1, max_held_messages=2 * MAX_DRAIN)

_logger = logging.getLogger(__name__)


class _RankRecovery:
    """Recovers one series of sequence numbers: a publisher's rank, or an engine's stream if the rank is None."""

    def __init__(self, rank: WorkerRank | None, topic: bytes, restarts: RestartDetector) -> None:
        self.session: Session[Message] = Session(_LIMITS, has_snapshots=rank is not None)
        self.rank = rank
        self._topic = topic
        self._restarts = restarts
        # Epoch and number: live messages before it that arrive next are in the answer, too, or of a process before it.
        self._answered_before = 0, 0

    def receive(self, envelope: CanonicalEnvelope | EngineEnvelope, message: Message, now_s: float) -> list[Message]:
        """Return what to write now, after a live message."""
        session = self.session
        if isinstance(envelope, CanonicalEnvelope):
            epoch, sequence = envelope.epoch, envelope.sequence
        else:
            sequence = message.sequence
            # A message that may be of an earlier process than the one that answered cannot show a restart.
            is_unproven = session.is_unproven
            epoch = self._restarts.epoch if is_unproven else self._restarts.observe(sequence, message.payload)
        is_first = session.epoch is None
        ready = self._release_older_epoch(epoch, now_s)
        if (epoch, sequence) < self._answered_before:
            return ready
        self._answered_before = 0, 0
        if isinstance(envelope, CanonicalEnvelope) and envelope.is_heartbeat:
            believe_heartbeat(session, envelope, now_s)
            ready += [] if self._is_waiting else [message]
        elif applied := _applied(session.receive(epoch, sequence, message, now_s)):
            ready += applied
        elif not session.held or session.held[-1][1] is not message:  # it is a duplicate, or late
            ready.append(message)
        if is_first:
            session.num_gaps = 0  # what came before the first message was not lost
        return ready

    def question(self, now_s: float) -> ReplayRequest | None:
        """Return what to ask now; of an engine also the last message, whose bytes show whether it restarted."""
        start_sequence = self.session.question(now_s)
        if start_sequence is None:
            return None
        if self.rank is None:
            return ReplayRequest(None, max(0, start_sequence - 1))
        return ReplayRequest(self._topic, start_sequence, self.session.epoch)

    def on_answer(
        self, request: ReplayRequest, messages: Sequence[Message], now_s: float
    ) -> Generator[None, None, list[Message] | None]:
        """Return what to write after an answer; None if it has only a part of a snapshot. Yields between messages."""
        snapshot: RecordedSnapshot | None = None
        answered: list[tuple[int, Message]] = []  # with their epochs, which engines do not name
        collector, has_parts = SnapshotCollector(), False
        for message in messages:
            if self.rank is not None and is_snapshot_part(message.payload):
                has_parts = True
                whole = collector.add(message, self.rank.worker)
                snapshot = whole if whole is not None and whole.snapshot.source == self.rank else snapshot
            envelope = read_envelope(message.payload)
            if self.rank is None and isinstance(envelope, EngineEnvelope):
                answered.append((0, message if message.topic else message._replace(topic=self._topic)))
            elif isinstance(envelope, CanonicalEnvelope) and envelope.source == self.rank and not envelope.is_heartbeat:
                answered.append((envelope.epoch, message))
            yield
        if has_parts and snapshot is None:
            return None
        return self._apply_answer(request, snapshot, answered, now_s)

    def _apply_answer(
        self,
        request: ReplayRequest,
        snapshot: RecordedSnapshot | None,
        answered: list[tuple[int, Message]],
        now_s: float,
    ) -> list[Message]:
        session = self.session
        ready: list[Message] = []
        if self.rank is None:
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
        numbered = [(message.sequence, message) for message in messages]
        snapshot_sequence = None if snapshot is None else snapshot.snapshot.sequence
        steps = session.on_answer(epoch, numbered, now_s, snapshot_sequence=snapshot_sequence)
        applied = _applied(steps)
        self._answered_before = session.epoch or 0, session.expected_sequence
        if snapshot is not None and Restore() in steps:
            ready += snapshot.messages
        elif applied and Clear(ClearReason.INCOMPLETE) in steps:
            envelope = read_envelope(applied[0].payload)
            assert isinstance(envelope, CanonicalEnvelope)
            ready.append(empty_snapshot(envelope, applied[0].topic))
        return ready + applied

    def give_up(self, now_s: float) -> list[Message]:
        """Wait for no answer; return what was held back."""
        return _applied(self.session.on_answer(None, None, now_s)) if self._is_waiting else []

    def _release_older_epoch(self, epoch: int | None, now_s: float) -> list[Message]:
        """Return what was held back of an epoch that this one ends: written later, it would look like a step back."""
        last = self.session.epoch
        return self.give_up(now_s) if epoch is not None and last is not None and epoch > last else []

    @property
    def _is_waiting(self) -> bool:
        return self.session.question(float("inf")) is not None


class SourceRecovery:
    """Decides what to ask one source, and what to write in which order: the `Follower` of a recorder."""

    def __init__(self, name: str, write: Callable[[Message], None]) -> None:
        """Record the source of this name; `write` appends a message to the recording."""
        self.num_messages = 0
        """Messages received live; those from answers are `num_recovered` of the sessions."""
        self.num_malformed = 0
        self._name = name
        self._write = write
        self._ranks: dict[WorkerRank | None, _RankRecovery] = {}
        self._recorded = Numbering()
        self._recorded_topics: dict[WorkerRank | None, bytes] = {}
        self._asks_at_s = 0.0
        self._num_unanswered = 0

    @property
    def sessions(self) -> list[Session[Message]]:
        return [rank.session for rank in self._ranks.values()]

    @property
    def partial(self) -> list[str]:
        """Return the ranks of which the recording lacks something at present; for an engine, the source's name."""
        return [
            self._name if key is None else f"{key.worker}/{key.rank}"
            for key, rank in self._ranks.items()
            if rank.session.state is not SourceState.LIVE
        ]

    def skip(self, record: Record) -> None:
        """Note a message that an earlier part of the recording has: it is neither written again nor asked for."""
        envelope = read_envelope(record.message.payload)
        if envelope is not None:
            self._recorded.on_message(envelope, record)
            self._recorded_topics[rank_of(envelope)] = record.message.topic

    def resume(self) -> None:
        """Continue behind all that was skipped; call it before anything is received."""
        for key, recorded in self._recorded.sessions.items():
            assert recorded.epoch is not None
            rank = self._ranks[key] = _RankRecovery(key, self._recorded_topics[key], self._recorded.restarts)
            rank.session.resume(recorded.epoch, recorded.expected_sequence, is_complete=recorded.is_complete)

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        for message in messages:
            self._write_all(self._receive(message, now_s))
            yield

    def _receive(self, message: Message, now_s: float) -> list[Message]:
        self.num_messages += 1
        envelope = read_envelope(message.payload)
        self.num_malformed += envelope is None
        if envelope is None or isinstance(envelope, SnapshotPart):
            return [message]
        key = rank_of(envelope)
        if (rank := self._ranks.get(key)) is None:
            if len(self._ranks) > MAX_RANKS:  # a stranger may make up names: further ones are only recorded
                return [message]
            rank = self._ranks[key] = _RankRecovery(key, message.topic, self._recorded.restarts)
        return rank.receive(envelope, message, now_s)

    def on_reconnect(self, now_s: float) -> None:
        """Ask an engine, which may be another process, as only its answer shows."""
        self._asks_at_s = now_s
        if (engine := self._ranks.get(None)) is not None:
            self._write_all(engine.give_up(now_s))
            engine.session.doubt(now_s)

    def on_departure(self) -> None:
        """Do nothing: what is recorded stays true."""

    def questions(self, now_s: float) -> Iterator[Question]:
        """Yield what to ask now. Once a question is not answered, no rank waits any longer."""
        for idx, rank in enumerate([*self._ranks.values()]):
            request = rank.question(now_s)
            if request is not None and now_s >= self._asks_at_s:
                yield Question(request, idx)
            else:
                self._write_all(rank.give_up(now_s))

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        rank = [*self._ranks.values()][question.rank]
        ready = None
        if messages is not None:
            ready = yield from rank.on_answer(question.request, messages, now_s)
        if ready is None:
            ready = rank.give_up(now_s)
            self._asks_at_s = now_s + SILENCE_S
            self._num_unanswered += 1
            if self._num_unanswered == 1:
                text = "what came before is not answered: recorded without source=%s rank=%s"
                _logger.warning(text, self._name, rank.rank)
        self._write_all(ready)

    def close(self, now_s: float) -> None:
        """Write what waits for an answer."""
        for rank in self._ranks.values():
            self._write_all(rank.give_up(now_s))

    def _write_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._write(message)


def _applied(steps: Sequence[Step[Message]]) -> list[Message]:
    return [step.body for step in steps if isinstance(step, Apply)]
