"""Writing a recording: append-only files that are readable up to the last whole frame at any time."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvist.errors import InvalidValueError
from kvist.events.transports import Message
from kvist.events.transports.base import MAX_MESSAGE_BYTES
from kvist.replay.errors import RecordingError
from kvist.replay.format import Block, End, Entry, RecordedSource, Start, encode
from kvist.replay.frames import PREAMBLE, FrameKind, pack_frame
from kvist.replay.parts import existing_parts, part_path
from kvist.replay.reader import RecordingReader, Torn

BLOCK_BYTES = 256 << 10
"""A block is written once its messages have this size: 2 ms to compress, and a loss at most of these on kill -9."""
FLUSH_S = 1.0
"""A block is written once its first message is this old."""
MIN_ROTATE_BYTES = 4096

_ENTRY_BYTES = 24  # what a message takes beside topic and payload, about


class RecordingWriter:
    """Appends messages to a recording; what `flush` wrote survives the end of this process, however it ends.

    It does not survive a power failure until the file is closed. Messages are to be added in the order in which they
    came. For one thread.
    """

    def __init__(
        self,
        path: Path,
        sources: Sequence[RecordedSource] = (),
        *,
        appends: bool = False,
        rotate_bytes: int | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Create the file, or with `appends` go on in what is there, cut back to its last whole frame.

        Beyond `rotate_bytes` the next file is begun. Raises InvalidValueError when the file cannot be opened, exists
        and is not to be appended to, or is being written; RecordingError when it is no recording; OSError when a write
        fails.
        """
        if rotate_bytes is not None and rotate_bytes < MIN_ROTATE_BYTES:
            raise InvalidValueError("rotate_bytes", rotate_bytes, f"at least {MIN_ROTATE_BYTES} bytes")
        if not path.name:
            raise InvalidValueError("recording", str(path), "the name of a file")
        self._first_path = path
        self._rotate_bytes = rotate_bytes
        self._wall_ns = wall_ns
        self._sources = list(sources)
        self._entries: list[Entry] = []
        self._entries_bytes = 0
        self._first_mono_ns = self._first_wall_ns = 0
        self._must_start = False
        self._has_blocks = False
        self._is_broken = False
        self.num_messages = 0
        self.num_payload_bytes = 0
        self.num_written_bytes = 0
        self.torn: Torn | None = None
        """What was cut off what is appended to."""
        self._recording_id, self._part, self._session = secrets.randbits(63), 0, 0
        parts = _existing(path) if appends else []
        if parts:
            self._append_to(parts)
        else:
            self._create()
        self._write_start()

    def __enter__(self) -> Self:
        """Return the writer, whose file is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; if the file could not be written, without trying to write more."""
        if self._is_broken:
            os.close(self._fd)
        else:
            self.close()

    @property
    def num_parts(self) -> int:
        """Return how many files the recording has."""
        return self._part + 1

    def add_source(self, source: RecordedSource) -> int:
        """Return the source's position, for `add`."""
        if source in self._sources:
            return self._sources.index(source)
        self.flush()
        self._sources.append(source)
        self._must_start = True
        return len(self._sources) - 1

    def begin_session(self, session: int) -> None:
        """Let what follows be of another run of a recorder, whose monotonic clock is another one."""
        if session != self._session:
            self.flush()
            self._session = session
            self._must_start = True

    def add(self, source_idx: int, message: Message, mono_ns: int, wall_ns: int) -> None:
        """Add a message that came at these readings of the monotonic and the wall clock."""
        size_bytes = len(message.topic) + len(message.payload)
        if size_bytes > MAX_MESSAGE_BYTES:
            raise InvalidValueError("message", f"{size_bytes} bytes", f"at most {MAX_MESSAGE_BYTES} bytes")
        delta_ns = mono_ns - self._first_mono_ns
        if not 0 <= delta_ns < FLUSH_S * 1e9 or delta_ns != wall_ns - self._first_wall_ns:
            self.flush()  # a block has one difference between the clocks
        if not self._entries:
            self._first_mono_ns, self._first_wall_ns, delta_ns = mono_ns, wall_ns, 0
        self._entries.append(Entry(source_idx, delta_ns, message.topic, message.sequence, message.payload))
        self._entries_bytes += size_bytes + _ENTRY_BYTES
        self.num_messages += 1
        self.num_payload_bytes += len(message.payload)
        if self._entries_bytes >= BLOCK_BYTES:
            self.flush()

    def flush_if_due(self, mono_ns: int) -> None:
        """Write what is older than `FLUSH_S`; to be called every now and then while no messages come."""
        if self._entries and mono_ns - self._first_mono_ns >= FLUSH_S * 1e9:
            self.flush()

    def flush(self) -> None:
        """Write everything added so far."""
        if not self._entries:
            return
        if self._must_start:
            self._write_start()
        block = Block(self._first_mono_ns, self._first_wall_ns, self._entries)
        frame = pack_frame(FrameKind.BLOCK, encode(block))
        self._entries, self._entries_bytes = [], 0
        if self._must_rotate(len(frame)):
            self._rotate()
        self._write(frame)
        self._has_blocks = True

    def close(self) -> None:
        """Write everything and say that the recording ended here."""
        try:
            self.flush()
            self._write(pack_frame(FrameKind.END, encode(End(is_continued=False))))
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _must_rotate(self, num_bytes: int) -> bool:
        is_over = self._rotate_bytes is not None and self._size_bytes + num_bytes > self._rotate_bytes
        return is_over and self._has_blocks

    def _rotate(self) -> None:
        self._write(pack_frame(FrameKind.END, encode(End(is_continued=True))))
        os.fsync(self._fd)
        os.close(self._fd)
        self._part += 1
        self._create()
        self._write_start()

    def _create(self) -> None:
        path, beyond = part_path(self._first_path, self._part), part_path(self._first_path, self._part + 1)
        try:
            if beyond.exists():
                raise InvalidValueError("recording", str(path), f"a name behind which no {beyond.name} is")
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            raise InvalidValueError("recording", str(path), "a new file, or one to be appended to (--append)") from None
        except OSError as error:
            raise _impossible(path, "created", error) from None
        self._size_bytes = 0
        self._has_blocks = False
        self._lock(path)
        self._write(PREAMBLE)

    def _append_to(self, parts: Sequence[Path]) -> None:
        """Open the last part behind its last whole frame, and note what session comes next."""
        path = parts[-1]
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise _impossible(path, "written", error) from None
        try:
            self._lock(path)
            start, self.torn, is_continued = _read_to_end(self._first_path)
        except (InvalidValueError, RecordingError):
            os.close(self._fd)
            raise
        self._size_bytes = os.fstat(self._fd).st_size
        if self.torn is not None:
            os.ftruncate(self._fd, self.torn.offset)
            self._size_bytes = self.torn.offset
        self._part = len(parts) - 1
        self._has_blocks = True
        if start is not None:
            self._recording_id, self._session = start.recording_id, start.session + 1
        if self._size_bytes == 0:
            self._write(PREAMBLE)
        elif is_continued:
            os.close(self._fd)
            self._part += 1
            self._create()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValueError("recording", str(path), "a file that nobody is writing") from None

    def _write_start(self) -> None:
        start = Start(self._recording_id, self._part, self._session, tuple(self._sources), self._wall_ns())
        self._write(pack_frame(FrameKind.START, encode(start)))
        self._must_start = False

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        self._is_broken = True
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            path = part_path(self._first_path, self._part)
            raise OSError(f"recording: got {str(path)!r}, expected room for what comes ({error.strerror})") from error
        self._is_broken = False
        self._size_bytes += len(data)
        self.num_written_bytes += len(data)


def _existing(path: Path) -> list[Path]:
    try:
        return existing_parts(path)
    except OSError as error:
        raise _impossible(path, "created", error) from None


def _impossible(path: Path, done: str, error: OSError) -> InvalidValueError:
    return InvalidValueError("recording", str(path), f"a file that can be {done} ({error.strerror})")


def _read_to_end(path: Path) -> tuple[Start | None, Torn | None, bool]:
    """Return a recording's last start, what is torn off its end, and whether it says that another file follows."""
    with RecordingReader(path) as reader:
        while reader.read() is not None:
            pass
        return reader.start, reader.torn, reader.is_continued
