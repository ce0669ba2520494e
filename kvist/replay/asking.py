"""What a recorder asks of a stream that it writes down, and where in the recording the answers stand. No I/O, no clock.

Whatever a rank held before it was heard, or lost on the way, is asked for as an index would: a publisher answers with
batches or with a snapshot, an engine with what its replay buffer has. Until the answer is here the source's messages
are held back, so that it stands in front of the first that it explains. A source that does not answer in time, or with
what cannot be believed, is recorded as it comes; a publisher is asked again at a later heartbeat, more and more rarely.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvist.events import WorkerRank
from kvist.events.session import Apply, Clear, Restore, SourceState
from kvist.events.steps import ClearReason
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.base import MESSAGE_BYTES
from kvist.events.types import MAX_RANKS
from kvist.replay.asked import Answer, CanonicalAsked, EngineAsked, nothing_before
from kvist.replay.envelope import CanonicalEnvelope, Envelope, SnapshotEnvelope, read_envelope
from kvist.replay.numbering import SourceNumbering

MAX_HELD_BYTES = 64 << 20
"""What is held back of one source; if more comes before the answer, that is given up."""
MAX_WAIT_S = 10.0
"""How long messages are held back."""

_logger = logging.getLogger(__name__)


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
        if not self._asked[rank].is_waiting:
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
        rank = WorkerRank(envelope.worker, envelope.rank) if isinstance(envelope, CanonicalEnvelope) else None
        return self._answered.get((rank, message.sequence)) == xxh3_64_intdigest(message.payload)

    def _judge(self, envelope: Envelope | None, message: Message, now_s: float) -> None:
        self.numbering.seen_as(envelope, message)
        if envelope is None or isinstance(envelope, SnapshotEnvelope):
            return
        rank = WorkerRank(envelope.worker, envelope.rank) if isinstance(envelope, CanonicalEnvelope) else None
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
        if self._waiting or asked.is_waiting:
            self._note(rank, now_s)


def _is_earlier(message: Message, rank: WorkerRank, epoch: int) -> bool:
    envelope = read_envelope(message.payload)
    if not isinstance(envelope, CanonicalEnvelope):
        return False
    return (envelope.worker, envelope.rank) == rank and envelope.epoch < epoch
