"""What a recorder asks of a stream that it writes down, and where in the recording the answers stand. No I/O, no clock.

Whatever a rank held before it was heard, or lost on the way, is asked for as an index would: a publisher answers with
batches or with a snapshot, an engine with what its replay buffer has. Until the answer is here the source's messages
are held back, so that it stands in front of the first that it explains. A source that does not answer in time, or with
what cannot be believed, is recorded as it comes; a publisher is asked again at a later heartbeat, more and more rarely.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from kvist.errors import MalformedMessageError
from kvist.events import Heartbeat, WorkerRank
from kvist.events.codec import decode_batch, encode_snapshot_part, is_snapshot_part
from kvist.events.restarts import RestartDetector
from kvist.events.session import Apply, Clear, Holding, Restore, Session, SessionLimits, SourceState, Step
from kvist.events.steps import ClearReason
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.base import MESSAGE_BYTES
from kvist.events.types import MAX_RANKS, SnapshotPart
from kvist.replay.envelope import (
    CanonicalEnvelope,
    EngineEnvelope,
    Envelope,
    SnapshotEnvelope,
    SourceNumbering,
    read_envelope,
)
from kvist.replay.held import RecordedSnapshot, SnapshotCollector

MAX_HELD_BYTES = 64 << 20
"""What is held back of one source; if more comes before the answer, that is given up."""
MAX_WAIT_S = 10.0
"""How long messages are held back."""

# Messages wait meanwhile: a publisher is asked once more at once, if the answer has a hole, and then at a heartbeat.
_LIMITS = SessionLimits(max_asks=2, jitter_s=0.0, retry_s=0.1)
_NOTHING = Holding(0, 0)

_logger = logging.getLogger(__name__)


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
        if envelope.source == self._rank:
            answer.numbered.append(Numbered(envelope.epoch, envelope.sequence, message))


class EngineAsked:
    """An engine's own stream, with all its ranks."""

    def __init__(self, topic: bytes, restarts: RestartDetector | None = None) -> None:
        self.session: Session[Message | None] = Session(_LIMITS)
        self._topic = topic
        self._restarts = restarts or RestartDetector()

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


class Timed(NamedTuple):
    """A message to write, and when it came; an answer's came when the first message that it explains did."""

    message: Message
    mono_ns: int


class Question(NamedTuple):
    """What to ask about one rank, None for an engine's whole stream."""

    rank: WorkerRank | None
    request: ReplayRequest


