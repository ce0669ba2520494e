"""The tensors that hold the blocks: a slot of a pool has one block of every layer of its group, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kvist.kvcache.plan import KvDtype, WindowPlan

TORCH_DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.FLOAT16: torch.float16,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FP8_E4M3: torch.float8_e4m3fn,
    KvDtype.FP8_E5M2: torch.float8_e5m2,
}


class KvTensors:
    """Every group's pool, and the pages of each layer in it, numbered by slot or by page.

    Zeroed, because what a kernel reads and then masks must not be NaN. Raises RuntimeError if the device lacks the
    memory. `allocate`, for pools that other processes can reach, returns a contiguous uint8 tensor of zeros with the
    given number of bytes.
    """

    def __init__(
        self,
        plan: WindowPlan,
        num_slots: Sequence[int],
        block_size: int,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.device = device
        self.pools: list[torch.Tensor] = []
        for group, count in zip(plan.groups, num_slots, strict=True):
            layer, num_layers = group.layer, len(group.layer_indices)
            shape = (count, num_layers, layer.kv_factor, layer.num_kv_heads, block_size, layer.head_dim)
            dtype = TORCH_DTYPES[layer.dtype]
            size_bytes = math.prod(shape) * dtype.itemsize
            try:
                memory = allocate(size_bytes) if allocate else torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            except RuntimeError as error:  # torch's own message describes its allocator at length
                raise RuntimeError(f"group {group.group_id}: {device} has not {size_bytes >> 20} MiB left") from error
            self.pools.append(memory.view(dtype).view(shape))
        self._places = plan.places
        self._by_slot = [self.pools[place.group_id][:, place.position] for place in plan.places]

    def by_slot(self, layer_idx: int) -> torch.Tensor:
        """Return `[num_slots, kv_factor, num_kv_heads, block_size, head_dim]`: page i is the layer's part of slot i."""
        return self._by_slot[layer_idx]

    def by_page(self, layer_idx: int) -> torch.Tensor:
        """Return the layer's whole pool, `[num_slots * num_layers, ...]`: any page of it can be any layer's."""
        return self.pools[self._places[layer_idx].group_id].flatten(0, 1)
