"""Message envelopes, decoded without the events inside."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvist.events import WorkerRank
from kvist.events.codec import DECODE_ERRORS, is_canonical, is_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.types import RankEnvelope, SnapshotPart

_HEARTBEAT_START = b"\xa9heartbeat"


class CanonicalEnvelope(RankEnvelope, tag="kvist1", array_like=True, frozen=True, gc=False):
    """A canonical batch whose events are still bytes."""

    timestamp_s: float
    events: list[msgspec.Raw]

    @property
    def is_heartbeat(self) -> bool:
        """Return whether the batch takes no sequence number, but announces the next one."""
        return len(self.events) == 1 and bytes(self.events[0])[1:11] == _HEARTBEAT_START

    @property
    def is_empty_heartbeat(self) -> bool:
        """Return whether it is a heartbeat of a rank that holds no block."""
        return self.is_heartbeat and bytes(self.events[0])[11:12] == b"\x00"


Envelope: TypeAlias = CanonicalEnvelope | SnapshotPart | EngineEnvelope

_canonical_decoder = msgspec.msgpack.Decoder(CanonicalEnvelope)
_snapshot_decoder = msgspec.msgpack.Decoder(SnapshotPart)
_engine_decoder = msgspec.msgpack.Decoder(EngineEnvelope)


def read_envelope(payload: bytes) -> Envelope | None:
    """Return the envelope of a batch, or a snapshot part; None when the payload is neither."""
    try:
        if is_canonical(payload):
            return _canonical_decoder.decode(payload)
        return (_snapshot_decoder if is_snapshot_part(payload) else _engine_decoder).decode(payload)
    except DECODE_ERRORS:
        return None


def rank_of(envelope: Envelope) -> WorkerRank | None:
    """Return the rank whose sequence numbers a message has; None for an engine, which numbers all ranks together."""
    return None if isinstance(envelope, EngineEnvelope) else envelope.source
