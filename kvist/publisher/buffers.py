"""A publisher's queues with their bounds and counters: the inbox, the outbox and the replay buffer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from kvist.events.engine_events import EngineEvent
from kvist.events.transports import Message, Publication, ReplayRequest
from kvist.publisher.stream import Streams, StreamStatistics
from kvist.settings import check_fields

_Count = Annotated[int, Meta(gt=0)]
_Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class PublisherLimits:
    """The bounds of a publisher's memory and time, and what happens at each."""

    inbox_capacity: _Count = 65_536
    """Events the background thread may lag; at the bound events are lost, and the rank is cleared for it."""
    outbox_capacity: _Count = 10_000
    """Batches the transport may lag; at the bound the oldest is dropped, and stays in the replay buffer."""
    replay_max_batches: _Count = 10_000
    replay_max_bytes: _Count = 64 << 20
    """How much is kept for replay, per rank; at either bound the oldest batch is dropped."""
    coalesce_s: Annotated[float, Meta(ge=0)] = 0.005
    """How long events are gathered into one batch."""
    num_events_a_slice: _Count = 8
    """Events hashed before the thread offers the interpreter lock, while it keeps up. An engine in the same process
    then waits for one slice of about 0.2 ms, not for the interpreter's switch interval of 5 ms: with 256 blocks a step,
    the p99 of a 3 ms step is 5.7 ms instead of 15.2 ms (benchmarks/results/publisher.md, two busy EPYC cores)."""
    heartbeat_s: _Seconds = 1.0
    close_timeout_s: _Seconds = 5.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """The counters of a publisher since its start; those of each rank say, too, what it holds now."""

    num_waiting_events: int = 0
    num_lost_events: int = 0
    num_malformed: int = 0
    """Events without a valid rank; other malformed events are counted with their rank."""
    num_waiting_batches: int = 0
    num_dropped_batches: int = 0
    num_sent_messages: int = 0
    num_sent_bytes: int = 0
    num_snapshots: int = 0
    failure: str | None = None
    ranks: Mapping[int, StreamStatistics] = field(default_factory=dict)


class Call(NamedTuple):
    """A function that the publisher's thread calls when it comes to this place of the inbox, and its result."""

    function: Callable[[Streams], Any]
    result: Future[Any]


class Malformed(NamedTuple):
    """An event that could not be read; its rank may be anything, too."""

    rank: Any
    error: Exception


class Inbox(deque[EngineEvent | Call | Malformed]):
    """What the publisher's thread has yet to process, in order; other threads append to it, and check its bound.

    A deque, because a method of ours would take an engine's thread longer.
    """

    def drop(self) -> int:
        """Remove everything, and cancel the calls; return how many events were removed."""
        num_events = 0
        while self:
            item = self.popleft()
            if isinstance(item, Call):
                item.result.cancel()
            else:
                num_events += 1
        return num_events


class Outbox:
    """Keeps the newest `capacity` messages in order; beyond them the oldest is dropped and counted.

    A dropped batch is still in the replay buffer, so overload costs a subscriber a range, not a resynchronisation.
    """

    def __init__(self, capacity: int) -> None:
        self._messages: deque[Message] = deque(maxlen=capacity)
        self.num_dropped = 0
        self.num_sent = 0
        self.num_sent_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Add a message behind the others; never waits."""
        self.num_dropped += len(self._messages) == self._messages.maxlen
        self._messages.append(message)

    def flush(self, publication: Publication) -> None:
        """Send what the transport takes, in order, and keep the rest; raises OSError when the transport is broken."""
        while self._messages:
            message = self._messages[0]
            try:
                publication.send(message)
            except BlockingIOError:
                return
            self._messages.popleft()
            self.num_sent += 1
            self.num_sent_bytes += len(message.payload)


class ReplayBuffer:
    """Keeps the newest messages of each topic, without a gap: at most `max_batches`, of at most `max_bytes` together.

    The bounds are per topic, so that a busy rank does not push out a quiet one's. Safe to use from several threads.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._topics: dict[bytes, _Topic] = {}
        self._heartbeats: dict[bytes, Message] = {}

    def append(self, message: Message) -> None:
        """Keep a topic's next message; sequences of a topic must be consecutive."""
        with self._lock:
            topic = self._topics.setdefault(message.topic, _Topic())
            topic.messages.append(message)
            topic.size_bytes += len(message.payload)
            topic.next_sequence = message.sequence + 1
            while len(topic.messages) > self._max_batches or topic.size_bytes > self._max_bytes:
                topic.size_bytes -= len(topic.messages.popleft().payload)

    def keep_heartbeat(self, message: Message) -> None:
        with self._lock:
            self._heartbeats[message.topic] = message

    def heartbeats(self, topic: bytes | None = None) -> list[Message]:
        """Return the last heartbeat of each topic, or of one."""
        with self._lock:
            return [message for message in self._heartbeats.values() if topic in (None, message.topic)]

    def first_sequence(self, topic: bytes) -> int | None:
        """Return the sequence from which on a topic's messages are kept, None before its first message."""
        with self._lock:
            found = self._topics.get(topic)
            if found is None:
                return None
            return found.messages[0].sequence if found.messages else found.next_sequence

    def replay(self, request: ReplayRequest) -> list[Message]:
        """Return the messages kept of the topic, or of all if it is empty, from the sequence asked for on."""
        with self._lock:
            topics = filter(None, (self._topics.get(request.topic),)) if request.topic else self._topics.values()
            return [message for topic in topics for message in topic.since(request.start_sequence)]


class _Topic:
    """One topic's messages, oldest first."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.size_bytes = 0
        self.next_sequence = 0

    def since(self, sequence: int) -> list[Message]:
        if sequence >= self.next_sequence or not self.messages:  # also a number that `islice` would not take
            return []
        return list(islice(self.messages, max(0, sequence - self.messages[0].sequence), None))
