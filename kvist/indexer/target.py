"""What the indexer needs of an index; `kvist.radix.RadixIndex` is such an index."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kvist.events import Event, WorkerRank
from kvist.events.session import SourceState

if TYPE_CHECKING:
    from kvist.radix import SnapshotChunk


class RankDigest(Protocol):
    """What a rank holds, as a publisher's heartbeat tells it."""

    @property
    def num_blocks(self) -> int:
        """Return the number of (block, tier) pairs."""

    @property
    def digest(self) -> int:
        """Return their digest (`kvist.events.digest`)."""


class ApplyResult(Protocol):
    """The outcome of one batch."""

    @property
    def num_parent_not_found(self) -> int:
        """Return how many stored events were refused because the rank does not hold their parent."""

    @property
    def num_invalid(self) -> int:
        """Return how many stored events were refused because their chain is not one."""


class Index(Protocol):
    """An index that events are applied to; nothing here does I/O or raises for what a peer sent."""

    def apply(self, source: WorkerRank, events: Iterable[Event]) -> ApplyResult:
        """Apply a batch's events in order, heartbeats passed over."""

    def clear(self, worker: str, rank: int | None = None) -> None:
        """Note that a rank, or every rank of a worker, holds nothing any more."""

    def restore(self, chunk: SnapshotChunk) -> None:
        """Hold what a chunk of a snapshot holds, beside what is held already."""

    def remove_worker(self, worker: str) -> None:
        """Forget a worker."""

    def digest(self, source: WorkerRank) -> RankDigest:
        """Return what the rank holds; O(1)."""

    def evicted_from(self, source: WorkerRank) -> bool:
        """Tell whether blocks of a rank were evicted since it was last cleared; O(1)."""

    def sweep(self) -> bool:
        """Do a bounded slice of housekeeping; return whether more is left."""


def state_of(index: Index, source: WorkerRank, followed: SourceState) -> SourceState:
    """Return how far a rank's blocks can be trusted: LIVE if it is followed exactly and nothing of it was evicted."""
    is_short = followed is SourceState.LIVE and index.evicted_from(source)
    return SourceState.PARTIAL if is_short else followed
