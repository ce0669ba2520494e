"""Statistics of a recording: blocks, ranks, sharing, churn, gaps. They are exact, so memory grows with the blocks.

About 100 bytes for each distinct block, 100 for each block that a rank holds and 60 for each that it held: 10 million
distinct blocks take some 2 to 3 GB. The recording itself is read chunk by chunk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from kvist.charts import Chart
from kvist.errors import MalformedMessageError
from kvist.events import Cleared, EngineStored, Event, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch
from kvist.events.dialects import decode_block_events
from kvist.events.snapshot import Snapshot
from kvist.events.types import SnapshotPart
from kvist.publisher.stream import RankStream
from kvist.replay.blocks import Change, RankBlocks, SnapshotCollector
from kvist.replay.envelope import CanonicalEnvelope, SourceTracker, read_envelope
from kvist.replay.recording import Record, RecordedSource

MAX_SPANS = 512
MIN_SPAN_S = 0.01
_UNKNOWN_MS = -1  # when a block of a snapshot was stored


class Span(NamedTuple):
    """A stretch of time: when it began, events a second in it, and how many blocks were live at its end."""

    start_s: float
    events_per_s: float
    num_live: int


@dataclass(slots=True)
class RankStatistics:
    """One rank. Blocks count once per tier; `stored_twice` were held already, `removed_not_held` were not."""

    num_restored: int = 0
    """Blocks known from snapshots alone: held when the recording began, or stored in a gap."""
    num_stored: int = 0
    num_stored_again: int = 0
    """Blocks stored again after their removal, which a larger cache would have kept."""
    num_stored_twice: int = 0
    num_removed: int = 0
    num_removed_not_held: int = 0
    num_cleared: int = 0
    num_heartbeats_agreeing: int = 0
    num_heartbeats_differing: int = 0
    """Heartbeats whose count or digest differs from that of the recorded blocks."""
    num_live: int = 0
    num_live_peak: int = 0


@dataclass(slots=True)
class SourceStatistics:
    """One source; gaps as `kvist.replay.envelope` counts them."""

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
    """How often the publisher answered with a snapshot."""
    num_malformed: int = 0
    num_malformed_events: int = 0
    num_ignored_events: int = 0
    is_from_start: bool = True
    """Whether each rank was recorded from its first message on, or with a snapshot of the state before."""
    block_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordingStatistics:
    """A whole recording. Histograms are by exact number of holders, and by powers of two of lifetime."""

    num_messages: int
    num_events: int
    num_sessions: int
    first_ns: int
    duration_s: float
    sources: list[SourceStatistics]
    ranks: dict[WorkerRank, RankStatistics]
    num_distinct: int
    num_live_distinct: int
    holders: dict[int, int]
    """Number of live blocks by the number of ranks that hold them."""
    lifetimes_s: dict[float, int]
    """Number of removed blocks by lifetime: at least the key, and less than twice that."""
    spans: list[Span]


class Timeline:
    """Counts events and live blocks in at most `MAX_SPANS` spans of one length, which doubles as time goes on."""

    def __init__(self) -> None:
        self.span_s = MIN_SPAN_S
        self._spans: dict[int, tuple[int, int]] = {}  # events, and live blocks at the end

    def add(self, time_s: float, num_events: int, num_live: int) -> None:
        """Count events at a time, which must not decrease; `num_live` blocks are live after them."""
        while (idx := int(time_s / self.span_s)) >= MAX_SPANS:
            self.span_s *= 2
            before, self._spans = self._spans, {}
            for old_idx, (num, live) in before.items():
                self._spans[old_idx // 2] = self._spans.get(old_idx // 2, (0, 0))[0] + num, live
        self._spans[idx] = self._spans.get(idx, (0, 0))[0] + num_events, num_live

    def spans(self) -> list[Span]:
        spans: list[Span] = []
        num_live = 0
        for idx in range(max(self._spans, default=-1) + 1):
            num_events, num_live = self._spans.get(idx, (0, num_live))
            spans.append(Span(idx * self.span_s, num_events / self.span_s, num_live))
        return spans


class RankState:
    """One rank while a recording is read."""

    def __init__(self) -> None:
        self.blocks = RankBlocks()
        self.removed: tuple[set[int], ...] = tuple(set() for _ in Tier)
        self.statistics = RankStatistics()
        self.epoch = -1
        self.stream: RankStream | None = None


class _Source:
    """One source while a recording is read."""

    def __init__(self, source: RecordedSource) -> None:
        self.statistics = SourceStatistics(source.name, source.url)
        self.tracker = SourceTracker()
        self.num_restarts = 0
        self.snapshots = SnapshotCollector()
        self.ranks: defaultdict[WorkerRank, RankState] = defaultdict(RankState)
        self.block_sizes: set[int] = set()

    def result(self) -> SourceStatistics:
        statistics, tracker = self.statistics, self.tracker
        for name in ("num_gaps", "num_missing", "num_duplicates", "num_restarts", "num_snapshots"):
            setattr(statistics, name, tracker.total(name))
        statistics.num_malformed = tracker.num_malformed + self.snapshots.num_malformed
        statistics.is_from_start = all(rank.is_from_start for rank in tracker.ranks.values())
        statistics.block_sizes = tuple(sorted(self.block_sizes))
        return statistics


class StatisticsCollector:
    """Collects statistics of a recording's messages, which are to be added in order.

    It does not make up for missing messages: a block whose removal was lost counts as live until its rank is cleared.
    """

    def __init__(self) -> None:
        self._sources: dict[RecordedSource, _Source] = {}
        self._sessions: set[int] = set()
        self._distinct: set[int] = set()
        self._lifetimes: Counter[int] = Counter()
        self._timeline = Timeline()
        self._num_live = 0
        self._num_events = 0
        self._first_ns: int | None = None
        self.time_ms = 0
        """When the last message came, from the first one on."""

    def add(self, record: Record) -> None:
        source = self._sources.get(record.source)
        if source is None:
            source = self._sources[record.source] = _Source(record.source)
        if self._first_ns is None:
            self._first_ns = record.time_ns
        self._sessions.add(record.session)
        self.time_ms = max(self.time_ms, (record.time_ns - self._first_ns) // 1_000_000)
        source.statistics.num_messages += 1
        source.statistics.num_bytes += len(record.message.payload)
        envelope = read_envelope(record.message.payload)
        is_new = source.tracker.on_message(envelope, record.message)
        try:
            if isinstance(envelope, CanonicalEnvelope):
                self._add_canonical(source, record, envelope, is_new)
            elif isinstance(envelope, SnapshotPart):
                self._add_snapshot(source, record)
            elif is_new:
                self._add_engine(source, record)
        except MalformedMessageError:
            source.statistics.num_malformed_events += 1

    def result(self) -> RecordingStatistics:
        ranks = {key: rank for source in self._sources.values() for key, rank in source.ranks.items()}
        held = Counter(block for rank in ranks.values() for block in set().union(*rank.blocks.tiers))
        return RecordingStatistics(
            num_messages=sum(source.statistics.num_messages for source in self._sources.values()),
            num_events=self._num_events,
            num_sessions=len(self._sessions),
            first_ns=self._first_ns or 0,
            duration_s=self.time_ms / 1000,
            sources=[source.result() for source in self._sources.values()],
            ranks={key: rank.statistics for key, rank in sorted(ranks.items())},
            num_distinct=len(self._distinct),
            num_live_distinct=len(held),
            holders=dict(sorted(Counter(held.values()).items())),
            lifetimes_s={2.0**power / 1000: count for power, count in sorted(self._lifetimes.items())},
            spans=self._timeline.spans(),
        )

    def _add_canonical(self, source: _Source, record: Record, envelope: CanonicalEnvelope, is_new: bool) -> None:
        batch = decode_batch(record.message.payload, record.source.name).batch
        source.statistics.is_canonical = True
        source.block_sizes.add(batch.block_size)
        rank = source.ranks[batch.source]
        is_outdated = source.tracker.ranks[batch.source].is_outdated(batch.epoch, batch.sequence)
        if not is_new and (is_outdated or not envelope.is_heartbeat):
            return
        if batch.epoch > rank.epoch:
            self._record_changes(rank, rank.blocks.apply(Cleared()))
            rank.epoch = batch.epoch
        for event in batch.events:
            self._apply(rank, event)
        self._count_events(len(batch.events))

    def _add_snapshot(self, source: _Source, record: Record) -> None:
        recorded = source.snapshots.add(record.message, record.source.name)
        if recorded is None:
            return
        source.statistics.is_canonical = True
        source.block_sizes.add(recorded.heartbeat.block_size)
        rank = source.ranks[recorded.rank]
        if recorded.snapshot.epoch >= rank.epoch:
            self._restore(rank, recorded.snapshot)

    def _restore(self, rank: RankState, snapshot: Snapshot) -> None:
        rank.epoch = snapshot.epoch
        changes = rank.blocks.restore(snapshot.slices, _UNKNOWN_MS)
        for change in changes:
            rank.removed[change.tier].difference_update(change.added)
            rank.statistics.num_restored += len(change.added)
        self._record_changes(rank, changes, is_counted=False)

    def _add_engine(self, source: _Source, record: Record) -> None:
        name = record.source.name
        decoded = decode_block_events(record.message.payload, name, record.source.engine)
        source.statistics.num_malformed_events += decoded.num_malformed_events
        source.statistics.num_ignored_events += decoded.num_ignored_events
        if (num_restarts := source.tracker.total("num_restarts")) > source.num_restarts:
            source.num_restarts = num_restarts
            for rank in source.ranks.values():
                self._record_changes(rank, rank.blocks.apply(Cleared()))
                rank.stream = None
        sizes = [event.block_size for event in decoded.events if isinstance(event, EngineStored) and event.block_size]
        source.block_sizes.update(sizes)
        key = WorkerRank(name, decoded.rank or 0)
        rank = source.ranks[key]
        if rank.stream is None and sizes:
            rank.stream = RankStream(key, sizes[0], epoch=0)
        if rank.stream is not None:
            for event in decoded.events:
                rank.stream.admit(event)
            for batch in rank.stream.close_batches(0.0):
                for canonical in batch.events:
                    self._apply(rank, canonical)
        self._count_events(len(decoded.events))

    def _count_events(self, num_events: int) -> None:
        self._num_events += num_events
        self._timeline.add(self.time_ms / 1000, num_events, self._num_live)

    def _apply(self, rank: RankState, event: Event) -> None:
        if isinstance(event, Heartbeat):
            agrees = (event.num_blocks, event.digest) == (rank.blocks.num_blocks, rank.blocks.digest)
            rank.statistics.num_heartbeats_agreeing += agrees
            rank.statistics.num_heartbeats_differing += not agrees
            return
        changes, statistics = rank.blocks.apply(event, self.time_ms), rank.statistics
        change = changes[0]
        if isinstance(event, Stored):
            removed = rank.removed[event.tier]
            again = removed.intersection(change.added)
            removed -= again
            statistics.num_stored += len(change.added)
            statistics.num_stored_again += len(again)
            statistics.num_stored_twice += change.num_without_effect
        elif isinstance(event, Removed):
            rank.removed[event.tier].update(change.removed)
            lifetimes_ms = (self.time_ms - added_ms for added_ms in change.added_ms if added_ms != _UNKNOWN_MS)
            self._lifetimes.update(max(0, lifetime_ms.bit_length() - 1) for lifetime_ms in lifetimes_ms)
            statistics.num_removed_not_held += change.num_without_effect
        else:
            statistics.num_cleared += 1
        self._record_changes(rank, changes)

    def _record_changes(self, rank: RankState, changes: Sequence[Change], *, is_counted: bool = True) -> None:
        """Record which blocks are live now; `is_counted` is False for a snapshot, which removes no blocks."""
        statistics = rank.statistics
        for change in changes:
            self._distinct.update(change.added)
            self._num_live += len(change.added) - len(change.removed)
            statistics.num_removed += len(change.removed) if is_counted else 0
        statistics.num_live = rank.blocks.num_blocks
        statistics.num_live_peak = max(statistics.num_live_peak, statistics.num_live)


def statistics_json(statistics: RecordingStatistics) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(statistics, name) for name in statistics.__slots__}
    fields["ranks"] = [rank._asdict() | msgspec.to_builtins(each) for rank, each in statistics.ranks.items()]
    builtins: dict[str, Any] = msgspec.to_builtins(fields, str_keys=True)
    return builtins


def statistics_tables(statistics: RecordingStatistics) -> Iterator[tuple[Sequence[str], list[Sequence[str]]]]:
    """Yield tables, each as column names and rows, of all but the spans. Columns that are 0 everywhere are left out."""
    overview = _counts(statistics) | {
        "events/s": f"{statistics.num_events / max(statistics.duration_s, 1e-9):,.0f}",
        "seconds": f"{statistics.duration_s:.1f}",
        "from": iso_time(statistics.first_ns),
    }
    yield [*overview], [[*overview.values()]]
    ranks = [{"rank": f"{key.worker} {key.rank}"} | _counts(rank) for key, rank in statistics.ranks.items()]
    for rows in ([*map(_source_row, statistics.sources)], ranks):
        names = [name for name in rows[0] if any(row[name] != "0" for row in rows)] if rows else []
        if names:
            yield names, [[row[name] for name in names] for row in rows]
    holders, live = statistics.holders, statistics.num_live_distinct
    shared = sum(number for num_ranks, number in holders.items() if num_ranks > 1)
    stored = sum(rank.num_stored for rank in statistics.ranks.values())
    again = sum(rank.num_stored_again for rank in statistics.ranks.values())
    yield (
        ("blocks", "number"),
        [
            ("live at the end on more than one rank", f"{shared:,} ({shared / (live or 1):.1%})"),
            ("live at the end, by number of ranks", _histogram(holders)),
            ("removed, by lifetime: at least so many seconds", _histogram(statistics.lifetimes_s)),
            ("stored again after a removal", f"{again:,} ({again / (stored or 1):.1%})"),
        ],
    )


def iso_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns * 1e-9, UTC).isoformat(timespec="seconds")


def _counts(statistics: RecordingStatistics | SourceStatistics | RankStatistics) -> dict[str, str]:
    counts = {name: getattr(statistics, name) for name in statistics.__slots__ if name.startswith("num_")}
    return {name.removeprefix("num_").replace("_", " "): f"{number:,}" for name, number in counts.items()}


def _source_row(source: SourceStatistics) -> dict[str, str]:
    kind = "canonical" if source.is_canonical else "engine's own"
    names = {
        "source": source.name,
        "URL": source.url,
        "stream": kind if source.is_from_start else f"{kind}, recorded from its middle: earlier blocks are unknown",
        "block size": ", ".join(map(str, source.block_sizes)) or "unknown",
    }
    return names | _counts(source)


def _histogram(counts: Mapping[int, int] | Mapping[float, int]) -> str:
    return "  ".join(f"{key:g}: {number:,}" for key, number in counts.items()) or "none"


def curves(spans: Sequence[Span]) -> dict[str, list[tuple[float, float]]]:
    """Return a recording's curves as points of seconds and values, at least one each."""
    return {
        "Live blocks": [(span.start_s, span.num_live) for span in spans] or [(0, 0)],
        "Events a second": [(span.start_s, span.events_per_s) for span in spans] or [(0, 0)],
    }


def charts(spans: Sequence[Span], name: str) -> list[Chart]:
    """Return the same curves as charts; `name` is the recording's."""
    return [Chart(title, "seconds", "", {name: curve}, log_x=False) for title, curve in curves(spans).items()]
