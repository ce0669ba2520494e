"""What an engine and whoever moves its blocks between workers tell each other.

The engine says which blocks may be fetched and which are to be filled, and hears how that ended. A block in another
worker's reach is not used for anything else until the engine has heard of its end.
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
