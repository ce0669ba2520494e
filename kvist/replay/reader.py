"""Reading a recording, frame by frame: also while it is written, and up to wherever it was cut off or damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

from kvist.errors import InvalidValueError
from kvist.replay.errors import RecordingError
from kvist.replay.format import Block, End, Record, RecordedSource, Start, decode, records
from kvist.replay.frames import (
    HEADER_BYTES,
    MAGIC,
    PREAMBLE,
    VERSION,
    DamagedFrameError,
    FrameHeader,
    FrameKind,
    unpack_body,
    unpack_header,
)
from kvist.replay.parts import existing_parts, part_path


class Torn(NamedTuple):
    """Bytes at a recording's end that are no whole frame: its recorder was stopped amid a write, or still writes."""

    path: Path
    offset: int
    num_bytes: int


class RecordingReader:
    """Reads a recording's messages in order; memory for one block, however large the files are.

    Everything before the end of the last whole frame is read. What is left after it is `torn`; if more is written
    there, `read` goes on. Whatever else is wrong raises RecordingError, after everything before it was read.
    """

    def __init__(self, path: Path) -> None:
        """Open the recording, or what is left of it from a later file on.

        Raises InvalidValueError when that cannot be opened.
        """
        self._base_path = path
        self._first_part = self._part = 0
        self._path = path
        self._file = _opened(path)
        self._offset = 0
        self._start: Start | None = None
        self._has_started_part = False
        self._end: End | None = None
        self._num_bytes_of_parts_before = 0

    def __enter__(self) -> Self:
        """Return the reader, which is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        """Yield what there is to read now."""
        while (block := self.read()) is not None:
            yield from block

    def read(self) -> list[Record] | None:
        """Return the messages of the next block, None while there is no whole one."""
        while (taken := self._step(skips_blocks=False)) is not None:
            if taken:
                return taken
        return None

    def sources(self) -> list[RecordedSource]:
        """Return whoever was recorded, in order of appearance, by skipping to the end, or to where it is damaged."""
        found: dict[RecordedSource, None] = {}
        with suppress(RecordingError):
            while self._step(skips_blocks=True) is not None:
                if self._start is not None:
                    found.update(dict.fromkeys(self._start.sources))
        return list(found)

    @property
    def torn(self) -> Torn | None:
        """Return what lies beyond the last whole frame, None if nothing does."""
        num_bytes = self._path.stat().st_size - self._offset
        return Torn(self._path, self._offset, num_bytes) if num_bytes > 0 else None

    @property
    def start(self) -> Start | None:
        """Return the start that was read last."""
        return self._start

    @property
    def is_ended(self) -> bool:
        """Return whether the recorder ended on purpose where the reader is: nothing more will come of its session."""
        return self._end is not None and not self.is_continued

    @property
    def is_continued(self) -> bool:
        """Return whether the next file is still to come."""
        return self._end is not None and self._end.is_continued

    @property
    def num_bytes_read(self) -> int:
        """Return how much of all parts was read."""
        return self._num_bytes_of_parts_before + self._offset

    @property
    def size_bytes(self) -> int:
        """Return the size of all parts that there are now."""
        return sum(part.stat().st_size for part in existing_parts(self._base_path, self._first_part))

    def _step(self, *, skips_blocks: bool) -> list[Record] | None:
        """Take the next frame, or go on to the next file; return the messages read, None when there is neither."""
        offset = max(self._offset, len(PREAMBLE))
        try:
            frame = self._next_frame(skips_blocks=skips_blocks)
            if frame is not None:
                return self._take(*frame)
            return [] if self._enter_next_part() else None
        except DamagedFrameError as error:
            raise RecordingError(self._path, offset, error.found, error.expected) from error

    def _next_frame(self, *, skips_blocks: bool) -> tuple[FrameKind, bytes] | None:
        """Return the next whole frame and step behind it, a block to be skipped with no body; None without one."""
        if self._offset == 0 and not self._read_preamble():
            return None
        self._file.seek(self._offset)
        data = self._file.read(HEADER_BYTES)
        if len(data) < HEADER_BYTES:
            return None
        header = unpack_header(data)
        end_offset = self._offset + HEADER_BYTES + header.stored_bytes
        if skips_blocks and header.kind is FrameKind.BLOCK:
            if end_offset > self._path.stat().st_size:
                return None
            self._offset = end_offset
            return header.kind, b""
        body = self._read_body(header)
        if body is None:
            return None
        self._offset = end_offset
        return header.kind, body

    def _read_body(self, header: FrameHeader) -> bytes | None:
        stored = self._file.read(header.stored_bytes)
        return None if len(stored) < header.stored_bytes else unpack_body(header, stored)

    def _read_preamble(self) -> bool:
        """Step behind the preamble; False while it is not all there."""
        self._file.seek(0)
        data = self._file.read(len(PREAMBLE))
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise RecordingError(self._path, 0, repr(data[: len(MAGIC)]), f"a recording, which begins with {MAGIC!r}")
        if len(data) < len(PREAMBLE):
            return False
        version = int.from_bytes(data[len(MAGIC) :], "little")
        if version != VERSION:
            raise RecordingError(self._path, len(MAGIC), f"version {version}", f"version {VERSION} of the format")
        self._offset = len(PREAMBLE)
        return True

    def _take(self, kind: FrameKind, body: bytes) -> list[Record]:
        """Take note of a frame; return its messages, none if it has none or was skipped."""
        if kind is FrameKind.START:
            self._begin(decode(body, Start))
            return []
        if not self._has_started_part or self._start is None or self._end is not None:
            raise DamagedFrameError(f"a {kind.value.decode()} frame", "a STRT frame before it")
        if kind is FrameKind.END:
            self._end = decode(body, End)
            return []
        return records(decode(body, Block), self._start) if body else []

    def _begin(self, start: Start) -> None:
        before = self._start
        suffix = f".{start.part}"
        if before is None and start.part > 0 and self._path.name.endswith(suffix):
            self._base_path = self._path.with_name(self._path.name.removesuffix(suffix))
            self._first_part = self._part = start.part
        if start.part != self._part or (before is not None and start.recording_id != before.recording_id):
            raise DamagedFrameError(
                f"part {start.part} of recording {start.recording_id:016x}",
                f"part {self._part}" + ("" if before is None else f" of recording {before.recording_id:016x}"),
            )
        if self.is_continued:
            raise DamagedFrameError("a STRT frame", "nothing behind a DONE frame that another file continues")
        self._start, self._end, self._has_started_part = start, None, True

    def _enter_next_part(self) -> bool:
        """Go on with the next file; False when there is none."""
        next_path = part_path(self._base_path, self._part + 1)
        if not next_path.exists():
            return False
        # Looked at once more: this part may have got its last frames while the next one was made.
        if (torn := self.torn) is not None and not self.is_continued:
            if self._is_whole_frame_next():
                return True
            raise DamagedFrameError(
                f"{torn.num_bytes} bytes of a frame that goes on", f"all of it: {next_path} follows"
            )
        if torn is not None:
            raise DamagedFrameError("bytes behind a DONE frame", f"nothing: {next_path} follows")
        if not self.is_continued:
            raise DamagedFrameError("the end of the file", f"a DONE frame: {next_path} follows")
        self._file.close()
        self._num_bytes_of_parts_before += self._offset
        self._part += 1
        self._path, self._file, self._offset = next_path, _opened(next_path), 0
        self._has_started_part, self._end = False, None
        return True

    def _is_whole_frame_next(self) -> bool:
        size_bytes = self._path.stat().st_size - self._offset
        if self._offset == 0 or size_bytes < HEADER_BYTES:
            return False
        self._file.seek(self._offset)
        return HEADER_BYTES + unpack_header(self._file.read(HEADER_BYTES)).stored_bytes <= size_bytes


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidValueError("recording", str(path), f"a recording that can be read ({error.strerror})") from None
