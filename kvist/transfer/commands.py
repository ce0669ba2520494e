"""What an engine and whoever moves its blocks between workers tell each other.

The engine says which blocks may be fetched and which are to be filled, and hears how that ended. A block in another
worker's reach is not used for anything else until the engine has heard of its end. How long that took, and what it
moved, is told once it has ended, in times of `time.monotonic`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Final, TypeAlias

from kvist.errors import InvalidValueError

BlockLists: TypeAlias = tuple[tuple[int, ...], ...]
MAX_NAME_LEN: Final = 256
"""Longest `remote_request_id`, in characters; none is empty."""
MAX_NUM_RANKS: Final = 64

_ENDPOINT: Final = re.compile(r"tcp://(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Offer:
    """Let a prompt's blocks be fetched once, as they are computed. Whatever happens, one `OfferReleased` follows."""

    remote_request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Note which blocks of an offer are filled: a list a group by ordinal, ABSENT where nobody will want them.

    Each time the lists are longer, until all `is_whole`; then the prompt's first token is told, if it is one that was
    computed to its end. To say more of what has ended is no error.
    """

    remote_request_id: str
    block_ids_per_group: BlockLists
    is_whole: bool
    first_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have a prompt's blocks filled, which are as an offer's, without those that a group has already: they come first.

    `endpoints` are those of the ranks that hold the prompt, by rank. Either `FetchCompleted` follows, or `FetchFailed`
    and then `FetchReleased`.
    """

    request_id: str
    endpoints: tuple[str, ...]
    remote_request_id: str
    num_tokens: int
    block_ids_per_group: BlockLists


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """End a fetch that nobody waits for: it fails, unless it is complete already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WithdrawOffer:
    """End an offer that nobody will come for: its blocks are released once nobody reads them."""

    remote_request_id: str


Command: TypeAlias = Offer | Computed | Fetch | CancelFetch | WithdrawOffer
"""What an engine asks for; to end what has ended is no error."""


@dataclass(frozen=True, slots=True)
class OfferReleased:
    """Nobody reads an offer's blocks any more: they have been fetched, or will not be."""

    remote_request_id: str
    is_fetched: bool


@dataclass(frozen=True, slots=True)
class FetchCompleted:
    """Every byte of a fetch is in its block; the prompt's first token is what its sender says, if anything."""

    request_id: str
    first_token_id: int | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Some bytes of a fetch will not come; others may still, until the blocks are released."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FetchReleased:
    """Nobody writes to a failed fetch's blocks any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TransfersStopped:
    """The last report of a rank whose transfers have ended by a defect: what it has not ended never ends."""


Report: TypeAlias = OfferReleased | FetchCompleted | FetchFailed | FetchReleased | TransfersStopped


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long either end waits, and how many ended transfers a sender remembers, to know what comes late."""

    transfer_timeout_s: float = 30.0
    hold_timeout_s: float = 60.0
    cancel_retry_s: float = 1.0
    max_remembered: int = 4096

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a limit that is not positive, or endless."""
        for each in fields(self):
            if not 0 < getattr(self, each.name) < inf:
                raise InvalidValueError(each.name, getattr(self, each.name), "more than 0, and finite")


def check_endpoints(endpoints: Sequence[str]) -> None:
    """Raise InvalidValueError unless these are the endpoints of a worker's ranks, at which they can be reached."""
    if not 1 <= len(endpoints) <= MAX_NUM_RANKS or len(set(endpoints)) < len(endpoints):
        raise InvalidValueError("remote_endpoints", endpoints, f"1 to {MAX_NUM_RANKS}, each once")
    for endpoint in endpoints:
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or not 1 <= int(match[1]) < 1 << 16:
            raise InvalidValueError("remote_endpoints", endpoint, "tcp://host:port")


@dataclass(frozen=True, slots=True)
class FetchTimes:
    """One fetch of this rank, as the receiver saw it.

    All its senders had written at `arrived_s`, None where it did not get so far; until `ended_s` bytes were scattered,
    where they had bounced.
    """

    request_id: str
    began_s: float
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


TransferTimes: TypeAlias = FetchTimes | WriteTimes | HoldTimes
Observer: TypeAlias = Callable[[TransferTimes], None]
"""Hears of what has ended, on the transfer thread and before the engine does; it may neither wait nor raise.

A write is told of before the hold that it was for.
"""
