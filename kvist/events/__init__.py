"""The contract between engines, publishers and routers: event types, hashing, dialects and transports.

`dialects` decodes an engine's own messages into engine events (`engine_events`). A publisher keeps one window group,
hashes its blocks (`hashing`) and sends canonical batches (`types`, `codec`) over a transport (`transports`).
"""

from kvist.events.engine_events import (
    FULL,
    UNKNOWN,
    EngineCleared,
    EngineCreated,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    EventSink,
    Window,
)
from kvist.events.types import Batch, Cleared, Event, Heartbeat, Removed, Stored, Tier, WorkerRank

__all__ = [
    "FULL",
    "UNKNOWN",
    "Batch",
    "Cleared",
    "EngineCleared",
    "EngineCreated",
    "EngineEvent",
    "EngineHash",
    "EngineRemoved",
    "EngineStored",
    "Event",
    "EventSink",
    "Heartbeat",
    "Removed",
    "Stored",
    "Tier",
    "Window",
    "WorkerRank",
]
