"""Compile every kernel for one target without a GPU and print what each takes: `python compile_kernels.py 90`.

One JSON line a kernel: registers, bytes of stack (what spilled) and shared memory. Run by test_compile.py in a process
of its own, because Triton must not have been imported for the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvist.kernels._fp8 import FP8_DTYPES, mantissa_bits
from kvist.kernels._tile import decode_tile, pad_head_dim, prefill_tile
from kvist.kernels._triton import next_power_of_2
from kvist.kernels.paged_decode import _merge_splits_kernel, _paged_decode_kernel
from kvist.kernels.paged_prefill import _paged_prefill_kernel
from kvist.kernels.write_kv import _write_kv_kernel

E4M3, E5M2 = FP8_DTYPES
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
TYPES = {FP16: "fp16", BF16: "bf16", FP32: "fp32", E4M3: "u8", E5M2: "u8"}
INTEGER_TYPES = {
    "block_tables_ptr": "*i32",
    "page_offsets_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "page_ids_ptr": "*i64",
}
FLOAT_TYPES = {
    "sinks_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "split_out_ptr": "*fp32",
    "split_lse_ptr": "*fp32",
    "scale": "fp32",
}
NO_SINKS = {"sinks_ptr": None}
ONE_POOL = {"page_offsets_ptr": None}

ATTENTION = [
    # head_dim, dtype of the query, of the cache, other compile-time arguments
    (64, BF16, BF16, {"WINDOW": 128, "SOFT_CAP": None}),  # gpt-oss: sinks
    (80, FP16, FP16, {"WINDOW": None, "SOFT_CAP": 50.0, **NO_SINKS, **ONE_POOL}),
    (128, BF16, BF16, {"WINDOW": None, "SOFT_CAP": None, **NO_SINKS}),
    (128, BF16, E4M3, {"WINDOW": 1000, "SOFT_CAP": None, **NO_SINKS}),
    (256, BF16, BF16, {"WINDOW": 1024, "SOFT_CAP": 50.0, **NO_SINKS}),
    (256, FP16, E5M2, {"WINDOW": 1024, "SOFT_CAP": None, **NO_SINKS}),
    (512, BF16, BF16, {"WINDOW": None, "SOFT_CAP": None, **NO_SINKS}),
    (64, FP32, FP32, {"WINDOW": 1000, "SOFT_CAP": None, **NO_SINKS}),
]


class Variant(NamedTuple):
    kernel: Any
    dtype: torch.dtype
    cache_dtype: torch.dtype
    constants: dict[str, Any]
    options: dict[str, int]


def writes() -> Iterator[Variant]:
    cache = {"NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, "HEAD_DIM": 80, "HEAD_DIM_PAD": 128, "TOKENS": 16}
    for cache_dtype in (BF16, E4M3, E5M2):
        constants = {**cache, "FP8_MANTISSA": mantissa_bits(cache_dtype)}
        yield Variant(_write_kv_kernel, BF16, cache_dtype, constants, {})
    # Triton compiles a kernel of its own for arguments that are 1.
    yield Variant(_write_kv_kernel, FP16, FP16, {**cache, "FP8_MANTISSA": None, "num_tokens": 1}, {})


def attention(capability: int) -> Iterator[Variant]:
    ones = {"table_stride": 1}
    for case, (head_dim, dtype, cache_dtype, masks) in enumerate(ATTENTION):
        shape = {
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PAD": pad_head_dim(head_dim),
            "FP8_MANTISSA": mantissa_bits(cache_dtype),
        }
        shared = {"NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, **shape, **masks}
        tile = decode_tile(4, head_dim, dtype)
        heads = {"HEADS_PER_KV": 4, "HEADS_PAD": tile.rows, "TILE": tile.keys, "NUM_SPLITS": 16}
        if case == 0:
            heads |= {**ones, "NUM_SPLITS": 1}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        yield Variant(_paged_decode_kernel, dtype, cache_dtype, {**shared, **heads}, options)
        tile = prefill_tile(head_dim, dtype, cache_dtype in FP8_DTYPES, capability)
        rows = {"NUM_HEADS": 32, "BATCH_PAD": next_power_of_2(9), "ROWS": tile.rows, "TILE": tile.keys}
        if case == 0:
            rows |= {**ones, "batch": 1, "num_tokens": 1, "BATCH_PAD": 2}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        yield Variant(_paged_prefill_kernel, dtype, cache_dtype, {**shared, **rows}, options)
    yield Variant(_merge_splits_kernel, BF16, BF16, {"HEAD_DIM": 80, "NUM_DIMS": 64, "NUM_SPLITS": 128}, {})


def signature(variant: Variant) -> dict[str, str]:
    """Types of the arguments: pointers by what they point to, everything else a 32-bit integer."""
    known = {"kv_cache_ptr": "*" + TYPES[variant.cache_dtype], **INTEGER_TYPES, **FLOAT_TYPES}
    known |= dict.fromkeys(variant.constants, "constexpr")
    fallback = {True: "*" + TYPES[variant.dtype], False: "i32"}
    return {name: known.get(name, fallback[name.endswith("_ptr")]) for name in variant.kernel.arg_names}


def report(variant: Variant, capability: int) -> dict[str, Any]:
    types, constants = signature(variant), variant.constants
    # What the launcher would find at run time: aligned pointers and strides.
    is_aligned = [name.endswith(("_ptr", "_stride")) and name not in constants for name in types]
    aligned = {(i,): [["tt.divisibility", 16]] for i, divides in enumerate(is_aligned) if divides}
    indexed = {(variant.kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(variant.kernel, types, indexed, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = dict(re.findall(r"(\w+):(\d+)", usage))
    return {
        "kernel": variant.kernel.__name__.strip("_").removesuffix("_kernel"),
        "query": str(variant.dtype).removeprefix("torch."),
        "cache": str(variant.cache_dtype).removeprefix("torch."),
        "head_dim": constants.get("HEAD_DIM", 0),
        "target": f"sm_{capability}",
        "warps": compiled.metadata.num_warps,
        "registers": int(resources["REG"]),
        "spilled_bytes": int(resources["STACK"]),
        "shared_bytes": compiled.metadata.shared,
    }


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for variant in (*writes(), *attention(capability)):
        print(json.dumps(report(variant, capability)), flush=True)
