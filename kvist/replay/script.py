"""What is played, in which order: a recording's messages, selected and rewritten, once or several times over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from kvist.errors import InvalidValueError
from kvist.replay.earlier import Earlier
from kvist.replay.format import Record
from kvist.replay.reader import Torn
from kvist.replay.rewriting import Rewriter
from kvist.replay.selection import Selection


class RecordReader(AbstractContextManager["RecordReader"], Protocol):
    """What records are read from: `RecordingReader`, or a reader of another form."""

    def read(self) -> list[Record] | None:
        """Return the next records, None while there are none."""

    @property
    def is_ended(self) -> bool:
        """Return whether no more will come."""

    @property
    def torn(self) -> Torn | None:
        """Return what lies beyond the last that is whole."""

    @property
    def num_bytes_read(self) -> int:
        """Return how much was read."""

    @property
    def size_bytes(self) -> int:
        """Return how much there is."""


class Line(NamedTuple):
    """A record to play, in which round."""

    round_idx: int
    record: Record


class Script:
    """Tells what to play, line by line; memory for one block of the recording and what the rewriter keeps.

    Where something is left out at the beginning, also for the blocks that were held then: 200 bytes each.
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
        self._first_wall_ns: int | None = None
        self._earlier = Earlier()
        self.num_recorded = 0
        """Messages read, in all rounds, of which some may not have been meant."""
        self.torn: Torn | None = None
        """What was left at the end of the recording, once it was read."""

    @property
    def progress(self) -> tuple[int, int]:
        """Return how many bytes were read, and how many there are, all rounds together."""
        if self._reader is None:
            return 0, 1
        size_bytes = self._reader.size_bytes
        return self._round_idx * size_bytes + self._reader.num_bytes_read, self._num_rounds * size_bytes

    def lines(self) -> Iterator[list[Line] | None]:
        """Yield what to play, some lines at a time; None where more is yet to be written.

        Raises RecordingError where the recording is damaged, after everything before it.
        """
        for round_idx in range(self._num_rounds):
            with self._open_reader() as reader:
                self._round_idx, self._reader, self._earlier = round_idx, reader, Earlier()
                yield from self._round(reader)

    def _round(self, reader: RecordReader) -> Iterator[list[Line] | None]:
        is_over = False
        while not is_over:
            records = reader.read()
            if records is not None:
                self.num_recorded += len(records)
                lines, is_over = self._taken(records)
                yield lines
            elif self._follows and not reader.is_ended:
                yield None
            else:
                self.torn = reader.torn
                return

    def _taken(self, records: list[Record]) -> tuple[list[Line], bool]:
        """Return the lines of some records, and whether the selection ends with them."""
        if self._first_wall_ns is None:
            self._first_wall_ns = records[0].wall_ns
        lines: list[Line] = []
        for record in records:
            if self._selection.is_over(record, self._first_wall_ns):
                return lines, True
            if self._selection.is_too_late(record, self._first_wall_ns) or not self._selection.has_worker(record):
                continue
            if self._selection.is_too_early(record, self._first_wall_ns):
                self._earlier.passed_over(record)
                continue
            for meant in (*self._earlier.told_before(record), record):
                for message in self._rewriter.rewritten(meant, self._round_idx):
                    is_same = message is meant.message
                    lines.append(Line(self._round_idx, meant if is_same else meant._replace(message=message)))
        return lines, False
