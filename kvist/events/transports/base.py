"""The transport contract: how batches travel from one publisher to its subscribers.

Delivery contract, the same for every transport
- A message is (sequence, payload) on a topic. Messages of one topic arrive in the order they were sent, or not at all:
  a transport may lose, and may deliver twice after a reconnect; it never reorders and never alters.
- Nothing is acknowledged. Order and gaps are judged by the subscriber from the batch's epoch and sequence; what is
  missing is asked for again with `Subscription.replay`.
- `Publication.send` never waits for a subscriber. With nobody listening the message is gone, but for the replay; a
  subscriber that reads too slowly loses messages of its own and delays nobody.
- Connecting, reconnecting and resubscribing are the transport's own work: a peer that is away is not an error.
- Closing drains: what was sent before `close` is delivered to whoever is connected, within `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self


class Message(NamedTuple):
    """One message as it travels. `sequence` is the batch's, repeated outside the payload for engines' own streams."""

    topic: bytes
    sequence: int
    payload: bytes


class ReplaySource(Protocol):
    """Answers a replay request. Called from the publication's own thread, so implementations are thread-safe."""

    def replay(self, topic: bytes, start_sequence: int) -> Iterable[Message]:
        """Return what is still kept of the topic (all topics if empty) from `start_sequence` on, each in order."""


class Publication(Protocol):
    """The publisher's end. Safe to use from one thread at a time."""

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to, with real port numbers."""

    def serve_replay(self, source: ReplaySource) -> None:
        """Answer replay requests from `source` from now on; called at most once."""

    def send(self, message: Message) -> None:
        """Hand the message to the transport without waiting.

        Raises BlockingIOError when it can take no more right now (the caller keeps the message and tries again), any
        other OSError when the transport is broken for good.
        """

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain and release everything; idempotent."""


class Subscription(Protocol):
    """A subscriber's end, for asyncio."""

    @property
    def num_connects(self) -> int:
        """How often a peer was connected so far, while entered; counts at least those that brought what was received.

        A stream without epochs is in doubt after each reconnect: another process may have taken the endpoint.
        """

    @property
    def num_malformed(self) -> int:
        """How many messages were skipped because their frames are not the transport's."""

    async def __aenter__(self) -> Self:
        """Connect in the background; returns at once, whether or not the peer is there."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything."""

    async def receive(self) -> Sequence[Message]:
        """Wait for at least one message and return all that are here, oldest first, at most `MAX_DRAIN`.

        They may be a `MessageBlock`, which is valid until the next `receive`. Cancelling loses no message.
        """

    async def replay(self, topic: bytes | None, start_sequence: int, timeout_s: float) -> list[Message] | None:
        """Return what the publisher still keeps of the topic from `start_sequence` on, oldest first.

        Topic None asks in the words every engine understands: for all there is. None is returned when the publisher
        cannot be asked, or says nothing for `timeout_s`.
        """


MAX_MESSAGE_BYTES = 64 << 20
"""The topic and payload a subscriber accepts from a network; more is counted and skipped."""
PING_INTERVAL_S, PING_TIMEOUT_S = 5.0, 15.0
"""When a subscriber gives up a connection whose other end vanished without a word, and connects anew."""
MIN_RECONNECT_S, MAX_RECONNECT_S = 0.1, 2.0
"""The wait before a peer that is away is tried again: doubled each time."""
MAX_DRAIN = 1024
"""Messages one `receive` returns at most, so that a busy source leaves the loop to others."""
