"""How soon does an index service answer after its start, and how do its figures change as the fleet grows?

The start is bound by compiling with a cold cache, and by importing with a warm one. With growth, CPU a message should
not change except by the processor's caches. Memory a block is bound by the table's rows and, for engines' own streams,
by the map from engine hashes to blocks; a dump by reading the table in passes, a restore by applying it. Baseline:
`dynamo.indexer` of ai-dynamo-runtime 1.6.1.

Every worker has its own stream of vLLM events, 8 new blocks of 16 tokens a message, sent as fast as they are received.
"canonical" is `kvist index` again, on what Kvist's publisher makes of the same events, 8 messages a batch. Then prompts
of 2,048 tokens are queried, each once, single events are waited for, a dump is read, and another service started from
one. Memory is the process's growth since it answered queries; for a dump, its additional memory.

    python benchmarks/bench_index_service.py [--quick] [--save] [--only start growth large]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import best_and_spread, report, table
from _engines import Probe
from _fleet import Dump, Fleet, quantile, query_times_ms
from _indexers import CANONICAL, SIDES, Indexer, held_by, query_of

from kvist.charts import Chart, svg_document

RESULTS = Path(__file__).parent / "results"
NUM_BLOCKS, NUM_WORKERS, FACTORS = 250_000, 16, (1, 4, 16)
LARGE_NUM_BLOCKS = 10_000_000
PEERS_LARGEST_DUMP = 1_000_000
"""Blocks. Extrapolated from it, the peer's dump of four million would take about 20 s and 6 GB of memory."""
CHANGES_A_SECOND = 500
"""Messages of 8 blocks during a dump: each segment of the table has changed within a second."""

Figures = dict[str, dict[str, float]]
FIGURES = {
    "cpu_us_a_message": "CPU µs a message of 8 blocks",
    "query_p50_ms": "query of 2,048 tokens, p50 ms",
    "query_p99_ms": "p99 ms",
    "visible_p50_ms": "an event visible after, p50 ms",
    "memory_bytes_a_block": "memory, bytes a block",
    "peak_bytes_a_block": "peak memory, bytes a block",
    "start_s": "start with a warm cache, s",
    "dump_s": "dump, s",
    "restore_s": "start from a dump, s",
}


