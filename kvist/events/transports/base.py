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
from typing import Any, NamedTuple, Protocol, Self


class Message(NamedTuple):
    """One message as it travels. `sequence` is the batch's, repeated outside the payload for engines' own streams."""

    topic: bytes
    sequence: int
    payload: bytes


class ReplayRequest(NamedTuple):
    """Asks a publisher for what it sent on a topic from `start_sequence` of `epoch` on.

    Topic None asks for all topics, in the form every engine understands, which has no epoch; an empty topic asks for
    all as well. Without an epoch the answer is what is still kept. With one, which only Kvist's publishers understand,
    the answer may begin with a snapshot, and continues from there.
    """

    topic: bytes | None
    start_sequence: int
    epoch: int | None = None


WHAT_FOLLOWS = ReplayRequest(None, (1 << 63) - 1)
"""Asks for messages not sent yet: an engine answers with nothing, a publisher of Kvist's with its heartbeats."""
EVERYTHING = ReplayRequest(None, 0)
"""Asks for all that is kept. Put to peers that answered nothing to `WHAT_FOLLOWS`, which spares Kvist's publishers."""
WHO_IS_THERE = ReplayRequest(b"", (1 << 63) - 1)
"""Asks a publisher of Kvist's for its ranks: it answers with their heartbeats, and an engine not at all."""


class ReplaySource(Protocol):
    """Answers replay requests. Called from the publication's own thread, so implementations are thread-safe.

    Iterating over an answer may wait, up to seconds for a large snapshot: never do it in an event loop.
    """

    def replay(self, request: ReplayRequest) -> Iterable[Message]:
        """Return the answer, the messages of each topic in order."""


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
        """How often a peer was connected so far; includes every connection that brought a received message.

        A stream without epochs is in doubt after each reconnect: another process may have taken the endpoint.
        """

    @property
    def num_malformed(self) -> int:
        """How many messages were skipped because their frames are not the transport's."""

    @property
    def is_peer_gone(self) -> bool:
        """Whether the publisher is known to have ended or died; False where the transport cannot know."""

    @property
    def is_caught_up(self) -> bool:
        """Whether a peer is connected and all that it sent was received, as far as this end can tell."""

    @property
    def problem(self) -> str | None:
        """Why nothing can be received now, for people to read and without secrets; None while all is well."""

    async def __aenter__(self) -> Self:
        """Connect in the background; returns at once, whether or not the peer is there."""

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Release everything."""

    async def receive(self) -> Sequence[Message]:
        """Wait for at least one message and return all that are here, oldest first, at most `MAX_DRAIN`.

        Returns without any when `is_peer_gone` becomes true, and maybe when a peer connects. They may be a
        `MessageBlock`. Cancelling loses no message.
        """

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Return the publisher's answer, oldest first; None if it cannot be asked, or is silent for `timeout_s`."""


MAX_MESSAGE_BYTES = 64 << 20
"""The topic and payload a subscriber accepts from a network; more is counted and skipped."""
MAX_ANSWER_BYTES = 1 << 30
"""The memory an answer may take here; a longer one comes from a broken peer, and is dropped."""
MAX_ANSWER_S = 300.0
"""How long an answer may take, whatever signs of life there are: other questions wait behind it."""
MESSAGE_BYTES = 128
"""What a message of an answer takes in memory beside topic and payload."""
PING_INTERVAL_S, PING_TIMEOUT_S = 5.0, 15.0
"""How often a connection is checked, and how long its other end may be silent before it is closed and opened anew."""
MIN_RECONNECT_S, MAX_RECONNECT_S = 0.1, 2.0
"""The wait before a peer that is away is tried again: doubled each time."""
MAX_DRAIN = 1024
"""Messages one `receive` returns at most, so that a busy source leaves the loop to others."""
