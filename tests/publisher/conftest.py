"""A transport that records what is sent, and refuses or breaks on demand."""

from __future__ import annotations

import threading

import pytest

from kvist.events import Heartbeat, Removed, Stored
from kvist.events.codec import decode_batch
from kvist.events.transports import Message


class RecordingPublication:
    """A publication without a network; `refusal` is raised by `send` while it is set, `gate` holds `send` up."""

    endpoint = "recording://"

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.source = None
        self.refusal: OSError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_closed = 0

    def serve_replay(self, source) -> None:
        self.source = source

    def send(self, message: Message) -> None:
        self.gate.wait(60)
        if self.refusal is not None:
            raise self.refusal
        self.messages.append(message)

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 - the Protocol's name
        self.num_closed += 1

    def batches(self):
        """Return the batches sent, without heartbeats."""
        return [batch for batch in self._decoded() if not isinstance(batch.events[0], Heartbeat)]

    def heartbeats(self):
        """Return the batches sent that are heartbeats."""
        return [batch for batch in self._decoded() if isinstance(batch.events[0], Heartbeat)]

    def events(self, rank: int = 0):
        """Return all events sent of a rank, heartbeats left out."""
        return [event for batch in self.batches() if batch.rank == rank for event in batch.events]

    def held(self, rank: int = 0) -> set[tuple[int, int]]:
        """Return the (hash, tier) pairs that the events of a rank add up to."""
        held: set[tuple[int, int]] = set()
        for event in self.events(rank):
            if isinstance(event, Stored):
                held |= {(block_hash, event.tier) for block_hash in memoryview(event.hashes).cast("Q")}
            elif isinstance(event, Removed):
                held -= {(block_hash, event.tier) for block_hash in memoryview(event.hashes).cast("Q")}
            else:
                held.clear()
        return held

    def _decoded(self):
        return [decode_batch(message.payload, "test").batch for message in tuple(self.messages)]


@pytest.fixture
def publication() -> RecordingPublication:
    return RecordingPublication()
