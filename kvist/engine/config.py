"""How to run the engine: one frozen value, checked where it is built, from which `kvist serve` has its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta

from kvist.errors import InvalidValueError
from kvist.settings import check_fields

Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
KvCacheDtype: TypeAlias = Literal["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"]
DTYPES: tuple[str, ...] = get_args(Dtype)

_Positive: TypeAlias = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings; with `tensor_parallel_size` processes, memory and threads are each one's."""

    model_dir: Annotated[Path, Meta(description="directory of the checkpoint (Hugging Face layout)")]
    device: Annotated[str, Meta(description="cpu, cuda or cuda:N")] = "cpu"
    dtype: Annotated[
        Dtype | None, Meta(description="what the model computes in; if none, float32 on the CPU, else bfloat16")
    ] = None
    max_model_len: Annotated[_Positive | None, Meta(description="longest sequence in tokens; if none, the model's")] = (
        None
    )
    block_size: Annotated[int, Meta(description="tokens a KV block, a power of two")] = 16
    num_blocks: Annotated[
        _Positive | None, Meta(description="KV blocks of each window group, whatever their memory")
    ] = None
    kv_memory_mib: Annotated[
        _Positive | None, Meta(description="KV memory of all groups; if none, 256, and on a GPU most of what is free")
    ] = None
    kv_budget: Annotated[
        Literal["bounded", "uniform"],
        Meta(description="'bounded' gives sliding windows what sequences can hold, 'uniform' every group as much"),
    ] = "bounded"
    kv_cache_dtype: Annotated[KvCacheDtype | None, Meta(description="of the cache, eight bits or as dtype")] = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences computed at once")] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="tokens in a step")] = 2048
    max_num_waiting: Annotated[int, Meta(ge=1, description="sequences that may queue, before any is refused")] = 1024
    has_prefix_cache: Annotated[bool, Meta(description="find what was computed before")] = True
    has_swa_scratch: Annotated[
        bool,
        Meta(
            description="blocks of a prompt that slide out of their window within a step share memory; less of it can "
            "be reused"
        ),
    ] = False
    has_cuda_graphs: Annotated[bool, Meta(description="on a GPU, replay decode steps that were captured")] = True
    num_threads: Annotated[int, Meta(ge=1, description="torch threads on the CPU")] = 1
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="processes to split the model over, by heads; on GPUs, rank i on cuda:i")
    ] = 1

    def __post_init__(self) -> None:
        """Raise InvalidValueError that names the first field out of range."""
        check_fields(self)
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise InvalidValueError("block_size", self.block_size, "a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            expected = f"at least max_num_seqs={self.max_num_seqs}, so that every sequence can decode each step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, expected)
