"""The tensors behind the block ids: a slot of a pool holds one block of every layer of its group, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.kvcache.groups import KvGroup


def allocate_pool(
    group: KvGroup, num_slots: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a pool `[num_slots, num_layers, 2, num_kv_heads, block_size, head_dim]`, layers as in `layer_indices`.

    Zeroed: what a kernel reads and then masks must not be NaN.
    """
    layer = group.layer
    shape = (num_slots, len(group.layer_indices), layer.kv_factor, layer.num_kv_heads, block_size, layer.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def layer_caches(groups: Sequence[KvGroup], pools: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each layer's pages `[num_slots, 2, num_kv_heads, block_size, head_dim]`, by layer index: views of pools.

    All layers of a group call a block by the same number, its slot.
    """
    by_layer = {
        layer_idx: pool[:, position]
        for group, pool in zip(groups, pools, strict=True)
        for position, layer_idx in enumerate(group.layer_indices)
    }
    return [by_layer[layer_idx] for layer_idx in sorted(by_layer)]
