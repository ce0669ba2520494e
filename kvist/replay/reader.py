"""Reads a recording in order, also while it is written, and up to where it was cut off or damaged.

The library reads the records of a part, by `_PartReader.read`. Its own stream would take a read that the file's end cut
short for a whole one, and allocate whatever size a field claims.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import EndOfFile, McapError
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk, DataEnd, Header, McapRecord, Metadata
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
    """Reads one file of a recording forward, up to the end of its data; by `read` it is what the library reads from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_fifo():
                raise OSError(0, "it is a pipe")  # whose opening would wait for a writer
            self._file = path.open("rb")
        except OSError as error:
            raise recording.file_error(path, "read", error) from None
        self.about: recording.About | None = None
        self.offset = 0
        """Where the first record begins that was not read."""
        self.num_torn_bytes = 0
        """How much of that record is in the file, if the file was not closed."""
        self._channels: dict[int, _Channel] = {}
        self._num_channel_bytes = 0

    def close(self) -> None:
        self._file.close()

    def read(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes; raises EndOfFile if there are fewer, ValueError for more than a record has."""
        if not 0 <= num_bytes <= _MAX_RECORD_BYTES:
            raise ValueError(f"a field of {num_bytes} bytes in a record, which has {_MAX_RECORD_BYTES} at most")
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise EndOfFile
        return data

    def batches(self) -> Iterator[list[recording.Record]]:
        """Yield the messages in batches, and an empty one after each record; raises RecordingError for damage."""
        is_closed = self._check_ends()
        try:
            stream = StreamReader(
                cast(Any, self), emit_chunks=True, validate_crcs=True, record_size_limit=_MAX_RECORD_BYTES
            )
            for record in stream.records:
                messages = self._messages(record)
                while batch := list(islice(messages, MAX_RECORDS_AT_ONCE)):
                    yield batch
                self.offset = self._file.tell()
                yield []
                if isinstance(record, DataEnd):  # what follows repeats what was read
                    self.offset = self._file.seek(0, os.SEEK_END)
                    return
        except EndOfFile:
            if is_closed:
                found, expected = "a record that goes on behind the end of the file", "all of it: the file was closed"
                raise self._damage(found, expected) from None
            self.num_torn_bytes = self._file.tell() - self.offset
        except _MALFORMED as error:
            found = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
            raise self._damage(found, "a record as MCAP has it") from error
        else:
            raise self._damage("the end of the file", "the end of its data before it: some bytes were altered")

    def _check_ends(self) -> bool:
        """Return whether the file was closed; raises RecordingError if it does not begin as MCAP files do."""
        num_bytes = len(MCAP0_MAGIC)
        begin = self._file.read(num_bytes)
        if not MCAP0_MAGIC.startswith(begin):
            raise self._damage(repr(begin), f"a recording of events, an MCAP file, which begins with {MCAP0_MAGIC!r}")
        self._file.seek(max(num_bytes, self._file.seek(0, os.SEEK_END) - num_bytes))
        is_closed = self._file.read(num_bytes) == MCAP0_MAGIC
        self._file.seek(0)
        self.offset = num_bytes if begin == MCAP0_MAGIC else 0
        return is_closed

    def _damage(self, found: str, expected: str) -> recording.RecordingError:
        return recording.RecordingError(self.path, self.offset, found, expected)

    def _messages(self, record: McapRecord) -> Iterator[recording.Record]:
        """Yield the messages of a record, and keep what others say."""
        if isinstance(record, Header) and record.profile != recording.PROFILE:
            found = f"an MCAP file of profile {record.profile!r}"
            raise self._damage(found, f"a recording, of profile {recording.PROFILE!r}")
        if isinstance(record, Metadata) and record.name == recording.ABOUT:
            self.about = self._read_about(record.metadata["about"])
        elif isinstance(record, Chunk | Channel | McapMessage) and self.about is None:
            raise self._damage("messages", f"what {recording.ABOUT} tells before them")
        elif isinstance(record, Chunk):
            yield from self._messages_of_chunk(_chunk_data(record))
        elif isinstance(record, Channel):
            self._add_channel(record)
        elif isinstance(record, McapMessage):
            yield self._message(record.channel_id, record.sequence, record.log_time, record.data)

    def _read_about(self, text: str) -> recording.About:
        version = msgspec.json.decode(text, type=dict)["version"]
        if version != recording.VERSION:
            raise self._damage(f"version {version!r}", f"version {recording.VERSION} of recordings")
        return msgspec.json.decode(text, type=recording.About)

    def _messages_of_chunk(self, data: bytes) -> Iterator[recording.Record]:
        """Yield the messages of a chunk one by one, and add its channels."""
        offset = 0
        while offset < len(data):
            kind, length = _RECORD_START.unpack_from(data, offset)
            offset += _RECORD_START.size
            body = data[offset : offset + length]
            offset += length
            if len(body) < length:
                raise ValueError("a record that goes on behind its chunk")
            if kind == Opcode.MESSAGE:
                channel, sequence, time_ns, _ = recording.MESSAGE_START.unpack_from(body)
                yield self._message(channel, sequence, time_ns, body[recording.MESSAGE_START.size :])
            elif kind == Opcode.CHANNEL:
                self._add_channel(Channel.read(ReadDataStream(BytesIO(body))))
            elif kind != Opcode.SCHEMA:
                raise ValueError(f"a record of kind {kind:#x} in a chunk")

    def _message(self, number: int, sequence: int, time_ns: int, payload: bytes) -> recording.Record:
        assert self.about is not None
        if (channel := self._channels.get(number)) is None:
            raise ValueError(f"a message of channel {number}, which is none")
        message = Message(channel.topic, channel.sequence_base | sequence, payload)
        return recording.Record(self.about.session, channel.source, time_ns, message)

    def _add_channel(self, channel: Channel) -> None:
        metadata = channel.metadata
        self._num_channel_bytes += sum(map(len, metadata.values()))
        if self._num_channel_bytes > recording.MAX_CHUNK_BYTES:
            raise ValueError(f"more than {recording.MAX_CHUNK_BYTES} bytes of channels")
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

    Of each part that there is when the recording is opened, everything up to the last whole chunk is read, and what is
    left behind it is `torn`. Missing parts are logged. Any other damage raises RecordingError, after everything before
    it was read.
    """

    def __init__(self, path: Path) -> None:
        """Open the recording by the path of its first part, which may have been deleted; raises InvalidValueError."""
        self._path = path
        self._numbers = recording.part_numbers(path, "read") or [0]
        self._batches = self._read_parts()
        self.torn: list[Torn] = []
        """Incomplete records at the ends of the parts that were read."""
        self.num_bytes = self.num_bytes_read = 0
        """The size of all parts, and how much of it was read."""
        for number in self._numbers:
            with suppress(FileNotFoundError):  # parts may be deleted at any time
                self.num_bytes += recording.part_path(path, number).stat().st_size

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._batches.close()

    def __iter__(self) -> Iterator[recording.Record]:
        while (records := self.read()) is not None:
            yield from records

    def read(self) -> list[recording.Record] | None:
        """Return the next messages, None behind the last; raises InvalidValueError for a file that cannot be read."""
        return next(self._batches, None)

    def sources(self) -> list[recording.RecordedSource]:
        """Return the sources that the parts name at their beginnings, in order of appearance."""
        found: dict[recording.RecordedSource, None] = {}
        with suppress(recording.RecordingError):
            for number in self._numbers:
                about = read_about(recording.part_path(self._path, number))
                found.update(dict.fromkeys(about.sources if about is not None else ()))
        return list(found)

    def _read_parts(self) -> Generator[list[recording.Record]]:
        recording_id, next_number, num_bytes_before = None, 0, 0
        for number in self._numbers:
            path, missing = (recording.part_path(self._path, each) for each in (number, next_number))
            if number > 0 and not path.exists():
                continue
            if path != missing:
                _logger.warning("part missing, all messages up to %s are lost path=%s", path.name, missing)
            next_number = number + 1
            with closing(_PartReader(path)) as part:
                for records in part.batches():
                    self.num_bytes_read = num_bytes_before + part.offset
                    about = part.about
                    if about is None or not records:
                        continue
                    if about.part != number or about.recording != (recording_id or about.recording):
                        expected = f"part {number}" + (f" of recording {recording_id}" if recording_id else "")
                        found = f"part {about.part} of recording {about.recording}"
                        raise recording.RecordingError(path, 0, found, expected)
                    recording_id = about.recording
                    yield records
                if part.num_torn_bytes:
                    self.torn.append(Torn(path, part.offset, part.num_torn_bytes))
            num_bytes_before += part.offset
            self.num_bytes_read = num_bytes_before


def read_about(path: Path) -> recording.About | None:
    """Return what a part says of itself, None if it was cut off before that; raises RecordingError for other files."""
    with closing(_PartReader(path)) as part:
        for _ in part.batches():
            if part.about is not None:
                break
        return part.about
