# mypy: disable-error-code="no-untyped-def, untyped-decorator, call-overload"
"""The ops of decode steps on a CPU, as loops that Numba compiles: one call where torch needs dozens.

Numba keeps the machine code in `NUMBA_CACHE_DIR` or the user's cache. KV caches are float32, or bfloat16 as its bits.
Shapes are not checked: that takes as long as a small product.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from numba import extending, njit, types

if TYPE_CHECKING:
    from kvist.kernels._checks import AttentionOptions

_MIN_WORK = 2**20  # multiplications for each thread, some 100 us; starting its part takes 20
_BITS = (types.float32, types.uint16)
_config: Any = numba.config
# Not beside this file: pip would leave that folder behind, as a package `kvist` that hides a later editable one.
_LOCATORS = "UserProvidedCacheLocator,UserWideCacheLocator"


def _compiled(*signatures: Any) -> Any:
    def decorate(function: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
        before, _config.CACHE_LOCATOR_CLASSES = _config.CACHE_LOCATOR_CLASSES, _LOCATORS
        try:
            return njit(list(signatures), cache=True, **options)(function)
        except RuntimeError:  # there is no writable cache directory
            return njit(list(signatures), **options)(function)
        finally:
            _config.CACHE_LOCATOR_CLASSES = before

    return decorate


def _widened(bits: Any) -> Any:
    raise NotImplementedError  # compiled alone


@extending.overload(_widened, inline="always")
def _widened_overload(bits):
    if isinstance(bits, types.Float):
        return lambda bits: bits
    return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@_compiled(*[(x[:, :, ::1], x[:, :, ::1], x[::1], types.int64[::1], types.int64, types.int64) for x in _BITS])
def _write(key, value, cache, slot_mapping, page_stride, block_size):
    """Write rows to their slots; return whether the cache has all of these."""
    num_kv_heads, head_dim = key.shape[1:]
    for token in range(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot < 0:
            continue
        to = slot // block_size * page_stride + slot % block_size * head_dim
        if to >= len(cache):
            return False
        for rows in (key, value):
            for head in range(num_kv_heads):
                cache[to : to + head_dim] = rows[token, head]
                to += block_size * head_dim
    return True


@_compiled((types.float32[::1], types.float32[::1], types.float64, types.float32[::1]))
def _rms_norm(x, scale, eps, out):
    size = len(scale)
    for start in range(0, len(x), size):
        row, normed = x[start : start + size], out[start : start + size]
        squares = np.float32(0)
        for value in row:
            squares += value * value
        factor = np.float32(1 / math.sqrt(squares / size + eps))
        for dim in range(size):
            normed[dim] = row[dim] * factor * scale[dim]


@_compiled(
    *[
        (
            *(x[:, :, ::1], x[::1], types.int32[:, ::1], types.int32[::1], types.int32[::1]),
            *(types.float32[::1], types.float32[:, :, ::1]),
            *([types.int64] * 6 + [types.float32] * 2),
        )
        for x in _BITS
    ]
)
def _attend(
    query, cache, block_tables, page_offsets, seq_lens, sinks, out, first, last, num_kv_heads, block_size, page_stride,
    window, scale, soft_cap,
):  # fmt: skip
    """Attend with rows `first` to `last`, each a KV head of a sequence; return whether all visible keys have pages.

    The softmax is computed page by page, as in `_paged_attention_kernel`: sums are rescaled when the maximum grows.
    """
    num_heads, head_dim = query.shape[1:]
    heads_per_kv, num_pages = num_heads // num_kv_heads, (len(cache) - 1) // page_stride + 1
    weights = np.empty(block_size, np.float32)
    for place in range(first, last):
        seq, kv_head = place // num_kv_heads, place % num_kv_heads
        end = seq_lens[seq]
        start = max(0, end - window)
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            row_max = sinks[head]
            row_sum = np.float32(0 if row_max == -np.inf else 1)
            row, sums = query[seq, head], out[seq, head]
            sums[:] = 0
            for page in range(start // block_size, (end + block_size - 1) // block_size):
                column = page - page_offsets[seq]
                if not 0 <= column < block_tables.shape[1] or not 0 <= block_tables[seq, column] < num_pages:
                    return False
                low, high = max(0, start - page * block_size), min(block_size, end - page * block_size)
                keys = block_tables[seq, column] * page_stride + kv_head * block_size * head_dim
                values = keys + num_kv_heads * block_size * head_dim
                page_max = row_max
                for i in range(low, high):
                    key = cache[keys + i * head_dim : keys + (i + 1) * head_dim]
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += _widened(row[dim]) * _widened(key[dim])
                    score *= scale
                    if soft_cap > 0:
                        score = soft_cap * math.tanh(score / soft_cap)
                    weights[i] = score
                    page_max = max(page_max, score)
                shrunk = math.exp(row_max - page_max)
                row_max, row_sum = page_max, row_sum * shrunk
                sums *= shrunk
                for i in range(low, high):
                    weight = math.exp(weights[i] - row_max)
                    row_sum += weight
                    value = cache[values + i * head_dim : values + (i + 1) * head_dim]
                    for dim in range(head_dim):
                        sums[dim] += weight * _widened(value[dim])
            if row_sum > 0:
                sums /= row_sum
    return True


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` over the last dimension, computed in float32."""
    out = torch.empty(x.shape)
    _rms_norm(x.float().contiguous().numpy().ravel(), scale.numpy(), eps, out.numpy().ravel())
    return out.to(x.dtype)


