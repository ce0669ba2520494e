"""Parts of paged attention in torch: gather keys and values, then attend in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvist.kernels._checks import AttentionOptions


def attend_rows(
    query: torch.Tensor, first_query: int, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Consecutive rows `[rows, num_heads, head_dim]` attend; `first_query` counts from the first key given."""
    window, sinks = options.get("window"), options.get("sinks")
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    low = 0 if window is None else max(0, first_query - window + 1)
    end = first_query + num_rows
    keys = torch.arange(low, end, device=query.device)
    positions = torch.arange(first_query, end, device=query.device)[:, None]
    visible = keys <= positions
    if window is not None:
        visible &= positions - keys < window
    heads_per_kv = num_heads // num_kv_heads
    attended = _attend(
        query.transpose(0, 1).reshape(1, num_kv_heads, heads_per_kv * num_rows, head_dim),
        key[:, :, low:end],
        value[:, :, low:end],
        visible.repeat(heads_per_kv, 1),
        options,
        None if sinks is None else sinks.repeat_interleave(num_rows).view(1, num_kv_heads, -1, 1),
    )
    return attended.view(num_heads, num_rows, head_dim).transpose(0, 1).to(query.dtype)


def gather(kv_cache: torch.Tensor, pages: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as float32 `[1, num_kv_heads, num_keys, head_dim]`, by page and position.

    To index the cache in its five dimensions takes two to four times as long.
    """
    num_pages, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    rows_apart, rest = divmod(kv_cache.stride(0), head_dim)
    if rest:
        raise ValueError(f"kv_cache has strides {list(kv_cache.stride())}; expected pages a multiple of head_dim apart")
    heads = torch.arange(0, 2 * num_kv_heads * block_size, block_size, device=keys.device)
    rows = (pages * rows_apart + keys % block_size) + heads.view(2, 1, num_kv_heads, 1)
    num_rows = (num_pages - 1) * rows_apart + 2 * num_kv_heads * block_size
    cache_rows = kv_cache.as_strided((num_rows, head_dim), (head_dim, 1))
    key, value = cache_rows.index_select(0, rows.flatten()).view(*rows.shape, head_dim).float()
    return key, value


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention in float32 over the visible keys, of which each row has one.

    `query` is `[batch, num_kv_heads, rows, head_dim]`, `key` and `value` `[batch, num_kv_heads, keys, head_dim]`,
    `visible` broadcasts to `[batch, num_kv_heads, rows, keys]`, `sinks` to `[batch, num_kv_heads, rows, 1]`: one more
    score, whose value is zero. All keys and values are finite.
    """
    scale, soft_cap = options["scale"], options.get("soft_cap")
    if soft_cap is None and sinks is None:
        return functional.scaled_dot_product_attention(query.float(), key, value, visible, scale=scale)
    scores = (query.float() * scale) @ key.mT
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores.masked_fill_(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1) @ value
    weights = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(dim=-1)
    return weights[..., :-1] @ value
