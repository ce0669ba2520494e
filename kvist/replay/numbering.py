"""What the numbers of a stream tell about what is missing in it. No I/O, nothing repaired."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.events import WorkerRank
from kvist.events.restarts import RestartDetector
from kvist.events.transports import Message
from kvist.replay.envelope import EngineEnvelope, Envelope, SnapshotEnvelope, read_envelope


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
    """Whether the first message was the publisher's first, or what it held before that one was recorded."""
    num_snapshots: int = 0
    _epoch: int | None = None
    _expected: int = 0
    _told: range = range(0)  # numbers that were not seen before a snapshot told what came of them
    _is_told_first: bool = False

    def seen(self, epoch: int, sequence: int) -> bool:
        """Take the next message; return whether it is new."""
        self.num_messages += 1
        if not self._enter(epoch, sequence) or sequence < self._expected:
            self._repeated(epoch, sequence)
            return False
        self._miss(sequence)
        self._expected = sequence + 1
        return True

    def announced(self, epoch: int, next_sequence: int) -> None:
        """Take a heartbeat, which says what number comes next."""
        if self._enter(epoch, next_sequence):
            self._miss(next_sequence)
            self._expected = max(self._expected, next_sequence)

    def told(self, epoch: int, sequence: int) -> None:
        """Take a snapshot of what was held before a number: that one is next, even if later ones were seen."""
        self.num_snapshots += 1
        self._is_told_first = self._epoch is None
        if self._enter(epoch, sequence):
            self._told = range(0 if self._is_told_first else self._expected, sequence)
            self._miss(sequence)
            self._expected = sequence
            self.is_from_start |= self._is_told_first

    def is_behind(self, epoch: int, sequence: int) -> bool:
        """Return whether a heartbeat tells of less than was seen: it was sent before, and came later."""
        return epoch != self._epoch or sequence < self._expected

    def _enter(self, epoch: int, sequence: int) -> bool:
        """Follow a later epoch; return False for an earlier one."""
        if self._epoch is None:
            self._epoch, self._expected = epoch, sequence
            self.is_from_start = sequence == 0
        elif epoch > self._epoch:
            self._epoch, self._expected, self._told = epoch, 0, range(0)
            self.num_restarts += 1
        return epoch == self._epoch

    def _repeated(self, epoch: int, sequence: int) -> None:
        if epoch != self._epoch or sequence not in self._told:
            self.num_duplicates += 1
        elif not self._is_told_first:
            self.num_missing -= 1  # it came after all, behind the snapshot that was asked for

    def _miss(self, sequence: int) -> None:
        if sequence > self._expected:
            self.num_gaps += 1
            self.num_missing += sequence - self._expected


class SourceNumbering:
    """Judges all that one source says."""

    def __init__(self) -> None:
        self.num_malformed = 0
        self.num_heartbeats = 0
        self.num_snapshot_parts = 0
        self.ranks: dict[WorkerRank, Numbering] = {}
        self.engine: Numbering | None = None
        self._restarts: RestartDetector | None = None

    def seen(self, message: Message) -> bool:
        """Take the next message; return whether it is a new batch, and no heartbeat."""
        return self.seen_as(read_envelope(message.payload), message)

    def seen_as(self, envelope: Envelope | None, message: Message) -> bool:
        """Take the next message, whose envelope was read already."""
        if envelope is None:
            self.num_malformed += 1
            return False
        if isinstance(envelope, EngineEnvelope):
            if self._restarts is None:
                self._restarts, self.engine = RestartDetector(), Numbering()
            assert self.engine is not None
            return self.engine.seen(self._restarts.received(message.sequence, message.payload), message.sequence)
        numbering = self.ranks.setdefault(WorkerRank(envelope.worker, envelope.rank), Numbering())
        if isinstance(envelope, SnapshotEnvelope):
            self.num_snapshot_parts += 1
            if envelope.is_last:
                numbering.told(envelope.epoch, envelope.sequence)
            return False
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
    def num_snapshots(self) -> int:
        """Return how often it was told what a rank held."""
        return sum(numbering.num_snapshots for numbering in self.numberings)

    @property
    def num_duplicates(self) -> int:
        """Return how many messages came again."""
        return sum(numbering.num_duplicates for numbering in self.numberings)

    @property
    def num_restarts(self) -> int:
        """Return how often a publisher or engine was started anew."""
        return sum(numbering.num_restarts for numbering in self.numberings)
