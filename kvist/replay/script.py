"""Selects which messages of a recording are played, in which order and when, once or several times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvist.errors import InvalidValueError
from kvist.events.dialects import EngineEnvelope
from kvist.events.transports import Message
from kvist.replay.envelope import read_envelope
from kvist.replay.reader import RecordingReader, Torn
from kvist.replay.recording import Record

_MIN_UNIX_S = 1e9  # smaller numbers are seconds since a recording's beginning: 31 years are no recording
_EPOCH_IDX: Final = 3  # in a canonical batch, and in a snapshot part
_TIMESTAMP_IDX: Final = 0  # in an engine's batch
_EPOCHS_A_ROUND = 1 << 50  # 35 years of the microseconds in which publishers count: more than any recording spans
_MAX_U64 = (1 << 64) - 1

_decode_fields = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time, as Unix time or as seconds after a recording's first message."""

    seconds: float
    is_unix: bool

    @classmethod
    def parse(cls, field: str, text: str) -> Moment:
        """Parse seconds, Unix time or ISO 8601 (local time if it has no zone); raises InvalidValueError."""
        try:
            seconds = float(text)
            if 0 <= seconds < float("inf"):
                return cls(seconds, seconds >= _MIN_UNIX_S)
        except ValueError:
            try:
                return cls(datetime.fromisoformat(text).timestamp(), is_unix=True)
            except (ValueError, OverflowError):
                pass
        expected = "seconds from the beginning, Unix time, or a time such as 2026-01-31T12:00Z"
        raise InvalidValueError(field, text, expected)

    def time_ns(self, first_ns: int) -> int:
        """Return this moment in Unix time, for a recording that begins at `first_ns`."""
        return int(self.seconds * 1e9) + (0 if self.is_unix else first_ns)


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages of some workers, or of all, from one moment up to another.

    The worker is what a canonical batch names, and for anything else the source's name.
    """

    workers: AbstractSet[str] = frozenset()
    since: Moment | None = None
    until: Moment | None = None

    def times_ns(self, first_ns: int) -> tuple[float, float]:
        """Return both moments in Unix time, infinite where not set; the recording begins at `first_ns`."""
        since_ns = float("-inf") if self.since is None else self.since.time_ns(first_ns)
        return since_ns, float("inf") if self.until is None else self.until.time_ns(first_ns)

    def has_worker(self, record: Record) -> bool:
        return not self.workers or worker_of(record) in self.workers


def worker_of(record: Record) -> str:
    envelope = read_envelope(record.message.payload)
    return record.source.name if envelope is None or isinstance(envelope, EngineEnvelope) else envelope.worker


class Line(NamedTuple):
    """A record to play, and the round in which; an early one is not played, but kept for replays."""

    round_idx: int
    record: Record
    is_early: bool = False


class Pace:
    """Spaces messages as they were recorded, `speed` times as fast; with speed None all are due at once.

    No time passes between two sessions, nor between two rounds. Due times never decrease.
    """

    def __init__(self, speed: float | None = 1.0) -> None:
        if speed is not None and not 0 < speed < float("inf"):
            raise InvalidValueError("speed", speed, "a positive number")
        self._speed = speed
        self._run: tuple[int, int] | None = None
        self._base_ns = 0
        self._base_due_s = 0.0
        self._due_s = 0.0

    def due_s(self, round_idx: int, record: Record) -> float:
        """Return how many seconds after the first message this one is due; to be called in order."""
        if self._speed is None:
            return 0.0
        run = (round_idx, record.session)
        if run != self._run:
            self._run, self._base_ns, self._base_due_s = run, record.time_ns, self._due_s
        passed_s = (record.time_ns - self._base_ns) * 1e-9 / self._speed
        self._due_s = max(self._due_s, self._base_due_s + passed_s)
        return self._due_s


class Script:
    """Yields what to play, line by line, with memory for one chunk of the recording."""

    def __init__(self, path: Path, *, selection: Selection | None = None, num_rounds: int = 1) -> None:
        """Read the recording once for each round."""
        if num_rounds < 1:
            raise InvalidValueError("loop", num_rounds, "at least 1 round")
        self.path = path
        self.selection = selection or Selection()
        self._num_rounds = num_rounds
        self._round_idx = 0
        self._reader: RecordingReader | None = None
        self.first_ns: int | None = None
        """When the first message came, selected or not."""
        self.num_recorded = self.num_selected = 0
        """Messages read, in all rounds, and those of them to be played."""
        self.is_over = False
        self.torn: Sequence[Torn] = ()
        """Incomplete records at the ends of parts, known once all is read."""

    @property
    def progress(self) -> tuple[int, int]:
        """Return the number of bytes read and of all bytes, over all rounds."""
        if self._reader is None:
            return 0, 1
        num_bytes = self._reader.num_bytes
        return self._round_idx * num_bytes + self._reader.num_bytes_read, self._num_rounds * num_bytes

    def lines(self) -> Iterator[list[Line]]:
        """Yield lines to play; raises RecordingError for damage."""
        for round_idx in range(self._num_rounds):
            with RecordingReader(self.path) as reader:
                self._round_idx, self._reader = round_idx, reader
                while (records := reader.read()) is not None:
                    self.num_recorded += len(records)
                    lines, is_over = self._select(records)
                    yield lines
                    if is_over:
                        break
                else:
                    self.torn = reader.torn
        self.is_over = True

    def _select(self, records: list[Record]) -> tuple[list[Line], bool]:
        """Return the lines of the selected records, and whether no later record can be selected."""
        if self.first_ns is None:
            self.first_ns = records[0].time_ns
        since_ns, until_ns = self.selection.times_ns(self.first_ns)
        lines, is_over = list[Line](), False
        for record in records:
            if is_over := record.time_ns >= until_ns:
                break
            if self.selection.has_worker(record):
                renewed = record._replace(message=self._renew(record.message))
                lines.append(Line(self._round_idx, renewed, is_early=record.time_ns < since_ns))
        self.num_selected += sum(not line.is_early for line in lines)
        return lines, is_over

    def _renew(self, message: Message) -> Message:
        """Return the message, changed from the second round on so that subscribers do not take it for a duplicate.

        Canonical batches get a later epoch. An engine's get a later timestamp: other bytes under used sequence numbers
        mean that the engine was restarted.
        """
        envelope = read_envelope(message.payload) if self._round_idx else None
        if envelope is None:
            return message
        fields: list[object] = [*_decode_fields(message.payload)]
        if isinstance(envelope, EngineEnvelope):
            fields[_TIMESTAMP_IDX] = envelope.timestamp_s + self._round_idx
        else:
            epoch = envelope.epoch + self._round_idx * _EPOCHS_A_ROUND
            if epoch > _MAX_U64:
                raise InvalidValueError("loop", self._round_idx + 1, f"fewer rounds: no epoch follows {_MAX_U64}")
            fields[_EPOCH_IDX] = epoch
        return message._replace(payload=_encode(fields))
