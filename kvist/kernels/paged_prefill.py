"""Attention of a ragged batch of new tokens over a paged cache that already holds them: prefill and extend."""

from __future__ import annotations

import torch

from kvist.kernels._checks import check_attention, check_rows, check_tensor
from kvist.kernels._dense import attend, gather_pages

# Bounds the score matrix of the reference, and lets it skip the keys that a chunk of rows cannot see. Of 32, 64, 128
# and 256 rows, 64 was fastest for 2,048 tokens, 4 and 8 heads (float32, one core of an x86-64 server, 2026-11).
_REFERENCE_ROWS = 64


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every new token attends to the keys of its window, its own included; rows of no sequence are zero.

    `query`: `[num_tokens, num_heads, head_dim]`; rows `query_start_loc[i]` to `query_start_loc[i + 1]` (int32
    `[batch + 1]`, from 0) are the last tokens of sequence i, whose length after this step is `seq_lens[i]` (int32
    `[batch]`). Rows past `query_start_loc[-1]` are padding. All else as in `paged_decode`.
    """
    check_attention(query, kv_cache, block_tables, seq_lens, window, soft_cap, out)
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), kv_cache)
    check_rows("query_start_loc", query_start_loc)
    result = paged_prefill_reference(
        query, kv_cache, block_tables, query_start_loc, seq_lens, scale=scale, window=window, soft_cap=soft_cap
    )
    return result if out is None else out.copy_(result)


def paged_prefill_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """`paged_prefill` in torch: a sequence at a time, and of its rows a chunk at a time."""
    block_size = kv_cache.shape[3]
    out = torch.zeros_like(query)
    starts = query_start_loc.tolist()
    for table, start, end, seq_len in zip(block_tables, starts[:-1], starts[1:], seq_lens.tolist(), strict=True):
        first_query = seq_len - (end - start)
        first_page = 0 if window is None else max(0, first_query - window + 1) // block_size
        block_idxs = table[first_page : (seq_len + block_size - 1) // block_size]
        key, value = (pages[:, 0] for pages in gather_pages(kv_cache, block_idxs[None]))
        for row in range(start, end, _REFERENCE_ROWS):
            rows = slice(row, min(row + _REFERENCE_ROWS, end))
            offset = first_query + row - start - first_page * block_size
            out[rows] = _attend_rows(query[rows], offset, key, value, scale=scale, window=window, soft_cap=soft_cap)
    return out


def _attend_rows(
    query: torch.Tensor,
    first_query: int,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Consecutive rows `[rows, num_heads, head_dim]` attend; `first_query` counts from the first key given."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    low = 0 if window is None else max(0, first_query - window + 1)
    keys = torch.arange(low, first_query + num_rows, device=query.device)
    positions = torch.arange(first_query, first_query + num_rows, device=query.device)[:, None]
    visible = keys <= positions
    if window is not None:
        visible &= positions - keys < window
    heads_per_kv = num_heads // num_kv_heads
    grouped = query.transpose(0, 1).reshape(num_kv_heads, heads_per_kv * num_rows, head_dim)
    seen = slice(low, first_query + num_rows)
    attended = attend(
        grouped, key[:, seen], value[:, seen], visible.repeat(heads_per_kv, 1), scale=scale, soft_cap=soft_cap
    )
    return attended.view(num_heads, num_rows, head_dim).transpose(0, 1).to(query.dtype)
