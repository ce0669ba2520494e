"""Reading a recording, record by record: also while it is written, and up to wherever it was cut off or damaged.

The library's own readers take a file that ends amid a record for one that is damaged there, and hold nothing against
one that says it is larger than memory. So records are told apart here, by their nine bytes of kind and length, and what
is in them is the library's to read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk, DataEnd, Header, Metadata
from mcap.stream_reader import get_chunk_data_stream
from mcap.writer import MCAP0_MAGIC

from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import Message
from kvist.replay.recording import (
    ABOUT,
    END,
    MAX_CHUNK_BYTES,
    MESSAGE_START,
    PROFILE,
    VERSION,
    About,
    Record,
    RecordedSource,
    RecordingError,
    first_part_path,
    impossible,
    part_path,
)

MAX_RECORDS_AT_ONCE = 8192
"""Records that are read at a time, of a chunk that has more."""

_RECORD_START = struct.Struct("<BQ")
_MAX_RECORD_BYTES = MAX_CHUNK_BYTES + 4096
_KINDS = {int(kind) for kind in Opcode}
_OLD_MAGIC: Final = b"\x89KVREC"
_MALFORMED = (McapError, struct.error, OverflowError, zstandard.ZstdError, ValueError, KeyError, *DECODE_ERRORS)


class Torn(NamedTuple):
    """Bytes at a part's end that are no whole record: its recorder was stopped amid a write, or still writes."""

    path: Path
    offset: int
    num_bytes: int