class Asking:
    """Decides about one source: what to ask it, and what to write in which order."""

    def __init__(self, name: str, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.numbering = SourceNumbering()
        """What came live."""
        self._name = name
        self._max_held_bytes = max_held_bytes
        self._asked: dict[WorkerRank | None, CanonicalAsked | EngineAsked] = {}
        self._waiting: set[WorkerRank | None] = set()
        self._waiting_since_s = 0.0
        self._held: list[Timed] = []
        self._held_bytes = 0
        self._recalled = SourceNumbering()
        self._recalled_topics: dict[WorkerRank | None, bytes] = {}
        # Fingerprints of what answers brought that is also among what is held, or comes next.
        self._answered: dict[tuple[WorkerRank | None, int], int] = {}
        self.num_snapshots = 0
        self.num_recovered = 0
        """Messages that answers brought."""
        self.num_unanswered = 0
        """Questions without an answer that could be believed."""

    @property
    def partial(self) -> list[str]:
        """Return of which ranks something is missing in the recording, as things are; an engine's by its source."""
        return [
            self._name if rank is None else f"{rank.worker}/{rank.rank}"
            for rank, asked in self._asked.items()
            if asked.session.state is not SourceState.LIVE
        ]

    @property
    def is_waiting(self) -> bool:
        """Return whether messages are held back for an answer."""
        return bool(self._waiting)

    def is_overdue(self, now_s: float) -> bool:
        """Return whether messages were held back for too long."""
        return bool(self._waiting) and now_s - self._waiting_since_s > MAX_WAIT_S

    def heard(self, messages: Sequence[Message], mono_ns: int) -> list[Timed]:
        """Take live messages; return what is to be written now."""
        ready: list[Timed] = []
        now_s = mono_ns * 1e-9
        for message in messages:
            self._judge(read_envelope(message.payload), message, now_s)
            if not self._waiting:
                ready += self._released() if self._held else ()
                if not self._answered or not self._is_answered(message):
                    self._answered.clear()
                    ready.append(Timed(message, mono_ns))
                continue
            self._held.append(Timed(message, mono_ns))
            self._held_bytes += MESSAGE_BYTES + len(message.topic) + len(message.payload)
            if self._held_bytes > self._max_held_bytes:
                ready += self.give_up(now_s)
        return ready

    def recall(self, message: Message) -> None:
        """Take what an earlier part of the recording has: it is not written again, and asked for no more."""
        envelope = read_envelope(message.payload)
        self._recalled.seen(envelope, message)
        if envelope is not None:
            self._recalled_topics[None if isinstance(envelope, EngineEnvelope) else envelope.source] = message.topic

    def resume(self) -> None:
        """Go on behind all that was recalled; to be called before anything is heard."""
        for rank, topic in self._recalled_topics.items():
            numbering = self._recalled.engine if rank is None else self._recalled.ranks[rank]
            assert numbering is not None
            if numbering.epoch is not None:
                asked = EngineAsked(topic, self._recalled.restarts) if rank is None else CanonicalAsked(rank, topic)
                asked.session.resume(numbering.epoch, numbering.next_sequence, is_complete=numbering.is_complete)
                self._asked[rank] = asked

    def reconnected(self, now_s: float) -> None:
        """Take note that a peer connected: an engine may be another process, which only its answer tells."""
        if (engine := self._asked.get(None)) is not None:
            engine.session.doubt(now_s)
            self._note(None, now_s)

    def question(self, now_s: float) -> Question | None:
        """Return what to ask now, the same until it is `answered` or given up."""
        for rank in self._waiting:
            if (request := self._asked[rank].question(now_s)) is not None:
                return Question(rank, request)
        return None

    def read(self, question: Question, messages: Sequence[Message]) -> Generator[None, None, Answer | None]:
        """Return what is believed of an answer, None for nothing; yields between messages."""
        return self._asked[question.rank].read(messages)

    def answered(self, question: Question, answer: Answer | None, now_s: float) -> list[Timed]:
        """Take the answer, None for none; return what is to be written now."""
        rank, asked = question.rank, self._asked[question.rank]
        if rank not in self._waiting:
            return []
        if answer is None:
            self._unanswered(rank, now_s)
            return self._released()
        before = self._held_of_earlier(rank, answer.epoch)
        came_ns = self._held[0].mono_ns if self._held else round(now_s * 1e9)
        steps = asked.steps(question.request, answer, now_s)
        answered = {id(each.message) for each in answer.numbered}
        applied = [step.body for step in steps if isinstance(step, Apply) and step.body is not None]
        taken = [message for message in applied if id(message) in answered]
        self.num_recovered += len(taken)
        self._answered.update(((rank, message.sequence), xxh3_64_intdigest(message.payload)) for message in taken)
        if answer.snapshot is not None and any(isinstance(step, Restore) for step in steps):
            self.num_snapshots += 1
            taken[:0] = answer.snapshot.messages
        elif taken and any(isinstance(step, Clear) and step.reason is ClearReason.INCOMPLETE for step in steps):
            taken[:0] = [nothing_before(taken[0])]
        self._note(rank, now_s)
        return [*before, *(Timed(message, came_ns) for message in taken), *self._released()]

    def give_up(self, now_s: float) -> list[Timed]:
        """Wait for no answer; return what was held back."""
        while self._waiting:
            self._unanswered(next(iter(self._waiting)), now_s)
        return self._released()

    def _unanswered(self, rank: WorkerRank | None, now_s: float) -> None:
        self._asked[rank].session.replayed(None, None, now_s)
        self._note(rank, now_s)
        self.num_unanswered += 1
        if self.num_unanswered == 1:
            _logger.warning("what came before is not answered: recorded without source=%s rank=%s", self._name, rank)

    def _note(self, rank: WorkerRank | None, now_s: float) -> None:
        if self._asked[rank].session.state is not SourceState.RESYNCING:
            self._waiting.discard(rank)
            return
        if not self._waiting:
            self._waiting_since_s = now_s
        self._waiting.add(rank)

    def _released(self) -> list[Timed]:
        """Return what was held back, but for what an answer brought as well; nothing while a question is left."""
        if self._waiting:
            return []
        held, self._held, self._held_bytes = self._held, [], 0
        return [timed for timed in held if not self._answered or not self._is_answered(timed.message)]

    def _held_of_earlier(self, rank: WorkerRank | None, epoch: int | None) -> list[Timed]:
        """Return what was held back of a rank's earlier epochs: behind the answer it would look like a step back."""
        if rank is None or epoch is None:
            return []
        earlier: list[Timed] = []
        held: list[Timed] = []
        for timed in self._held:
            (earlier if _is_earlier(timed.message, rank, epoch) else held).append(timed)
        self._held = held
        return earlier

    def _is_answered(self, message: Message) -> bool:
        """Return whether an answer brought a message as well: it is written once."""
        envelope = read_envelope(message.payload)
        rank = envelope.source if isinstance(envelope, CanonicalEnvelope) else None
        return self._answered.get((rank, message.sequence)) == xxh3_64_intdigest(message.payload)

    def _judge(self, envelope: Envelope | None, message: Message, now_s: float) -> None:
        self.numbering.seen(envelope, message)
        if envelope is None or isinstance(envelope, SnapshotEnvelope):
            return
        rank = envelope.source if isinstance(envelope, CanonicalEnvelope) else None
        asked = self._asked.get(rank)
        if asked is None:
            if len(self._asked) > MAX_RANKS:  # of names that a stranger makes up: recorded, and not asked about
                return
            asked = CanonicalAsked(rank, message.topic) if rank is not None else EngineAsked(message.topic)
            self._asked[rank] = asked
        if isinstance(asked, EngineAsked):
            asked.received(message, now_s)
        else:
            assert isinstance(envelope, CanonicalEnvelope)
            asked.received(envelope, message, now_s)
        if self._waiting or asked.session.state is SourceState.RESYNCING:
            self._note(rank, now_s)


def _is_earlier(message: Message, rank: WorkerRank, epoch: int) -> bool:
    envelope = read_envelope(message.payload)
    if not isinstance(envelope, CanonicalEnvelope):
        return False
    return envelope.source == rank and envelope.epoch < epoch
