"""Writes a recording: MCAP files that are readable up to the last whole chunk at any time."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
from mcap.writer import IndexType, Writer
from msgspec.structs import replace

from kvist.errors import InvalidValueError
from kvist.events.transports import Message
from kvist.events.transports.base import MAX_MESSAGE_BYTES
from kvist.replay import recording
from kvist.replay.envelope import read_envelope
from kvist.replay.reader import read_about

CHUNK_BYTES = 256 << 10
"""A chunk is written once its messages have this size: it takes 1 ms to compress, and kill -9 loses at most this."""
FLUSH_NS = 1_000_000_000
"""A chunk is written once its first message is this old."""
MIN_ROTATE_BYTES = 4096
MAX_CHUNKS_A_PART, MAX_CHANNELS_A_PART, MAX_CHANNEL_BYTES = 50_000, 4096, 16 << 20
"""Beyond these a new part is begun: the library numbers channels in 16 bits, and keeps 0.6 kB per chunk and channel, as
well as topics, until a part ends. At a chunk a second that is a part every 14 hours."""

_MAX_SHOWN_BYTES = 200  # of a topic in its channel's name, which other tools show
_U32_MASK, _MAX_NS = (1 << 32) - 1, (1 << 63) - 1


class RecordingWriter(AbstractContextManager["RecordingWriter"]):
    """Writes messages to a new part of a recording; what `flush` wrote survives this process, however it ends.

    It survives a power failure once the part is closed. Existing files are never changed. Messages are to be added in
    the order of their arrival. For one thread.
    """

    def __init__(
        self,
        path: Path,
        sources: Sequence[recording.RecordedSource] = (),
        *,
        appends: bool = False,
        rotate_bytes: int | None = None,
    ) -> None:
        """Create the recording, or with `appends` its next part; beyond `rotate_bytes` another part is begun.

        Raises InvalidValueError when the file cannot be created, when the recording exists and `appends` is not set, or
        when it is being written; RecordingError when the file is no recording; OSError when a write fails.
        """
        if rotate_bytes is not None and rotate_bytes < MIN_ROTATE_BYTES:
            raise InvalidValueError("rotate_bytes", rotate_bytes, f"at least {MIN_ROTATE_BYTES} bytes")
        self._first_path = path
        self._rotate_bytes = rotate_bytes
        self.num_messages = 0
        self.num_payload_bytes = 0
        self.num_parts = 1
        self.earlier: Path | None = None
        """The recording, if it existed before."""
        self._num_bytes_of_parts_before = 0
        about = recording.About(recording.VERSION, secrets.token_hex(8), 0, 0, tuple(sources))
        numbers = recording.part_numbers(path, "created")
        with ExitStack() as stack:
            if numbers and not appends:
                raise InvalidValueError("recording", str(path), "a new file, or one to be appended to (--append)")
            if numbers:
                self.earlier = path
                stack.callback(os.close, _open_locked(recording.part_path(path, numbers[-1])))
                about = replace(about, part=numbers[-1] + 1)
                # A crash may leave parts that say nothing of themselves.
                abouts = (read_about(recording.part_path(path, number)) for number in reversed(numbers))
                if (before := next(filter(None, abouts), None)) is not None:
                    about = replace(about, recording=before.recording, session=before.session + 1)
            self._part = self._begin(about)

    @property
    def num_written_bytes(self) -> int:
        return self._num_bytes_of_parts_before + self._part.num_bytes

    def add(self, source: recording.RecordedSource, message: Message, time_ns: int) -> None:
        """Add a message that arrived at this Unix time."""
        size_bytes = len(message.topic) + len(message.payload)
        if size_bytes > MAX_MESSAGE_BYTES:
            raise InvalidValueError("message", f"{size_bytes} bytes", f"at most {MAX_MESSAGE_BYTES} bytes")
        self.flush_if_due(time_ns)
        is_large = self._rotate_bytes is not None and self._part.num_bytes >= self._rotate_bytes
        if self._part.num_chunks > 0 and (is_large or self._part.is_full):
            self._begin_next()
        self._part.add(source, message, time_ns)
        self.num_messages += 1
        self.num_payload_bytes += len(message.payload)

    def flush_if_due(self, now_ns: int) -> None:
        """Write messages older than a second; call it regularly while no messages come."""
        first_ns = self._part.first_ns
        if first_ns is not None and not 0 <= now_ns - first_ns < FLUSH_NS:
            self.flush()

    def flush(self) -> None:
        self._part.write_chunk()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write everything, unless a write failed before."""
        self._part.finish()

    def _begin(self, about: recording.About) -> _PartWriter:
        chunk_bytes = min(CHUNK_BYTES, self._rotate_bytes or CHUNK_BYTES)
        return _PartWriter(recording.part_path(self._first_path, about.part), about, chunk_bytes)

    def _begin_next(self) -> None:
        """Complete this part, and begin the next one."""
        self._part.finish()
        self._num_bytes_of_parts_before += self._part.num_bytes
        self._part = self._begin(replace(self._part.about, part=self._part.about.part + 1))
        self.num_parts += 1


