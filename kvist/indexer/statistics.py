"""A source's statistics: a frozen value for the metrics page, and the counters it is made from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from kvist.events.session import SourceState

_logger = logging.getLogger(__name__)

DEFAULT_NUM_RANKS = 64
"""Ranks that a stream may name by default: each is one more candidate for every request."""
SESSION_COUNTERS = ("num_gaps", "num_replays", "num_snapshots", "num_recovered", "num_diverged", "num_duplicates")
"""The counters of `SourceStatistics` that are sums of the sessions' counters."""


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """One source at one moment; counters since it was added.

    `last_event_age_s` is None before the first batch. `lag_s` is the age of the newest batch or heartbeat when it was
    applied, by the two machines' clocks, and None before the first.
    """

    worker: str
    url: str
    states: Mapping[int, SourceState]
    num_batches: int = 0
    num_events: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    num_recovered: int = 0
    num_cleared: int = 0
    num_diverged: int = 0
    num_restarts: int = 0
    num_duplicates: int = 0
    num_malformed: int = 0
    num_unknown_events: int = 0
    num_refused_batches: int = 0
    num_refused_events: int = 0
    num_refused_ranks: int = 0
    last_event_age_s: float | None = None
    lag_s: float | None = None
    failure: str | None = None
    has_upper_bounds: bool = False
    """Whether hits may be shorter than the overlaps say: see `Heartbeat.is_upper_bound`."""
    is_peer_gone: bool = False

    def after(self, earlier: Self | None) -> Self:
        """Return a copy with the counts of `earlier`, if any, added."""
        if earlier is None:
            return self
        names = [field.name for field in fields(self) if field.name.startswith("num_")]
        return replace(self, **{name: getattr(earlier, name) + getattr(self, name) for name in names})


@dataclass(slots=True)
class RankBound:
    """The ranks that a stream may name: those below `num_ranks`, and the one that it was added for."""

    num_ranks: int = DEFAULT_NUM_RANKS
    own_rank: int = 0

    def admits(self, rank: int, worker: str, counters: SourceCounters) -> bool:
        """Return whether the rank may be followed; if not, count it, and log it if it is the source's first."""
        if rank < self.num_ranks or rank == self.own_rank:
            return True
        counters.num_refused_ranks += 1
        if counters.num_refused_ranks == 1:
            text = "stream names a rank beyond its data-parallel size: skipped, and further ones are only counted"
            _logger.warning("%s worker=%s rank=%d data_parallel_size=%d", text, worker, rank, self.num_ranks)
        return False


@dataclass(slots=True)
class SourceCounters:
    """The counters of `SourceStatistics` that a follower keeps itself; its sessions keep the others."""

    num_batches: int = 0
    num_events: int = 0
    num_malformed: int = 0
    num_unknown_events: int = 0
    num_refused_batches: int = 0
    num_refused_events: int = 0
    num_refused_ranks: int = 0
    last_event_at_s: float | None = None
    lag_s: float | None = None
    failure: str | None = None
    has_upper_bounds: bool = False

    def count_applied(
        self, num_events: int, timestamp_s: float | None, now_s: float, wall_s: float, num_batches: int = 1
    ) -> None:
        """Count batches applied at `now_s`; `timestamp_s`, that of the last batch, and `wall_s` are Unix times."""
        self.num_batches += num_batches
        self.num_events += num_events
        self.last_event_at_s = now_s
        if timestamp_s is not None:
            self.count_lag(timestamp_s, wall_s)

    def count_lag(self, timestamp_s: float, wall_s: float) -> None:
        """Record how old a message was when it was applied; both are Unix times."""
        self.lag_s = max(0.0, wall_s - timestamp_s)

    def count_refused(self, worker: str, block_size: int, expected: int) -> None:
        """Count a batch or event with another block size; log it, but no further one until one fits."""
        self.num_refused_batches += 1
        if self.failure is None:
            self.failure = f"block_size {block_size}, expected {expected}"
            text = "stream refused: its blocks are not of this index's size worker=%s block_size=%d expected=%d"
            _logger.error(text, worker, block_size, expected)
