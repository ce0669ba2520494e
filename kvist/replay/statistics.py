"""Statistics of a recording: blocks, ranks, sharing, churn, gaps. They are exact, so memory grows with the changes.

A block that is stored and removed once takes some 130 bytes, and 100 more while the results are computed: 2 to 3 GB for
ten million. The recording itself is read chunk by chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.charts import Chart
from kvist.errors import MalformedMessageError
from kvist.events import Cleared, EngineStored, Event, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch
from kvist.events.dialects import EngineEnvelope, decode_block_events
from kvist.events.session import Clear, Restore
from kvist.events.snapshot import Snapshot
from kvist.publisher.stream import RankStream
from kvist.replay.envelope import rank_of, read_envelope
from kvist.replay.numbering import Numbering
from kvist.replay.recording import Record, RecordedSource

Changes: TypeAlias = NDArray[np.void]
MAX_SPANS = 512
MIN_SPAN_S = 0.01
CHANGE = np.dtype([("block", "u8"), ("parent", "u8"), ("time_ms", "i8"), ("holder", "i4"), ("kind", "i1")])
"""A block came to a holder, or left it: these alternate. A holder is a rank's index times the number of tiers, plus the
tier. The parent is that of a stored block, or the block itself where a prompt begins; else 0."""
STORED, RESTORED, REMOVED, DROPPED = range(4)
"""The kinds of changes: a block came by an event or with a snapshot, and it left by an event, or with others when the
rank was cleared, restarted, lost messages or had a snapshot without it."""


class Span(NamedTuple):
    """A stretch of time: when it began, events a second in it, and how many blocks were live at its end."""

    start_s: float
    events_per_s: float
    num_live: int


@dataclass(slots=True)
class RankStatistics:
    """One rank. Blocks count once per tier."""

    num_restored: int = 0
    """Blocks known from snapshots alone: held when the recording began, or stored in a gap."""
    num_stored: int = 0
    num_stored_again: int = 0
    """Blocks stored again after their removal, which a larger cache would have kept."""
    num_removed: int = 0
    num_cleared: int = 0
    """How often all of its blocks were dropped: by the engine, a restart or a gap."""
    num_live: int = 0
    num_live_peak: int = 0


@dataclass(slots=True)
class SourceStatistics:
    """One source. A gap is what a subscriber would have lost: messages that neither an answer nor a snapshot brings."""

    name: str
    url: str
    is_canonical: bool = False
    num_messages: int = 0
    num_bytes: int = 0
    num_gaps: int = 0
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


class _Rank:
    """One rank while a recording is read."""

    def __init__(self, key: WorkerRank, idx: int, block_sizes: AbstractSet[int]) -> None:
        self.key = key
        self.idx = idx
        self.block_sizes = block_sizes
        self.held: tuple[set[int], ...] = tuple(set() for _ in Tier)
        self.num_cleared = 0
        self.stream: RankStream | None = None


class _Source:
    """One source while a recording is read."""

    def __init__(self, source: RecordedSource) -> None:
        self.statistics = SourceStatistics(source.name, source.url)
        self.numbering = Numbering()
        self.ranks: dict[WorkerRank, _Rank] = {}
        self.block_sizes: set[int] = set()

    def result(self) -> SourceStatistics:
        statistics, numbering = self.statistics, self.numbering
        statistics.num_gaps = numbering.total("num_gaps")
        statistics.num_duplicates = numbering.total("num_duplicates", "num_stale")
        statistics.num_restarts = numbering.total("num_epochs") - len(numbering.sessions)
        statistics.num_snapshots = numbering.total("num_snapshots")
        statistics.num_malformed += numbering.snapshots.num_malformed
        statistics.is_from_start = numbering.is_from_start
        statistics.block_sizes = tuple(sorted(self.block_sizes))
        return statistics


class StatisticsCollector:
    """Collects what happened to blocks from a recording's messages, which are to be added in order.

    Missing messages clear their rank, as they do in an index that cannot ask for them.
    """

    def __init__(self) -> None:
        self._sources: dict[RecordedSource, _Source] = {}
        self._ranks: list[_Rank] = []
        self._sessions: set[int] = set()
        self._first_ns: int | None = None
        self._time_ms = 0
        self._changes = [np.empty(0, CHANGE)]
        self._event_times_ms, self._num_events = array("q"), array("q")

    def add(self, record: Record) -> None:
        source = self._sources.get(record.source)
        if source is None:
            source = self._sources[record.source] = _Source(record.source)
        if self._first_ns is None:
            self._first_ns = record.time_ns
        self._sessions.add(record.session)
        self._time_ms = max(self._time_ms, (record.time_ns - self._first_ns) // 1_000_000)
        source.statistics.num_messages += 1
        source.statistics.num_bytes += len(record.message.payload)
        envelope = read_envelope(record.message.payload)
        if envelope is None:
            source.statistics.num_malformed += 1
            return
        key = rank_of(envelope)
        if not isinstance(envelope, EngineEnvelope):
            source.statistics.is_canonical = True
            source.block_sizes.add(envelope.block_size)
            self._rank(source, envelope.source)
        try:
            for step in source.numbering.on_message(envelope, record):
                if isinstance(step, Clear):
                    for rank in source.ranks.values():
                        if key in (None, rank.key):
                            self._clear(rank)
                            rank.stream = None
                elif isinstance(step, Restore):
                    assert source.numbering.snapshot is not None
                    snapshot = source.numbering.snapshot.snapshot
                    self._restore(self._rank(source, snapshot.source), snapshot)
                elif key is None:
                    self._apply_engine(source, record)
                else:
                    self._apply_canonical(source, record)
        except MalformedMessageError:
            source.statistics.num_malformed_events += 1

    def ranks(self) -> list[tuple[WorkerRank, int]]:
        """Return all ranks by index, each with its block size."""
        return [(rank.key, min(rank.block_sizes, default=1)) for rank in self._ranks]

    def changes(self) -> Changes:
        """Return all changes in order of time."""
        self._changes = [np.concatenate(self._changes)]
        return self._changes[0]

    def result(self) -> RecordingStatistics:
        changes = self.changes()
        by_block, is_next = sorted_by_block(changes)
        ranks, kinds, kinds_before = by_block["holder"] // len(Tier), by_block["kind"], np.roll(by_block["kind"], 1)
        is_again = is_next & (kinds == STORED) & (kinds_before == REMOVED)
        is_life = is_next & (kinds == REMOVED) & (kinds_before == STORED)
        lifetimes_ms = (by_block["time_ms"] - np.roll(by_block["time_ms"], 1))[is_life]
        powers = np.log2(np.maximum(lifetimes_ms, 1)).astype(np.int64)
        is_live = (kinds <= RESTORED) & ~np.append(is_next, False)[1:]
        live, live_ranks = by_block["block"][is_live], ranks[is_live]
        num_holders = np.unique(live[_differs(live, live_ranks)], return_counts=True)[1]
        return RecordingStatistics(
            num_messages=sum(source.statistics.num_messages for source in self._sources.values()),
            num_events=sum(self._num_events),
            num_sessions=len(self._sessions),
            first_ns=self._first_ns or 0,
            duration_s=self._time_ms / 1000,
            sources=[source.result() for source in self._sources.values()],
            ranks=self._rank_statistics(changes, np.bincount(ranks[is_again], minlength=len(self._ranks)).tolist()),
            num_distinct=int(np.count_nonzero(_differs(by_block["block"]))),
            num_live_distinct=len(num_holders),
            holders=_histogram(num_holders),
            lifetimes_s={2.0**power / 1000: num for power, num in _histogram(powers).items()},
            spans=self._spans(changes),
        )

    def _rank_statistics(self, changes: Changes, num_again: Sequence[int]) -> dict[WorkerRank, RankStatistics]:
        rows = {}
        for rank in sorted(self._ranks, key=lambda rank: rank.key):
            kinds = changes["kind"][changes["holder"] // len(Tier) == rank.idx]
            stored, restored, removed, dropped = np.bincount(kinds, minlength=4).tolist()
            rows[rank.key] = RankStatistics(
                num_restored=restored,
                num_stored=stored,
                num_stored_again=num_again[rank.idx],
                num_removed=removed + dropped,
                num_cleared=rank.num_cleared,
                num_live=sum(map(len, rank.held)),
                num_live_peak=int(np.cumsum(_signs(kinds)).max(initial=0)),
            )
        return rows

    def _spans(self, changes: Changes) -> list[Span]:
        """Return at most `MAX_SPANS` spans of one length, a power of two times `MIN_SPAN_S`."""
        span_ms = MIN_SPAN_S * 1000
        while self._time_ms / span_ms >= MAX_SPANS:
            span_ms *= 2

        def sums(times_ms: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[Any]:
            num_spans = int(self._time_ms / span_ms) + 1
            return np.bincount((times_ms / span_ms).astype(np.int64), weights, minlength=num_spans)

        events = sums(np.array(self._event_times_ms), np.array(self._num_events))
        live = np.cumsum(sums(changes["time_ms"], _signs(changes["kind"]))).astype(np.int64)
        span_s = span_ms / 1000
        rows = zip((events / span_s).tolist(), live.tolist(), strict=True)
        return [Span(idx * span_s, *row) for idx, row in enumerate(rows)]

    def _rank(self, source: _Source, key: WorkerRank) -> _Rank:
        if (rank := source.ranks.get(key)) is None:
            rank = source.ranks[key] = _Rank(key, len(self._ranks), source.block_sizes)
            self._ranks.append(rank)
        return rank

    def _apply_canonical(self, source: _Source, record: Record) -> None:
        batch = decode_batch(record.message.payload, record.source.name).batch
        self._apply(self._rank(source, batch.source), batch.events)
        self._count_events(len(batch.events))

    def _apply_engine(self, source: _Source, record: Record) -> None:
        name = record.source.name
        decoded = decode_block_events(record.message.payload, name, record.source.engine)
        source.statistics.num_malformed_events += decoded.num_malformed_events
        source.statistics.num_ignored_events += decoded.num_ignored_events
        sizes = [event.block_size for event in decoded.events if isinstance(event, EngineStored) and event.block_size]
        source.block_sizes.update(sizes)
        rank = self._rank(source, WorkerRank(name, decoded.rank or 0))
        if rank.stream is None and sizes:
            rank.stream = RankStream(rank.key, sizes[0], epoch=0)
        if rank.stream is not None:
            for event in decoded.events:
                rank.stream.admit(event)
            for batch in rank.stream.close_batches(0.0):
                self._apply(rank, batch.events)
        self._count_events(len(decoded.events))

    def _count_events(self, num_events: int) -> None:
        self._event_times_ms.append(self._time_ms)
        self._num_events.append(num_events)

    def _apply(self, rank: _Rank, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self._clear(rank)
            elif isinstance(event, Stored | Removed):
                hashes, held = np.frombuffer(event.hashes, "<u8").tolist(), rank.held[event.tier]
                if isinstance(event, Stored):
                    parents = chain(hashes[:1] if event.parent is None else (event.parent,), hashes)
                    added = {block: parent for block, parent in zip(hashes, parents, strict=False) if block not in held}
                    self._record(rank, event.tier, STORED, added)
                    held.update(added)
                else:
                    removed = held.intersection(hashes)
                    self._record(rank, event.tier, REMOVED, dict.fromkeys(removed, 0))
                    held -= removed

    def _clear(self, rank: _Rank) -> None:
        rank.num_cleared += 1
        for tier, held in zip(Tier, rank.held, strict=True):
            self._record(rank, tier, DROPPED, dict.fromkeys(held, 0))
            held.clear()

    def _restore(self, rank: _Rank, snapshot: Snapshot) -> None:
        """Replace all blocks by a snapshot's; those that were held before stay."""
        for tier, held in zip(Tier, rank.held, strict=True):
            now: dict[int, int] = {}
            for blocks in snapshot.slices:
                is_here = blocks.tiers >> tier & 1 == 1
                hashes = blocks.hashes[is_here]
                parents = np.where(blocks.depths[is_here] == 0, hashes, 0)
                now |= zip(hashes.tolist(), parents.tolist(), strict=True)
            self._record(rank, tier, DROPPED, dict.fromkeys(held - now.keys(), 0))
            self._record(rank, tier, RESTORED, {block: now[block] for block in now.keys() - held})
            held.clear()
            held.update(now)

    def _record(self, rank: _Rank, tier: Tier, kind: int, parents: Mapping[int, int]) -> None:
        """Record what happened to blocks, given with their parents as `CHANGE` has them."""
        changes = np.empty(len(parents), CHANGE)
        changes["block"] = np.fromiter(parents, np.uint64, len(parents))
        changes["parent"] = np.fromiter(parents.values(), np.uint64, len(parents))
        changes["time_ms"], changes["holder"], changes["kind"] = self._time_ms, rank.idx * len(Tier) + tier, kind
        self._changes.append(changes)


