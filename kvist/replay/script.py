"""What is played, in which order and when: a recording's messages, or some of them, once or several times over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
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
_MAX_WAIT_NS = 25_000_000_000  # for so long a recorder may hold messages back, which is for two answers, and some
_EPOCH_IDX: Final = 3  # the field of a canonical batch, and of a part of a snapshot
_TIMESTAMP_IDX: Final = 0  # of an engine's batch
_EPOCHS_A_ROUND = 1 << 50  # 35 years of the microseconds in which publishers count: more than any recording spans
_MAX_U64 = (1 << 64) - 1

_logger = logging.getLogger(__name__)

_decode_fields = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.msgpack.Encoder().encode


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
        expected = "seconds from the beginning, Unix time, or a time such as 2026-01-31T12:00Z"
        raise InvalidValueError(field, text, expected)

    def time_ns(self, first_ns: int) -> int:
        """Return this moment in Unix time, for a recording that begins at `first_ns`."""
        return int(self.seconds * 1e9) + (0 if self.is_unix else first_ns)


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages of some workers, or of all, from one moment up to another.

    A worker is named by canonical batches; for an engine's own stream, and for what is no batch, the source's name
    counts.
    """

    workers: AbstractSet[str] = frozenset()
    since: Moment | None = None
    until: Moment | None = None

    def times_ns(self, first_ns: int) -> tuple[float, float]:
        """Return from when to when in Unix time, for a recording that begins at `first_ns`; without end if not said."""
        since_ns = float("-inf") if self.since is None else self.since.time_ns(first_ns)
        return since_ns, float("inf") if self.until is None else self.until.time_ns(first_ns)

    def has_worker(self, record: Record) -> bool:
        return not self.workers or worker_of(record) in self.workers


def worker_of(record: Record) -> str:
    envelope = read_envelope(record.message.payload)
    return record.source.name if envelope is None or isinstance(envelope, EngineEnvelope) else envelope.worker


class Line(NamedTuple):
    """A record to play, in which round; what is early is not played, but part of what may be asked for."""

    round_idx: int
    record: Record
    is_early: bool = False


class Pace:
    """Spaces messages as they were recorded, `speed` times as fast; with speed None all are due at once.

    Between two sessions, and between two rounds, nothing was recorded: no time passes there. Due times never decrease.
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
    """Tells what to play, line by line; memory for one chunk of the recording."""

    def __init__(
        self,
        open_reader: Callable[[], RecordingReader],
        *,
        selection: Selection | None = None,
        num_rounds: int = 1,
        follows: bool = False,
    ) -> None:
        """Read what `open_reader` opens anew for each round; with `follows`, for as long as it is being written."""
        if num_rounds < 1:
            raise InvalidValueError("loop", num_rounds, "at least 1 round")
        self._open_reader = open_reader
        self.selection = selection or Selection()
        self._num_rounds = num_rounds
        self._follows = follows
        self._round_idx = 0
        self._reader: RecordingReader | None = None
        self.first_ns: int | None = None
        """When the first message came, which need not be meant."""
        self._session: int | None = None
        self._latest_ns = self._set_back_ns = 0
        self.num_recorded = self.num_chosen = 0
        """Messages read, in all rounds, and those of them that are meant to be played."""
        self.is_over = False
        self.torn: Sequence[Torn] = ()
        """What was left at the end of the recording's parts, once it was read."""
        self.missing: Path | None = None
        """The part that may be missing behind the last, likewise."""

    @property
    def progress(self) -> tuple[int, int]:
        """Return how many bytes were read, and how many there are, all rounds together."""
        if self._reader is None:
            return 0, 1
        size_bytes = self._reader.num_bytes_read + self._reader.num_bytes_left
        return self._round_idx * size_bytes + self._reader.num_bytes_read, self._num_rounds * size_bytes

    def lines(self) -> Iterator[list[Line] | None]:
        """Yield lines to play, None where more is yet to be written; raises RecordingError where there is damage."""
        for round_idx in range(self._num_rounds):
            with self._open_reader() as reader:
                self._round_idx, self._reader, self._session = round_idx, reader, None
                self._latest_ns = 0
                is_over = False
                while not is_over:
                    records = reader.read()
                    if records is not None:
                        self.num_recorded += len(records)
                        lines, is_over = self._chosen(records)
                        yield lines
                    elif self._follows and not reader.is_ended:
                        yield None
                    else:
                        self.torn, self.missing, is_over = reader.torn, reader.missing, True
        self.is_over = True

    def _chosen(self, records: list[Record]) -> tuple[list[Line], bool]:
        """Return the lines of some records, and whether the selection ends with them."""
        if self.first_ns is None:
            self.first_ns = records[0].time_ns
        since_ns, until_ns = self.selection.times_ns(self.first_ns)
        lines, is_over = list[Line](), False
        for record in map(self._in_order, records):
            if is_over := record.time_ns >= until_ns + _MAX_WAIT_NS:
                break
            if record.time_ns < until_ns and self.selection.has_worker(record):
                of_round = record._replace(message=self._of_round(record.message))
                lines.append(Line(self._round_idx, of_round, is_early=record.time_ns < since_ns))
        self.num_chosen += sum(not line.is_early for line in lines)
        return lines, is_over

    def _in_order(self, record: Record) -> Record:
        """Return the record with a time that follows on the session before, even if the clock was set back."""
        if record.session != self._session:
            self._session = record.session
            self._set_back_ns = max(0, self._latest_ns - record.time_ns)
            if self._set_back_ns and self._round_idx == 0:
                text = "the recorder's clock was set back: from here on times count from the end of what stands before"
                _logger.warning("%s session=%d back_s=%.3f", text, record.session, self._set_back_ns * 1e-9)
        if self._set_back_ns:
            record = record._replace(time_ns=record.time_ns + self._set_back_ns)
        self._latest_ns = max(self._latest_ns, record.time_ns)
        return record

    def _of_round(self, message: Message) -> Message:
        """Return what makes a message news to who heard the rounds before; in the first it is as it was recorded.

        Canonical batches are of a later epoch. An engine's are a second later than in the round before: as other bytes
        under numbers that were used, they are those of an engine that was started anew.
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
