"""How long a transfer took and what it moved, told once it has ended; all times are those of `time.monotonic`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchTimes:
    """One fetch of this rank, as the receiver saw it.

    All its senders had greeted at `greeted_s`, and all had written at `arrived_s`; None where it did not get so far.
    Until `ended_s` bytes were scattered, where they had bounced.
    """

    request_id: str
    began_s: float
    greeted_s: float | None
    arrived_s: float | None
    ended_s: float
    num_bytes: int
    num_senders: int
    error: str | None


@dataclass(frozen=True, slots=True)
class WriteTimes:
    """One write of this rank into a receiver's memory, in so many pieces, or gathered and written in one."""

    remote_request_id: str
    began_s: float
    ended_s: float
    num_bytes: int
    num_pieces: int
    is_bounced: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class HoldTimes:
    """How long this rank held a prompt's blocks, and whether they were fetched."""

    remote_request_id: str
    began_s: float
    ended_s: float
    is_fetched: bool


class TransferObserver:
    """Hears of what has ended, on the transfer thread and before the engine does; nothing here may wait or raise.

    This one listens to nothing.
    """

    def fetched(self, times: FetchTimes) -> None:
        """A fetch has ended, or has failed."""

    def written(self, times: WriteTimes) -> None:
        """A write has ended; the hold that it was for ends later."""

    def released(self, times: HoldTimes) -> None:
        """Blocks are held no more."""
