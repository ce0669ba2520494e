"""What every bounce offers, what it hands out, and the one that never bounces."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from kvist.transfer.agents.base import Fragments, Int64s, PeerId, WriteState
from kvist.transfer.frames import BounceTail, Extent


class Lease:
    """A part of the receive region, reserved for one transfer; `extents` is each writer's own, by rank."""

    __slots__ = ("extents", "is_released", "offset")

    def __init__(self, offset: int, extents: tuple[Extent, ...]) -> None:
        self.offset = offset
        self.extents = extents
        self.is_released = False


class Outgoing:
    """A send under way: `state` is polled; the tail says what the region of the peer will hold."""

    __slots__ = ("_ended", "reason", "state", "tail")

    def __init__(self, tail: BounceTail) -> None:
        self.tail = tail
        self.state = WriteState.PENDING
        self.reason: str | None = None
        self._ended = threading.Event()

    def end(self, state: WriteState, reason: str | None) -> None:
        """Leave PENDING: for the bounce alone."""
        self.reason = reason
        self.state = state
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, at the latest after `timeout_s`."""
        return self._ended.wait(timeout_s)


class Scattering:
    """A scatter under way: `is_done` is polled; `error` says why it failed."""

    __slots__ = ("_ended", "error")

    def __init__(self) -> None:
        self.error: str | None = None
        self._ended = threading.Event()

    @property
    def is_done(self) -> bool:
        """Return whether every byte lies in its place, or has failed to."""
        return self._ended.is_set()

    def end(self, error: str | None = None) -> None:
        """Be done: for the bounce alone."""
        self.error = error
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is done, at the latest after `timeout_s`."""
        return self._ended.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class BounceStatistics:
    """What was bounced, why it was not, and what is taken now."""

    num_sent: int = 0
    bytes_sent: int = 0
    num_fragments_sent: int = 0
    num_scattered: int = 0
    num_failed: int = 0
    refused_as_slower: int = 0
    refused_by_size: int = 0
    refused_for_room: int = 0
    receive_bytes: int = 0
    send_bytes: int = 0
    quarantined_bytes: int = 0


class Bounce(Protocol):
    """What both transports offer; callers have no branches for the one that never bounces."""

    def reserve(self, size_bytes: int, num_fragments: int, num_writers: int = 1) -> Lease | None:
        """Return room for a transfer from so many writers; None: fragments as they are."""
        ...

    def release(self, lease: Lease) -> None:
        """Give room back that no write can reach any more; again does nothing."""
        ...

    def quarantine(self, lease: Lease) -> None:
        """Count room as lost until it is released: its transfer has failed, but may still be written."""
        ...

    def send(self, peer: PeerId, fragments: Fragments, base: int) -> Outgoing | None:
        """Gather, and write to `base` at the peer; None if there is no room to gather in: write fragments instead."""
        ...

    def scatter(self, lease: Lease, copies: Int64s) -> Scattering:
        """Copy out of a lease's room: [n, 3] of source, target and size. The transfer is complete when that is done."""
        ...

    def close(self) -> bool:
        """Finish what is queued and take the regions back, once; False if a write or a lease still needs them."""
        ...

    def statistics(self) -> BounceStatistics:
        """Return the counters."""
        ...


class NullBounce:
    """Never bounces."""

    def reserve(
        self,
        size_bytes: int,  # noqa: ARG002
        num_fragments: int,  # noqa: ARG002
        num_writers: int = 1,  # noqa: ARG002
    ) -> Lease | None:
        """Return None."""
        return None

    def release(self, lease: Lease) -> None:
        """Do nothing: there are no leases."""

    def quarantine(self, lease: Lease) -> None:
        """Do nothing: there are no leases."""

    def send(
        self,
        peer: PeerId,  # noqa: ARG002
        fragments: Fragments,  # noqa: ARG002
        base: int,  # noqa: ARG002
    ) -> Outgoing | None:
        """Return None."""
        return None

    def scatter(self, lease: Lease, copies: Int64s) -> Scattering:  # noqa: ARG002
        """Return a scatter that has failed: no lease is of this transport."""
        scattering = Scattering()
        scattering.end("bouncing is off")
        return scattering

    def close(self) -> bool:
        """Return True."""
        return True

    def statistics(self) -> BounceStatistics:
        """Return zeros."""
        return BounceStatistics()
