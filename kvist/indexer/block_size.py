"""Learning the block size from a stream, for a router that was not told."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.errors import MalformedMessageError
from kvist.events import EngineStored
from kvist.events.codec import decode_batch, decode_snapshot_part, is_canonical, is_snapshot_part
from kvist.events.dialects import decode_block_events
from kvist.events.follow import REPLAY_TIMEOUT_S
from kvist.events.transports import Endpoint, Message, Subscription, base


async def learn_block_size(endpoint: Endpoint, subscription: Subscription) -> int:
    """Return the tokens per block that the stream's first message with blocks names, kept for replay or live.

    Waits for as long as the stream says nothing of the kind. Raises InvalidValueError when it cannot be followed.
    """
    async with subscription:
        messages: Sequence[Message] | None = await subscription.replay(base.WHAT_FOLLOWS, REPLAY_TIMEOUT_S)
        if messages is not None and not messages:
            messages = await subscription.replay(base.EVERYTHING, REPLAY_TIMEOUT_S)
        messages = messages or ()
        while True:
            for message in messages:
                if (block_size := block_size_in(message.payload, endpoint.address, endpoint.engine)) is not None:
                    return block_size
            messages = await subscription.receive()


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
