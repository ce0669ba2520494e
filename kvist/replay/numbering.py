"""What the numbers of a stream tell about what is missing in it. No I/O, nothing repaired."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.events import WorkerRank
from kvist.events.restarts import RestartDetector
from kvist.events.transports import Message
from kvist.replay.envelope import CanonicalEnvelope, read_envelope


@dataclass(slots=True)
class Numbering:
    """Judges one numbering: a rank's in canonical streams, a whole stream's in an engine's own."""

    num_messages: int = 0
    num_gaps: int = 0
    num_missing: int = 0
    """Messages that the numbers say there were."""
    num_duplicates: int = 0
    """Messages that came again, or late, or from an epoch that had ended."""
    num_restarts: int = 0
    is_from_start: bool = True
    """Whether the first message was the publisher's first."""
    _epoch: int | None = None
    _expected: int = 0

    def seen(self, epoch: int, sequence: int) -> bool:
        """Take the next message; return whether it is new."""
        self.num_messages += 1
        if not self._enter(epoch, sequence) or sequence < self._expected:
            self.num_duplicates += 1
            return False
        self._miss(sequence)
        self._expected = sequence + 1
        return True

    def announced(self, epoch: int, next_sequence: int) -> None:
        """Take a heartbeat, which says what number comes next."""
        if self._enter(epoch, next_sequence):
            self._miss(next_sequence)
            self._expected = max(self._expected, next_sequence)

    def _enter(self, epoch: int, sequence: int) -> bool:
        """Follow a later epoch; return False for an earlier one."""
        if self._epoch is None:
            self._epoch, self._expected = epoch, sequence
            self.is_from_start = sequence == 0
        elif epoch > self._epoch:
            self._epoch, self._expected = epoch, 0
            self.num_restarts += 1
        return epoch == self._epoch

    def _miss(self, sequence: int) -> None:
        if sequence > self._expected:
            self.num_gaps += 1
            self.num_missing += sequence - self._expected


class SourceNumbering:
    """Judges all that one source says."""

    def __init__(self) -> None:
        self.num_malformed = 0
        self.num_heartbeats = 0
        self.ranks: dict[WorkerRank, Numbering] = {}
        self.engine: Numbering | None = None
        self._restarts: RestartDetector | None = None

    def seen(self, message: Message) -> bool:
        """Take the next message; return whether it is new, and no heartbeat."""
        envelope = read_envelope(message.payload)
        if envelope is None:
            self.num_malformed += 1
            return False
        if not isinstance(envelope, CanonicalEnvelope):
            if self._restarts is None:
                self._restarts, self.engine = RestartDetector(), Numbering()
            assert self.engine is not None
            return self.engine.seen(self._restarts.received(message.sequence, message.payload), message.sequence)
        numbering = self.ranks.setdefault(WorkerRank(envelope.worker, envelope.rank), Numbering())
        if envelope.is_heartbeat:
            self.num_heartbeats += 1
            numbering.announced(envelope.epoch, envelope.sequence)
            return False
        return numbering.seen(envelope.epoch, envelope.sequence)

    @property
    def numberings(self) -> list[Numbering]:
        """Return all there are."""
        return [*self.ranks.values(), *([self.engine] if self.engine is not None else [])]

    @property
    def num_gaps(self) -> int:
        """Return how often something was missing."""
        return sum(numbering.num_gaps for numbering in self.numberings)

    @property
    def num_missing(self) -> int:
        """Return how many messages are missing."""
        return sum(numbering.num_missing for numbering in self.numberings)

    @property
    def num_duplicates(self) -> int:
        """Return how many messages came again."""
        return sum(numbering.num_duplicates for numbering in self.numberings)

    @property
    def num_restarts(self) -> int:
        """Return how often a publisher or engine was started anew."""
        return sum(numbering.num_restarts for numbering in self.numberings)
