"""The torch side of paged attention: gather keys and values, then attend in float32. The references end here."""

from __future__ import annotations

import torch


def gather_kv(kv_cache: torch.Tensor, block_idxs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the blocks as fresh float32 `[num_kv_heads, batch, num_pages * block_size, head_dim]`.

    `block_idxs` is `[batch, num_pages]`; every entry must be a block of the cache.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    batch, num_pages = block_idxs.shape
    flat = block_idxs.flatten()
    pages = kv_cache.new_empty(2, num_kv_heads, batch * num_pages, block_size, head_dim)
    # A select a head lands in the layout that matmul wants: one copy, where selecting whole blocks needs a second.
    for kv in range(2):
        for head in range(num_kv_heads):
            torch.index_select(kv_cache[:, kv, head], 0, flat, out=pages[kv, head])
    key, value = pages.view(2, num_kv_heads, batch, num_pages * block_size, head_dim).float()
    return key, value


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention in float32 over the visible keys; a row that sees none is zero.

    `query` is `[..., rows, head_dim]`, `key` and `value` `[..., keys, head_dim]`, `visible` broadcasts to
    `[..., rows, keys]`, `sinks` to `[..., rows, 1]`: one more score, whose value is zero. Invisible keys may hold
    anything, invisible values only finite numbers.
    """
    scores = (query.float() * scale) @ key.mT
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores.masked_fill_(~visible, -torch.inf)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        weights = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ value).masked_fill_(~visible.any(dim=-1, keepdim=True), 0.0)