def sorted_by_block(changes: Changes) -> tuple[Changes, NDArray[np.bool_]]:
    """Return changes in order of block, holder and time, and which of them follow one of the same block and holder."""
    changes = changes[np.lexsort((changes["holder"], changes["block"]))]  # which is stable
    return changes, ~_differs(changes["block"], changes["holder"])


def _differs(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows differ from the one before, as the first one does."""
    is_other = np.any([np.diff(column) != 0 for column in columns], axis=0)
    return np.append(True, is_other)[: len(columns[0])]


def _signs(kinds: NDArray[np.int8]) -> NDArray[np.int64]:
    """Return 1 where a block came, -1 where it left."""
    return np.where(kinds <= RESTORED, 1, -1)


def _histogram(values: NDArray[np.int64]) -> dict[int, int]:
    """Return how often each value occurs, in ascending order."""
    return dict(zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True))


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
            ("live at the end, by number of ranks", _shown(holders)),
            ("removed, by lifetime: at least so many seconds", _shown(statistics.lifetimes_s)),
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


def _shown(counts: Mapping[int, int] | Mapping[float, int]) -> str:
    return "  ".join(f"{key:g}: {number:,}" for key, number in counts.items()) or "none"


def curves(spans: Sequence[Span]) -> dict[str, list[tuple[float, float]]]:
    """Return a recording's curves as points of seconds and values, at least one each."""
    return {
        "Live blocks": [(span.start_s, span.num_live) for span in spans],
        "Events a second": [(span.start_s, span.events_per_s) for span in spans],
    }


def charts(spans: Sequence[Span], name: str) -> list[Chart]:
    """Return the same curves as charts; `name` is the recording's."""
    return [Chart(title, "seconds", "", {name: curve}, log_x=False) for title, curve in curves(spans).items()]
