"""Messages of an engine that are decoded only where they are admitted: until then they are small, and cost little."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from kvist.events.codec import DECODE_ERRORS
from kvist.events.engine import EngineEvent
from kvist.events.types import Rank

_CLEARED_TAG = b"AllBlocksCleared"


class Unread(NamedTuple):
    """A message whose events are all of one rank, and clear nothing: nobody but that rank's stream needs to know them.

    `decode` returns those events if the message is not plain; it never raises.
    """

    rank: int
    payload: bytes
    decode: Callable[[bytes], Iterable[EngineEvent]]


class _Envelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    timestamp_s: float
    events: msgspec.Raw
    rank: Rank | None = None


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode


def rank_to_be_read(payload: bytes) -> int | None:
    """Return the rank of a batch that can wait unread; None for what clears a rank, or is no batch."""
    if _CLEARED_TAG in payload:
        return None
    try:
        envelope = _decode_envelope(payload)
    except DECODE_ERRORS:
        return None
    return (envelope.rank or 0) if math.isfinite(envelope.timestamp_s) else None
