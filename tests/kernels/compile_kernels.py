"""Compile every kernel for sm_80 and sm_90 without a GPU and print what each takes: `python compile_kernels.py`.

One JSON line a kernel: registers, bytes of stack (what spilled) and shared memory. Run by test_compile.py in a process
of its own, because Triton must not have been imported for the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvist.kernels._tile import pad_head_dim, tile_shape
from kvist.kernels._triton import next_power_of_2
from kvist.kernels.paged_decode import _merge_splits_kernel, _paged_decode_kernel
from kvist.kernels.paged_prefill import _paged_prefill_kernel
from kvist.kernels.write_kv import _write_kv_kernel

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
INTEGER_TYPES = {
    "block_tables_ptr": "*i32",
    "page_offsets_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
}
FLOAT_TYPES = {
    "sinks_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "split_out_ptr": "*fp32",
    "split_lse_ptr": "*fp32",
    "scale": "fp32",
}

ATTENTION = [
    # head_dim, dtype, window, soft cap
    (128, torch.bfloat16, 1000, None),
    (80, torch.float16, None, 50.0),
    (256, torch.bfloat16, 1024, 50.0),
    (512, torch.bfloat16, None, None),
    (64, torch.float32, 1000, None),
]


def signature(kernel: Any, dtype: torch.dtype, constants: dict[str, Any]) -> dict[str, str]:
    """Types of the arguments: pointers by what they point to, everything else a 32-bit integer."""
    known = {**INTEGER_TYPES, **FLOAT_TYPES, **dict.fromkeys(constants, "constexpr")}
    fallback = {True: "*" + TYPES[dtype], False: "i32"}
    return {name: known.get(name, fallback[name.endswith("_ptr")]) for name in kernel.arg_names}


def variants() -> Iterator[tuple[Any, torch.dtype, dict[str, Any], int]]:
    """Kernel, dtype, compile-time arguments and warps of what the launchers would compile."""
    cache = {"NUM_KV_HEADS": 8, "BLOCK_SIZE": 16}
    yield _write_kv_kernel, torch.bfloat16, {**cache, "HEAD_DIM": 80, "HEAD_DIM_PAD": 128, "TOKENS": 16}, 4
    yield _merge_splits_kernel, torch.bfloat16, {"HEAD_DIM": 80, "NUM_DIMS": 64, "NUM_SPLITS": 128}, 4
    for head_dim, dtype, window, soft_cap in ATTENTION:
        shape = {**cache, "HEAD_DIM": head_dim, "HEAD_DIM_PAD": pad_head_dim(head_dim)}
        tile = tile_shape(head_dim, dtype)
        masks = {"TILE": tile.keys, "WINDOW": window, "SOFT_CAP": soft_cap}
        heads = {"HEADS_PER_KV": 4, "HEADS_PAD": 16, "NUM_SPLITS": 16}
        yield _paged_decode_kernel, dtype, {**shape, **masks, **heads}, 4
        rows = {"NUM_HEADS": 32, "BATCH_PAD": next_power_of_2(9), "ROWS": tile.rows}
        yield _paged_prefill_kernel, dtype, {**shape, **masks, **rows}, tile.num_warps
    # Triton compiles a kernel of its own for arguments that are 1: here one sequence, one token, one block.
    ones = {"batch": 1, "num_tokens": 1, "table_stride": 1, "BATCH_PAD": 2}
    yield _paged_prefill_kernel, dtype, {**shape, **masks, **rows, **ones}, tile.num_warps
    yield _paged_decode_kernel, dtype, {**shape, **masks, **heads, "table_stride": 1, "NUM_SPLITS": 1}, 4
    one_token = {**cache, "num_tokens": 1, "HEAD_DIM": 64, "HEAD_DIM_PAD": 64, "TOKENS": 16}
    yield _write_kv_kernel, torch.float16, one_token, 4


def compile_variant(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], num_warps: int, capability: int) -> str:
    types = signature(kernel, dtype, constants)
    # What the launcher would find at run time: aligned pointers and strides.
    is_aligned = [name.endswith(("_ptr", "_stride")) and name not in constants for name in types]
    aligned = {(i,): [["tt.divisibility", 16]] for i, divides in enumerate(is_aligned) if divides}
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, types, indexed, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = dict(re.findall(r"(\w+):(\d+)", usage))
    report = {
        "kernel": kernel.__name__,
        "target": f"sm_{capability}",
        "dtype": TYPES[dtype],
        "head_dim": constants["HEAD_DIM"],
        "registers": int(resources["REG"]),
        "spilled_bytes": int(resources["STACK"]),
        "shared_bytes": compiled.metadata.shared,
    }
    return json.dumps(report)


if __name__ == "__main__":
    for capability in (80, 90):
        for variant in variants():
            print(compile_variant(*variant, capability), flush=True)