class _PartWriter:
    """Writes one file of a recording, unbuffered, and locks it until it is closed.

    By `write`, `tell` and `flush` it is also the stream that the library writes to.
    """

    def __init__(self, path: Path, about: recording.About, chunk_bytes: int) -> None:
        self.about = about
        self.num_bytes = self.num_chunks = 0
        self.first_ns: int | None = None
        """When the first message arrived that is not written yet."""
        self._path = path
        self._is_broken = self._is_finished = False
        self._channels: dict[tuple[recording.RecordedSource, bytes, int], int] = {}
        self._num_channel_bytes = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise recording.file_error(path, "created", error) from None
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        indexes = IndexType.CHUNK | IndexType.METADATA
        self._mcap = Writer(cast(Any, self), chunk_size=chunk_bytes, index_types=indexes, enable_data_crcs=True)
        try:
            self._mcap.start(recording.PROFILE)
            self._mcap.add_metadata(recording.ABOUT, {"about": msgspec.json.encode(about).decode()})
        except OSError:
            os.close(self._fd)
            raise

    @property
    def is_full(self) -> bool:
        has_many_channels = len(self._channels) >= MAX_CHANNELS_A_PART or self._num_channel_bytes >= MAX_CHANNEL_BYTES
        return self.num_chunks >= MAX_CHUNKS_A_PART or has_many_channels

    def add(self, source: recording.RecordedSource, message: Message, time_ns: int) -> None:
        topic, sequence, payload = message
        channel = self._channels.get((source, topic, sequence >> 32))
        if channel is None:
            channel = self._add_channel(source, topic, sequence >> 32)
        self.first_ns = time_ns if self.first_ns is None else self.first_ns
        published_s = getattr(read_envelope(payload), "timestamp_s", 0.0)
        published_ns = int(published_s * 1e9) if 0 < published_s < _MAX_NS * 1e-9 else time_ns
        num_bytes = self.num_bytes
        self._mcap.add_message(channel, time_ns, payload, published_ns, sequence & _U32_MASK)
        self._count_chunk(num_bytes)

    def write_chunk(self) -> None:
        num_bytes = self.num_bytes
        self._mcap.flush()
        self._count_chunk(num_bytes)

    def finish(self) -> None:
        """Write what is left and close the file; after a failed write, only close it."""
        if self._is_finished:
            return
        self._is_finished = True
        try:
            if not self._is_broken:
                self.write_chunk()
                self._mcap.finish()
                os.fsync(self._fd)  # so that a whole file survives a power failure
        finally:
            os.close(self._fd)

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        self._is_broken = True
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            found = f"got {str(self._path)!r}, expected room for what comes ({error.strerror})"
            raise OSError(f"recording: {found}") from error
        self._is_broken = False
        self.num_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""

    def _count_chunk(self, num_bytes_before: int) -> None:
        """Count a chunk if the library wrote one, as it does once a chunk is large enough."""
        if self.num_bytes > num_bytes_before:
            self.num_chunks += 1
            self.first_ns = None

    def _add_channel(self, source: recording.RecordedSource, topic: bytes, sequence_base: int) -> int:
        self._num_channel_bytes += len(topic)
        shown = f"{source.name}/{topic[:_MAX_SHOWN_BYTES].decode(errors='replace')}".rstrip("/")
        metadata = {**msgspec.structs.asdict(source), "topic": topic.hex(), "sequence_base": str(sequence_base)}
        channel = self._mcap.register_channel(shown, "msgpack", 0, metadata)
        self._channels[source, topic, sequence_base] = channel
        return channel


def _open_locked(path: Path) -> int:
    """Open a file and lock it against other recorders; raises InvalidValueError if one is writing it."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise recording.file_error(path, "read", error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InvalidValueError("recording", str(path), "a file that nobody is writing") from None
    return fd
