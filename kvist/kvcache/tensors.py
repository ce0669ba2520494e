"""The tensors behind the block ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.kvcache.budget import NUM_KV
from kvist.kvcache.groups import KvGroup


def allocate_kv_tensors(
    groups: Sequence[KvGroup], num_blocks: Sequence[int], block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return each layer's cache `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, by layer index.

    Zeroed: what a kernel reads and then masks must not be NaN.
    """
    by_layer: dict[int, torch.Tensor] = {}
    for group, count in zip(groups, num_blocks, strict=True):
        shape = (count, NUM_KV, group.layer.num_kv_heads, block_size, group.layer.head_dim)
        for layer_idx in group.layer_indices:
            by_layer[layer_idx] = torch.zeros(shape, dtype=dtype, device=device)
    return [by_layer[layer_idx] for layer_idx in sorted(by_layer)]