def write_rows(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`write_kv` in the dtype of the cache; raises IndexError for a slot that it does not have."""
    rows = _array(key.to(kv_cache.dtype)), _array(value.to(kv_cache.dtype))
    if not _write(*rows, _flat(kv_cache), _array(slot_mapping), kv_cache.stride(0), kv_cache.shape[3]):
        raise IndexError(f"slot_mapping is out of range: the cache has {kv_cache.shape[0]} pages")


def attend_last(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """`paged_attention` with one token a sequence, on as many of torch's threads as the work is enough for.

    Raises IndexError if a table lacks a visible key's block.
    """
    (batch, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = query.shape, kv_cache.shape
    out = torch.empty(query.shape)
    sinks, offsets, window = options.get("sinks"), options.get("page_offsets"), options.get("window")
    inputs = (
        _array(query),
        _flat(kv_cache),
        _array(block_tables),
        _array(torch.zeros_like(seq_lens) if offsets is None else offsets),
        _array(seq_lens),
        np.full(num_heads, -np.inf, np.float32) if sinks is None else _array(sinks),
        out.numpy(),
    )
    longest = block_tables.shape[1] * block_size
    sizes = (
        num_kv_heads,
        block_size,
        kv_cache.stride(0),
        window or 2**31,
        options["scale"],
        options.get("soft_cap") or 0.0,
    )
    work = 2 * batch * num_heads * head_dim * min(longest, window or longest)
    num_parts = max(1, min(torch.get_num_threads(), work // _MIN_WORK))
    bounds = [batch * num_kv_heads * part // num_parts for part in range(num_parts + 1)]
    run = map if num_parts == 1 else _threads(num_parts).map
    if not all(run(lambda first, last: _attend(*inputs, first, last, *sizes), bounds[:-1], bounds[1:])):
        raise IndexError("block_tables lack a block that is in sight, or are out of range")
    return out.to(query.dtype)


@cache
def _threads(num: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num, "kvist-attend")


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _flat(kv_cache: torch.Tensor) -> np.ndarray[Any, Any]:
    page_stride = kv_cache.stride(0)
    return _array(kv_cache.as_strided(((len(kv_cache) - 1) * page_stride + kv_cache[0].numel(),), (1,)))
