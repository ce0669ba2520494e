"""Other attention implementations over the same keys, each as a function to time, or the reason why it is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

Run = Callable[[], object]
UNAVAILABLE = (ImportError, RuntimeError, NotImplementedError, ValueError)


@dataclass(frozen=True, slots=True)
class Problem:
    """A batch of equally long sequences: a paged cache full of noise, its tables, queries of `num_new` tokens each."""

    num_heads: int
    num_new: int
    window: int | None
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query: torch.Tensor

    @property
    def batch(self) -> int:
        return self.block_tables.shape[0]

    @property
    def seq_len(self) -> int:
        return self.block_tables.shape[1] * self.kv_cache.shape[3]

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def starts(self) -> torch.Tensor:
        """Return where each sequence's queries begin, as both kinds of paged prefill want it."""
        count = self.batch * self.num_new
        return torch.arange(0, count + 1, self.num_new, dtype=torch.int32, device=self.query.device)


def window_left(window: int | None) -> int:
    """Return what FlashInfer calls a window: the keys left of the query's own, -1 for all of them."""
    return -1 if window is None or window <= 0 else window - 1


def _dense(problem: Problem, num_keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `[batch, heads, tokens, head_dim]` laid out contiguously."""
    num_kv_heads, head_dim = problem.kv_cache.shape[2], problem.kv_cache.shape[4]
    query = problem.query.view(problem.batch, problem.num_new, problem.num_heads, head_dim)
    shape = (problem.batch, num_kv_heads, num_keys, head_dim)
    key, value = torch.randn(2, *shape, dtype=problem.query.dtype, device=problem.query.device)
    return query.transpose(1, 2).contiguous(), key, value


def sdpa(problem: Problem) -> Run:
    """torch's SDPA over 16-bit keys; it follows no table and knows no window.

    Decode gets the window's keys alone, a whole prompt all of them; it has no mask for a chunk behind a history.
    """
    if 1 < problem.num_new < problem.seq_len:
        raise NotImplementedError("no causal mask for a chunk behind a history")
    num_keys = min(problem.seq_len, problem.window or problem.seq_len) if problem.num_new == 1 else problem.seq_len
    query, key, value = _dense(problem, num_keys)
    is_causal = problem.num_new > 1
    return lambda: scaled_dot_product_attention(
        query, key, value, scale=problem.scale, is_causal=is_causal, enable_gqa=True
    )


def flex_attention(problem: Problem) -> Run:
    """torch's FlexAttention, compiled, with a mask of blocks for cause and window."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    query, key, value = _dense(problem, problem.seq_len)
    first, window = problem.seq_len - problem.num_new, problem.window or problem.seq_len

    def is_visible(_batch: object, _head: object, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        position = row + first
        return (column <= position) & (position - column < window)

    mask = create_block_mask(is_visible, None, None, problem.num_new, problem.seq_len, device=str(query.device))
    compiled = torch.compile(flex)
    return lambda: compiled(query, key, value, block_mask=mask, scale=problem.scale, enable_gqa=True)


def flashinfer(problem: Problem) -> Run:
    """FlashInfer over the very same pages."""
    import flashinfer as library

    cache, device = problem.kv_cache, problem.query.device
    num_kv_heads, block_size, head_dim = cache.shape[2:]
    num_pages = problem.block_tables.shape[1]
    pages = torch.arange(0, problem.batch * num_pages + 1, num_pages, dtype=torch.int32, device=device)
    last = torch.full((problem.batch,), block_size, dtype=torch.int32, device=device)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    sizes = (problem.num_heads, num_kv_heads, head_dim, block_size)
    options = {
        "window_left": window_left(problem.window),
        "sm_scale": problem.scale,
        "q_data_type": problem.query.dtype,
        "kv_data_type": cache.dtype,
    }
    ids = problem.block_tables.flatten()
    if problem.num_new == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(pages, ids, last, *sizes, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(problem.starts(), pages, ids, last, *sizes, causal=True, **options)
    return lambda: wrapper.run(problem.query, cache)


PEERS = {"SDPA": sdpa, "FlexAttention": flex_attention, "FlashInfer": flashinfer}
