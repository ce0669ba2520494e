"""Reads a recording record by record, also while it is written, and up to where it was cut off or damaged.

The library's own readers take an unfinished record at a file's end for damage, and allocate whatever size a file
claims. So this module finds the records, by their nine bytes of kind and length, and the library parses each.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk, DataEnd, Footer, Header, Metadata
from mcap.records import Message as McapMessage
from mcap.stream_reader import StreamReader, get_chunk_data_stream
from mcap.writer import MCAP0_MAGIC

from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import Message
from kvist.replay import recording

MAX_RECORDS_AT_ONCE = 8192
"""Records that are read at a time, of a chunk that has more."""

_logger = logging.getLogger(__name__)

_RECORD_START = struct.Struct("<BQ")
_MAX_RECORD_BYTES = recording.MAX_CHUNK_BYTES + 4096
_KINDS = {int(kind) for kind in Opcode}
_MALFORMED = (McapError, struct.error, OverflowError, zstandard.ZstdError, ValueError, KeyError, *DECODE_ERRORS)


class Torn(NamedTuple):
    """An incomplete record at a part's end: its recorder was stopped within a write, or is still writing."""

    path: Path
    offset: int
    num_bytes: int


class _Channel(NamedTuple):
    source: recording.RecordedSource
    topic: bytes
    sequence_base: int


