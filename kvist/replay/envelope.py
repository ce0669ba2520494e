"""What a message says beside its events or blocks, read without those: whose it is, and its place in the order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvist.events.codec import DECODE_ERRORS, is_canonical, is_snapshot_part
from kvist.events.types import NonEmpty, NonNegative, Positive, Rank

_HEARTBEAT_START = b"\xa9heartbeat"


class CanonicalEnvelope(msgspec.Struct, tag="kvist1", array_like=True, frozen=True, gc=False):
    """A canonical batch around its events."""

    worker: NonEmpty
    rank: Rank
    epoch: NonNegative
    sequence: NonNegative
    block_size: Positive
    timestamp_s: float
    events: list[msgspec.Raw]

    @property
    def is_heartbeat(self) -> bool:
        """Return whether the batch takes no sequence number, but announces the next one."""
        return len(self.events) == 1 and bytes(self.events[0])[1:11] == _HEARTBEAT_START


class SnapshotEnvelope(msgspec.Struct, tag="kvist-snapshot", array_like=True, frozen=True, gc=False):
    """A part of a snapshot without its blocks: what a rank held before the batch `sequence`."""

    worker: NonEmpty
    rank: Rank
    epoch: NonNegative
    sequence: NonNegative
    block_size: Positive
    part_idx: NonNegative
    num_parts: Positive
    num_blocks: NonNegative
    digest: NonNegative

    @property
    def is_last(self) -> bool:
        """Return whether no part follows: a recording that was cut off has none that is."""
        return self.part_idx == self.num_parts - 1


class EngineEnvelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An engine's own batch around its events."""

    timestamp_s: float
    events: list[msgspec.Raw]
    rank: Rank | None = None


Envelope: TypeAlias = CanonicalEnvelope | SnapshotEnvelope | EngineEnvelope

_canonical_decoder = msgspec.msgpack.Decoder(CanonicalEnvelope)
_snapshot_decoder = msgspec.msgpack.Decoder(SnapshotEnvelope)
_engine_decoder = msgspec.msgpack.Decoder(EngineEnvelope)


def read_envelope(payload: bytes) -> Envelope | None:
    """Return the envelope of a batch, or of a part of a snapshot; None when the payload is neither."""
    try:
        if is_canonical(payload):
            return _canonical_decoder.decode(payload)
        return (_snapshot_decoder if is_snapshot_part(payload) else _engine_decoder).decode(payload)
    except DECODE_ERRORS:
        return None
