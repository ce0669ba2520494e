"""Attention of one query token a sequence over a paged cache: split-K flash decoding."""

from __future__ import annotations

import torch

from kvist.kernels._checks import check_attention
from kvist.kernels._dense import attend, gather_pages


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each sequence's last token attends to the keys of its window; a sequence of length 0 yields zeros.

    `query`: `[batch, num_heads, head_dim]`, the token at position `seq_lens - 1`, already in the cache; `kv_cache` and
    `block_tables` (int32 `[batch, max_blocks]`) as in `kvist.kernels`; `seq_lens`: int32 `[batch]`, absolute. Key k is
    visible to query q iff `k <= q` and `q - k < window`. A score s is `scale * q.k`, with a cap `soft_cap * tanh(s /
    soft_cap)`. Returns `out`, or a new tensor shaped like `query`. Raises ValueError.
    """
    check_attention(query, kv_cache, block_tables, seq_lens, window, soft_cap, out)
    if query.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"seq_lens has shape {list(seq_lens.shape)}; expected one length a query: [{query.shape[0]}]")
    result = paged_decode_reference(
        query, kv_cache, block_tables, seq_lens, scale=scale, window=window, soft_cap=soft_cap
    )
    return result if out is None else out.copy_(result)


def paged_decode_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """`paged_decode` in torch: the window's pages gathered, padded to the longest of the batch, one batched matmul."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    lengths = seq_lens.long()
    first_key = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    first_page = first_key // block_size
    num_pages = int(((lengths + block_size - 1) // block_size - first_page).max()) if batch else 0
    if num_pages == 0:
        return torch.zeros_like(query)
    pages = first_page[:, None] + torch.arange(num_pages, device=query.device)
    keys = (first_page * block_size)[:, None] + torch.arange(num_pages * block_size, device=query.device)
    visible = (keys >= first_key[:, None]) & (keys < lengths[:, None])
    # Columns past a row's end and absent blocks only fill the rectangle: any block will do, nothing of it is visible.
    block_idxs = block_tables.gather(1, pages.clamp(max=block_tables.shape[1] - 1)).clamp(min=0)
    key, value = gather_pages(kv_cache, block_idxs)
    value[:, ~visible] = 0.0
    grouped = query.view(batch, num_kv_heads, -1, head_dim).transpose(0, 1)
    attended = attend(grouped, key, value, visible[:, None, :], scale=scale, soft_cap=soft_cap)
    return attended.transpose(0, 1).reshape(batch, num_heads, head_dim).to(query.dtype)
