"""Checks that arguments are safe to launch a kernel on; errors name the argument, its value and what was expected.

The contents of tensors are not checked: that would synchronise with the device on every call.
"""

from __future__ import annotations

from typing import Required, TypedDict

import torch

from kvist.kernels._fp8 import FP8_DTYPES

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = (*DTYPES, *FP8_DTYPES)
MAX_HEAD_DIM = 512


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of every attention op."""

    scale: Required[float]
    page_offsets: torch.Tensor | None
    sinks: torch.Tensor | None
    window: int | None
    soft_cap: float | None


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], like: torch.Tensor
) -> None:
    """Raise ValueError unless the tensor has this shape (None: any size), one of the dtypes, and the device of `like`.

    A vector, or each row of a larger tensor, must be contiguous; rows may lie apart.
    """
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(want not in (None, size) for size, want in zip(sizes, shape, strict=True)):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(sizes)}; expected [{expected}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}")
    if not (tensor.is_contiguous() or (tensor.ndim > 1 and tensor[0].is_contiguous())):
        raise ValueError(f"{name} has strides {list(tensor.stride())}; expected contiguous rows")


def check_kv_cache(kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless it is `[num_blocks, 2, num_kv_heads, block_size, head_dim]` in contiguous blocks."""
    check_tensor("kv_cache", kv_cache, (None, 2, None, None, None), CACHE_DTYPES, kv_cache)
    block_size, head_dim = kv_cache.shape[3:]
    if block_size & (block_size - 1) or not block_size:
        raise ValueError(f"kv_cache has block_size {block_size}; expected a power of two")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"kv_cache has head_dim {head_dim}; expected 1 to {MAX_HEAD_DIM}")


def check_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    options: AttentionOptions,
    out: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the arguments that every attention op takes are valid."""
    check_kv_cache(kv_cache)
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    query_dtypes = DTYPES if kv_cache.dtype in FP8_DTYPES else (kv_cache.dtype,)
    check_tensor("query", query, (None, None, head_dim), query_dtypes, kv_cache)
    if query.shape[1] % num_kv_heads or not query.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads; expected a multiple of the cache's {num_kv_heads}")
    check_tensor("seq_lens", seq_lens, (None,), (torch.int32,), kv_cache)
    check_tensor("block_tables", block_tables, (seq_lens.shape[0], None), (torch.int32,), kv_cache)
    if not options["scale"] > 0:
        raise ValueError(f"scale is {options['scale']}; expected a positive number")
    page_offsets, sinks = options.get("page_offsets"), options.get("sinks")
    window, soft_cap = options.get("window"), options.get("soft_cap")
    if page_offsets is not None:
        check_tensor("page_offsets", page_offsets, tuple(seq_lens.shape), (torch.int32,), kv_cache)
    if sinks is not None:
        check_tensor("sinks", sinks, (query.shape[1],), (torch.float32,), kv_cache)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1 token, or None for full attention")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; expected a positive number, or None")
    if out is not None:
        if not out.is_contiguous():
            raise ValueError(f"out has strides {list(out.stride())}; expected a contiguous tensor")
        check_tensor("out", out, tuple(query.shape), (query.dtype,), query)


def row_stride(tensor: torch.Tensor) -> int:
    """Return the stride between the rows of a checked tensor; torch's own is arbitrary if there is a single row."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor[0].numel()
