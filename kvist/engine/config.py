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
    """directory of the checkpoint, in Hugging Face layout"""
    device: str = "cpu"
    """cpu, cuda or cuda:N"""
    dtype: Dtype | None = None
    """dtype of weights and activations; by default bfloat16, on a CPU only if that is faster than float32"""
    max_model_len: Count | None = None
    """longest sequence in tokens; by default the model's"""
    block_size: int = 16
    """tokens per KV block, a power of two"""
    num_blocks: Count | None = None
    """KV blocks of each window group, instead of --kv-memory-mib"""
    kv_memory_mib: Count | None = None
    """KV cache memory in MiB; by default 256 on a CPU, most of the free memory on a GPU"""
    kv_budget: Literal["bounded", "uniform"] = "bounded"
    """bounded: sliding windows get what their sequences can hold; uniform: every window group gets the same"""
    kv_cache_dtype: KvCacheDtype | None = None
    """dtype of the KV cache; by default --dtype"""
    max_num_seqs: Count = 64
    """most sequences computed in a step"""
    max_num_batched_tokens: Count = 2048
    """most tokens computed in a step"""
    max_num_waiting: Count = 1024
    """most waiting sequences; further ones are refused"""
    has_prefix_cache: bool = True
    """reuse the KV of prefixes computed before"""
    has_swa_scratch: bool = False
    """sliding windows: blocks of a prompt that leave the window within a step share memory; fewer can be reused"""
    enforce_eager: bool = False
    """on a GPU, neither compile layers nor replay captured decode steps; starts faster, and computes slower"""
    num_threads: Count | None = None
    """torch threads on a CPU; by default OMP_NUM_THREADS, else one per core"""
    tensor_parallel_size: Count = 1
    """processes to split the model over, by attention heads; on GPUs rank i uses cuda:i"""

    def __post_init__(self) -> None:
        """Raise InvalidValueError that names the first field out of range."""
        check_fields(self)
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise InvalidValueError("block_size", self.block_size, "a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            expected = f"at least max_num_seqs={self.max_num_seqs}, so that every sequence can decode each step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, expected)
