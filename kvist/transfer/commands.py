"""The interface between an engine and its transfers: commands, and reports of their ends.

The engine commands which blocks may be fetched and which are to be filled, and gets reports of how that ended. It does
not reuse a block that another worker may read or write until the report of its release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvist.errors import InvalidValueError

BlockLists: TypeAlias = tuple[tuple[int, ...], ...]
MAX_NAME_LEN: Final = 256
"""The longest `remote_request_id`, in characters; it may not be empty."""
MAX_NUM_RANKS: Final = 64

_ENDPOINT: Final = re.compile(r"tcp://(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Offer:
    """Let a prompt's blocks be fetched once, while they are computed. Exactly one `OfferReleased` follows."""

    remote_request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Make an offer's blocks available that are computed: a list per group, by ordinal, ABSENT if not needed.

    Lists grow from command to command; the last one `is_whole`, and has the prompt's first token if that was sampled.
    For an offer that has ended the command is ignored.
    """

    remote_request_id: str
    block_ids_per_group: BlockLists
    is_whole: bool
    first_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fill a prompt's blocks: a list per group as in `Computed`, ABSENT also for leading blocks that are cached.

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
    """Cancel a fetch: it fails, unless it is complete already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WithdrawOffer:
    """Withdraw an offer: its blocks are released once nobody reads them."""

    remote_request_id: str


Command: TypeAlias = Offer | Computed | Fetch | CancelFetch | WithdrawOffer
"""What an engine may command; cancelling or withdrawing what has ended is no error."""


@dataclass(frozen=True, slots=True)
class OfferReleased:
    """Nobody reads an offer's blocks any more; `is_fetched` is whether they were fetched."""

    remote_request_id: str
    is_fetched: bool


@dataclass(frozen=True, slots=True)
class FetchCompleted:
    """Every byte of a fetch is in its block; the prompt's first token is here if the sender sampled it."""

    request_id: str
    first_token_id: int | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch is incomplete for good; its blocks may still be written to until `FetchReleased`."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FetchReleased:
    """Nobody writes to a failed fetch's blocks any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TransfersStopped:
    """A rank's transfer thread died of a defect: it reports no more, and what it had not ended never ends."""


Report: TypeAlias = OfferReleased | FetchCompleted | FetchFailed | FetchReleased | TransfersStopped


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long either end waits, and how many ended transfers a sender remembers, to recognise late messages."""

    transfer_timeout_s: float = 30.0
    hold_timeout_s: float = 60.0
    cancel_retry_s: float = 1.0
    max_remembered: int = 4096


def check_endpoints(endpoints: Sequence[str]) -> None:
    """Raise InvalidValueError unless these are valid and distinct endpoints, one for each rank of a worker."""
    if not 1 <= len(endpoints) <= MAX_NUM_RANKS or len(set(endpoints)) < len(endpoints):
        raise InvalidValueError("remote_endpoints", endpoints, f"1 to {MAX_NUM_RANKS}, each once")
    for endpoint in endpoints:
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or not 1 <= int(match[1]) < 1 << 16:
            raise InvalidValueError("remote_endpoints", endpoint, "tcp://host:port")