def start_times(num_starts: int) -> list[list[str]]:
    """Return the seconds until queries are answered and the memory then, with a cold and a warm compile cache."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        environments = {
            "kvist, cold cache": ("kvist", {"NUMBA_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}, 1),
            "kvist, warm cache": ("kvist", {"NUMBA_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}, num_starts),
            "peer": ("peer", {}, num_starts),
        }
        for name, (side, environment, number) in environments.items():
            seconds, sizes = [], []
            for _ in range(number):
                indexer = Indexer(side, {1: "tcp://127.0.0.1:9"}, environment)
                seconds.append(indexer.start_s)
                sizes.append(indexer.memory_bytes()[0] / 1e6)
                indexer.close()
            least, median, most = best_and_spread(seconds)
            rows.append([name, f"{median:.2f} ({least:.2f}–{most:.2f})", f"{best_and_spread(sizes)[1]:.0f}"])
    return rows


def figures_of(fleet: Fleet, cpu_us: dict[str, float], prompts: list[Probe]) -> Figures:
    """Return all figures of a fleet by side, as far as they are measured for it."""
    figures: Figures = {name: {} for name in (*FIGURES, "restored_right")}
    figures["cpu_us_a_message"] = cpu_us
    requests = [query_of(prompt.token_ids) for prompt in prompts]
    for side in fleet.indexers:
        figures["memory_bytes_a_block"][side], figures["peak_bytes_a_block"][side] = fleet.bytes_a_block(side)
    for side, indexer in fleet.indexers.items():
        if side in SIDES:
            times_ms = query_times_ms(indexer, requests)
            figures["query_p50_ms"][side], figures["query_p99_ms"][side] = (
                quantile(times_ms, 0.5),
                quantile(times_ms, 0.99),
            )
        figures["visible_p50_ms"][side] = quantile(fleet.visible_ms(side, 40), 0.5)
        figures["start_s"][side] = indexer.start_s
    for side in SIDES:
        if side == "kvist" or fleet.num_blocks <= PEERS_LARGEST_DUMP:
            figures["dump_s"][side] = fleet.dump(side).seconds
            with fleet.restored(side) as restored:
                figures["restore_s"][side] = restored.start_s
                is_right = [held_by(restored.ask(each.token_ids), each.stream_idx) == each.num_held for each in prompts]
                figures["restored_right"][side] = sum(is_right) / len(is_right)
    return figures


def grow(num_blocks: int, num_workers: int, num_queries: int) -> tuple[Figures, int]:
    """Feed all sides so many blocks of so many workers; return the figures, and how many of 100 answers differ."""
    with ExitStack() as stack:
        fleet = Fleet(stack, num_workers, has_canonical=True)
        cpu_us = fleet.fill(num_blocks)
        prompts = fleet.publisher.call("whole_prompts", num_queries)
        num_wrong = fleet.num_wrong(prompts[:100])
        return figures_of(fleet, cpu_us, prompts), num_wrong


def growth(quick: bool, save: bool) -> tuple[str, dict[str, Any]]:
    """Return the table and the figures at each size; with `save` draw them."""
    num_blocks = NUM_BLOCKS // (4 if quick else 1)
    sizes = {("blocks", factor): (num_blocks * factor, NUM_WORKERS) for factor in FACTORS}
    sizes |= {("workers", factor): (num_blocks * 4, NUM_WORKERS * factor) for factor in FACTORS}
    measured = {size: grow(*size, 100 if quick else 500) for size in dict.fromkeys(sizes.values())}
    sides = (*SIDES, CANONICAL)
    rows = []
    for (blocks, workers), (figures, num_wrong) in measured.items():
        cells = [
            " / ".join(f"{figures[name][side]:.3g}" for side in sides if side in figures[name]) for name in FIGURES
        ]
        rights = " / ".join(f"{share:.1%}" for share in figures["restored_right"].values())
        rows.append([f"{blocks:,}", str(workers), *cells, str(num_wrong), rights])
    headers = ["blocks", "workers", *FIGURES.values(), "wrong of 100", "right after a restore"]
    for name, text in FIGURES.items() if save else ():
        series = {
            f"{side}, more {axis}": [
                (factor, measured[size][0][name][side])
                for (of, factor), size in sizes.items()
                if of == axis and side in measured[size][0][name]
            ]
            for side in sides
            for axis in ("blocks", "workers")
        }
        path = RESULTS / f"bench_index_service_{name}.svg"
        x_label = f"times {num_blocks:,} blocks, or times {NUM_WORKERS} workers at {4 * num_blocks:,}"
        measured_series = {label: points for label, points in series.items() if points}
        path.write_text(svg_document(Chart(text, x_label, text, measured_series)))
    text = "Each cell: peer / kvist / canonical, as far as measured.\n\n" + table(headers, rows)
    return text, {f"{blocks} blocks, {workers} workers": r[0] for (blocks, workers), r in measured.items()}


def large(quick: bool) -> tuple[str, dict[str, Any]]:
    """Return whole processes' memory at ten million blocks, and a dump of them while all of the table changes."""
    num_blocks = LARGE_NUM_BLOCKS // (40 if quick else 1)
    with ExitStack() as stack:
        fleet = Fleet(stack, NUM_WORKERS)
        cpu_us = fleet.fill(num_blocks)
        sizes = {side: fleet.bytes_a_block(side) for side in SIDES}
        prompts = fleet.publisher.call("whole_prompts", 200)
        num_wrong = fleet.num_wrong(prompts)
        quiet = fleet.dump("kvist", prompts=prompts)
        control_ms = query_times_under_changes(fleet, prompts, quiet.seconds)
        changing = fleet.dump("kvist", int(quiet.seconds * CHANGES_A_SECOND), quiet.seconds, prompts)
    rows = [
        [side, f"{num_blocks:,}", *(f"{size:.1f}" for size in sizes[side]), f"{cpu_us[side]:.1f}"] for side in SIDES
    ]
    memory = table(["side", "blocks", "bytes a block", "at the peak", "CPU µs a message of 8"], rows)
    dumps = table(
        ["dump", "s", "MB", "extra memory at the peak, MB", "blocks stored meanwhile", "query p50, ms", "longest"],
        [
            dump_row("none, while blocks are stored", Dump(0.0, 0, 0, changing.num_changes, control_ms)),
            dump_row("of a quiet index", quiet),
            dump_row("while every segment changes", changing),
        ],
    )
    wrong = f"{len(prompts) - num_wrong} of {len(prompts)} answers are the engines' blocks and equal."
    facts = {"num_blocks": num_blocks, "bytes_a_block_resting_peak": sizes, "num_wrong": num_wrong}
    facts |= {"quiet_dump": row_facts(quiet), "changing_dump": row_facts(changing)}
    return f"{memory}\n\n{wrong}\n\n{dumps}", facts


