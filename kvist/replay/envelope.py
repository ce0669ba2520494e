"""What a message says beside its events, read without reading those: whose it is, and what place it takes in order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvist.events.codec import DECODE_ERRORS, is_canonical
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


class EngineEnvelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An engine's own batch around its events."""

    timestamp_s: float
    events: list[msgspec.Raw]
    rank: Rank | None = None


Envelope: TypeAlias = CanonicalEnvelope | EngineEnvelope

_canonical_decoder = msgspec.msgpack.Decoder(CanonicalEnvelope)
_engine_decoder = msgspec.msgpack.Decoder(EngineEnvelope)


def read_envelope(payload: bytes) -> Envelope | None:
    """Return a batch's envelope, None when the payload is no batch."""
    try:
        return (_canonical_decoder if is_canonical(payload) else _engine_decoder).decode(payload)
    except DECODE_ERRORS:
        return None
