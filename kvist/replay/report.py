"""A recording's statistics as text for people, as values for JSON, and as a small SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvist.charts import short_number, svg_lines, svg_stack
from kvist.replay.statistics import RecordingStatistics, SourceStatistics, Span

_MAX_RANKS_SHOWN = 32


def statistics_text(statistics: RecordingStatistics) -> str:
    """Return everything but the spans as lines of text."""
    sources = map(_source_text, statistics.sources)
    return "\n".join([_overview(statistics), *sources, "", *_rank_lines(statistics), "", *_block_lines(statistics)])


def statistics_json(statistics: RecordingStatistics) -> dict[str, Any]:
    """Return everything as what JSON can say."""
    told: dict[str, Any] = {name: getattr(statistics, name) for name in statistics.__slots__}
    told["ranks"] = [
        {"worker": rank.worker, "rank": rank.rank, **msgspec.to_builtins(each)}
        for rank, each in statistics.ranks.items()
    ]
    builtins: dict[str, Any] = msgspec.to_builtins(told, str_keys=True)
    return builtins


def _overview(statistics: RecordingStatistics) -> str:
    began = datetime.fromtimestamp(statistics.first_ns * 1e-9, UTC).isoformat(timespec="seconds")
    rate = short_number(statistics.num_events / max(statistics.duration_s, 1e-9))
    return (
        f"{statistics.num_messages} messages with {statistics.num_events} events, {rate} events a second\n"
        f"{statistics.duration_s:.1f} s from {began}, in {statistics.num_sessions} sessions\n\nsources"
    )


def _source_text(source: SourceStatistics) -> str:
    kind = "canonical" if source.is_canonical else "an engine's own"
    sizes = ", ".join(map(str, source.block_sizes)) or "unknown"
    return (
        f"  {source.name} ({source.url or 'no URL'}): {kind}, block size {sizes}\n"
        f"    {source.num_messages} messages, {source.num_bytes} bytes, "
        f"{source.num_gaps} gaps ({source.num_missing} messages missing), {source.num_duplicates} duplicates, "
        f"{source.num_restarts} restarts, {source.num_snapshots} snapshots\n"
        f"    {source.num_malformed} malformed messages, {source.num_malformed_events} malformed events, "
        f"{source.num_ignored_events} ignored events"
        + ("" if source.is_from_start else "; recorded from amid the stream: what was stored before is not known")
    )


def _rank_lines(statistics: RecordingStatistics) -> Iterator[str]:
    names = ("before", "stored", "again", "in vain", "removed", "in vain", "cleared", "live", "peak", "heartbeats")
    yield f"{'ranks (blocks)':<24}" + "".join(f"{name:>11}" for name in names)
    for rank, each in list(statistics.ranks.items())[:_MAX_RANKS_SHOWN]:
        num_heartbeats = each.num_heartbeats_agreeing + each.num_heartbeats_differing
        heartbeats = f"{each.num_heartbeats_agreeing}/{num_heartbeats} ok" if num_heartbeats else "-"
        stored = (each.num_restored, each.num_stored, each.num_stored_again, each.num_stored_in_vain)
        removed = (each.num_removed, each.num_removed_in_vain, each.num_cleared)
        cells = (*stored, *removed, each.num_live, each.num_live_peak, heartbeats)
        yield f"  {f'{rank.worker}/{rank.rank}':<22}" + "".join(f"{cell:>11}" for cell in cells)
    if len(statistics.ranks) > _MAX_RANKS_SHOWN:
        yield f"  and {len(statistics.ranks) - _MAX_RANKS_SHOWN} more ranks"


def _block_lines(statistics: RecordingStatistics) -> Iterator[str]:
    live = statistics.num_live_distinct
    shared = sum(count for holders, count in statistics.holders.items() if holders > 1)
    yield f"blocks: {statistics.num_distinct} distinct, {live} of them live at the end"
    yield f"  held by more than one rank: {shared} ({100 * shared / (live or 1):.1f} %)"
    yield f"  ranks that hold a live block:  {_histogram(statistics.holders)}"
    yield f"  lifetime until removed, from:  {_histogram(statistics.lifetimes_s, ' s')}"
    stored = sum(rank.num_stored for rank in statistics.ranks.values())
    again = sum(rank.num_stored_again for rank in statistics.ranks.values())
    yield f"  stored again after removal:    {again} of {stored} ({100 * again / (stored or 1):.1f} %)"


def _histogram(counts: Mapping[int, int] | Mapping[float, int], unit: str = "") -> str:
    return "  ".join(f"{key:g}{unit}: {count}" for key, count in counts.items()) or "none"


def svg_plot(spans: Sequence[Span], title: str) -> str:
    """Return an SVG document with both curves."""
    curves: dict[str, list[tuple[float, float]]] = {
        "live blocks": [(span.start_s, span.num_live) for span in spans],
        "events a second": [(span.start_s, span.events_per_s) for span in spans],
    }
    return svg_stack(
        *(svg_lines(title, "seconds", name, {name: curve or [(0, 0)]}, log_x=False) for name, curve in curves.items())
    )
