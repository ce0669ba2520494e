"""The figures that are told about a recording."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.events import WorkerRank
from kvist.events.windows import Window
from kvist.replay.timeline import Span


@dataclass(slots=True)
class RankStatistics:
    """One rank. Blocks count once a tier; in vain are a store of what is held and a removal of what is not."""

    num_restored: int = 0
    """Told by snapshots: what was held when the recording began, or behind a gap, and was not known."""
    num_stored: int = 0
    num_stored_again: int = 0
    """Stored after they had been removed: what a larger cache would have kept."""
    num_stored_in_vain: int = 0
    num_removed: int = 0
    num_removed_in_vain: int = 0
    num_cleared: int = 0
    num_heartbeats_agreeing: int = 0
    num_heartbeats_differing: int = 0
    """Heartbeats whose count or digest is another than that of what was recorded."""
    num_live: int = 0
    num_live_peak: int = 0


@dataclass(slots=True)
class WindowStatistics:
    """One layer group of an engine's own stream, before any is left out."""

    num_stored_events: int = 0
    num_stored_blocks: int = 0
    num_removed_blocks: int = 0


@dataclass(slots=True)
class SourceStatistics:
    """One source; gaps as `kvist.replay.numbering` counts them."""

    name: str
    url: str
    is_canonical: bool = False
    num_messages: int = 0
    num_bytes: int = 0
    num_gaps: int = 0
    num_missing: int = 0
    num_duplicates: int = 0
    num_restarts: int = 0
    num_snapshots: int = 0
    """How often the publisher was asked what a rank holds, and told."""
    num_malformed: int = 0
    num_malformed_events: int = 0
    num_ignored_events: int = 0
    is_from_start: bool = True
    """Whether each of its numberings was recorded from its beginning, or with what was held before."""
    block_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordingStatistics:
    """All of a recording. Histograms are by exact number of holders, and by powers of two of depth and lifetime."""

    num_messages: int
    num_events: int
    num_sessions: int
    first_wall_ns: int
    duration_s: float
    sources: list[SourceStatistics]
    ranks: dict[WorkerRank, RankStatistics]
    windows: dict[tuple[str, int | None, Window], WindowStatistics]
    num_distinct: int
    num_live_distinct: int
    holders: dict[int, int]
    """How many live blocks so many ranks hold."""
    depths: dict[int, int]
    """How many distinct blocks are at this depth or up to twice as deep; 1 is a prompt's first block."""
    num_parents_unknown: int
    """Stored chains whose parent was never recorded: they count as beginning at depth 1."""
    lifetimes_s: dict[float, int]
    """How many blocks were removed after at least so long, and less than twice that."""
    spans: list[Span]
