"""The block size as a stream names it, for whoever was not told."""

from __future__ import annotations

from kvist.errors import MalformedMessageError
from kvist.events import EngineStored
from kvist.events.codec import decode_batch, decode_snapshot_part, is_canonical, is_snapshot_part
from kvist.events.dialects import decode_block_events


def block_size_in(payload: bytes, source: str, engine: str) -> int | None:
    """Return what one message tells; what is malformed tells nothing, and is counted where the stream is followed."""
    try:
        if is_snapshot_part(payload):
            return decode_snapshot_part(payload, source).block_size
        if is_canonical(payload):
            return decode_batch(payload, source).batch.block_size
        events = decode_block_events(payload, source, engine).events
    except MalformedMessageError:
        return None
    return next((event.block_size for event in events if isinstance(event, EngineStored) and event.block_size), None)
