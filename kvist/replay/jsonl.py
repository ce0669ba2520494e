"""Recordings as JSON, one object a line, for people's own tools.

    message   {"session": 0, "source": "pod-1", "url": "tcp://...", "engine": "vllm", "time_ns": 1763..., "seq": 3,
               "topic": "kv/w/0", "batch": [...], "payload": "..."}      everything that was recorded
    batch     {"seq": 3, "batch": [timestamp, [event, ...], rank]}       the form that others use

`batch` is the payload as JSON, with bytes as text of hex digits behind 0x. `payload`, in base64, stands beside it where
the batch alone would not give the same bytes again, and wins when both are read: take it out to have an altered batch
count.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias

import msgspec

from kvist.events.codec import DECODE_ERRORS, is_snapshot_part
from kvist.events.transports import Message
from kvist.events.transports.base import MAX_MESSAGE_BYTES
from kvist.events.types import NonNegative
from kvist.replay.reader import Torn
from kvist.replay.recording import Closable, Engine, Record, RecordedSource, RecordingError

JsonlForm: TypeAlias = Literal["message", "batch"]

_MAX_RECORDS_AT_ONCE = 1024
_MAX_LINE_BYTES = 8 * MAX_MESSAGE_BYTES
_HEX = re.compile("0x((?:[0-9a-f]{2})*)")
_Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message; without a `source` it is of the form that others use."""

    session: NonNegative = 0
    source: str | None = None
    url: str = ""
    engine: Engine = "vllm"
    time_ns: _Time | None = None
    topic: str = ""
    seq: NonNegative
    batch: Any = None
    payload: str | None = None


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(_Line)
_any_decoder = msgspec.json.Decoder()


def to_line(record: Record, form: JsonlForm) -> bytes | None:
    """Return a record as one line; None for what is no batch, as snapshots are, in the form that has only batches."""
    source, (topic, sequence, payload) = record.source, record.message
    try:
        batch = _jsonable(msgspec.msgpack.decode(payload))
    except (*DECODE_ERRORS, TypeError):
        batch = None
    if form == "batch":
        if batch is None or is_snapshot_part(payload):
            return None
        return _encoder.encode(_Line(seq=sequence, batch=batch)) + b"\n"
    line = _Line(
        session=record.session,
        source=source.name,
        url=source.url,
        engine=source.engine,
        time_ns=record.time_ns,
        topic=_text_of(topic),
        seq=sequence,
        batch=batch,
        payload=None if _gives_back(batch, payload) else base64.b64encode(payload).decode(),
    )
    return _encoder.encode(line) + b"\n"


class JsonlReader(Closable):
    """Reads records from lines of either form; memory for a thousand of them.

    Lines without a source are of one named after the file, and timed by their batches' timestamps.
    """

    def __init__(self, path: Path, engine: Engine = "vllm") -> None:
        """Open the file; `engine` is whose dialect batches without a source are in."""
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._unnamed = RecordedSource(path.stem, "", engine)
        self._last_ns = 0
        self._records = self._read_lines()
        self._damage: RecordingError | None = None
        self.num_bytes_read = 0
        self.is_ended = True  # such a file is not followed while it is written
        self.torn: Sequence[Torn] = ()  # a line that was cut off is an error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> list[Record] | None:
        """Return the next records, None at the end; raises RecordingError, after everything before it was returned."""
        if records := list(islice(self._records, _MAX_RECORDS_AT_ONCE)):
            return records
        if self._damage is not None:
            raise self._damage
        return None

    def _read_lines(self) -> Iterator[Record]:
        """Yield a record a line, up to the end or to one that is wrong."""
        while text := self._file.readline(_MAX_LINE_BYTES):
            try:
                if text.strip():
                    yield self._record(text)
            except (*DECODE_ERRORS, OverflowError) as error:
                expected = "a JSON object with seq and batch or payload"
                self._damage = RecordingError(self._path, self.num_bytes_read, str(error), expected)
                return
            self.num_bytes_read += len(text)

    def sources(self) -> list[RecordedSource]:
        """Return whoever is named in what is left to read, or up to a wrong line, in order of appearance."""
        found: dict[RecordedSource, None] = {}
        with suppress(RecordingError):
            while (records := self.read()) is not None:
                found.update(dict.fromkeys(record.source for record in records))
        return list(found)

    @property
    def num_bytes_left(self) -> int:
        """Return how much of the file was not read."""
        return self._path.stat().st_size - self.num_bytes_read

    def _record(self, text: bytes) -> Record:
        """Return what a line says; raises ValueError."""
        line = _decoder.decode(text)
        if line.seq >= 1 << 64:
            raise ValueError(f"seq {line.seq}")
        if line.payload is None and not isinstance(line.batch, list):
            raise ValueError(f"a batch of {type(line.batch).__name__}")
        payload = _payload_of(line.batch) if line.payload is None else base64.b64decode(line.payload, validate=True)
        if line.source is None:
            return self._unnamed_record(line, payload)
        if line.time_ns is None:
            raise ValueError("a source without time_ns")
        source = RecordedSource(line.source, line.url, line.engine)
        topic = _with_bytes(line.topic)
        message = Message(topic if isinstance(topic, bytes) else topic.encode(), line.seq, payload)
        return Record(line.session, source, line.time_ns, message)

    def _unnamed_record(self, line: _Line, payload: bytes) -> Record:
        batch = line.batch if isinstance(line.batch, list) else []
        is_canonical = len(batch) > 6 and batch[0] == "kvist1"
        timestamp_s = batch[6 if is_canonical else 0] if batch else None
        if not isinstance(timestamp_s, int | float) or not 0 <= timestamp_s < 1e9 * 9:
            raise ValueError(f"a timestamp of {timestamp_s!r}")
        self._last_ns = max(self._last_ns, round(timestamp_s * 1e6) * 1000)  # a float has no more
        topic = f"kv/{batch[1]}/{batch[2]}".encode() if is_canonical else b""
        return Record(0, self._unnamed, self._last_ns, Message(topic, line.seq, payload))


def _jsonable(value: Any) -> Any:
    """Return a payload as what JSON can say; raises TypeError if it cannot."""
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _jsonable(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"{type(value).__name__} in JSON")


def _with_bytes(value: Any) -> Any:
    """Return what JSON says with bytes where it has hex digits."""
    if isinstance(value, list):
        return [_with_bytes(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_bytes(item) for key, item in value.items()}
    digits = _HEX.fullmatch(value) if isinstance(value, str) else None
    return bytes.fromhex(digits[1]) if digits else value


def _text_of(topic: bytes) -> str:
    with suppress(UnicodeDecodeError):
        if not _HEX.fullmatch(text := topic.decode()):
            return text
    return "0x" + topic.hex()


def _payload_of(batch: Any) -> bytes:
    return msgspec.msgpack.encode(_with_bytes(batch))


def _gives_back(batch: Any, payload: bytes) -> bool:
    """Return whether the batch alone, once it went through JSON, is the same payload again."""
    try:
        return isinstance(batch, list) and _payload_of(_any_decoder.decode(_encoder.encode(batch))) == payload
    except DECODE_ERRORS:
        return False
