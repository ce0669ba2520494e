"""Encodes and decodes canonical batches and snapshots, as docs/wire-format.md specifies.

Decoding tolerates what later versions may add: trailing fields are ignored at every level, and an event whose type is
unknown is skipped and counted. Anything else that is not as specified is a MalformedMessageError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Event, Removed, Stored, Tier
from kvist.events.types import SnapshotPart

# Hostile bytes raise more than msgspec's own error (a ValueError): broken UTF-8, and nesting as deep as the C stack.
DECODE_ERRORS: Final = (ValueError, RecursionError)

_HASH_BYTES = 8
# Behind the one-byte array header: a six-byte string, "kvist" and the version. An engine's batch has a float there.
_CANONICAL_MARK = b"\xa6kvist"
_SNAPSHOT_MARK = b"\xaekvist-snapshot"
_DEPTH_BYTES = 4
_TIER_MASKS = bytes(range(1, 1 << len(Tier)))
_EVENTS_IDX = 7
_EVENT_TAGS = {"stored", "removed", "cleared", "heartbeat"}


class DecodedBatch(NamedTuple):
    """A batch, and how many events were left out because this version does not know them."""

    batch: Batch
    num_unknown_events: int


_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(Batch)
_any_decoder = msgspec.msgpack.Decoder()
_snapshot_decoder = msgspec.msgpack.Decoder(SnapshotPart)


def encode_batch(batch: Batch) -> bytes:
    """Return the batch as one msgpack message; equal batches give equal bytes."""
    return _encoder.encode(batch)


def is_canonical(payload: bytes) -> bool:
    """Tell a canonical batch, of whatever version, from an engine's own batch by its first eight bytes."""
    return payload[1:7] == _CANONICAL_MARK


def decode_batch(payload: bytes, source: str) -> DecodedBatch:
    """Return the batch in `payload`, checked; raises MalformedMessageError, naming `source` and the wrong field."""
    try:
        batch, num_unknown_events = _batch_decoder.decode(payload), 0
    except DECODE_ERRORS as error:
        try:
            batch, num_unknown_events = _decode_known_events(payload)
        except (*DECODE_ERRORS, TypeError, LookupError):  # no list, or not of events
            raise MalformedMessageError(source, f"not a batch: {error}") from error
    if not math.isfinite(batch.timestamp_s):
        raise MalformedMessageError(source, f"timestamp_s is {batch.timestamp_s}, expected a finite number")
    _check_hashes(batch.events, source)
    return DecodedBatch(batch, num_unknown_events)


def encode_snapshot_part(part: SnapshotPart) -> bytes:
    return _encoder.encode(part)


def is_snapshot_part(payload: bytes) -> bool:
    """Tell a part of a snapshot from a batch by its first bytes."""
    return payload[1:16] == _SNAPSHOT_MARK


def decode_snapshot_part(payload: bytes, source: str) -> SnapshotPart:
    """Return the part in `payload`, checked; raises MalformedMessageError, naming `source` and the wrong field."""
    try:
        part = _snapshot_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(source, f"not a part of a snapshot: {error}") from error
    if part.part_idx >= part.num_parts:
        raise MalformedMessageError(source, f"part_idx is {part.part_idx}, expected less than {part.num_parts}")
    num_blocks = len(part.tiers)
    for name, num_bytes, width in (
        ("hashes", len(part.hashes), _HASH_BYTES),
        ("depths", len(part.depths), _DEPTH_BYTES),
    ):
        if num_bytes != num_blocks * width:
            raise MalformedMessageError(source, f"{name} has {num_bytes} bytes, expected {num_blocks * width}")
    if part.tiers.translate(None, _TIER_MASKS):
        raise MalformedMessageError(source, f"tiers has a byte that is not from 1 to {len(_TIER_MASKS)}")
    return part


def _decode_known_events(payload: bytes) -> DecodedBatch:
    """Return the batch without the events of types that only a later version knows."""
    fields = _any_decoder.decode(payload)
    events = fields[_EVENTS_IDX]
    fields[_EVENTS_IDX] = known = [event for event in events if not _is_of_unknown_type(event)]
    return DecodedBatch(_batch_decoder.decode(_encoder.encode(fields)), len(events) - len(known))


def _is_of_unknown_type(event: object) -> bool:
    return isinstance(event, list) and len(event) > 0 and isinstance(event[0], str) and event[0] not in _EVENT_TAGS


def _check_hashes(events: Sequence[Event], source: str) -> None:
    for event_idx, event in enumerate(events):
        if isinstance(event, Stored | Removed) and len(event.hashes) % _HASH_BYTES:
            found = f"events[{event_idx}].hashes has {len(event.hashes)} bytes"
            raise MalformedMessageError(source, f"{found}, expected a multiple of {_HASH_BYTES}")
