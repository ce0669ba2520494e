"""What is played, in which order and when: a recording's messages, selected, rewritten, once or several times over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias

from kvist.errors import InvalidValueError
from kvist.events.transports import ReplayRequest
from kvist.replay.blocks import SentBuffer
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, read_envelope
from kvist.replay.jsonl import JsonlReader
from kvist.replay.reader import RecordingReader, Torn
from kvist.replay.recording import Record, RecordedSource
from kvist.replay.rewriting import Rewriter

RecordReader: TypeAlias = RecordingReader | JsonlReader

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

    def is_too_early(self, record: Record, first_ns: int) -> bool:
        """Return whether the record lies before what is meant."""
        return self.since is not None and record.time_ns < self.since.time_ns(first_ns)

    def is_too_late(self, record: Record, first_ns: int, wait_ns: int = 0) -> bool:
        """Return whether the record lies behind what is meant, by `wait_ns` at least."""
        return self.until is not None and record.time_ns >= self.until.time_ns(first_ns) + wait_ns

    def has_worker(self, record: Record) -> bool:
        """Return whether the record is of a worker that is meant."""
        return not self.workers or worker_of(record) in self.workers


def worker_of(record: Record) -> str:
    """Return whose blocks a record is about."""
    envelope = read_envelope(record.message.payload)
    return record.source.name if envelope is None or isinstance(envelope, EngineEnvelope) else envelope.worker


class Line(NamedTuple):
    """A record to play, in which round."""

    round_idx: int
    record: Record


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
    """Tells what to play, line by line; memory for one chunk of the recording and what the rewriter keeps.

    Where something is left out at the beginning, also for the blocks that were held then: some 150 bytes each.
    """

    def __init__(
        self,
        open_reader: Callable[[], RecordReader],
        *,
        selection: Selection | None = None,
        rewriter: Rewriter | None = None,
        num_rounds: int = 1,
        follows: bool = False,
    ) -> None:
        """Read what `open_reader` opens anew for each round; with `follows`, for as long as it is being written."""
        if num_rounds < 1:
            raise InvalidValueError("loop", num_rounds, "at least 1 round")
        self._open_reader = open_reader
        self._selection = selection or Selection()
        self._rewriter = rewriter or Rewriter()
        self._num_rounds = num_rounds
        self._follows = follows
        self._round_idx = 0
        self._reader: RecordReader | None = None
        self._first_ns: int | None = None
        self._skipped = _Skipped()
        self.num_recorded = 0
        """Messages read, in all rounds, of which some may not have been meant."""
        self.torn: Sequence[Torn] = ()
        """What was left at the end of the recording's parts, once it was read."""

    @property
    def progress(self) -> tuple[int, int]:
        """Return how many bytes were read, and how many there are, all rounds together."""
        if self._reader is None:
            return 0, 1
        size_bytes = self._reader.num_bytes_read + self._reader.num_bytes_left
        return self._round_idx * size_bytes + self._reader.num_bytes_read, self._num_rounds * size_bytes

    def lines(self) -> Iterator[list[Line] | None]:
        """Yield what to play, some lines at a time; None where more is yet to be written.

        Raises RecordingError where the recording is damaged, after everything before it.
        """
        for round_idx in range(self._num_rounds):
            with self._open_reader() as reader:
                self._round_idx, self._reader, self._skipped = round_idx, reader, _Skipped()
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
                        self.torn, is_over = reader.torn, True

    def _chosen(self, records: list[Record]) -> tuple[list[Line], bool]:
        """Return the lines of some records, and whether the selection ends with them."""
        first_ns = self._first_ns = records[0].time_ns if self._first_ns is None else self._first_ns
        selection, lines = self._selection, list[Line]()
        for record in records:
            if selection.is_too_late(record, first_ns, _MAX_WAIT_NS):
                return lines, True
            if selection.is_too_late(record, first_ns) or not selection.has_worker(record):
                continue
            if selection.is_too_early(record, first_ns):
                self._skipped.skip(record)
                continue
            for meant in (*self._skipped.snapshots_before(record), record):
                for message in self._rewriter.rewritten(meant, self._round_idx):
                    lines.append(Line(self._round_idx, meant._replace(message=message)))
        return lines, False


class _Skipped:
    """Turns the messages that are passed over into snapshots, for ranks of which they tell all; others stay unknown."""

    def __init__(self) -> None:
        # What keeps next to nothing knows what was held before it.
        self._buffers: defaultdict[RecordedSource, SentBuffer] = defaultdict(lambda: SentBuffer(max_bytes=1))
        self._begun: set[tuple[RecordedSource, bytes]] = set()

    def skip(self, record: Record) -> None:
        """Take a record that comes before what is meant."""
        self._buffers[record.source].append(record.message)

    def snapshots_before(self, record: Record) -> list[Record]:
        """Return what is to be told before a record that is meant: a snapshot, once for each rank."""
        key, buffer = (record.source, record.message.topic), self._buffers.get(record.source)
        if buffer is None or key in self._begun:
            return []
        envelope = read_envelope(record.message.payload)
        if envelope is None or isinstance(envelope, EngineEnvelope):
            return []
        self._begun.add(key)
        if not isinstance(envelope, CanonicalEnvelope):
            return []
        request = ReplayRequest(record.message.topic, 0, envelope.epoch)
        return [record._replace(message=message) for message in buffer.replay(request)]
