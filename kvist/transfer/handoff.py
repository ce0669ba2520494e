"""What an engine and whoever moves its blocks between workers tell each other.

The engine says which blocks may be fetched and which are to be filled, and hears how that ended. A block in another
worker's reach is not used for anything else until the engine has heard of its end. How long that took, and what it
moved, is told once it has ended, in times of `time.monotonic`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvist.errors import InvalidValueError

BlockLists: TypeAlias = tuple[tuple[int, ...], ...]
MAX_NAME_LEN: Final = 256
"""Longest `remote_request_id`, in characters; none is empty."""
MAX_NUM_RANKS: Final = 64

_ENDPOINT: Final = re.compile(r"tcp://(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """A computed prompt's blocks: a list a group by ordinal, ABSENT where no later query sees them."""

    remote_request_id: str
    num_tokens: int
    block_ids_per_group: BlockLists


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """A prompt's blocks to fill, as `OfferedBlocks`; those of the first `num_cached_tokens` tokens are filled.

    `endpoints` are those of the ranks that hold the prompt, by rank.
    """

    request_id: str
    endpoints: tuple[str, ...]
    remote_request_id: str
    num_tokens: int
    num_cached_tokens: int
    block_ids_per_group: BlockLists


class Cancelled(NamedTuple):
    """A fetch that nobody waits for."""

    request_id: str


class Withdrawn(NamedTuple):
    """An offer that nobody will come for."""

    remote_request_id: str


Command: TypeAlias = OfferedBlocks | WantedBlocks | Cancelled | Withdrawn
"""What an engine asks for: a call of `KvTransfers` as a value."""


def check_endpoints(endpoints: Sequence[str]) -> None:
    """Raise InvalidValueError unless these are the endpoints of a worker's ranks, at which they can be reached."""
    if not 1 <= len(endpoints) <= MAX_NUM_RANKS or len(set(endpoints)) < len(endpoints):
        raise InvalidValueError("remote_endpoints", endpoints, f"1 to {MAX_NUM_RANKS}, each once")
    for endpoint in endpoints:
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or not 1 <= int(match[1]) < 1 << 16:
            raise InvalidValueError("remote_endpoints", endpoint, "tcp://host:port")


class KvTransfers(Protocol):
    """Moves blocks between workers. No method waits or raises; the answers are calls of `TransferReports`."""

    def offer(self, offered: OfferedBlocks) -> None:
        """Let the blocks be fetched once; later, whatever happened, `release` is called."""

    def fetch(self, wanted: WantedBlocks) -> None:
        """Have the blocks filled; later either `fetch_completed`, or `fetch_failed` and `fetch_released` are called."""

    def cancel(self, request_id: str) -> None:
        """End a fetch that nobody waits for: it fails, unless it is complete already."""

    def withdraw(self, remote_request_id: str) -> None:
        """End an offer that nobody will come for: its blocks are released once nobody reads them. Else no error."""


class TransferReports(Protocol):
    """How offers and fetches end; all calls come on the engine's thread."""

    def release(self, remote_request_id: str, is_fetched: bool) -> None:
        """Nobody reads an offer's blocks any more: they have been fetched, or will not be."""

    def fetch_completed(self, request_id: str) -> None:
        """Every byte is in its block."""

    def fetch_failed(self, request_id: str, reason: str) -> None:
        """Some bytes will not come; others may still, until the blocks are released."""

    def fetch_released(self, request_id: str) -> None:
        """Nobody writes to a failed fetch's blocks any more."""


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
