"""Which of a recording's messages are meant: by worker and by time."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime

from kvist.errors import InvalidValueError
from kvist.replay.envelope import EngineEnvelope, read_envelope
from kvist.replay.format import Record

_MIN_UNIX_S = 1e9  # smaller numbers are seconds since a recording's beginning: 31 years are no recording
_MAX_WAIT_NS = 15_000_000_000  # by how much a recorder may put messages behind later ones, and some


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: Unix time, or seconds after a recording's first message."""

    seconds: float
    is_unix: bool

    @classmethod
    def parse(cls, field: str, text: str) -> Moment:
        """Read seconds, Unix time or ISO 8601 (local time if it has no zone); raises InvalidValueError."""
        try:
            seconds = float(text)
            if 0 <= seconds < float("inf"):
                return cls(seconds, seconds >= _MIN_UNIX_S)
        except ValueError:
            try:
                return cls(datetime.fromisoformat(text).timestamp(), is_unix=True)
            except (ValueError, OverflowError):
                pass
        raise InvalidValueError(
            field, text, "seconds from the beginning, Unix time, or a time such as 2026-01-31T12:00Z"
        )

    def wall_ns(self, first_wall_ns: int) -> int:
        """Return this moment by the recording's wall clock."""
        return int(self.seconds * 1e9) + (0 if self.is_unix else first_wall_ns)


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages of some workers, or of all, from one moment up to another.

    A worker is named by canonical batches; for an engine's own stream, and for what is no batch, the source's name
    counts.
    """

    workers: AbstractSet[str] = frozenset()
    since: Moment | None = None
    until: Moment | None = None

    def is_too_early(self, record: Record, first_wall_ns: int) -> bool:
        """Return whether the record lies before what is meant."""
        return self.since is not None and record.wall_ns < self.since.wall_ns(first_wall_ns)

    def is_over(self, record: Record, first_wall_ns: int) -> bool:
        """Return whether nothing that is meant comes behind the record; messages may have waited for an answer."""
        return self.until is not None and record.wall_ns >= self.until.wall_ns(first_wall_ns) + _MAX_WAIT_NS

    def is_too_late(self, record: Record, first_wall_ns: int) -> bool:
        """Return whether the record lies behind what is meant."""
        return self.until is not None and record.wall_ns >= self.until.wall_ns(first_wall_ns)

    def has_worker(self, record: Record) -> bool:
        """Return whether the record is of a worker that is meant."""
        return not self.workers or worker_of(record) in self.workers


def worker_of(record: Record) -> str:
    """Return whose blocks a record is about."""
    envelope = read_envelope(record.message.payload)
    return record.source.name if envelope is None or isinstance(envelope, EngineEnvelope) else envelope.worker