class _PartReader:
    """Reads one file of a recording forward; `offset` is behind the last whole record that was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_fifo():
                raise OSError(0, "it is a pipe")  # whose opening would wait for a writer
            self._file = path.open("rb", buffering=0)
            self.read_at(0, 1)  # a folder can be opened
        except OSError as error:
            raise recording.file_error(path, "read", error) from None
        self.offset = self._closed_bytes = 0
        self.about: recording.About | None = None
        self.is_closed = self.is_end = False
        self._has_header = self._has_data_end = False
        self._record_offset = self._crc = 0
        self._channels: dict[int, _Channel] = {}
        self._num_channel_bytes = 0
        self._messages: Iterator[recording.Record] = iter(())

    def close(self) -> None:
        self._closed_bytes = self.size_bytes
        self._file.close()

    @property
    def size_bytes(self) -> int:
        return self._closed_bytes if self._file.closed else os.fstat(self._file.fileno()).st_size

    @property
    def torn(self) -> list[Torn]:
        num_bytes = self.size_bytes - self.offset
        return [Torn(self.path, self.offset, num_bytes)] if num_bytes > 0 else []

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, offset)

    def read(self) -> list[recording.Record] | None:
        """Return the next messages, none if other records come first; None while there is no whole record."""
        try:
            if messages := list(islice(self._messages, MAX_RECORDS_AT_ONCE)):
                return messages
            self._record_offset = self.offset
            is_read = self._read_magic() if self.offset == 0 else self._read_record()
            return [] if is_read else None
        except _MALFORMED as error:
            found = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
            raise self._damage(found, "a record as MCAP has it") from error

    def _damage(self, found: str, expected: str) -> recording.RecordingError:
        return recording.RecordingError(self.path, self._record_offset, found, expected)

    def _read_magic(self) -> bool:
        data = self.read_at(0, len(MCAP0_MAGIC))
        if not MCAP0_MAGIC.startswith(data):
            raise self._damage(repr(data), f"a recording, which is an MCAP file and begins with {MCAP0_MAGIC!r}")
        if data == MCAP0_MAGIC:
            self.offset, self._crc = len(data), zlib.crc32(data)
        return data == MCAP0_MAGIC

    def _read_record(self) -> bool:
        """Read the next record; return False while it is incomplete."""
        if self.is_closed:
            return False
        size_bytes = self.size_bytes  # read once: a writer may append at any moment
        start = self.read_at(self.offset, _RECORD_START.size)
        kind, length = _RECORD_START.unpack(start) if len(start) == _RECORD_START.size else (Opcode.HEADER, 0)
        if kind not in _KINDS or length > _MAX_RECORD_BYTES:
            found = f"a record of kind {kind:#x} and {length} bytes"
            raise self._damage(found, f"one that MCAP knows, of {_MAX_RECORD_BYTES} at most")
        end = self.offset + _RECORD_START.size + length
        is_footer = kind == Opcode.FOOTER
        if size_bytes < end + (len(MCAP0_MAGIC) if is_footer else 0):
            last = self.read_at(max(0, size_bytes - len(MCAP0_MAGIC)), len(MCAP0_MAGIC))
            if last == MCAP0_MAGIC and size_bytes > len(MCAP0_MAGIC):
                raise self._damage("a record that goes on behind the end of the file", "all of it: the file was closed")
            return False
        data = start + self.read_at(self.offset + len(start), length)
        magic = self.read_at(end, len(MCAP0_MAGIC) + 1) if is_footer else b""
        if len(data) < len(start) + length or (is_footer and len(magic) < len(MCAP0_MAGIC)):  # truncated meanwhile
            return False
        self._handle(kind, data)
        self._crc = zlib.crc32(data, self._crc)
        self.offset = end + len(magic)
        self.is_closed = is_footer
        if is_footer and magic != MCAP0_MAGIC:
            raise self._damage("other bytes behind the footer", f"{MCAP0_MAGIC!r} and the end of the file")
        return True

    def _handle(self, kind: int, data: bytes) -> None:
        """Check a record and keep what it says; the next `read` returns its messages."""
        record = next(StreamReader(BytesIO(data), skip_magic=True, emit_chunks=True).records)
        if isinstance(record, Header):
            if record.profile != recording.PROFILE:
                found = f"an MCAP file of profile {record.profile!r}"
                raise self._damage(found, f"a recording, of profile {recording.PROFILE!r}")
            self._has_header = True
        elif not self._has_header or (self.about is None and isinstance(record, Chunk | Channel | McapMessage)):
            raise self._damage(f"a record of kind {kind:#x}", f"a header and what {recording.ABOUT} tells before it")
        elif self._has_data_end and isinstance(record, Chunk | McapMessage):
            raise self._damage("messages behind the end of the data", "a summary there: some bytes were altered")
        elif isinstance(record, Metadata):
            self.is_end |= record.name == recording.END
            if record.name == recording.ABOUT:
                self.about = self._read_about(record.metadata["about"])
        elif isinstance(record, Chunk):
            self._messages = self._records(_chunk_data(record))
        elif isinstance(record, Channel | McapMessage):
            self._messages = self._records(data)
        elif isinstance(record, DataEnd):
            self._has_data_end = True
            if record.data_section_crc not in (0, self._crc):
                raise self._damage("a wrong checksum of the file", "the one that its bytes have: some were altered")
        elif isinstance(record, Footer) and not self._has_data_end:
            raise self._damage("the end of the file", "the end of its data before it: some bytes were altered")

    def _read_about(self, text: str) -> recording.About:
        version = msgspec.json.decode(text, type=dict)["version"]
        if version != recording.VERSION:
            raise self._damage(f"version {version!r}", f"version {recording.VERSION} of recordings")
        return msgspec.json.decode(text, type=recording.About)

    def _records(self, data: bytes) -> Iterator[recording.Record]:
        """Yield the messages of a chunk one by one, and add its channels."""
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
                number, sequence, time_ns, _ = recording.MESSAGE_START.unpack_from(body)
                if (channel := self._channels.get(number)) is None:
                    raise ValueError(f"a message of channel {number}, which is none")
                message = Message(channel.topic, channel.sequence_base | sequence, body[recording.MESSAGE_START.size :])
                yield recording.Record(session, channel.source, time_ns, message)
            elif kind == Opcode.CHANNEL:
                self._num_channel_bytes += length
                if self._num_channel_bytes > recording.MAX_CHUNK_BYTES:
                    raise ValueError(f"more than {recording.MAX_CHUNK_BYTES} bytes of channels")
                self._add_channel(Channel.read(ReadDataStream(BytesIO(body))))
            elif kind != Opcode.SCHEMA:
                raise ValueError(f"a record of kind {kind:#x} in a chunk")

    def _add_channel(self, channel: Channel) -> None:
        metadata = channel.metadata
        source = msgspec.convert((metadata["name"], metadata["url"], metadata["engine"]), recording.RecordedSource)
        base = int(metadata["sequence_base"])
        if not 0 <= base < 1 << 32:
            raise ValueError(f"a sequence_base of {base}")
        self._channels[channel.id] = _Channel(source, bytes.fromhex(metadata["topic"]), base << 32)


def _chunk_data(chunk: Chunk) -> bytes:
    """Return a chunk's content after checking its size, before memory is taken for it, and its checksum."""
    size_bytes = len(chunk.data)
    if chunk.compression == "zstd":
        frame_bytes = zstandard.frame_content_size(chunk.data)
        size_bytes = chunk.uncompressed_size if frame_bytes < 0 else frame_bytes
    elif chunk.compression:
        raise ValueError(f"a chunk compressed by {chunk.compression!r}, neither by zstd nor not at all")
    if size_bytes != chunk.uncompressed_size or size_bytes > recording.MAX_CHUNK_BYTES:
        expected = f"{chunk.uncompressed_size}, {recording.MAX_CHUNK_BYTES} at most"
        raise ValueError(f"a chunk of {size_bytes} bytes in place of {expected}")
    stream, _ = get_chunk_data_stream(chunk, validate_crc=True)
    return stream.read(size_bytes)


