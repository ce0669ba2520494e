"""Compile what the launchers launch for one target without a GPU and print what each takes: `compile_kernels.py 90`.

One JSON line a kernel: registers, bytes of stack (what spilled) and shared memory. Run by test_compile.py in a process
of its own, because Triton must not have been imported for the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from kvist.kernels import paged_attention, write_kv
from kvist.kernels._fp8 import FP8_DTYPES
from kvist.kernels._triton import FUSED, DeviceFacts

E4M3, E5M2 = FP8_DTYPES
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

ATTENTION = [
    # head_dim, query heads of each of 8 kv heads, dtype of the query, of the cache, window, soft cap
    (64, 8, BF16, BF16, 128, None),  # gpt-oss: sinks
    (80, 1, FP16, FP16, None, 50.0),
    (128, 4, BF16, BF16, None, None),
    (128, 7, BF16, E4M3, 1000, None),
    (256, 2, BF16, BF16, 1024, 50.0),
    (256, 4, FP16, E5M2, 1024, None),
    (512, 8, BF16, BF16, None, None),
    (64, 4, FP32, FP32, 1000, None),
]


def launch(
    case: int, head_dim: int, heads_per_kv: int, dtype: torch.dtype, cache_dtype: torch.dtype, *masks: Any
) -> None:
    """A deployment's launches: of the first all, of the others a decode in splits and whole chunks, or vice versa."""
    kv_cache = torch.zeros(2, 2, 8, 16, head_dim).to(cache_dtype)
    query, key = torch.zeros(2, 8 * heads_per_kv, head_dim, dtype=dtype), torch.zeros(2, 8, head_dim, dtype=dtype)
    tables, ints = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    options: dict[str, Any] = {"scale": 1.0, "window": masks[0], "soft_cap": masks[1]}
    options["page_offsets"] = None if case == 1 else ints[:2]
    options["sinks"] = torch.zeros(8 * heads_per_kv) if case == 0 else None
    write_kv(key, key, kv_cache, torch.zeros(2, dtype=torch.int64))
    for num_splits in (1, 2):
        for chunk in (0, 1):
            if case == 0 or (num_splits + chunk + case) % 2:
                starts = ints if chunk else None
                paged_attention(query, kv_cache, tables, ints[:2], starts, num_splits=num_splits, **options)


def launched(capability: int) -> dict[str, tuple[ASTSource, dict[str, int]]]:
    """What Triton would compile for all cases, as it sees it: nothing is, for its hook says that it was."""
    target = GPUTarget("cuda", capability, 32)
    functions = {"target": target, "device": 0, "stream": 0}
    driver.set_active(SimpleNamespace(**{f"get_current_{name}": lambda *_, x=x: x for name, x in functions.items()}))
    for name in ("paged_attention", "write_kv"):
        import_module(f"kvist.kernels.{name}").is_launched = lambda _: True
    import_module("kvist.kernels.paged_attention").device_facts = lambda _: DeviceFacts(132, capability)
    sources = {}

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        sources[fn.name + key] = source, {name: compile[name] for name in ("num_warps", "num_stages", *FUSED)}
        return True

    knobs.runtime.jit_cache_hook = hook
    for case, shape in enumerate(ATTENTION):
        launch(case, *shape)
    knobs.runtime.jit_cache_hook = None
    return sources


def report(source: ASTSource, options: dict[str, int], target: GPUTarget) -> dict[str, Any]:
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = dict(re.findall(r"(\w+):(\d+)", usage))
    constants = {source.fn.arg_names[i]: value for (i,), value in source.constants.items()}
    return {
        "kernel": source.fn.__name__.strip("_").removesuffix("_kernel"),
        "query": source.signature.get("query_ptr", source.signature.get("key_ptr", "")),
        "cache": source.signature.get("kv_cache_ptr", ""),
        "head_dim": constants["HEAD_DIM"],
        "tokens": constants.get("TOKENS", ""),
        "split": "lse_ptr" not in constants,
        "target": f"sm_{target.arch}",
        "warps": compiled.metadata.num_warps,
        "registers": int(resources["REG"]),
        "spilled_bytes": int(resources["STACK"]),
        "shared_bytes": compiled.metadata.shared,
    }


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for source, options in launched(capability).values():
        print(json.dumps(report(source, options, GPUTarget("cuda", capability, 32))), flush=True)
