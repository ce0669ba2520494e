"""A recording's statistics as text for people, and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvist.events.windows import UnsizedWindow, Window
from kvist.replay.figures import RankStatistics, RecordingStatistics, SourceStatistics
from kvist.replay.plot import short_number, terminal_plot

_MAX_RANKS_SHOWN = 32


def statistics_text(statistics: RecordingStatistics) -> str:
    """Return everything as lines of text, with a plot at the end."""
    return "\n".join([*_lines(statistics), "", terminal_plot(statistics.spans)])


def statistics_json(statistics: RecordingStatistics) -> dict[str, Any]:
    """Return everything as what JSON can say."""
    ranks = [
        {"worker": rank.worker, "rank": rank.rank, **msgspec.to_builtins(each)}
        for rank, each in statistics.ranks.items()
    ]
    windows = [
        {"source": source, "group": group, "window": _window(window), **msgspec.to_builtins(each)}
        for (source, group, window), each in statistics.windows.items()
    ]
    plain = {name: getattr(statistics, name) for name in statistics.__slots__ if name not in ("ranks", "windows")}
    builtins: dict[str, Any] = msgspec.to_builtins(plain, str_keys=True)
    return {**builtins, "ranks": ranks, "windows": windows}


def _lines(statistics: RecordingStatistics) -> Iterator[str]:
    began = datetime.fromtimestamp(statistics.first_wall_ns * 1e-9, UTC).isoformat(timespec="seconds")
    rate = short_number(statistics.num_events / max(statistics.duration_s, 1e-9))
    yield f"{statistics.num_messages} messages with {statistics.num_events} events, {rate} events a second"
    yield f"{statistics.duration_s:.1f} s from {began}, in {statistics.num_sessions} sessions"
    yield ""
    yield "sources"
    for source in statistics.sources:
        yield from _source_lines(source)
    yield ""
    yield from _rank_lines(statistics)
    if statistics.windows:
        yield ""
        yield "window groups                   stored events       blocks      removed"
        for (source_name, group, window), each in statistics.windows.items():
            name = f"{source_name} group {'-' if group is None else group} window {_window(window)}"
            counts = (each.num_stored_events, each.num_stored_blocks, each.num_removed_blocks)
            yield f"  {name:<28} {counts[0]:>14} {counts[1]:>12} {counts[2]:>12}"
    yield ""
    yield from _block_lines(statistics)


def _source_lines(source: SourceStatistics) -> Iterator[str]:
    kind = "canonical" if source.is_canonical else "an engine's own"
    sizes = ", ".join(map(str, source.block_sizes)) or "unknown"
    yield f"  {source.name} ({source.url or 'no URL'}): {kind}, block size {sizes}"
    yield (
        f"    {source.num_messages} messages, {source.num_bytes} bytes, "
        f"{source.num_gaps} gaps ({source.num_missing} messages missing), {source.num_duplicates} duplicates, "
        f"{source.num_restarts} restarts, {source.num_snapshots} snapshots"
    )
    yield (
        f"    {source.num_malformed} malformed messages, {source.num_malformed_events} malformed events, "
        f"{source.num_ignored_events} ignored events"
        + ("" if source.is_from_start else "; recorded from amid the stream: what was stored before is not known")
    )


def _rank_lines(statistics: RecordingStatistics) -> Iterator[str]:
    names = ("before", "stored", "again", "in vain", "removed", "in vain", "cleared", "live", "peak", "heartbeats")
    yield f"{'ranks (blocks)':<24}" + "".join(f"{name:>11}" for name in names)
    for rank, each in list(statistics.ranks.items())[:_MAX_RANKS_SHOWN]:
        yield f"  {f'{rank.worker}/{rank.rank}':<22}" + "".join(f"{cell:>11}" for cell in _cells(each))
    if len(statistics.ranks) > _MAX_RANKS_SHOWN:
        yield f"  and {len(statistics.ranks) - _MAX_RANKS_SHOWN} more ranks"


def _cells(rank: RankStatistics) -> list[object]:
    num_heartbeats = rank.num_heartbeats_agreeing + rank.num_heartbeats_differing
    heartbeats = f"{rank.num_heartbeats_agreeing}/{num_heartbeats} ok" if num_heartbeats else "-"
    counts = (rank.num_restored, rank.num_stored, rank.num_stored_again, rank.num_stored_in_vain, rank.num_removed)
    return [*counts, rank.num_removed_in_vain, rank.num_cleared, rank.num_live, rank.num_live_peak, heartbeats]


def _block_lines(statistics: RecordingStatistics) -> Iterator[str]:
    live = statistics.num_live_distinct
    shared = sum(count for holders, count in statistics.holders.items() if holders > 1)
    yield f"blocks: {statistics.num_distinct} distinct, {live} of them live at the end"
    yield f"  held by more than one rank: {shared} ({100 * shared / (live or 1):.1f} %)"
    yield f"  ranks that hold a live block:  {_histogram(statistics.holders)}"
    yield f"  depth in the chain, from:      {_histogram(statistics.depths)}"
    yield f"  lifetime until removed, from:  {_histogram(statistics.lifetimes_s, ' s')}"
    stored = sum(rank.num_stored for rank in statistics.ranks.values())
    again = sum(rank.num_stored_again for rank in statistics.ranks.values())
    yield f"  stored again after removal:    {again} of {stored} ({100 * again / (stored or 1):.1f} %)"
    if statistics.num_parents_unknown:
        yield f"  chains behind a parent that was never recorded: {statistics.num_parents_unknown}"


def _histogram(counts: Mapping[int, int] | Mapping[float, int], unit: str = "") -> str:
    return "  ".join(f"{key:g}{unit}: {count}" for key, count in counts.items()) or "none"


def _window(window: Window) -> str | int:
    return window.value if isinstance(window, UnsizedWindow) else window