class RecordingReader(AbstractContextManager["RecordingReader"]):
    """Reads a recording's messages in order, with memory for one chunk, however large the files are.

    Everything up to the last whole chunk of each part is read, and what is left behind it is `torn`; if more is written
    to the last part, `read` continues. A missing part between others is logged. Any other damage raises RecordingError,
    after everything before it was read.
    """

    def __init__(self, path: Path) -> None:
        """Open the recording at its first part, or at a later one; raises InvalidValueError."""
        self._first_path = self._path = path
        self._number = 0
        self._part = _PartReader(path)
        self._num_bytes_before = 0
        self._about: recording.About | None = None
        self._before: _PartReader | None = None
        self._next_number: int | None = None
        self._torn: list[Torn] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._part.close()

    def __iter__(self) -> Iterator[recording.Record]:
        while (records := self.read()) is not None:
            yield from records

    def read(self) -> list[recording.Record] | None:
        """Return the next messages, None while there are no whole ones."""
        while True:
            is_begun = self._part.about is not None
            records = self._part.read()
            if not is_begun and self._part.about is not None:
                self._check_about(self._part.about)
            if records:
                return records
            if records is None:
                if self._next_number is not None:
                    self._open_part(self._next_number)
                # Once there is a next part, this one is complete: read what it got meanwhile, and then the next.
                elif (number := min(self._later_numbers, default=None)) is not None:
                    self._next_number = number
                else:
                    return None

    @property
    def _later_numbers(self) -> list[int]:
        return [number for number in recording.part_numbers(self._first_path, "read") if number > self._number]

    @property
    def num_bytes_read(self) -> int:
        return self._num_bytes_before + self._part.offset

    @property
    def num_bytes_left(self) -> int:
        """Return the number of bytes that were not read of all parts that exist now."""
        num_bytes = self._part.size_bytes - self._part.offset
        for number in self._later_numbers:
            with suppress(FileNotFoundError):  # parts may be deleted at any time
                num_bytes += recording.part_path(self._first_path, number).stat().st_size
        return num_bytes

    def sources(self) -> list[recording.RecordedSource]:
        """Return the sources that the parts from here on name at their beginnings, in order of appearance."""
        found: dict[recording.RecordedSource, None] = {}
        first_path, first_number = self._path, 0
        with suppress(recording.RecordingError):
            if (about := read_about(self._path)) is not None:
                first_path, first_number = recording.first_part_path(self._path, about.part)
            for number in recording.part_numbers(first_path, "read"):
                about = read_about(recording.part_path(first_path, number)) if number >= first_number else None
                found.update(dict.fromkeys(about.sources if about is not None else ()))
        return list(found)

    @property
    def torn(self) -> list[Torn]:
        """Return the bytes behind the last whole record of each part."""
        return [*self._torn, *self._part.torn]

    @property
    def is_ended(self) -> bool:
        """Return whether the current part has the mark of a recorder that ended on purpose."""
        return self._part.is_closed and self._part.is_end

    @property
    def missing(self) -> Path | None:
        """Return the next part, which may be missing if the current one is closed without the mark of an end."""
        is_cut_off = self._part.is_closed and not self._part.is_end
        return recording.part_path(self._first_path, self._number + 1) if is_cut_off else None

    def _open_part(self, number: int) -> None:
        missing, path = (recording.part_path(self._first_path, each) for each in (self._number + 1, number))
        part = _PartReader(path)
        if missing != path:
            _logger.warning("part missing, all messages up to %s are lost path=%s", path.name, missing)
        self._torn += self._part.torn
        self._part.close()
        self._num_bytes_before += self._part.offset
        self._before, self._part = self._part, part
        self._number, self._next_number = number, None

    def _check_about(self, about: recording.About) -> None:
        """Raise RecordingError unless the current part is the expected one and the part before it complete."""
        before, path = self._about, self._part.path
        if before is None and self._number == 0:
            self._first_path, self._number = recording.first_part_path(path, about.part)
        if about.part != self._number or (before is not None and about.recording != before.recording):
            expected = f"part {self._number}" + ("" if before is None else f" of recording {before.recording}")
            raise recording.RecordingError(path, 0, f"part {about.part} of recording {about.recording}", expected)
        cut = self._before
        if before is not None and cut is not None and before.session == about.session and not cut.is_closed:
            found, expected = "the end of the file", f"more of it: {path} follows"
            raise recording.RecordingError(cut.path, cut.size_bytes, found, expected)
        self._about = about


def read_about(path: Path) -> recording.About | None:
    """Return what a part says of itself, None if it was cut off before that; raises RecordingError for other files."""
    part = _PartReader(path)
    try:
        while part.about is None and part.read() is not None:
            pass
        return part.about
    finally:
        part.close()