def query_times_under_changes(fleet: Fleet, prompts: list[Probe], duration_s: float) -> list[float]:
    """Return the times of queries while an engine stores as much as during a dump, and there is none."""
    fleet.publisher.call("make", int(duration_s * CHANGES_A_SECOND))
    fleet.publisher.begin("paced", "kvist", duration_s)
    requests, times_ms = [query_of(prompt.token_ids[:128]) for prompt in prompts], []
    stop_s = time.monotonic() + duration_s
    while time.monotonic() < stop_s:
        times_ms += query_times_ms(fleet.indexers["kvist"], requests)
        time.sleep(0.005)
    fleet.publisher.result()
    return times_ms


def dump_row(name: str, dump: Dump) -> list[str]:
    """Return a line about a dump, or about a time without one."""
    waits = [f"{quantile(dump.waits_ms, 0.5):.3f}", f"{max(dump.waits_ms):.1f}"] if dump.waits_ms else ["", ""]
    sizes = [f"{dump.size_bytes / 1e6:.0f}", f"{dump.peak_bytes / 1e6:.1f}"] if dump.size_bytes else ["", ""]
    return [name, f"{dump.seconds:.1f}" if dump.size_bytes else "", *sizes, f"{dump.num_changes:,}", *waits]


def row_facts(dump: Dump) -> dict[str, float]:
    """Return what the JSON line says of a dump."""
    facts = {"seconds": dump.seconds, "size_bytes": dump.size_bytes, "peak_extra_bytes": dump.peak_bytes}
    return facts | ({"longest_query_ms": max(dump.waits_ms)} if dump.waits_ms else {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    sections = ("start", "growth", "large")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="some sections")
    args = parser.parse_args()
    parts, results = ["# The index service"], {}
    started_s = time.monotonic()
    if "start" in args.only:
        rows = results["start"] = start_times(2 if args.quick else 5)
        parts.append(f"## Start\n\n{table(['', 's until it answers queries, median (range)', 'MB resident'], rows)}")
    if "growth" in args.only:
        text, results["growth"] = growth(args.quick, args.save)
        parts.append(f"## Growth\n\n{text}")
    if "large" in args.only:
        text, results["large"] = large(args.quick)
        parts.append(f"## A large index, {NUM_WORKERS} workers\n\n{text}")
    facts = {"is_quick": args.quick, "wall_s": round(time.monotonic() - started_s), **results}
    report("bench_index_service", "\n\n".join(parts), facts, ("ai-dynamo-runtime", "numba", "pyzmq"), args.save)


if __name__ == "__main__":
    main()
