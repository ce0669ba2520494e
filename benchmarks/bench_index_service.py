"""How soon does an index service answer after its start, and what do its figures become as the fleet grows?

Start is bound by compiling when the cache is cold, and by importing when it is warm. Growth: CPU a message should not
depend on size but for the processor's caches; memory a block is bound by the table's rows and, for engines' own
streams, by the map from engine hashes to blocks. Baseline: `dynamo.indexer` of ai-dynamo-runtime 1.6.1.

Every worker has its own stream of vLLM events, 8 new blocks of 16 tokens a message, sent as fast as they are taken;
then prompts of 2,048 tokens are asked, each once. Memory is what the process has grown by since its /health answered.

    python benchmarks/bench_index_service.py [--quick] [--save] [--only start growth]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from _common import best_and_spread, report, table
from _engines import StreamSpec
from _indexers import SIDES, Indexer, compare, query_of, start_both
from _plot import svg_lines
from _streams import Publisher

RESULTS = Path(__file__).parent / "results"
NUM_BLOCKS, NUM_WORKERS, FACTORS = 250_000, 16, (1, 4, 16)
NUM_STEPS_A_CHUNK = 40_000


class Grown(NamedTuple):
    """What one side's figures are at one size."""

    cpu_us_a_message: float
    query_p50_ms: float
    memory_bytes_a_block: float
    peak_bytes_a_block: float


FIGURES = {
    "cpu_us_a_message": "CPU µs a message of 8 blocks",
    "query_p50_ms": "query of 2,048 tokens, p50 ms",
    "memory_bytes_a_block": "memory, bytes a block",
    "peak_bytes_a_block": "peak memory, bytes a block",
}


def start_times(num_starts: int) -> list[list[str]]:
    """Return the seconds to /health and the memory then, with a cold and with a warm cache of compiled code."""
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


def grow(num_blocks: int, num_workers: int, num_queries: int) -> tuple[dict[str, Grown], int]:
    """Feed both sides so many blocks of so many workers, in turns; return the figures, and how many answers differ."""
    spec = StreamSpec(8, dict.fromkeys(SIDES, "map"), num_streams=num_workers, num_open=4)
    with Publisher(spec) as publisher, ExitStack() as stack:
        indexers = start_both(stack, publisher.endpoints)
        for side in SIDES:
            publisher.call("await_subscribers", side)
        before = {side: indexer.memory_bytes()[0] for side, indexer in indexers.items()}
        cpu_s = dict.fromkeys(SIDES, 0.0)
        num_messages, num_left = 0, num_blocks // 8
        while num_left > 0:
            num_steps = min(num_left, NUM_STEPS_A_CHUNK)
            probes, sizes = publisher.call("make", num_steps)
            num_messages += int(sizes["kvist"][0])
            num_left -= num_steps
            for side, indexer in indexers.items():
                started_s = indexer.cpu_s()
                publisher.call("burst", side)
                indexer.await_visible(probes)
                cpu_s[side] += indexer.cpu_s() - started_s
        memory = {side: indexer.memory_bytes() for side, indexer in indexers.items()}
        prompts = publisher.call("whole_prompts", num_queries)
        requests = [query_of(prompt.token_ids) for prompt in prompts]
        grown = {
            side: Grown(
                cpu_s[side] / num_messages * 1e6,
                query_p50_ms(indexer, requests),
                (memory[side][0] - before[side]) / num_blocks,
                (memory[side][1] - before[side]) / num_blocks,
            )
            for side, indexer in indexers.items()
        }
        return grown, len(compare(indexers, prompts[:100]))


def query_p50_ms(indexer: Indexer, requests: list[bytes]) -> float:
    """Return the median time of queries, each asked once."""
    times_ms = []
    for request in requests:
        started_s = time.perf_counter()
        indexer.connection.exchange(request)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    return best_and_spread(times_ms)[1]


def growth(quick: bool, save: bool) -> tuple[str, dict[str, Any]]:
    """Return the table and the figures at each size; with `save` draw them."""
    num_blocks = NUM_BLOCKS // (4 if quick else 1)
    sizes = {("blocks", factor): (num_blocks * factor, NUM_WORKERS) for factor in FACTORS}
    sizes |= {("workers", factor): (num_blocks * 4, NUM_WORKERS * factor) for factor in FACTORS}
    measured: dict[tuple[int, int], tuple[dict[str, Grown], int]] = {}
    rows = []
    for size in sizes.values():
        if size in measured:
            continue
        grown, num_wrong = measured[size] = grow(*size, 100 if quick else 500)
        figures = [f"{getattr(grown[side], figure):.3g}" for figure in FIGURES for side in SIDES]
        rows.append([f"{size[0]:,}", str(size[1]), *figures, str(num_wrong)])
    headers = ["blocks", "workers", *(f"{text}: {side}" for text in FIGURES.values() for side in SIDES), "wrong of 100"]
    for figure, text in FIGURES.items() if save else ():
        series = {
            f"{side}, more {axis}": [
                (factor, getattr(measured[size][0][side], figure)) for (a, factor), size in sizes.items() if a == axis
            ]
            for side in SIDES
            for axis in ("blocks", "workers")
        }
        path = RESULTS / f"bench_index_service_{figure}.svg"
        svg_lines(path, text, f"times {num_blocks:,} blocks, or times {NUM_WORKERS} workers", text, series)
    facts = {f"{size[0]} blocks, {size[1]} workers": result for size, result in measured.items()}
    return table(headers, rows), {
        name: {side: one._asdict() for side, one in r[0].items()} for name, r in facts.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look")
    parser.add_argument("--save", action="store_true", help="write below benchmarks/results")
    parser.add_argument("--only", nargs="+", choices=("start", "growth"), default=("start", "growth"))
    args = parser.parse_args()
    parts, results = ["# The index service"], {}
    started_s = time.monotonic()
    if "start" in args.only:
        rows = results["start"] = start_times(2 if args.quick else 5)
        parts.append(f"## Start\n\n{table(['', 's to /health, median (range)', 'MB resident'], rows)}")
    if "growth" in args.only:
        text, results["growth"] = growth(args.quick, args.save)
        parts.append(f"## Growth\n\n{text}")
    facts = {"is_quick": args.quick, "wall_s": round(time.monotonic() - started_s), **results}
    report("bench_index_service", "\n\n".join(parts), facts, ("ai-dynamo-runtime", "numba", "pyzmq"), args.save)


if __name__ == "__main__":
    main()
