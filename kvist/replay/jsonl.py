"""Recordings as JSON, one object a line, for people's own tools.

    message   {"session": 0, "source": "pod-1", "url": "tcp://...", "engine": "vllm", "mono_ns": 17, "wall_ns": 1763...,
               "topic": "kv/w/0", "seq": 3, "batch": [...], "payload": "..."}      everything that was recorded
    batch     {"seq": 3, "batch": [timestamp, [event, ...], rank]}                 the form that others use

`batch` is the payload as JSON, with bytes as hex digits. `payload`, in base64, stands beside it where the batch alone
would not give the same bytes again, and wins when both are read: take it out to have an altered batch count.
"""

from __future__ import annotations

import base64
import math
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeAlias

import msgspec

from kvist.events.codec import DECODE_ERRORS, is_snapshot_part
from kvist.events.transports import Message
from kvist.events.transports.base import MAX_MESSAGE_BYTES
from kvist.events.types import NonNegative
from kvist.replay.errors import RecordingError
from kvist.replay.format import Engine, Record, RecordedSource

JsonlForm: TypeAlias = Literal["message", "batch"]

_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 8 * MAX_MESSAGE_BYTES
_MAX_SEQUENCE = (1 << 64) - 1
_CANONICAL_TAG, _SNAPSHOT_TAG = "kvist1", "kvist-snapshot"


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message; without a `source` it is of the form that others use."""

    session: NonNegative = 0
    source: str | None = None
    url: str = ""
    engine: Engine = "vllm"
    mono_ns: int | None = None
    wall_ns: int | None = None
    topic: str | None = None
    topic_hex: str | None = None
    seq: NonNegative
    batch: Any = None
    payload: str | None = None


_json_encoder = msgspec.json.Encoder()
_json_decoder = msgspec.json.Decoder(_Line)
_any_json_decoder = msgspec.json.Decoder()
_msgpack_encoder = msgspec.msgpack.Encoder()
_msgpack_decoder = msgspec.msgpack.Decoder()


def to_line(record: Record, form: JsonlForm) -> bytes | None:
    """Return a record as one line; None for what is no batch, as snapshots are, in the form that has only batches."""
    source, message = record.source, record.message
    batch = _batch_of(message.payload)
    if form == "batch":
        if batch is None or is_snapshot_part(message.payload):
            return None
        return _json_encoder.encode(_Line(seq=message.sequence, batch=batch)) + b"\n"
    try:
        topic, topic_hex = message.topic.decode(), None
    except UnicodeDecodeError:
        topic, topic_hex = None, message.topic.hex()
    is_enough = batch is not None and _gives_back(batch, message.payload)
    line = _Line(
        session=record.session,
        source=source.name,
        url=source.url,
        engine=source.engine,
        mono_ns=record.mono_ns,
        wall_ns=record.wall_ns,
        topic=topic,
        topic_hex=topic_hex,
        seq=message.sequence,
        batch=batch,
        payload=None if is_enough else base64.b64encode(message.payload).decode(),
    )
    return _json_encoder.encode(line) + b"\n"


class JsonlReader:
    """Reads records from lines of either form; memory for about a megabyte of them.

    Lines without a source are of one named after the file, and timed by their batches' timestamps.
    """

    def __init__(self, path: Path, engine: Engine = "vllm") -> None:
        """Open the file; `engine` is whose dialect batches without a source are in."""
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._unnamed = RecordedSource(path.stem, "", engine)
        self._num_bytes_read = 0
        self._last_ns = 0

    def __enter__(self) -> Self:
        """Return the reader, which is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> list[Record] | None:
        """Return the next records, None at the end; raises RecordingError, after everything before it was returned."""
        records: list[Record] = []
        begun_at = self._num_bytes_read
        while self._num_bytes_read - begun_at < _CHUNK_BYTES:
            text = self._file.readline(_MAX_LINE_BYTES)
            if not text:
                break
            try:
                if text.strip():
                    records.append(self._record(text))
            except (*DECODE_ERRORS, OverflowError) as error:
                if records:  # they count; this line is read once more
                    self._file.seek(self._num_bytes_read)
                    break
                expected = "a JSON object with seq and batch or payload"
                raise RecordingError(self._path, self._num_bytes_read, str(error), expected) from error
            self._num_bytes_read += len(text)
        return records or None

    def sources(self) -> list[RecordedSource]:
        """Return whoever is named in what is left to read, or up to a wrong line, in order of appearance."""
        found: dict[RecordedSource, None] = {}
        with suppress(RecordingError):
            while (records := self.read()) is not None:
                found.update(dict.fromkeys(record.source for record in records))
        return list(found)

    @property
    def is_ended(self) -> bool:
        """Return True: such a file is not followed while it is written."""
        return True

    @property
    def torn(self) -> None:
        """Return None: a line that was cut off is an error."""

    @property
    def num_bytes_read(self) -> int:
        """Return how much was read."""
        return self._num_bytes_read

    @property
    def size_bytes(self) -> int:
        """Return the file's size."""
        return self._path.stat().st_size

    def _record(self, text: bytes) -> Record:
        """Return what a line says; raises ValueError."""
        line = _json_decoder.decode(text)
        if line.seq > _MAX_SEQUENCE:
            raise ValueError(f"seq {line.seq}")
        given = line.payload
        payload = _payload_of(line.batch) if given is None else base64.b64decode(given, validate=True)
        if line.source is None:
            return self._unnamed_record(line, payload)
        if line.mono_ns is None or line.wall_ns is None:
            raise ValueError("a source without mono_ns and wall_ns")
        topic = (line.topic or "").encode() if line.topic_hex is None else bytes.fromhex(line.topic_hex)
        source = RecordedSource(line.source, line.url, line.engine)
        return Record(line.session, source, line.mono_ns, line.wall_ns, Message(topic, line.seq, payload))

    def _unnamed_record(self, line: _Line, payload: bytes) -> Record:
        is_canonical = isinstance(line.batch, list) and len(line.batch) > 6 and line.batch[0] == _CANONICAL_TAG
        timestamp_s = line.batch[6 if is_canonical else 0] if isinstance(line.batch, list) and line.batch else None
        if not isinstance(timestamp_s, int | float) or not abs(timestamp_s) < 1e10:
            raise ValueError(f"a timestamp of {timestamp_s!r}")
        wall_ns = round(timestamp_s * 1e6) * 1000  # a float has no more
        self._last_ns = max(self._last_ns, wall_ns)
        topic = f"kv/{line.batch[1]}/{line.batch[2]}".encode() if is_canonical else b""
        return Record(0, self._unnamed, self._last_ns, wall_ns, Message(topic, line.seq, payload))


