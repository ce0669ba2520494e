"""Does a decode step cost only what its window holds, and how close do the kernels come to the device's limits?

On any machine: the pages that one decode step, and one chunk of 256 tokens, read of each of four growing sequences, and
the CPU time of the torch references, with a window of 1024 and without. The tables hold no other pages, so no others
can be read. Bound by memory traffic; the baseline is the same op over the whole sequence. CPU seconds, best of several
rounds over all lengths.

On a GPU: decode, and suffixes of up to 128 tokens after a long history, as a fraction of the bandwidth of a device
copy; longer prefills as a fraction of a bf16 matrix product of 8192 cubed; all measured in the same run, beside SDPA,
FlexAttention and FlashInfer where available (`_attention_peers.py` says how they are called). Medians of 25 replays of
a graph, each after a flush of L2: what the device takes, without the launch by Python. Without a CUDA device this half
says "not run".

    python benchmarks/bench_paged_attention.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import torch
from _attention_peers import PEERS, UNAVAILABLE, Problem
from _common import report, table

from kvist.kernels import paged_attention

BLOCK_SIZE = 16


class Heads(NamedTuple):
    """Query heads, kv heads and their width."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = Heads(32, 8, 128)
GEMMA_SLIDING, GEMMA_FULL = Heads(16, 8, 256), Heads(16, 2, 512)
SMALL = Heads(8, 2, 64)  # what a CPU reads in milliseconds


