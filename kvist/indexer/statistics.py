"""What a source did: a frozen value for the metrics page, and the counters it is made from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from kvist.events.session import Session, SourceState

_logger = logging.getLogger(__name__)

DEFAULT_NUM_RANKS = 64
"""Ranks that a stream may name where nobody says how many there are: each costs every request a candidate."""
_COUNTED_BY_SESSIONS = ("num_gaps", "num_replays", "num_snapshots", "num_recovered", "num_diverged", "num_duplicates")


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """One source at one moment; counters since it was added. `last_event_age_s` and `lag_s` are None before the first.

    `lag_s` is the age of the newest batch when it was applied, by the two machines' clocks.
    """

    worker: str
    url: str
    states: Mapping[int, SourceState]
    num_batches: int
    num_events: int
    num_gaps: int
    num_replays: int
    num_snapshots: int
    num_recovered: int
    num_cleared: int
    num_diverged: int
    num_restarts: int
    num_duplicates: int
    num_malformed: int
    num_unknown_events: int
    num_refused_batches: int
    num_refused_events: int
    num_refused_ranks: int
    last_event_age_s: float | None
    lag_s: float | None
    failure: str | None
    has_upper_bounds: bool
    """Whether hits may be shorter than overlaps, or only reach further back than they tell: see `Heartbeat`."""
    is_peer_gone: bool = False

    def after(self, earlier: Self | None) -> Self:
        """Return this one with the counts of an earlier one, if any, added."""
        if earlier is None:
            return self
        names = [field.name for field in fields(self) if field.name.startswith("num_")]
        return replace(self, **{name: getattr(earlier, name) + getattr(self, name) for name in names})


@dataclass(slots=True)
class RankBound:
    """Which ranks a stream may name: those below `num_ranks`, and the one that it was added for."""

    num_ranks: int = DEFAULT_NUM_RANKS
    own_rank: int = 0

    def admits(self, rank: int, worker: str, counters: SourceCounters) -> bool:
        """Return whether the rank may be followed; where not, count it, and log the first of the source."""
        if rank < self.num_ranks or rank == self.own_rank:
            return True
        counters.num_refused_ranks += 1
        if counters.num_refused_ranks == 1:
            text = "stream names a rank beyond its data-parallel size: skipped, and further ones are only counted"
            _logger.warning("%s worker=%s rank=%d data_parallel_size=%d", text, worker, rank, self.num_ranks)
        return False


@dataclass(slots=True)
class SourceCounters:
    """What a source's follower counts itself, named as in `SourceStatistics`; the rest its sessions count."""

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

    def applied(
        self, num_events: int, timestamp_s: float | None, now_s: float, wall_s: float, num_batches: int = 1
    ) -> None:
        """Count what was applied at `now_s`; `timestamp_s`, of the last batch, and `wall_s` are Unix times."""
        self.num_batches += num_batches
        self.num_events += num_events
        self.last_event_at_s = now_s
        if timestamp_s is not None:
            self.lag_s = max(0.0, wall_s - timestamp_s)

    def refuse(self, worker: str, block_size: int, expected: int) -> None:
        """Count a batch or event whose blocks are of another size; log it, naming both, once until one fits."""
        self.num_refused_batches += 1
        if self.failure is None:
            self.failure = f"block_size {block_size}, expected {expected}"
            text = "stream refused: its blocks are not of this index's size worker=%s block_size=%d expected=%d"
            _logger.error(text, worker, block_size, expected)

    def frozen(
        self,
        worker: str,
        url: str,
        states: Mapping[int, SourceState],
        sessions: Iterable[Session[Any]],
        num_malformed_frames: int,
        now_s: float,
    ) -> SourceStatistics:
        sessions = tuple(sessions)
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        last_event_at_s = values.pop("last_event_at_s")
        values["num_malformed"] += num_malformed_frames
        for name in _COUNTED_BY_SESSIONS:
            values[name] = sum(getattr(session, name) for session in sessions)
        return SourceStatistics(
            worker=worker,
            url=url,
            states=states,
            num_cleared=sum(session.num_lost for session in sessions),
            num_restarts=sum(max(0, session.num_epochs - 1) for session in sessions),
            last_event_age_s=None if last_event_at_s is None else now_s - last_event_at_s,
            **values,
        )
