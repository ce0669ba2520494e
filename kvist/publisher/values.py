"""What a publisher is told, its limits, and what it tells, its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvist.errors import InvalidValueError
from kvist.publisher.stream import StreamStatistics


@dataclass(frozen=True, slots=True)
class PublisherLimits:
    """The bounds of a publisher's memory and time, and what happens at each."""

    inbox_capacity: int = 65_536
    """Events the background thread may lag; at the bound events are lost, and the rank is cleared for it."""
    outbox_capacity: int = 10_000
    """Batches the transport may lag; at the bound the oldest is dropped, and stays in the replay buffer."""
    replay_max_batches: int = 10_000
    replay_max_bytes: int = 64 << 20
    """What is kept for replay, per rank; at either bound the oldest batch is forgotten."""
    coalesce_s: float = 0.005
    """How long events are gathered into one batch."""
    num_events_a_slice: int = 8
    """Events hashed before the thread offers the interpreter lock, while it keeps up. An engine in the same process
    then waits for one slice of about 0.2 ms, not for the interpreter's switch interval of 5 ms: with 256 blocks a step,
    the p99 of a 3 ms step is 5.7 ms instead of 15.2 ms (benchmarks/results/publisher.md, two busy EPYC cores)."""
    heartbeat_s: float = 1.0
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Check every field."""
        counts = ("inbox_capacity", "outbox_capacity", "replay_max_batches", "replay_max_bytes", "num_events_a_slice")
        for name in counts:
            if getattr(self, name) <= 0:
                raise InvalidValueError(name, getattr(self, name), "a positive number")
        for name in ("heartbeat_s", "close_timeout_s"):
            if getattr(self, name) <= 0:
                raise InvalidValueError(name, getattr(self, name), "a positive number of seconds")
        if self.coalesce_s < 0:
            raise InvalidValueError("coalesce_s", self.coalesce_s, "zero or a positive number of seconds")


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """What a publisher did since its start. Per rank: what was filtered, left out and why, and what is held now."""

    num_waiting_events: int = 0
    num_lost_events: int = 0
    num_malformed: int = 0
    """Events of no rank; what else was malformed is counted with its rank."""
    num_waiting_batches: int = 0
    num_dropped_batches: int = 0
    num_sent_messages: int = 0
    num_sent_bytes: int = 0
    num_heartbeats: int = 0
    num_snapshots: int = 0
    failure: str | None = None
    ranks: Mapping[int, StreamStatistics] = field(default_factory=dict)
