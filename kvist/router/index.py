"""What the router needs to know of the fleet's caches, apart from how it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank

Overlaps: TypeAlias = Mapping[WorkerRank, tuple[int, ...]]
"""Leading blocks a rank holds in each tier or a faster one; a rank that holds none is absent."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """How well one rank's cache is known; only a `live` rank's overlaps count."""

    rank: int
    state: str
    num_blocks: int
    num_gaps: int
    last_event_age_s: float | None


class FleetIndex(Protocol):
    """Follows the workers' event streams and answers from what they said."""

    def add_source(self, worker: str, endpoint: str) -> None:
        """Follow the worker's stream; never blocks, and a peer that is away is waited for."""

    def remove_source(self, worker: str) -> None:
        """Stop following the stream and drop all blocks of the worker."""

    def match(self, hashes: NDArray[np.uint64]) -> Overlaps:
        """Return who holds how many leading blocks."""

    def ranks(self, worker: str) -> Sequence[RankStatus]:
        """Return the ranks this worker's events came from, in order."""

    def num_blocks(self) -> int:
        """Return how many distinct blocks the index holds."""
