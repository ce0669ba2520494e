"""What does paging cost: how close do paged_decode and paged_prefill come to torch's SDPA on contiguous keys?

Decode is bound by memory bandwidth (it reads the window's keys and values once), prefill by the tensor cores.
Baseline: `scaled_dot_product_attention` over the visible keys laid out contiguously, with the backend that torch picks;
it follows no block table, so it is a ceiling. A window has no SDPA of its own: decode gets the window's keys alone,
prefill the whole causal square, as it would run without a windowed kernel. Medians of triton's do_bench, which flushes
L2.
Needs a CUDA device; exits with 2 where there is none.

    python benchmarks/bench_paged_attention.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvist.kernels import paged_decode, paged_prefill

# Llama 3 8B: 32 query heads over 8 kv heads of 128.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16


def paged_cache(batch: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a filled cache, its shuffled block tables and the lengths."""
    num_pages = -(-seq_len // BLOCK_SIZE)
    shape = (batch * num_pages, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    tables = torch.randperm(batch * num_pages, device="cuda").int().view(batch, num_pages)
    lengths = torch.full((batch,), seq_len, dtype=torch.int32, device="cuda")
    return torch.randn(shape, dtype=DTYPE, device="cuda"), tables, lengths


def contiguous(batch: int, num_heads: int, num_tokens: int) -> torch.Tensor:
    return torch.randn(batch, num_heads, num_tokens, HEAD_DIM, dtype=DTYPE, device="cuda")


def median_us(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return 1e3 * float(do_bench(function, return_mode="median"))


def bench_decode(batch: int, seq_len: int, window: int | None) -> dict[str, Any]:
    """One step of a decode batch; `rate` in GB/s of keys and values."""
    kv_cache, tables, lengths = paged_cache(batch, seq_len)
    query = torch.randn(batch, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    num_keys = min(seq_len, window or seq_len)
    key, value = contiguous(batch, NUM_KV_HEADS, num_keys), contiguous(batch, NUM_KV_HEADS, num_keys)
    dense_query = query[:, :, None]
    ours_us = median_us(lambda: paged_decode(query, kv_cache, tables, lengths, scale=SCALE, window=window))
    sdpa_us = median_us(lambda: scaled_dot_product_attention(dense_query, key, value, scale=SCALE, enable_gqa=True))
    size_bytes = key.nbytes + value.nbytes
    return {"us": ours_us, "sdpa_us": sdpa_us, "rate": size_bytes / ours_us / 1e3, "unit": "GB/s"}


def bench_prefill(batch: int, seq_len: int, window: int | None) -> dict[str, Any]:
    """A batch of whole prompts; `rate` in TFLOP/s of the visible (query, key) pairs."""
    kv_cache, tables, lengths = paged_cache(batch, seq_len)
    query = torch.randn(batch * seq_len, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    starts = torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device="cuda")
    dense_query = contiguous(batch, NUM_HEADS, seq_len)
    key, value = contiguous(batch, NUM_KV_HEADS, seq_len), contiguous(batch, NUM_KV_HEADS, seq_len)
    ours_us = median_us(lambda: paged_prefill(query, kv_cache, tables, starts, lengths, scale=SCALE, window=window))
    sdpa_us = median_us(
        lambda: scaled_dot_product_attention(dense_query, key, value, scale=SCALE, is_causal=True, enable_gqa=True)
    )
    width = min(seq_len, window or seq_len)
    num_pairs = batch * NUM_HEADS * (seq_len * width - width * (width - 1) // 2)
    return {"us": ours_us, "sdpa_us": sdpa_us, "rate": 4 * HEAD_DIM * num_pairs / ours_us / 1e6, "unit": "TFLOP/s"}


BENCHES = {"decode": bench_decode, "prefill": bench_prefill}
# op, batch, sequence length, window
QUICK = [("decode", 8, 8192, None), ("decode", 8, 8192, 1024), ("prefill", 1, 4096, None), ("prefill", 1, 4096, 1024)]
FULL = [
    *(("decode", batch, seq_len, None) for batch in (1, 8, 64) for seq_len in (1024, 8192, 32768)),
    *(("decode", batch, 32768, 1024) for batch in (1, 8, 64)),
    *(
        ("prefill", batch, seq_len, window)
        for batch, seq_len in ((1, 2048), (1, 16384), (8, 2048))
        for window in (None, 1024)
    ),
]


def environment() -> dict[str, str]:
    import triton

    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four cases instead of eighteen")
    parser.add_argument("--save", action="store_true", help="also write the output below benchmarks/results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_paged_attention: no CUDA device, nothing measured", file=sys.stderr)
        return 2
    lines = [
        "| op | batch | tokens | window | µs | rate | SDPA µs | SDPA / ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    results = []
    for op, batch, seq_len, window in QUICK if arguments.quick else FULL:
        result = BENCHES[op](batch, seq_len, window)
        results.append({"op": op, "batch": batch, "seq_len": seq_len, "window": window, **result})
        rate, ratio = f"{result['rate']:.0f} {result['unit']}", f"{result['sdpa_us'] / result['us']:.2f}"
        cells = [op, batch, seq_len, window or "full", f"{result['us']:.1f}", rate, f"{result['sdpa_us']:.1f}", ratio]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append(json.dumps({"name": "bench_paged_attention", **environment(), "results": results}))
    print("\n".join(lines))
    if arguments.save:
        (Path(__file__).parent / "results" / "bench_paged_attention.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