class _DamageError(Exception):
    """What was found, and what was expected."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.expected = expected


class _Channel(NamedTuple):
    source: RecordedSource
    topic: bytes
    sequence_base: int


class _Part:
    """One file of a recording, read forward; `offset` is behind the last whole record that was taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            self.read_at(0, 1)  # a folder can be opened
        except OSError as error:
            raise impossible(path, "read", error) from None
        self.offset = self._closed_bytes = 0
        self.about: About | None = None
        self.is_closed = self.is_end = False
        self._is_ours = self._has_data_end = False
        self._record_offset = self._crc = 0
        self._channels: dict[int, _Channel] = {}
        self._num_channel_bytes = 0
        self._messages: Iterator[Record] = iter(())

    def close(self) -> None:
        self._closed_bytes = self.size_bytes
        self._file.close()

    @property
    def size_bytes(self) -> int:
        return self._closed_bytes if self._file.closed else os.fstat(self._file.fileno()).st_size

    @property
    def torn(self) -> Torn | None:
        num_bytes = self.size_bytes - self.offset
        return Torn(self.path, self.offset, num_bytes) if num_bytes > 0 else None

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, offset)

    def read(self) -> list[Record] | None:
        """Return some records, an empty list where there are others, None while there is no whole one."""
        try:
            if records := list(islice(self._messages, MAX_RECORDS_AT_ONCE)):
                return records
            self._record_offset = self.offset
            return [] if self._step() else None
        except _DamageError as error:
            raise RecordingError(self.path, self._record_offset, str(error), error.expected) from None
        except _MALFORMED as error:
            found = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
            raise RecordingError(self.path, self._record_offset, found, "a record as MCAP has it") from error

    def _step(self) -> bool:
        """Take the next record; return False while it is not all there."""
        if self.offset == 0:
            return self._take_magic()
        if self.is_closed:
            return False
        start = self.read_at(self.offset, _RECORD_START.size)
        if len(start) < _RECORD_START.size:
            return self._is_missing()
        kind, length = _RECORD_START.unpack(start)
        if kind not in _KINDS or length > _MAX_RECORD_BYTES:
            raise _DamageError(
                f"a record of kind {kind:#x} and {length} bytes", f"one that MCAP knows, of {_MAX_RECORD_BYTES} at most"
            )
        body_offset = self.offset + len(start)
        end = body_offset + length + (len(MCAP0_MAGIC) if kind == Opcode.FOOTER else 0)
        if self.size_bytes < end:
            return self._is_missing()
        body = self.read_at(body_offset, length)
        self._take(kind, body)
        self._crc = zlib.crc32(body, zlib.crc32(start, self._crc))
        self.offset = end
        if kind == Opcode.FOOTER:
            self.is_closed = True
            if self.read_at(body_offset + length, len(MCAP0_MAGIC) + 1) != MCAP0_MAGIC:
                raise _DamageError("other bytes behind the footer", f"{MCAP0_MAGIC!r} and the end of the file")
        return True

    def _take_magic(self) -> bool:
        data = self.read_at(0, len(MCAP0_MAGIC))
        if data.startswith(_OLD_MAGIC):
            found = "a recording of the form before MCAP"
            raise _DamageError(found, "an MCAP file: this version reads no other, record anew")
        if not MCAP0_MAGIC.startswith(data):
            raise _DamageError(repr(data), f"a recording, which is an MCAP file and begins with {MCAP0_MAGIC!r}")
        if len(data) < len(MCAP0_MAGIC):
            return False
        self.offset, self._crc = len(data), zlib.crc32(data)
        return True

    def _is_missing(self) -> bool:
        """Return False; raises _DamageError when a recorder closed the file, so that nothing more will be written."""
        is_whole = self.read_at(max(0, self.size_bytes - len(MCAP0_MAGIC)), len(MCAP0_MAGIC)) == MCAP0_MAGIC
        if is_whole and self.size_bytes > len(MCAP0_MAGIC):
            raise _DamageError("a record that goes on behind the end of the file", "all of it: the file was closed")
        return False

    def _take(self, kind: int, body: bytes) -> None:
        """Take a record of the file."""
        stream = ReadDataStream(BytesIO(body))
        if kind == Opcode.HEADER:
            profile = Header.read(stream).profile
            if profile != PROFILE:
                raise _DamageError(f"an MCAP file of profile {profile!r}", f"a recording, of profile {PROFILE!r}")
            self._is_ours = True
        elif not self._is_ours or (self.about is None and kind in (Opcode.CHUNK, Opcode.CHANNEL, Opcode.MESSAGE)):
            raise _DamageError(f"a record of kind {kind:#x}", f"a header and what {ABOUT} tells before it")
        elif kind == Opcode.METADATA:
            self._note(Metadata.read(stream))
        elif kind == Opcode.CHUNK:
            self._messages = self._records(_chunk_data(Chunk.read(stream)))
        elif kind in (Opcode.CHANNEL, Opcode.MESSAGE):
            self._messages = self._records(_RECORD_START.pack(kind, len(body)) + body)
        elif kind == Opcode.DATA_END:
            self._has_data_end = True
            if DataEnd.read(stream).data_section_crc not in (0, self._crc):
                raise _DamageError("a wrong checksum of the file", "the one that its bytes have: some were altered")
        elif kind == Opcode.FOOTER and not self._has_data_end:
            raise _DamageError("the end of the file", "the end of its data before it: some bytes were altered")

    def _note(self, metadata: Metadata) -> None:
        if metadata.name == END:
            self.is_end = True
        elif metadata.name == ABOUT:
            text = metadata.metadata["about"]
            version = msgspec.json.decode(text, type=dict)["version"]
            if version != VERSION:
                raise _DamageError(f"version {version!r}", f"version {VERSION} of recordings")
            self.about = msgspec.json.decode(text, type=About)

    def _records(self, data: bytes) -> Iterator[Record]:
        """Yield the messages of a chunk, and take note of its channels."""
        assert self.about is not None
        offset, session = 0, self.about.session
        while offset < len(data):
            kind, length = _RECORD_START.unpack_from(data, offset)
            offset += _RECORD_START.size
            body = data[offset : offset + length]
            offset += length
            if len(body) < length:
                raise ValueError("a record that goes on behind its chunk")
            if kind == Opcode.MESSAGE:
                number, sequence, time_ns, _ = MESSAGE_START.unpack_from(body)
                if (channel := self._channels.get(number)) is None:
                    raise ValueError(f"a message of channel {number}, which is none")
                message = Message(channel.topic, channel.sequence_base | sequence, body[MESSAGE_START.size :])
                yield Record(session, channel.source, time_ns, message)
            elif kind == Opcode.CHANNEL:
                self._num_channel_bytes += length
                if self._num_channel_bytes > MAX_CHUNK_BYTES:
                    raise _DamageError(f"{self._num_channel_bytes} bytes of channels", f"at most {MAX_CHUNK_BYTES}")
                self._add_channel(Channel.read(ReadDataStream(BytesIO(body))))
            elif kind != Opcode.SCHEMA:
                raise ValueError(f"a record of kind {kind:#x} in a chunk")

    def _add_channel(self, channel: Channel) -> None:
        told = channel.metadata
        source = msgspec.convert((told["name"], told["url"], told["engine"]), RecordedSource)
        base = int(told["sequence_base"])
        if not 0 <= base < 1 << 32:
            raise ValueError(f"a sequence_base of {base}")
        self._channels[channel.id] = _Channel(source, bytes.fromhex(told["topic"]), base << 32)


