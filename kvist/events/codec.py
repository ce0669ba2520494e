"""Encodes and decodes canonical batches and snapshots, as docs/wire-format.md specifies.

Decoding tolerates what later versions may add, at every level: trailing fields are ignored, and an event whose type or
tier is unknown is skipped and counted. Anything else that is not as specified is a MalformedMessageError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Cleared, Event, Heartbeat, Removed, Stored, Tier
from kvist.events.types import RankEnvelope, SnapshotPart

# Hostile bytes raise more than msgspec's own error (a ValueError): broken UTF-8, and nesting as deep as the C stack.
DECODE_ERRORS: Final = (ValueError, RecursionError)

_HASH_BYTES = 8
# Behind the one-byte array header: a six-byte string, "kvist" and the version. An engine's batch has a float there.
_CANONICAL_MARK = b"\xa6kvist"
_SNAPSHOT_MARK = b"\xaekvist-snapshot"
_DEPTH_BYTES = 4
_TIER_MASKS = bytes(range(1, 1 << len(Tier)))
# Where each event type has its tier, counting the tag; None where it has none.
_TIER_IDX_OF_TAG: dict[str, int | None] = {"stored": 3, "removed": 2, "cleared": None, "heartbeat": None}


class DecodedBatch(NamedTuple):
    """A batch, and how many events were left out because this version does not know them."""

    batch: Batch
    num_unknown_events: int


class RawBatch(RankEnvelope, tag="kvist1", array_like=True, frozen=True, gc=False):
    """A batch whose events are still bytes, so that each can be decoded by itself."""

    timestamp_s: float
    events: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(Batch)
_raw_batch_decoder = msgspec.msgpack.Decoder(RawBatch)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Stored | Removed | Cleared | Heartbeat)
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
        batch = _batch_decoder.decode(payload)
        num_unknown_events = 0
    except DECODE_ERRORS:
        batch, num_unknown_events = _decode_each_event(payload, source)
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


def _decode_each_event(payload: bytes, source: str) -> DecodedBatch:
    """Return the batch without the events that only a later version knows."""
    try:
        raw = _raw_batch_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(source, f"not a batch: {error}") from error
    events: list[Event] = []
    num_unknown_events = 0
    for event_idx, raw_event in enumerate(raw.events):
        try:
            events.append(_event_decoder.decode(raw_event))
        except DECODE_ERRORS as error:
            if not _is_from_later_version(raw_event):
                raise MalformedMessageError(source, f"events[{event_idx}]: {error}") from error
            num_unknown_events += 1
    batch = Batch(raw.worker, raw.rank, raw.epoch, raw.sequence, raw.block_size, raw.timestamp_s, tuple(events))
    return DecodedBatch(batch, num_unknown_events)


def _is_from_later_version(raw_event: msgspec.Raw) -> bool:
    """Tell an event of an unknown type or tier from one that is broken."""
    try:
        fields: Any = _any_decoder.decode(raw_event)
    except DECODE_ERRORS:
        return False
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        return False
    if fields[0] not in _TIER_IDX_OF_TAG:
        return True
    tier_idx = _TIER_IDX_OF_TAG[fields[0]]
    if tier_idx is None or len(fields) <= tier_idx:
        return False
    tier = fields[tier_idx]
    if not isinstance(tier, int) or tier < len(Tier):
        return False
    fields[tier_idx] = Tier.GPU
    try:
        msgspec.convert(fields, Stored | Removed)
    except DECODE_ERRORS:
        return False
    return True


def _check_hashes(events: Sequence[Event], source: str) -> None:
    for event_idx, event in enumerate(events):
        if isinstance(event, Stored | Removed) and len(event.hashes) % _HASH_BYTES:
            found = f"events[{event_idx}].hashes has {len(event.hashes)} bytes"
            raise MalformedMessageError(source, f"{found}, expected a multiple of {_HASH_BYTES}")