def make_problem(
    device: str,
    heads: Heads,
    batch: int,
    seq_len: int,
    num_new: int,
    window: int | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Problem:
    """Return a batch over shuffled pages; dtypes of the queries and of the cache."""
    num_pages = seq_len // BLOCK_SIZE
    shape = (batch * num_pages, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    kv_cache = torch.randn(shape, dtype=dtypes[0], device=device).to(dtypes[1])
    tables = torch.randperm(batch * num_pages, device=device).int().view(batch, num_pages)
    lengths = torch.full((batch,), seq_len, dtype=torch.int32, device=device)
    query = torch.randn(batch * num_new, heads.num_heads, heads.head_dim, dtype=dtypes[0], device=device)
    return Problem(heads.num_heads, num_new, window, kv_cache, tables, lengths, query)


def attend(problem: Problem, page_offsets: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """Return one call of our op for the problem."""
    options: dict[str, Any] = {"scale": problem.scale, "window": problem.window, "page_offsets": page_offsets}
    starts = None if problem.num_new == 1 else problem.starts()
    inputs = (problem.query, problem.kv_cache, problem.block_tables, problem.seq_lens, starts)
    return lambda: paged_attention(*inputs, **options)


def evicted(problem: Problem) -> tuple[Problem, torch.Tensor]:
    """Return the problem over tables that hold only the pages its window reaches, and the pages they lack."""
    first_query = problem.seq_len - problem.num_new
    gone = 0 if problem.window is None else max(0, first_query - problem.window + 1) // BLOCK_SIZE
    tables = problem.block_tables[:, gone:].contiguous()
    fields = (problem.num_heads, problem.num_new, problem.window, problem.kv_cache, tables)
    return Problem(*fields, problem.seq_lens, problem.query), torch.full_like(problem.seq_lens, gone)


def growth(op: str, lengths: Sequence[int], num_rounds: int) -> list[dict[str, Any]]:
    """CPU time and pages read of our op over growing sequences, windowed and full, in alternating rounds."""
    num_new = 1 if op == "decode" else 256
    rows, calls = [], []
    for seq_len in lengths:
        for window in (1024, None):
            problem = make_problem("cpu", SMALL, 4, seq_len, num_new, window, (torch.float32, torch.float32))
            local, offsets = evicted(problem)
            num_pages = local.block_tables.shape[1]
            size_bytes = num_pages * problem.kv_cache[0].nbytes
            rows.append({"op": op, "tokens": seq_len, "window": window, "pages": num_pages, "kv_bytes": size_bytes})
            calls.append(attend(local, offsets))
    for _ in range(num_rounds):
        for row, call in zip(rows, calls, strict=True):
            start = process_time()
            call()
            row["cpu_ms"] = min((process_time() - start) * 1e3, row.get("cpu_ms", float("inf")))
    return rows


def growth_table(rows: list[dict[str, Any]]) -> str:
    """Each length against the shortest one, with the window and without."""
    lines = []
    for windowed, full in zip(rows[::2], rows[1::2], strict=True):
        cells = [windowed["op"], f"{windowed['tokens']:,}"]
        for row, base in ((windowed, rows[0]), (full, rows[1])):
            ratio = row["cpu_ms"] / base["cpu_ms"]
            cells += [f"{row['pages']:,}", f"{row['kv_bytes'] / 2**10:,.0f}", f"{row['cpu_ms']:.2f}", f"{ratio:.1f}"]
        lines.append(cells)
    kinds = [f"{kind} {what}" for kind in ("window:", "full:") for what in ("pages", "KiB", "CPU ms", "x shortest")]
    return table(["op", "tokens", *kinds], lines)


def median_us(function: Callable[[], object]) -> float:
    """Return the median time of a call on the device, replayed as a graph after what it reads has left the L2 cache."""
    function()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    flushed = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flushed.zero_()  # longer than the launch of what follows takes, which so waits for nothing
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * median(float(start.elapsed_time(end)) for start, end in times)


def ceilings() -> dict[str, float]:
    """Bytes read and written by a device copy, and operations of a bf16 matrix product, each a second."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy_us = median_us(lambda: torch.neg(source, out=target))  # a graph's own copies are slower than a kernel's
    left, right = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    matmul_us = median_us(lambda: left @ right)
    return {"copy_gb_s": 2 * source.nbytes / copy_us / 1e3, "matmul_tflop_s": 2 * 8192**3 / matmul_us / 1e6}


BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# heads, batch, tokens, new tokens, window, dtype of the cache
QUICK = [
    (LLAMA_8B, 16, 8192, 1, None, BF16),
    (LLAMA_8B, 16, 8192, 1, 1024, BF16),
    *((LLAMA_8B, 1, 32768, num_new, None, BF16) for num_new in (1, 2, 8, 32, 128)),
    (LLAMA_8B, 1, 8192, 8192, None, BF16),
    (LLAMA_8B, 1, 8192, 8192, 1024, BF16),
]
FULL = [
    *QUICK,
    *((heads, 8, 8192, num_new, None, BF16) for heads in (LLAMA_8B, GEMMA_FULL) for num_new in (2, 16, 64, 128, 256)),
    *((LLAMA_8B, batch, seq_len, 1, None, BF16) for batch, seq_len in ((16, 32768), (64, 8192))),
    *((LLAMA_8B, 16, 8192, 1, None, dtype) for dtype in (E4M3, E5M2)),
    (LLAMA_8B, 16, 32768, 1, 1024, BF16),
    (GEMMA_SLIDING, 16, 8192, 1, 1024, BF16),
    (GEMMA_FULL, 16, 8192, 1, None, BF16),
    (LLAMA_8B, 4, 2048, 2048, None, BF16),
    (LLAMA_8B, 1, 8192, 512, None, BF16),
    (LLAMA_8B, 1, 8192, 8192, None, E4M3),
    (GEMMA_SLIDING, 1, 8192, 8192, 1024, BF16),
    (GEMMA_FULL, 1, 8192, 8192, None, BF16),
]


MAX_SUFFIX = 128  # new tokens up to which reading the history bounds


def work(problem: Problem) -> float:
    """Bytes of the keys and values that a suffix must read, or operations that prefill must do."""
    width = min(problem.seq_len, problem.window or problem.seq_len)
    head_dim = problem.kv_cache.shape[4]
    if problem.num_new <= MAX_SUFFIX:
        width = min(problem.seq_len, width + problem.num_new - 1)
        return problem.batch * width * 2 * problem.kv_cache.shape[2] * head_dim * problem.kv_cache.itemsize
    pairs = sum(min(position + 1, width) for position in range(problem.seq_len - problem.num_new, problem.seq_len))
    return 4 * problem.batch * problem.num_heads * head_dim * pairs


def on_device(case: tuple[Heads, int, int, int, int | None, torch.dtype], limits: dict[str, float]) -> dict[str, Any]:
    """Time our op and its peers on one problem."""
    heads, batch, seq_len, num_new, window, cache_dtype = case
    problem = make_problem("cuda", heads, batch, seq_len, num_new, window, (BF16, cache_dtype))
    us = median_us(attend(problem))
    unit, limit, per_unit = "GB/s", limits["copy_gb_s"], 1e3
    if num_new > MAX_SUFFIX:
        unit, limit, per_unit = "TFLOP/s", limits["matmul_tflop_s"], 1e6
    rate = work(problem) / us / per_unit
    peers: dict[str, float | str] = {}
    for name, peer in PEERS.items():
        try:
            peers[name] = median_us(peer(problem))
        except UNAVAILABLE as error:  # Not installed, or a shape that it does not take: the table says which.
            peers[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    names = ("heads", "batch", "tokens", "new_tokens", "window")
    facts = {"cache": str(cache_dtype).removeprefix("torch."), "us": us, "rate": rate, "unit": unit}
    return dict(zip(names, case, strict=False)) | facts | {"of_ceiling": rate / limit, "peers_us": peers}


def device_table(results: list[dict[str, Any]]) -> str:
    """One line a case; a peer's cell is its time over ours, or a dash."""
    lines = []
    for row in results:
        cells = ["/".join(map(str, row["heads"])), row["batch"], row["tokens"], row["new_tokens"]]
        cells += [row["window"] or "full", row["cache"], f"{row['us']:.1f}", f"{row['rate']:.0f} {row['unit']}"]
        cells.append(f"{row['of_ceiling']:.0%}")
        cells += [f"{us / row['us']:.2f}" if isinstance(us, float) else "-" for us in row["peers_us"].values()]
        lines.append(cells)
    headers = ["heads/kv/dim", "batch", "tokens", "new", "window", "cache", "µs", "rate", "of ceiling"]
    return table([*headers, *(f"{name} / ours" for name in PEERS)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths and cases")
    parser.add_argument("--save", action="store_true", help="also write the output below benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths, num_rounds = ((1024, 8192), 5) if arguments.quick else ((1024, 2048, 4096, 8192, 16384, 32768), 8)
    results: dict[str, Any] = {"growth": [], "gpu": "not run: no CUDA device"}
    parts, packages = [], ["torch", "numpy"]
    for op in ("decode", "prefill"):
        results["growth"] += growth(op, lengths, num_rounds)
        parts.append(growth_table(results["growth"][-2 * len(lengths) :]))
    if torch.cuda.is_available():
        packages.append("triton")
        limits = ceilings()
        cases = [on_device(case, limits) for case in (QUICK if arguments.quick else FULL)]
        results["gpu"] = {"device": torch.cuda.get_device_name(), **limits, "cases": cases}
        facts = ", ".join(f"{name} {value:.0f}" for name, value in limits.items())
        parts.append(f"{torch.cuda.get_device_name()}: {facts}\n\n{device_table(cases)}")
    else:
        parts.append("GPU: not run: no CUDA device")
    report("bench_paged_attention", "\n\n".join(parts), results, packages, arguments.save)


if __name__ == "__main__":
    main()