def _chunk_data(chunk: Chunk) -> bytes:
    """Return what is in a chunk, whose checksum is right; its size is looked at before memory is taken for it."""
    size_bytes = len(chunk.data)
    if chunk.compression == "zstd":
        told = zstandard.frame_content_size(chunk.data)
        size_bytes = chunk.uncompressed_size if told < 0 else told
    elif chunk.compression:
        raise _DamageError(f"a chunk compressed by {chunk.compression!r}", "zstd, or none")
    if size_bytes != chunk.uncompressed_size or size_bytes > MAX_CHUNK_BYTES:
        raise _DamageError(f"a chunk of {size_bytes} bytes", f"{chunk.uncompressed_size}, {MAX_CHUNK_BYTES} at most")
    stream, _ = get_chunk_data_stream(chunk, validate_crc=True)
    return stream.read(size_bytes)


class RecordingReader:
    """Reads a recording's messages in order; memory for one chunk, however large the files are.

    Everything up to the last whole chunk of each part is read. What is left behind it is `torn`; if more is written to
    the last part, `read` goes on. Whatever else is wrong raises RecordingError, after everything before it was read.
    """

    def __init__(self, path: Path) -> None:
        """Open the recording, or what is left of it from a later part on.

        Raises InvalidValueError when that cannot be opened.
        """
        self._first_path = self._path = path
        self._number = 0
        self._part = _Part(path)
        self._about: About | None = None
        self._was_closed = False
        self._num_bytes_of_parts_before = 0
        self._torn: list[Torn] = []

    def __enter__(self) -> Self:
        """Return the reader, which is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._part.close()

    def __iter__(self) -> Iterator[Record]:
        """Yield what there is to read now."""
        while (records := self.read()) is not None:
            yield from records

    def read(self) -> list[Record] | None:
        """Return the next messages, None while there are no whole ones."""
        while True:
            # Looked at before the rest is read: once there is another part, this one does not grow any more.
            next_path = part_path(self._first_path, self._number + 1)
            is_last = not next_path.exists()
            is_begun = self._part.about is not None
            records = self._part.read()
            if not is_begun and self._part.about is not None:
                self._begin(self._part.about)
            if records:
                return records
            if records is None:
                if is_last:
                    return None
                self._enter(next_path)

    def sources(self) -> list[RecordedSource]:
        """Return whoever is recorded from here on, in order of appearance, as the parts say at their beginnings."""
        found: dict[RecordedSource, None] = {}
        path = first_path = self._path
        number = 0
        with suppress(RecordingError):
            while path.exists():
                if (about := read_about(path)) is not None:
                    found.update(dict.fromkeys(about.sources))
                    if number == 0:
                        first_path, number = first_part_path(path, about.part)
                number += 1
                path = part_path(first_path, number)
        return list(found)

    @property
    def torn(self) -> list[Torn]:
        """Return what lies behind the last whole record of each part."""
        return [*self._torn, *([self._part.torn] if self._part.torn is not None else [])]

    @property
    def is_ended(self) -> bool:
        """Return whether the recorder ended on purpose where the reader is: nothing more will come of its session."""
        return self._part.is_closed and self._part.is_end

    @property
    def num_bytes_read(self) -> int:
        """Return how much of all parts was read."""
        return self._num_bytes_of_parts_before + self._part.offset

    @property
    def size_bytes(self) -> int:
        """Return the size of all parts that there are now."""
        size_bytes, number = self._num_bytes_of_parts_before + self._part.size_bytes, self._number + 1
        while (path := part_path(self._first_path, number)).exists():
            size_bytes, number = size_bytes + path.stat().st_size, number + 1
        return size_bytes

    def _enter(self, path: Path) -> None:
        part = _Part(path)
        if self._part.torn is not None:
            self._torn.append(self._part.torn)
        self._num_bytes_of_parts_before += self._part.size_bytes
        self._part.close()
        self._was_closed, self._part = self._part.is_closed, part
        self._number += 1

    def _begin(self, about: About) -> None:
        """Check that a part is the one that was expected."""
        before, path = self._about, self._part.path
        if before is None and self._number == 0:
            self._first_path, self._number = first_part_path(path, about.part)
        if about.part != self._number or (before is not None and about.recording != before.recording):
            expected = f"part {self._number}" + ("" if before is None else f" of recording {before.recording}")
            raise RecordingError(path, 0, f"part {about.part} of recording {about.recording}", expected)
        if before is not None and before.session == about.session and not self._was_closed:
            cut = part_path(self._first_path, about.part - 1)
            raise RecordingError(cut, cut.stat().st_size, "the end of the file", f"more of it: {path} follows")
        self._about = about


def read_about(path: Path) -> About | None:
    """Return what a part says of itself, None if it was cut off before; raises RecordingError for another file."""
    part = _Part(path)
    try:
        while part.about is None and part.read() is not None:
            pass
        return part.about
    finally:
        part.close()
