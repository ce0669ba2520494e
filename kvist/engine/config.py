"""How to run the engine: one frozen value, checked where it is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from kvist.errors import InvalidValueError
from kvist.kvcache import BudgetPolicy, KvDtype

DTYPES = ("bfloat16", "float16", "float32")
KV_CACHE_DTYPES = tuple(dtype.value for dtype in KvDtype)
KV_BUDGETS: tuple[str, ...] = get_args(BudgetPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings.

    `max_model_len`, `dtype`, `num_blocks` and `kv_memory_mib` default to what model and device suggest; `num_blocks` is
    per KV group and wins over `kv_memory_mib`, which `kv_budget` splits among the groups. The cache has the `dtype` of
    the model but for `kv_cache_dtype`. With `has_swa_scratch`, blocks of a prompt that slide out of their window within
    a step share scratch slots: less memory for long prompts, and less of them to reuse. `has_cuda_graphs` is about CUDA
    devices alone. `max_num_waiting` requests may queue before new ones are turned away. The model is split over
    `tensor_parallel_size` processes, rank i on cuda:i; `kv_memory_mib` and `num_threads` are each one's.
    """

    model_dir: Path
    device: str = "cpu"
    dtype: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_mib: int | None = None
    kv_budget: BudgetPolicy = "bounded"
    kv_cache_dtype: str | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 1024
    has_prefix_cache: bool = True
    has_swa_scratch: bool = False
    has_cuda_graphs: bool = True
    num_threads: int = 1
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise InvalidValueError("block_size", self.block_size, "a power of two")
        for name, choices in (
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("kv_budget", KV_BUDGETS),
        ):
            if getattr(self, name) not in (None, *choices):
                raise InvalidValueError(name, getattr(self, name), f"one of {list(choices)}")
        for name in ("max_model_len", "num_blocks", "kv_memory_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValueError(name, value, "at least 1")
        counts = ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "num_threads", "tensor_parallel_size")
        for name in counts:
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            expected = f"at least max_num_seqs={self.max_num_seqs}, so that every sequence can decode each step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, expected)
