"""The engine's settings: one frozen value, checked when it is built, from which `kvist serve` derives its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from kvist.errors import InvalidValueError
from kvist.settings import Count, check_fields

Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
KvCacheDtype: TypeAlias = Literal["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"]
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings; with several `tensor_parallel_size` processes, memory and threads are per process."""

    model_dir: Path
    """directory of the checkpoint (Hugging Face layout)"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    dtype: Dtype | None = None
    """what the model computes in; if none, bfloat16, on a CPU only where that is faster, else float32"""
    max_model_len: Count | None = None
    """longest sequence in tokens; if none, the model's"""
    block_size: int = 16
    """tokens a KV block, a power of two"""
    num_blocks: Count | None = None
    """KV blocks of each window group, whatever their memory"""
    kv_memory_mib: Count | None = None
    """KV memory of all groups; if none, 256, and on a GPU most of what is free"""
    kv_budget: Literal["bounded", "uniform"] = "bounded"
    """'bounded' gives sliding windows what sequences can hold, 'uniform' every group as much"""
    kv_cache_dtype: KvCacheDtype | None = None
    """of the cache, eight bits or as dtype"""
    max_num_seqs: Count = 64
    """sequences computed at once"""
    max_num_batched_tokens: Count = 2048
    """tokens in a step"""
    max_num_waiting: Count = 1024
    """sequences that may queue, before any is refused"""
    has_prefix_cache: bool = True
    """find what was computed before"""
    has_swa_scratch: bool = False
    """blocks of a prompt that slide out of their window within a step share memory; less of it can be reused"""
    has_cuda_graphs: bool = True
    """on a GPU, replay decode steps that were captured"""
    num_threads: Count | None = None
    """torch threads on the CPU; if none, one a core, or OMP_NUM_THREADS"""
    tensor_parallel_size: Count = 1
    """processes to split the model over, by heads; on GPUs, rank i on cuda:i"""

    def __post_init__(self) -> None:
        """Raise InvalidValueError that names the first field out of range."""
        check_fields(self)
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise InvalidValueError("block_size", self.block_size, "a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            expected = f"at least max_num_seqs={self.max_num_seqs}, so that every sequence can decode each step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, expected)