def _batch_of(payload: bytes) -> Any:
    """Return a payload as what JSON can say, None if it cannot."""
    try:
        return _jsonable(_msgpack_decoder.decode(payload))
    except (*DECODE_ERRORS, TypeError):
        return None


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key that is no text")
        return {key: _jsonable(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"{type(value).__name__} in JSON")


def _gives_back(batch: Any, payload: bytes) -> bool:
    try:
        return _payload_of(_any_json_decoder.decode(_json_encoder.encode(batch))) == payload
    except DECODE_ERRORS:
        return False


def _payload_of(batch: Any) -> bytes:
    """Return the bytes of a batch in JSON; raises ValueError when it is none."""
    if not isinstance(batch, list) or not batch:
        raise ValueError(f"a batch of {type(batch).__name__}")
    if batch[0] == _CANONICAL_TAG:
        if len(batch) > 7 and isinstance(batch[7], list):
            batch = [*batch[:7], [_canonical_event(event) for event in batch[7]], *batch[8:]]
    elif batch[0] == _SNAPSHOT_TAG:
        batch = [*batch[:10], *map(_bytes_of, batch[10:13]), *batch[13:]]
    elif len(batch) > 1 and isinstance(batch[1], list):
        batch = [batch[0], [_engine_event(event) for event in batch[1]], *batch[2:]]
    return _msgpack_encoder.encode(batch)


def _canonical_event(event: Any) -> Any:
    has_hashes = isinstance(event, list) and len(event) > 1 and event[0] in ("stored", "removed")
    return [event[0], _bytes_of(event[1]), *event[2:]] if has_hashes else event


def _engine_event(event: Any) -> Any:
    """Return an event with the bytes where engines have hashes: a hash is never a text."""
    if isinstance(event, dict):
        hashes = {key: _bytes_of(event[key]) for key in ("block_hashes", "parent_block_hash") if key in event}
        return {key: hashes.get(key, value) for key, value in event.items()}
    if isinstance(event, list) and event and event[0] in ("BlockStored", "BlockRemoved"):
        num_hashes = 3 if event[0] == "BlockStored" else 2
        return [event[0], *map(_bytes_of, event[1:num_hashes]), *event[num_hashes:]]
    return event


def _bytes_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_bytes_of(item) for item in value]
    return bytes.fromhex(value) if isinstance(value, str) else value
