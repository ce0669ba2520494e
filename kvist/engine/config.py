"""How to run the engine: one frozen value, checked where it is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvist.errors import InvalidValueError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings.

    `max_model_len`, `dtype`, `num_blocks` and `kv_memory_mib` default to what model and device suggest; `num_blocks` is
    per KV group and wins over `kv_memory_mib`. `max_num_waiting` requests may queue before new ones are turned away.
    """

    model_dir: Path
    device: str = "cpu"
    dtype: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_mib: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 1024
    has_prefix_cache: bool = True
    num_threads: int = 1

    def __post_init__(self) -> None:
        """Raise InvalidValueError that names the first field out of range."""
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise InvalidValueError("block_size", self.block_size, "a power of two")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidValueError("dtype", self.dtype, f"one of {list(DTYPES)}")
        for name in ("max_model_len", "num_blocks", "kv_memory_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValueError(name, value, "at least 1")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "num_threads"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            expected = f"at least max_num_seqs={self.max_num_seqs}, so that every sequence can decode each step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, expected)
