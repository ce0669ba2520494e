"""How fast, how small and how even is the index, compared with the RadixTree of ai-dynamo-runtime in the same run?

Bottlenecks: of a hot match instructions per block and the call from Python, of a cold one how many cache misses the
processor can have in flight at once; of applying the encoding of events when they are short, cache misses, page faults
and growth when they are long; of memory rows of 16 bytes in segments at most 0.72 full. The baseline is compiled Rust,
called through its Python API: a list of ints to match, one event as JSON bytes to apply. Its scores can only be read as
a dict, so a match is timed with its answer read on both sides (ours: the arrays that a policy reads), and once more
without. Answers are checked to be equal. Repetitions alternate. CPU time includes the baseline's own thread, and does
not depend on what else the machine runs.

    python benchmarks/bench_index.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np
from _common import report, table
from _index_loads import (
    COMPARISON,
    NUM_WORKERS,
    QUERY_BLOCKS,
    RANKS,
    Both,
    Row,
    Step,
    compare,
    hashes_of,
    peer_event,
    removal_heavy,
    row_of,
    run_steps,
    shared_prefixes,
)
from _index_memory import MIXES, PEER, bench_memory
from dynamo.llm import RadixTree

from kvist.charts import Chart, svg_document
from kvist.events import Removed, Stored, Tier
from kvist.radix import RadixIndex

Loads = Callable[[int, np.random.Generator], Iterator[Step]]
STEPS: dict[str, Loads] = {
    "removals: full caches, chains of 32 in and out, 64 workers": removal_heavy,
    "shared prefixes: 10 of 200 blocks, chats, 128 workers": shared_prefixes,
}
SCALES = (1, 4, 16)


def bench_match(quick: bool) -> list[Row]:
    """Match 1,000 blocks: hot, held by 256 workers, and cold, in a table that no cache holds."""
    rng, both = np.random.default_rng(1), Both()
    num_chains = 400 if quick else 10_000
    same, stairs = hashes_of(rng, 2, QUERY_BLOCKS)
    chains = hashes_of(rng, num_chains, QUERY_BLOCKS)
    depths = (rng.permutation(NUM_WORKERS) + 1) * (QUERY_BLOCKS // NUM_WORKERS)
    for worker in range(NUM_WORKERS):
        both.store([worker], None, same)
        both.store([worker], None, stairs[: depths[worker]])
    both.grow_chains(chains, lambda number: [number % NUM_WORKERS, (number * 7 + 1) % NUM_WORKERS])
    num_reps = 5 if quick else 9
    cold = f"cold, {num_chains * QUERY_BLOCKS:,} blocks in events of 8, 2 workers a chain, answer read"
    return [
        both.compare("hot, 256 workers, one depth, answer read", [same], 200, num_reps),
        both.compare("hot, 256 workers, 250 depths, answer read", [stairs], 200, num_reps),
        both.compare("hot, one depth, call only", [same], 200, num_reps, is_read=False),
        both.compare("hot, 250 depths, call only", [stairs], 200, num_reps, is_read=False),
        both.compare(cold, chains[rng.permutation(num_chains)], min(500, num_chains // num_reps), num_reps),
    ]


def bench_steps(quick: bool) -> list[Row]:
    """Apply a message, then match, in loads that change what is asked for."""
    rows = []
    for name, load in STEPS.items():
        steps = list(load(1_000 if quick else 6_000, np.random.default_rng(1)))
        rows.append(row_of(name, [run_steps(steps, 200) for _ in range(3 if quick else 5)]))
    return rows


def bench_growth(quick: bool) -> list[Row]:
    """Match in an index of 1, 4 and 16 times the blocks and workers, and tell it of more."""
    rows: list[Row] = []
    base = 20_000 if quick else 100_000
    for scale in SCALES:
        rng, both, num_workers = np.random.default_rng(scale), Both(), 64 * scale
        shared, chains = hashes_of(rng, QUERY_BLOCKS), hashes_of(rng, base * scale // 200, 200)
        for worker in range(num_workers):
            both.store([worker], None, shared[: int(rng.integers(1, QUERY_BLOCKS))])
        holders = rng.integers(0, num_workers, (len(chains), 2)).tolist()
        both.grow_chains(chains, holders.__getitem__)
        size = f"{base * scale:,} blocks, {num_workers:,} workers"
        queries, num_reps = chains[rng.permutation(len(chains))], 5
        own_events = iter([[Stored(each.tobytes())] for each in hashes_of(rng, num_reps * 200, 8)])
        peer_events = iter([peer_event(None, each) for each in hashes_of(rng, num_reps * 200, 8).tolist()])
        apply = partial(_call_next, partial(both.index.apply, RANKS[0]), own_events)
        peer_apply = partial(_call_next, partial(both.tree.apply_event, 0), peer_events)
        rows += [
            both.compare(f"{size}: match, shared prefix of 1,000", [shared], 100, num_reps),
            both.compare(f"{size}: cold match, a chain of 200", queries, min(200, len(queries)), num_reps),
            compare(f"{size}: apply, 8 blocks", apply, peer_apply, 200, num_reps),
        ]
    return rows


def _call_next(function: Callable[[Any], object], arguments: Iterator[Any]) -> object:
    return function(next(arguments))


def plot_growth(rows: list[Row], path: Path) -> None:
    """Draw the CPU times of matches over the scale, both sides."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows):
        what = str(row[0]).partition(": ")[2]
        for side, column in (("kvist", 2), ("RadixTree", 4)):
            points = series.setdefault(f"{side}: {what}", [])
            points.append((SCALES[number // (len(rows) // len(SCALES))], float(str(row[column]))))
    chart = Chart("Growth", "times the blocks and the workers", "µs of CPU a call", series, log_y=True)
    path.write_text(svg_document(chart))


def timed_loop(function: Callable[..., object], *columns: Any) -> tuple[float, float]:
    """Return the seconds of calling a function along columns of arguments: on the wall, and of CPU."""
    gc.collect()
    wall, cpu = perf_counter(), process_time()
    for arguments in zip(*columns, strict=True):
        function(*arguments)
    return perf_counter() - wall, process_time() - cpu


def bench_apply(quick: bool) -> list[Row]:
    """Store events of 1, 8 and 64 new blocks, in an index that grows from nothing."""
    rows: list[Row] = []
    num_blocks = 40_000 if quick else 1_000_000
    for length in (1, 8, 64):
        num_events = min(num_blocks // length, 200_000)
        times: dict[str, list[Any]] = {}
        for repetition in range(3 if quick else 5):
            chains = hashes_of(np.random.default_rng(repetition), num_events, length)
            events = [Stored(chain.tobytes()) for chain in chains]
            batches = [events[first : first + 32] for first in range(0, num_events, 32)]
            growing, single, tree = RadixIndex(), RadixIndex(), RadixTree()
            peer_events = [peer_event(None, chain.tolist()) for chain in chains]
            peer = timed_loop(tree.apply_event, repeat(0, num_events), peer_events)
            del peer_events
            of_rank = repeat(RANKS[0], len(batches))
            root = [repeat(each, num_events) for each in (RANKS[0], Tier.GPU, None)]
            for name, seconds in (
                ("apply, 32 events a call", timed_loop(growing.apply, of_rank, batches)),
                ("store, one event a call", timed_loop(single.store, *root, list(chains))),
            ):
                scale = 1e9 / (num_events * length)
                pair = tuple((wall * scale, cpu * scale) for wall, cpu in (seconds, peer))
                times.setdefault(f"{length} block{'s' * (length > 1)}: {name}", []).append(pair)
        rows += [row_of(name, pairs) for name, pairs in times.items()]
    return rows


def bench_pauses(quick: bool) -> list[Row]:
    """Time every call while an index grows to ten million blocks, changes, and is emptied; without garbage collection.

    The longest wall time includes whatever else the machine ran; the CPU time is the call's own.
    """
    rng = np.random.default_rng(1)
    num_events = (300_000 if quick else 10_000_000) // 8
    chains = hashes_of(rng, num_events, 8)
    index = RadixIndex()
    calls: dict[str, list[tuple[float, float]]] = {}
    gc.collect()
    gc.disable()

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        wall, cpu = perf_counter(), thread_time()
        result = function(*arguments)
        calls.setdefault(name, []).append((thread_time() - cpu, perf_counter() - wall))
        return result

    for number, chain in enumerate(chains):
        timed("store 8 blocks, growing", index.store, RANKS[number % NUM_WORKERS], Tier.GPU, None, chain)
    snapshot = timed("begin a snapshot", index.snapshot)
    for number, chain in enumerate(chains[: 4 * QUERY_BLOCKS]):
        timed("store on a second worker, copying for a snapshot", index.store, RANKS[999], Tier.GPU, None, chain)
        if number % 4 == 0:
            timed("next chunk of a snapshot", next, snapshot, None)
    while timed("next chunk of a snapshot", next, snapshot, None) is not None:
        pass
    for number in range(0, num_events, 64):
        batch = [Removed(chains[i].tobytes()) for i in range(number, min(number + 32, num_events))]
        timed("apply, 32 removals of 8", index.apply, RANKS[number % NUM_WORKERS], batch)
        timed("match 8 blocks", index.match, chains[number])
    for number in range(num_events // 10):
        timed("store on a second worker", index.store, RANKS[1000 + number % 999], Tier.GPU, None, chains[number])
    for worker in range(0, NUM_WORKERS, 2):
        timed("remove_worker", index.remove_worker, RANKS[worker].worker)
    while timed("sweep(50_000)", index.sweep):
        pass
    for source in index.ranks():
        timed("remove_worker", index.remove_worker, source.worker)
    while timed("sweep(50_000)", index.sweep):
        pass
    assert index.statistics().num_blocks == 0
    rows: list[Row] = []
    for name, seconds in calls.items():
        cpu, wall = np.array(seconds).T * 1e3
        high, median = np.quantile(cpu, 0.9999), np.median(cpu)
        rows.append([name, f"{len(cpu):,}", f"{median:.4f}", f"{high:.3f}", f"{cpu.max():.2f}", f"{wall.max():.2f}"])
    return rows


SECTIONS: dict[str, tuple[str, list[str], Callable[[bool], list[Row]]]] = {
    "match": (
        "Match of 1,000 blocks, µs a call",
        COMPARISON,
        bench_match,
    ),
    "steps": ("A message applied, then a match of its conversation or another, µs for both", COMPARISON, bench_steps),
    "growth": ("Growth, µs a call", COMPARISON, bench_growth),
    "apply": (
        "Stored events of new blocks, ns a block",
        COMPARISON,
        bench_apply,
    ),
    "memory": (
        "Memory, bytes a block",
        ["mix", "blocks", "held", "sets", "own, resting", "own, peak", "resident, resting", "resident, peak"],
        lambda quick: [row for mix in (*MIXES, PEER) for row in in_process("memory", quick, mix)],
    ),
    "pauses": (
        "Time of single calls, ms",
        ["call", "calls", "CPU, median", "CPU, 99.99th percentile", "CPU, longest", "wall, longest"],
        bench_pauses,
    ),
}


def in_process(section: str, quick: bool, mix: str = "") -> list[Row]:
    """Run a section in a process of its own, so that none inherits another's memory."""
    command = [sys.executable, __file__, "--section", section, "--mix", mix, *(["--quick"] if quick else [])]
    rows: list[Row] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return rows


def main() -> None:
    """Run all sections, or print one as JSON for the process that asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--mix", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        is_mix = options.section == "memory" and options.mix
        print(
            json.dumps(
                bench_memory(options.mix, options.quick) if is_mix else SECTIONS[options.section][2](options.quick)
            )
        )
        return
    start = perf_counter()
    results = {name: in_process(name, options.quick) for name in SECTIONS}
    parts = [f"## {title}\n\n{table(headers, results[name])}" for name, (title, headers, _) in SECTIONS.items()]
    facts = {"is_quick": options.quick, "wall_s": round(perf_counter() - start), "rows": results}
    if options.save:
        plot_growth(results["growth"], Path(__file__).parent / "results" / "bench_index_growth.svg")
    packages = ("numpy", "numba", "ai-dynamo-runtime")
    report("bench_index", "\n\n".join(["# The index", *parts]), facts, packages, options.save)


if __name__ == "__main__":
    main()
